"""Is what a script saves what the ranks agree on? The decision for one save, made on the very tensors handed over."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sdcrun.shim import fingerprint
from sdcrun.shim.checkpoints.clock import NotThatVersion
from sdcrun.shim.checkpoints.contents import Leaf, leaves
from sdcrun.shim.checkpoints.question import Answer, Questions
from sdcrun.shim.checkpoints.recognise import Known, Part, parts
from sdcrun.shim.checkpoints.tables import Comparison, Saved, Table, compare, moving_names, table_of

PROVISIONAL, UNVERIFIED, WITHHELD = "provisional", "unverified", "withheld"
_WORST = (PROVISIONAL, UNVERIFIED, WITHHELD)
READ_SECONDS = 2.0
KEPT_ANSWERS = 4
# Up to this many ranks each rank that saves may ask all others: that is their square in messages.
ALL_ASK = 64


@dataclass
class Finding:
    """What was decided on one part of a save. `how` is "vote" or "question" for a part that is good."""

    part: Part
    state: str
    reason: str
    step: int | None = None
    how: str | None = None
    differing: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Verdict:
    """What was decided on a save. `step` is the window after whose update the weights were taken, None if unknown;
    `voted` maps names in the save to the names that ranks vote on."""

    saved: Saved
    findings: list[Finding]
    step: int | None
    group: Any
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def state(self) -> str:
        """The worst of the parts."""
        return max((finding.state for finding in self.findings), key=_WORST.index)

    @property
    def reason(self) -> str:
        """One line: the worst parts first."""
        order = sorted(self.findings, key=lambda f: -_WORST.index(f.state))
        reasons = [f.reason for f in order if f.state != PROVISIONAL]
        said: dict[str, list[str]] = {}
        for finding in order:
            if finding.state == PROVISIONAL:
                said.setdefault(finding.reason, []).append(_kind(finding.part))
        reasons += [f"{' and '.join(sorted(set(kinds), reverse=True))} {reason}" for reason, kinds in said.items()]
        return "; ".join(dict.fromkeys(reasons))[:600]

    @property
    def voted(self) -> dict[str, str]:
        """Name in the save -> name in the table, of every tensor of a part."""
        return {leaf.name: name for f in self.findings for name, leaf in f.part.leaves.items()}

    @property
    def differing(self) -> list[dict[str, Any]]:
        """Tensors that are not what the ranks agree on: {tensor, name, expected, observed, word, bits}."""
        return [row for finding in self.findings for row in finding.differing]


class Judge:
    """Decides for one rank. `answers` keeps tables that ranks gave to questions, by group."""

    def __init__(self, runtime, questions: Questions) -> None:
        self.runtime, self.questions = runtime, questions
        self._answers: dict[int, deque[Table]] = {}

    def judge(self, contents: Any) -> Verdict | None:
        """The verdict on a save, or None when there is no tensor of a guarded module in it."""
        found = leaves(contents)
        if not found:
            return None
        chosen: list[tuple[Any, Known, list[Part]]] = []
        with contextlib.ExitStack() as keeping:
            for group in self.runtime.groups.values():
                known = Known(group, self.optimizer_state(group))
                mine = parts(found, known)
                if mine:
                    chosen.append((group, known, mine))
                    if not any(table.version == group.weights_clock.version for table in self._tables(group)):
                        # In the background: once this rank goes on, no other can say any more what it held.
                        keeping.enter_context(group.weights_clock.kept())
            return self._verdict(Saved(found), chosen) if chosen else None

    def _verdict(self, saved: Saved, chosen: list[tuple[Any, Known, list[Part]]]) -> Verdict:
        findings = [f for group, known, mine in chosen for f in self._group(saved, group, known, mine)]
        known_of = {id(group): known for group, known, _ in chosen}
        if threading.current_thread() is threading.main_thread():
            findings += [more for f in findings if (more := _buffers(saved, f, known_of[id(f.part.group)]))]
        steps = [finding.step for finding in findings if finding.step is not None]
        group = chosen[0][0]
        return Verdict(saved, findings, max(steps, default=_last_step(group)), group)

    @staticmethod
    def optimizer_state(group) -> dict[str, Any]:
        """The optimizers' state tensors by table name."""
        from sdcrun.shim.checks.weights import WeightVote

        return (group.weights or WeightVote(group)).optimizer_state()

    def _tables(self, group, kind: str = "weights") -> list[Table]:
        """All tables of a kind that ranks agreed on, the newest version first."""
        voted = group.weights.tables() if group.weights is not None else []
        known = [table for table in (*voted, *self._answers.get(id(group), ())) if table.kind == kind]
        return sorted(known, key=lambda table: -table.version)

    def _group(self, saved: Saved, group, known: Known, mine: list[Part]) -> list[Finding]:
        findings: list[Finding] = []
        undecided: list[Part] = []
        for part in mine:
            finding = self._by_tables(saved, part, known)
            if finding is None:
                undecided.append(part)
            else:
                findings.append(finding)
        return findings + self._by_question(saved, group, known, undecided) if undecided else findings

    def _by_tables(self, saved: Saved, part: Part, known: Known) -> Finding | None:
        """A finding where a table fits, or where one is of the version that the rank holds now."""
        group = part.group
        tables = self._tables(group, part.kind)
        best: Comparison | None = None
        for table in tables:
            comparison = compare(saved, part.leaves, table)
            if comparison.good:
                return _good(part, comparison)
            if best is None or len(comparison.equal) > len(best.equal):
                best = comparison
        foreign = [reason for reason in (best.foreign.values() if best else ()) if not reason.startswith("the table")]
        if foreign:
            return _other(part, f"no vote is about it: {foreign[0]}")
        clock = group.weights_clock
        if best is not None and not best.foreign:
            moving = moving_names(tables, known.trainable if part.kind == "weights" else set(known.state))
            current = best.table.version == clock.version and not clock.moving
            if (current or len({t.version for t in tables}) > 1) and best.same_weights(saved, part.leaves, moving):
                return _wrong(part, best, saved, known)
        return None

    def _by_question(self, saved: Saved, group, known: Known, undecided: list[Part]) -> list[Finding]:
        """The rest: are these the weights that the rank holds now, and do the other ranks hold the same?"""
        why = _cannot_ask(group)
        if why is not None:
            return [_other(part, why) for part in undecided]
        clock, step = group.weights_clock, _last_step(group)
        version = clock.version
        kinds = sorted({part.kind for part in undecided}, reverse=True)
        try:
            held = group.snapshots.read(version, kinds, READ_SECONDS)
        except NotThatVersion:
            return [_other(part, "the weights were changing while they were saved") for part in undecided]
        findings: list[Finding] = []
        asked: list[tuple[Part, Comparison, set[str]]] = []
        for part in undecided:
            read = held[part.kind]
            mine = table_of(part.kind, step, version, "question", read.names, read.rows, read.metas)
            moving = moving_names([mine, *self._tables(group, part.kind)], _all_moving(part, known))
            comparison = compare(saved, part.leaves, mine)
            if comparison.foreign:
                findings.append(_other(part, f"no vote is about it: {next(iter(comparison.foreign.values()))}"))
            elif comparison.good or comparison.same_weights(saved, part.leaves, moving):
                asked.append((part, comparison, moving))
            else:
                findings.append(_other(part, "it matches no vote and is not what this rank holds now: an average, an "
                                             "older state, or weights newer than the last vote"))  # fmt: skip
        if asked:
            answer = self.questions.ask(group, version, step, kinds)
            for table in answer.tables.values():
                self._answers.setdefault(id(group), deque(maxlen=KEPT_ANSWERS)).append(table)
            findings += [self._answered(saved, part, moving, answer, known) for part, _, moving in asked]
        return findings

    def _answered(self, saved: Saved, part: Part, moving: set[str], answer: Answer, known: Known) -> Finding:
        table, group = answer.tables.get(part.kind), known.group
        if table is None:
            if any(2 * n < len(part.leaves) for n in answer.dissent.get(part.kind, {}).values()):
                group.wanted.add("vote")
            return _other(part, answer.why or "nobody could say")
        comparison = compare(saved, part.leaves, table)
        dissent = answer.dissent.get(part.kind, {})
        if dissent:
            group.wanted.add("vote")
        if not comparison.good:
            if comparison.same_weights(saved, part.leaves, moving):
                return _wrong(part, comparison, saved, known)
            return _other(part, f"this rank's {_kind(part)} are not those of the other ranks: swapped or loaded on "
                                "purpose, most likely", table.step)  # fmt: skip
        count = len(table.rows)
        few = {rank: number for rank, number in dissent.items() if 2 * number <= count}
        if few:
            finding = _good(part, comparison)
            finding.state = WITHHELD
            finding.reason = (
                f"rank {min(few)} holds other {_kind(part)} than the majority "
                f"({', '.join(answer.named[part.kind][:3])}): its wrong gradients may be in these already"
            )
            return finding
        return _good(part, comparison)


