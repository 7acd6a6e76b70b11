"""Check 3's rules: weight votes with dissent, over time -> findings. Pure.

One vote's dissent is a `VoteCase`; the cases of one group and table in one attempt make a `VoteHistory`, which knows
what a single vote cannot: a difference that persists (one finding, one strike) and a minority that moves from rank to
rank (probable software).
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sdcrun.core import words
from sdcrun.core.roster import MAX_PEERS, Group
from sdcrun.core.types import Finding, Verdict

KEPT = 8
# Stands among accused ranks for "no version has a majority".
SPLIT = -1
TITLES = {"weights": "Weights", "optimizer": "Optimizer state", "buffers": "Buffers"}


def standing(said: dict[str, set[Any]]) -> str:
    """Of several accounts of one thing (text -> senders) the one that stands: most senders, then the lowest sender."""
    return min(said, key=lambda text: (-len(said[text]), min(said[text]), text))


@dataclass
class VoteCase:
    """Dissent in one vote. `said` maps the text of each version of the content to the ranks that sent it."""

    attempt: int
    step: int
    group: Group
    table: str
    said: dict[str, set[int]] = field(default_factory=dict)
    minority: dict[str, tuple[int, ...]] = field(default_factory=dict)
    no_majority: tuple[str, ...] = ()
    action: str = "reported"
    again: str | None = None
    why: str | None = None

    def add(self, rank: int, data: dict[str, Any]) -> None:
        """Take one rank's account. All should be equal; where one differs, the account of most ranks stands, then that
        of the lowest rank, so that a broken rank does not get the last word. Raises on malformed data."""
        content = {
            "minority": {str(t): sorted({int(r) for r in ranks}) for t, ranks in data["minority"].items()},
            "no_majority": sorted(str(t) for t in data["no_majority"]),
            "action": str(data["action"]),
            "again": data.get("again"),
            "why": data.get("why"),
        }
        if any(rank not in self.group.members for ranks in content["minority"].values() for rank in ranks):
            raise ValueError("a minority rank outside the group")
        self.said.setdefault(json.dumps(content, sort_keys=True), set()).add(rank)
        best = json.loads(standing(self.said))
        self.minority = {t: tuple(ranks) for t, ranks in best["minority"].items()}
        self.no_majority = tuple(best["no_majority"])
        self.action, self.again, self.why = best["action"], best["again"], best["why"]

    @property
    def accused(self) -> frozenset[int]:
        """Ranks in the minority of any tensor."""
        return frozenset(r for ranks in self.minority.values() for r in ranks)

    @property
    def settled(self) -> bool:
        """Whether the replicas are known to be equal again after this vote."""
        return self.action == "repaired" and self.again == "clean"


class VoteHistory:
    """Cases of one group and table in one attempt, in step order, whatever order they came in.

    `planted` holds the steps whose dissent an injected fault explains: it says nothing about the script.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.cases: dict[int, VoteCase] = {}
        self.planted: set[int] = set()
        self.moving = False
        self._fresh: dict[int, frozenset[int]] = {}
        self._lasting: dict[int, frozenset[int]] = {}
        self._seen: Counter[int] = Counter()
        self._votes = 0

    def case(self, attempt: int, step: int, group: Group, table: str) -> VoteCase:
        """The case of `step`, made on first use; call `update` after a change to it."""
        if step not in self.cases:
            insort(self.steps, step)
            self.cases[step] = VoteCase(attempt, step, group, table)
        return self.cases[step]

    def update(self, step: int) -> list[int]:
        """Work a new or changed case in; returns the steps whose finding may be another now, in order.

        A rank that was accused in the vote before and not settled since is not accused afresh: the difference lasts. So
        it is with replicas of which no version has a majority.
        """
        at = bisect_left(self.steps, step)
        lasting = self._lasting[self.steps[at - 1]] if at else frozenset()
        changed = []
        for other in self.steps[at:]:
            case = self.cases[other]
            marks = case.accused | ({SPLIT} if case.no_majority else frozenset())
            fresh, after = marks - lasting, frozenset() if case.settled else marks
            if other != step and fresh == self._fresh[other] and after == self._lasting[other]:
                break
            self._count(other, -1)
            self._fresh[other], self._lasting[other] = fresh, after
            self._count(other, 1)
            changed.append(other)
            lasting = after
        return self._moved(changed)

    def plant(self, step: int, planted: bool) -> list[int]:
        """Say whether an injected fault explains the dissent of `step`; returns like `update`."""
        if (step in self.planted) == planted:
            return []
        self._count(step, -1)
        self.planted ^= {step}
        self._count(step, 1)
        return self._moved([step])

    def _count(self, step: int, by: int) -> None:
        ranks = self._fresh.get(step, frozenset()) - {SPLIT}
        if ranks and step not in self.planted:
            self._votes += by
            for rank in ranks:
                self._seen[rank] += by
                if not self._seen[rank]:
                    del self._seen[rank]

    def _moved(self, changed: list[int]) -> list[int]:
        """The minority moves when there are several ranks and none of them is in more than half of the findings."""
        moving = len(self._seen) > 1 and self._votes > 1 and 2 * max(self._seen.values()) <= self._votes
        if moving == self.moving:
            return changed
        self.moving = moving
        return list(self.steps)

    def judge(self, step: int, known: dict[int, list[dict[str, Any]]]) -> list[Finding]:
        """Findings of the vote at `step`. `known` maps ranks to their `word` data of this step and table."""
        case, found = self.cases[step], []
        fresh = self._fresh.get(step, frozenset())
        if ranks := tuple(sorted(fresh - {SPLIT})):
            found.append(self._minority(case, ranks, known))
        if SPLIT in fresh:
            found.append(_no_majority(case, known))
        return found

    def _minority(self, case: VoteCase, accused: tuple[int, ...], known: dict[int, list[dict[str, Any]]]) -> Finding:
        rows = tuple(row for rank in accused for row in _evidence(case, rank, known.get(rank, [])))[: KEPT * 2]
        text = f"{_difference(case, accused)}.{_word({r: known.get(r, []) for r in accused}, len(accused) > 1)}"
        verdict, rule, strike = Verdict.SUSPECT, "weight-minority", True
        ruled_out: tuple[str, ...] = ("the all-reduce (all ranks got the same sum)",) if case.table == "weights" else ()
        if case.step not in self.planted:
            software = ""
            if case.step == 0:
                rule, software = (
                    "minority-at-start",
                    (
                        "It was there in the first step"
                        + (" after a restart" if case.attempt else "")
                        + ": probable software (other seeds, a load on one rank, weights changed outside the optimizer)"
                    ),
                )
            elif self.moving:
                rule, software = (
                    "minority-moves",
                    (
                        "In this attempt the minority moves from rank to rank: probable software (rank-dependent code, "
                        "weights changed outside the optimizer)"
                    ),
                )
            if software:
                verdict, strike, text, ruled_out = Verdict.INCONCLUSIVE, False, f"{text} {software}.", ()
        return Finding(
            case.attempt, case.step, "weights", verdict, rule, text, accused if strike else (), strike, rows, ruled_out
        )


