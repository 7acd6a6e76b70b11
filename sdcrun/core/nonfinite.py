"""Check 1's rules: what the ranks of a group saw in one step -> findings. Pure.

A step with a non-finite value becomes one `NonfiniteCase`; each rank of the group adds its view of the elements it
really found. The local gradients tell where a value was born, the reduced ones whether the all-reduce made it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from sdcrun.core import words
from sdcrun.core.roster import MAX_PEERS, Group
from sdcrun.core.types import Finding, Verdict

KEPT = 8
SOFTWARE = "data, learning rate and code are more likely than hardware"


@dataclass(frozen=True)
class Bad:
    """Non-finite elements of one tensor in one view."""

    tensor: str
    elements: int
    nan: int
    inf: int
    numel: int


@dataclass(frozen=True)
class View:
    """One rank's view: tensors that are not finite, before (`local`) and after (`reduced`) the all-reduce.

    `kept` holds details of the first few tensors as (phase, Bad); the names of all are in the two sets.
    """

    amp: bool
    skipped: bool
    local: frozenset[str]
    reduced: frozenset[str]
    kept: tuple[tuple[str, Bad], ...]


def view_of(data: dict[str, Any]) -> View:
    """The view in a `nonfinite` event's data; raises ValueError, KeyError or TypeError on anything malformed."""
    rows = [
        (phase, Bad(str(b["tensor"]), int(b["elements"]), int(b["nan"]), int(b["inf"]), int(b["numel"])))
        for phase in ("local", "reduced")
        for b in data[phase]
    ]
    return View(
        bool(data["amp"]),
        bool(data["skipped"]),
        frozenset(b.tensor for phase, b in rows if phase == "local"),
        frozenset(b.tensor for phase, b in rows if phase == "reduced"),
        tuple(rows[:KEPT]),
    )


@dataclass
class NonfiniteCase:
    """All views of one step of one group. `passed` are ranks that went on without a view; `closed`: nothing more is
    waited for (a later view still counts)."""

    attempt: int
    step: int
    group: Group
    views: dict[int, View] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    closed: bool = False

    @property
    def complete(self) -> bool:
        """Whether every rank of the group has answered."""
        return len(self.views) >= len(self.group)


def judge(case: NonfiniteCase) -> list[Finding]:
    """The finding of a case; none while nobody has answered.

    A local value that is not finite reaches every rank through the all-reduce (and other tensors through a comm hook),
    so the reduced gradients are judged only where every local one is finite.
    """
    if not case.views:
        return []
    local = {rank: view.local for rank, view in case.views.items() if view.local}
    reduced = {rank: view.reduced for rank, view in case.views.items() if view.reduced}
    if local:
        return [_judge_local(case, local)]
    return [_judge_reduced(case, reduced) if reduced else _nothing_left(case)]


def merge(triaged: list[Finding], own: list[Finding]) -> list[Finding]:
    """Findings of the replay in place of check 1's own: one for each rank they accuse, one for all ranks of which they
    say the same and accuse nobody. Check 1's evidence (which tensors) is added."""
    rows = [row for finding in own for row in finding.evidence]
    merged: dict[tuple[Any, ...], Finding] = {}
    for finding in triaged:
        key = (finding.verdict, finding.rule, finding.ranks)
        if key in merged:
            first = merged[key]
            texts = dict.fromkeys((*first.text.split("\n"), finding.text))
            evidence = (*first.evidence, *finding.evidence)[: 2 * KEPT]
            merged[key] = replace(first, text="\n".join(list(texts)[:4]), evidence=evidence)
        else:
            mine = [row for row in rows if not finding.ranks or row["rank"] in finding.ranks]
            merged[key] = replace(finding, evidence=(*finding.evidence, *mine)[: 2 * KEPT])
    return [replace(finding, text=finding.text.replace("\n", " ")) for finding in merged.values()]


def _judge_local(case: NonfiniteCase, local: dict[int, frozenset[str]]) -> Finding:
    ranks = tuple(sorted(local))
    where = (
        f"Local gradients of {words.ranks(ranks)} are not finite before the all-reduce: "
        f"{_tensors(case, ranks, 'local')}"
    )
    if all(view.amp for view in case.views.values()):
        return _finding(
            case, Verdict.AMP_OVERFLOW, "amp-overflow", f"{where}. A GradScaler expects this and lowers its scale."
        )
    if not case.complete:
        return _finding(case, Verdict.INCONCLUSIVE, "ranks-missing", f"{where}. {_answered(case)}", evidence=ranks)
    if len(case.group) == 1:
        text = f"{where}. With one rank there is nothing to compare with; {SOFTWARE}."
        return _finding(case, Verdict.INCONCLUSIVE, "one-rank-alone", text, evidence=ranks)
    if len(ranks) > 1:
        return _finding(
            case, Verdict.INCONCLUSIVE, "several-ranks-local", f"{where}. Several at once: {SOFTWARE}.", evidence=ranks
        )
    text = f"{where}; those of the {words.count(len(case.group) - 1, 'other rank')} are finite."
    return _finding(
        case,
        Verdict.SUSPECT,
        "one-rank-local",
        text,
        ranks,
        evidence=ranks,
        ruled_out=("a cause that all ranks share (learning rate, weights)", "the all-reduce"),
    )