def _cannot_ask(group) -> str | None:
    if group.off_reason is not None:
        return f"the guard is off: {group.off_reason}"
    if group.size < 2:
        return "one replica: there is nothing to compare it with"
    if group.weights is not None and group.weights.off:
        return "the replicas differ on purpose or could not be compared: the weight vote is off"
    if group.size > ALL_ASK and group.rank:
        return "in a large job only the first rank asks the others what they hold"
    return None


def _last_step(group) -> int | None:
    return group.step - 1 if group.step else None


def _all_moving(part: Part, known: Known) -> set[str]:
    return known.trainable if part.kind == "weights" else set(known.state)


def _kind(part: Part) -> str:
    return "weights" if part.kind == "weights" else "optimizer states"


def _good(part: Part, comparison: Comparison) -> Finding:
    table = comparison.table
    asked = "the vote" if table.how == "vote" else "what all ranks hold"
    reason = f"equal {asked} after step {table.step}"
    return Finding(part, PROVISIONAL, reason, table.step, table.how)


def _other(part: Part, why: str, step: int | None = None) -> Finding:
    return Finding(part, UNVERIFIED, f"{part.place}: {why}", step)


def _wrong(part: Part, comparison: Comparison, saved: Saved, known: Known) -> Finding:
    """Of a part that is the table's but for some tensors."""
    if comparison.rewritten(saved, part.leaves, known.parameters if part.kind == "weights" else known.state):
        first, more = comparison.differing[0], len(comparison.differing) - 1
        named = f"{first} and {more} more" if more else first
        why = f"{named} differ from the vote in a good part of the elements: changed on purpose, most likely"
        return _other(part, why)
    comparison.find_words(saved, part.leaves)
    source = "the vote" if comparison.table.how == "vote" else "what the ranks hold"
    return _damaged(part, part.leaves, comparison, comparison.differing, source)