def _difference(case: VoteCase, accused: tuple[int, ...]) -> str:
    tensors = sorted(t for t, ranks in case.minority.items() if set(ranks) & set(accused))
    wrong = {r for t in tensors for r in case.minority[t]}
    agreeing = len(case.group) - len(wrong)
    return (
        f"{TITLES.get(case.table, words.clean(case.table))} of {words.ranks(accused)} differ from those of "
        f"{words.count(agreeing, 'agreeing rank')} in {words.count(len(tensors), 'tensor')} ({words.names(tensors)})"
    )


def _no_majority(case: VoteCase, known: dict[int, list[dict[str, Any]]]) -> Finding:
    text = (
        f"{TITLES.get(case.table, words.clean(case.table))} differ and no version has a majority among "
        f"{words.count(len(case.group), 'rank')}: {words.names(case.no_majority)}. The replicas are no longer replicas."
    )
    if known:
        text += f" Against rank {case.group[0]}:{_word(known, True)}"
    if case.why:
        text += f" ({words.clean(case.why)})"
    rows = tuple(_row(case, tensor, None, []) for tensor in case.no_majority[:KEPT])
    return Finding(case.attempt, case.step, "weights", Verdict.INCONCLUSIVE, "no-majority", text, (), False, rows)


def _word(known: dict[int, list[dict[str, Any]]], several: bool) -> str:
    """A sentence on the differing words of each accused rank, the first of them in full."""
    said = []
    for rank, rows in known.items():
        if not rows:
            continue
        row, total = rows[0], sum(r["words"] for r in rows)
        text = "one 32-bit word differs" if total == 1 else f"{words.count(total, '32-bit word')} differ, the first"
        if row["index"] is not None:
            text += f": element {row['index']:,} of {words.clean(row['tensor'], 80)}"
        if row["bits"]:
            text += f", bit{'s' if len(row['bits']) > 1 else ''} {', '.join(map(str, row['bits'][:8]))} flipped"
        text += f", expected {words.number(row['expected_value'])}, observed {words.number(row['observed_value'])}"
        said.append(f"Rank {rank}: {text}" if several else f"{text[0].upper()}{text[1:]}")
    return f" {'. '.join(said[:3])}." if said else ""


def _row(case: VoteCase, tensor: str, rank: int | None, peers: list[int]) -> dict[str, Any]:
    return {
        "step": case.step,
        "check": "weights",
        "phase": case.table,
        "tensor": tensor,
        "dtype": None,
        "shape": None,
        "expected": None,
        "observed": None,
        "peers_agreeing": peers,
        "replays": [],
        "rank": rank,
    }


def _peers(case: VoteCase, tensor: str) -> list[int]:
    """The first ranks that agree on `tensor`."""
    return list(islice((rank for rank in case.group if rank not in case.minority[tensor]), MAX_PEERS))


def _evidence(case: VoteCase, rank: int, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evidence rows against `rank`: one per tensor, with the word where the rank could say."""
    said = {str(row.get("tensor")): row for row in known}
    rows = []
    for tensor in sorted(t for t, ranks in case.minority.items() if rank in ranks)[:KEPT]:
        row = _row(case, tensor, rank, _peers(case, tensor))
        if tensor in said:
            keys = (
                "dtype",
                "shape",
                "expected",
                "observed",
                "expected_value",
                "observed_value",
                "index",
                "bits",
                "words",
            )
            row.update({key: said[tensor].get(key) for key in keys})
        rows.append(row)
    return rows
