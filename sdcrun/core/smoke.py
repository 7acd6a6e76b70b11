"""Runs with --inject-fault: for each fault whether it fired, was caught, and whether the right devices were named.
Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sdcrun.core import faultspec, words
from sdcrun.core.audit import NARROWED
from sdcrun.core.firings import Firing
from sdcrun.core.ledger import ACCUSING
from sdcrun.core.roster import Attempt, domain_count
from sdcrun.core.state import State
from sdcrun.core.types import Finding, Verdict

BLAMELESS = ("allreduce", "input")
STOPPED = "the policy stopped the job before its step"
NOT_NAMED = "it was caught, but the device was not named"
ACCUSED = "a device was accused of what no device did"
MISSED = (
    "it fired and was not caught (perhaps nothing was left to catch: a low bit is rounded away, dropout, ReLU or a "
    "mask may drop the element; of several micro-batches in a step one is audited)"
)


@dataclass(frozen=True)
class FaultRow:
    """What became of one fault. `fired` counts firings in training (not those in replays); `step`, `rank` are the first
    one's. `after_steps` is the distance from the first firing that changed something to the finding that caught it: how
    long it went unnoticed. `named_right` is None where nobody could be named. `problem` says in words what went wrong,
    None when all is well."""

    spec: str
    fired: int
    step: int | None
    rank: int | None
    caught_by: str | None
    after_steps: int | None
    named_right: bool | None
    by_design_unseen: str | None
    problem: str | None


def fault_rows(state: State) -> list[FaultRow]:
    """One row for each --inject-fault, in order."""
    findings = [
        entry.finding for entry in state.ledger.ordered() if entry.finding.verdict is not Verdict.CLEAN_AFTER_TRIAGE
    ]
    explained = [(finding, state.firings.explain(finding)) for finding in findings]
    rows = []
    for position, text in enumerate(state.config.faults):
        firings = [f for f in state.firings.all if f.position == position]
        mine = [(finding, [f for f in why if f.position == position]) for finding, why in explained]
        rows.append(_row(state, position, text, firings, [(finding, why) for finding, why in mine if why]))
    return rows


def problems(state: State) -> list[str]:
    """Why a run with --inject-fault proves nothing or shows a failure; empty when every fault did as it should."""
    rows = fault_rows(state)
    found = [f"{words.clean(row.spec)}: {row.problem}" for row in rows if row.problem]
    tests = state.selftests.items()
    found += [f"self-test on rank {rank}: {text}" for (_, rank, _), (passed, text) in tests if not passed]
    for entry in state.ledger.ordered():
        finding = entry.finding
        if finding.verdict in ACCUSING and not finding.injected:
            found.append(
                f"{words.ranks(finding.ranks)} accused at step {finding.step} ({words.CHECK_TITLES[finding.check]}), "
                "where no fault was injected"
            )
    if rows and not any(row.fired for row in rows) and not any(row.problem for row in rows):
        found.append("no fault fired")
    return found


def _unfired(state: State, position: int) -> str:
    """Why a fault never fired, as its ranks said."""
    if position in state.unfired:
        return f"it never fired: {words.clean(state.unfired[position], 200)}"
    guarded = any(attempt.modules for attempt in state.roster.attempts.values())
    return "it never fired (no such step, rank or tensor?)" if guarded else "it never fired: no rank was guarded"


def _to_come(state: State, text: str) -> bool:
    """Whether the job ended before the first step of a fault."""
    last = state.roster.last
    try:
        return last is not None and faultspec.parse(text).first >= last.last_step
    except faultspec.FaultSpecError:
        return False


def _row(
    state: State, position: int, text: str, firings: list[Firing], caught: list[tuple[Finding, list[Firing]]]
) -> FaultRow:
    trained = sorted((f for f in firings if f.phase == "step"), key=lambda f: (f.attempt, f.step, f.rank))
    first = trained[0] if trained else None
    if first is None:
        stopped = state.stop is not None and _to_come(state, text)
        gone = None if stopped else _unfired(state, position)
        return FaultRow(text, 0, None, None, None, None, None, STOPPED if stopped else None, gone)
    unseen = _unseen(state, text, first)
    checkpoint = _caught_at_checkpoint(state, first) if first.site == "checkpoint" else None
    if checkpoint is not None:
        return FaultRow(text, len(trained), first.step, first.rank, "checkpoint", checkpoint, None, None, None)
    if not any(f.effective for f in trained):
        return FaultRow(
            text, len(trained), first.step, first.rank, None, None, None, None, "it fired but changed no value"
        )
    if not caught:
        unseen = unseen or _narrowed(state, first)
        missed = _missed_at_checkpoint(state, first) if first.site == "checkpoint" else MISSED
        problem = None if unseen and faultspec.SEEN not in unseen else missed
        return FaultRow(text, len(trained), first.step, first.rank, None, None, None, unseen, problem)
    finding = caught[0][0]
    before = [f.step for f in trained if f.effective and f.attempt == finding.attempt and f.step <= finding.step]
    after = finding.step - min(before, default=finding.step)
    named = _named_right(state, trained, [finding for finding, _ in caught], first, unseen)
    excused = unseen and first.site not in BLAMELESS
    problem = None if named is not False or excused else NOT_NAMED if first.site not in BLAMELESS else ACCUSED
    return FaultRow(text, len(trained), first.step, first.rank, finding.check, after, named, unseen, problem)


def _named_right(
    state: State, trained: list[Firing], found: list[Finding], first: Firing, unseen: str | None
) -> bool | None:
    """Whether exactly the devices on which the fault fired were named (`found` are findings that it explains)."""
    named = {(finding.attempt, rank) for finding in found for rank in finding.ranks if finding.verdict in ACCUSING}
    if first.site in BLAMELESS:
        return not named
    if not named and (unseen or all(f.verdict is Verdict.AMP_OVERFLOW for f in found)):
        return None
    fired = {state.device_key(f.attempt, f.rank) for f in trained if f.effective}
    return {state.device_key(*place) for place in named} == fired


def _caught_at_checkpoint(state: State, first: Firing) -> int | None:
    """Steps from the firing to the checkpoint that was not called good for it, None when all were."""
    steps = [
        c["step"] if c["step"] is not None else first.step
        for c in state.checkpoints.values()
        if (c["state"] in ("withheld", "tainted") or c["dissent"]) and (c["step"] is None or c["step"] >= first.step)
    ]
    return min(steps) - first.step if steps else None


def _missed_at_checkpoint(state: State, first: Firing) -> str:
    """What became of the checkpoint into which the fault went."""
    mine = [c for c in state.checkpoints.values() if c["rank"] == first.rank]
    saved = [c for c in mine if c["step"] is None or c["step"] >= first.step]
    if not saved:
        return "it fired and was not caught (no checkpoint that this rank saved from then on is on record)"
    one = min(saved, key=lambda c: (c["step"] is None, c["step"] or 0))
    why = f": {words.clean(one['reason'], 200)}" if one["state"] == "unverified" and one["reason"] else ""
    return f"it fired and was not caught (checkpoint {words.clean(one['path'], 200)} is {one['state']}{why})"


def _unseen(state: State, text: str, first: Firing) -> str | None:
    """Why no check of this run can see the fault or name its device; None where one must."""
    if first.site in BLAMELESS and first.loud:
        return None
    attempt = state.roster.attempt(first.attempt)
    group = _group(attempt, first.rank)
    try:
        spec = faultspec.parse(text)
    except faultspec.FaultSpecError:
        return None
    off = attempt.checks_off.get("replay" if first.site in faultspec.COMPUTED else "weights")
    if off and not first.loud:
        return f"the check went off: {words.clean(off)}"
    domains = domain_count(attempt, group)
    reason = faultspec.by_design_unseen(spec, state.config, domains, len(group))
    return reason or _too_many(state, first, domains)


def _narrowed(state: State, first: Firing) -> str | None:
    """Why a wrong loss was not compared: not every script's loss can be computed again by itself."""
    if first.site != "loss":
        return None
    limits = state.roster.attempt(first.attempt).limits
    return next((words.clean(text) for text in limits if text.startswith(NARROWED)), None)


def _too_many(state: State, first: Firing, domains: int) -> str | None:
    """Several faults in one step may leave no two devices that agree on what is right: then nobody can be named."""
    if first.site not in faultspec.COMPUTED or first.loud:
        return None
    same = [f for f in state.firings.before(first.attempt, first.step, "replay")
            if f.step == first.step and f.effective and f.site in faultspec.COMPUTED]  # fmt: skip
    attempt = state.roster.attempt(first.attempt)
    group = _group(attempt, first.rank)
    nodes = {attempt.places[rank].node for rank in group if rank in attempt.places}
    by_node = len(nodes) >= 3
    faulty = {attempt.places[f.rank].node if by_node and f.rank in attempt.places else f.rank for f in same}
    if len(faulty) > 1 and domains - len(faulty) < 2:
        return (
            f"faults on {len(faulty)} of {domains} failure domains in one step: {faultspec.SEEN}, but no two of the "
            "others are left to agree on what is right"
        )
    return None


def _group(attempt: Attempt, rank: int) -> tuple[int, ...]:
    """The smallest guarded group of `rank`, else the whole world."""
    groups = [g for g in attempt.groups if rank in g]
    return min(groups, key=len) if groups else tuple(range(max(attempt.world_size, 1)))