def _buffers(saved: Saved, finding: Finding, known: Known) -> Finding | None:
    """Ranks do not vote on buffers. But where one word of those beside this step's weights is not what this rank holds,
    the copy is damaged: what moves a buffer (a forward) moves all of it. Not asked in the background, while the
    training goes on."""
    part, step = finding.part, _last_step(known.group)
    if finding.state != PROVISIONAL or finding.step != step:
        return None
    held = {
        name: known.buffers[name] for name, leaf in part.buffers.items()
        if leaf.tensor.is_floating_point() and known.buffers[name].numel() > 2
    }  # fmt: skip
    if not held:
        return None
    rows, metas = fingerprint.fingerprints(list(held.values())), map(fingerprint.metadata, held.values())
    table = table_of("buffers", step, known.group.weights_clock.version, "held", held, rows, metas)
    mine = {name: part.buffers[name] for name in held}
    comparison = compare(saved, mine, table)
    comparison.find_words(saved, mine)
    wrong = [name for name in comparison.differing if name in comparison.words]
    return _damaged(part, mine, comparison, wrong, "what this rank holds") if wrong else None


def _damaged(part: Part, leaves: dict[str, Leaf], comparison: Comparison, wrong: list[str], source: str) -> Finding:
    table, rows = comparison.table, []
    for name in wrong:
        leaf, word = leaves[name], comparison.words.get(name)
        itemsize = leaf.tensor.element_size()
        rows.append({
            "tensor": name, "name": leaf.name, "dtype": str(leaf.tensor.dtype).removeprefix("torch."),
            "shape": list(leaf.tensor.shape), "text": word.text(itemsize) if word else None,
            "bits": word.bits if word else [], "index": word.index * 4 // itemsize if word else None,
            "expected": f"{word.expected:08x}" if word else None, "observed": f"{word.observed:08x}" if word else None,
        })  # fmt: skip
    first = rows[0]
    where = f", {first['text']}," if first["text"] else ""
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    reason = f"{part.place}: {first['tensor']}{where}{more} differs from {source} after step {table.step}"
    return Finding(part, WITHHELD, reason, table.step, table.how, rows)