def _judge_reduced(case: NonfiniteCase, reduced: dict[int, frozenset[str]]) -> Finding:
    ranks = tuple(sorted(reduced))
    where = (
        f"Gradients are not finite after the all-reduce on {words.ranks(ranks)} although every local one was: "
        f"{_tensors(case, ranks, 'reduced')}"
    )
    if not case.complete:
        return _finding(case, Verdict.INCONCLUSIVE, "ranks-missing", f"{where}. {_answered(case)}", evidence=ranks)
    if len(ranks) == 1 and len(case.group) > 1:
        text = f"{where}. The all-reduce gave finite values to the {words.count(len(case.group) - 1, 'other rank')}."
        return _finding(
            case,
            Verdict.SUSPECT,
            "one-rank-reduced",
            text,
            ranks,
            strike=True,
            evidence=ranks,
            ruled_out=("data and learning rate (local gradients are finite)",),
        )
    if all(view.amp for view in case.views.values()):
        return _finding(case, Verdict.AMP_OVERFLOW, "amp-overflow", f"{where}. The sum overflowed under a GradScaler.")
    text = f"{where}. It was born inside the all-reduce (an overflowing sum, the network, or any rank that takes part)."
    return _finding(case, Verdict.INCONCLUSIVE, "inside-all-reduce", text, evidence=ranks)


def _nothing_left(case: NonfiniteCase) -> Finding:
    if all(view.amp for view in case.views.values()):
        return _finding(case, Verdict.AMP_OVERFLOW, "amp-overflow", "Gradients overflowed under a GradScaler.")
    if not case.complete:
        return _finding(
            case, Verdict.INCONCLUSIVE, "ranks-missing", f"A gradient's sum was not finite. {_answered(case)}"
        )
    text = "A gradient's sum was not finite, but no element is: the sum itself overflowed, or a look went wrong."
    return _finding(case, Verdict.CLEAN_AFTER_TRIAGE, "only-the-sum", text)


def _answered(case: NonfiniteCase) -> str:
    return f"Only {len(case.views)} of {len(case.group)} ranks said what they saw, so nobody can be singled out."


def _tensors(case: NonfiniteCase, ranks: tuple[int, ...], phase: str) -> str:
    """Tensor names with counts, those that most ranks share first."""
    common = Counter(name for rank in ranks for name in sorted(getattr(case.views[rank], phase)))
    order = [name for name, _ in sorted(common.items(), key=lambda item: (-item[1], item[0]))]
    details = {bad.tensor: bad for rank in ranks for kind, bad in case.views[rank].kept if kind == phase}
    first = details.get(order[0])
    size = ""
    if first:
        kinds = [words.count(n, kind) for n, kind in ((first.nan, "NaN"), (first.inf, "Inf")) if n]
        found = " and ".join(kinds) or words.count(first.elements, "element")
        size = f" ({found} of {words.count(first.numel, 'element')})"
    more = f" and {words.count(len(order) - 1, 'other tensor')}" if len(order) > 1 else ""
    return f"{words.clean(order[0], 80)}{size}{more}"


def _finding(
    case: NonfiniteCase,
    verdict: Verdict,
    rule: str,
    text: str,
    ranks: tuple[int, ...] = (),
    strike: bool = False,
    evidence: tuple[int, ...] = (),
    ruled_out: tuple[str, ...] = (),
) -> Finding:
    rows = [_evidence(case, rank, phase, bad) for rank in evidence[:KEPT] for phase, bad in case.views[rank].kept]
    return Finding(
        case.attempt, case.step, "nonfinite", verdict, rule, text, ranks, strike, tuple(rows[:KEPT]), ruled_out
    )


def _evidence(case: NonfiniteCase, rank: int, phase: str, bad: Bad) -> dict[str, Any]:
    agree = (r for r in case.group if r in case.views and bad.tensor not in getattr(case.views[r], phase))
    fine = list(islice(agree, MAX_PEERS))
    return {
        "step": case.step,
        "check": "nonfinite",
        "phase": phase,
        "tensor": bad.tensor,
        "dtype": None,
        "shape": None,
        "expected": "finite",
        "observed": f"{bad.nan} NaN, {bad.inf} Inf of {bad.numel} elements",
        "peers_agreeing": fine,
        "replays": [],
        "rank": rank,
    }
