"""The controller's memory: everything the events of one job have said, and the cases they make. Pure.

`observe` takes one event in; nothing is decided here. Every rank's statement is filed under (attempt, step, group), so
that the order in which ranks speak does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sdcrun.core import nonfinite
from sdcrun.core.firings import Firings, firing_of, reach
from sdcrun.core.ledger import CaseKey, Entry, Ledger
from sdcrun.core.nonfinite import NonfiniteCase
from sdcrun.core.replays import ReplayBook
from sdcrun.core.roster import Attempt, Roster, group_of, rank_of
from sdcrun.core.types import Config, Event, Finding, Verdict
from sdcrun.core.votes import VoteHistory

MAX_LIMITS = 200
MAX_WORDS = 64


@dataclass
class StopOrder:
    """The policy's word to end the job. `recorded`: a `command` event of it is in the record."""

    code: int
    why: str
    recorded: bool = False


@dataclass
class State:
    """All that is known of a job. `changed` are cases whose findings may be new since the last decision, `clock` the
    controller's time at the last tick (None before)."""

    config: Config
    roster: Roster = field(default_factory=Roster)
    ledger: Ledger = field(default_factory=Ledger)
    firings: Firings = field(init=False)
    replays: ReplayBook = field(default_factory=ReplayBook)
    cases: dict[CaseKey, NonfiniteCase] = field(default_factory=dict)
    open_cases: set[CaseKey] = field(default_factory=set)
    votes: dict[tuple[int, tuple[int, ...], str], VoteHistory] = field(default_factory=dict)
    words: dict[tuple[int, int, str, int], list[dict[str, Any]]] = field(default_factory=dict)
    skips: dict[tuple[int, tuple[int, ...]], set[int]] = field(default_factory=dict)
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    approvals: list[dict[str, Any]] = field(default_factory=list)
    commands: list[dict[str, Any]] = field(default_factory=list)
    blind: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[dict[str, Any]] = field(default_factory=list)
    lost: list[dict[str, Any]] = field(default_factory=list)
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: int = 0
    first_time: float | None = None
    last_time: float | None = None
    malformed: dict[str, int] = field(default_factory=dict)
    stop: StopOrder | None = None
    changed: list[CaseKey] = field(default_factory=list)
    waiting: dict[CaseKey, float | None] = field(default_factory=dict)
    said: dict[Any, Any] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    since: dict[CaseKey, float] = field(default_factory=dict)
    clock: float | None = None

    def __post_init__(self) -> None:
        self.firings = Firings(self.config)

    def device_key(self, attempt: int, rank: int) -> str:
        """Key of the device that `rank` of `attempt` is."""
        return self.roster.attempt(attempt).device(rank).key

    @property
    def ended(self) -> bool:
        """Whether every supervisor that came up has said that the job ended."""
        return bool(self.ends) and all(node["source"] in self.ends for node in self.roster.nodes)


def observe(state: State, event: Event) -> None:
    """Take one event in. Malformed data is counted by kind and otherwise ignored: one bad sender must not stop the
    record."""
    state.first_time = event.time if state.first_time is None else min(state.first_time, event.time)
    state.last_time = event.time if state.last_time is None else max(state.last_time, event.time)
    handler = _HANDLERS.get(event.kind)
    if handler is None:
        return
    try:
        handler(state, event)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        state.malformed[event.kind] = state.malformed.get(event.kind, 0) + 1


def rejudge(state: State, key: CaseKey) -> None:
    """Work out the findings of one case again and file them."""
    if key.check == "nonfinite":
        case = state.cases[key]
        found, done = _judge_nonfinite(state, key, case), _done_nonfinite(case)
    elif key.check == "weights":
        history = state.votes[key.attempt, key.group, key.table]
        accused = history.cases[key.step].accused
        known = {rank: state.words.get((key.attempt, key.step, key.table, rank), []) for rank in accused}
        found, done = history.judge(key.step, known), _done_vote(history.cases[key.step])
    else:
        found = state.replays.judge(key, _accused_before(state, key), _voting(state, key))
        done = state.replays.done(key)
    found = [_mark(state, finding) for finding in found]
    if key.check == "replay":
        state.replays.remember(key, found)
    if state.ledger.put(key, [Entry(finding, done) for finding in found]):
        state.changed.append(key)


def _judge_nonfinite(state: State, key: CaseKey, case: NonfiniteCase) -> list[Finding]:
    """Check 1's own finding, or what a second device made of the same micro-batch where there was an audit of the step.
    """
    found = nonfinite.judge(case) if case.closed or case.complete else []
    if not any(view.local for view in case.views.values()):
        return found
    amp = all(view.amp for view in case.views.values())
    triaged = state.replays.triage(replace(key, check="replay"), _accused_before(state, key), amp)
    return nonfinite.merge(triaged, found) if triaged else found


def close(state: State, key: CaseKey) -> None:
    """Wait no longer for views of a non-finite step."""
    state.open_cases.discard(key)
    state.cases[key].closed = True
    rejudge(state, key)


def _mark(state: State, finding: Finding) -> Finding:
    return replace(finding, injected=bool(state.firings.all) and bool(state.firings.explain(finding)))


def _accused_before(state: State, key: CaseKey) -> frozenset[int]:
    """Ranks of the case's group whose device has a strike of an earlier step or of another check's finding before it.
    """
    struck = {
        device
        for device, strikes in state.ledger.strikes(state.device_key).items()
        if any(strike < (key.attempt, key.step) for strike in strikes)
    }
    return (
        frozenset(rank for rank in key.group if state.device_key(key.attempt, rank) in struck)
        if struck
        else frozenset()
    )


def _voting(state: State, key: CaseKey) -> bool:
    on = state.config.weights_every > 0 or state.config.budget is not None
    return on and "weights" not in state.roster.attempt(key.attempt).checks_off


def _done_nonfinite(case: NonfiniteCase) -> str:
    if any(view.skipped for view in case.views.values()):
        if all(view.amp for view in case.views.values()):
            return "The GradScaler skipped this update on all ranks."
        return f"All ranks skipped step {case.step}: gradients zeroed, weights, optimizer and buffers untouched."
    return "The step was not skipped."


def _done_vote(case: Any) -> str:
    if case.action == "repaired":
        if case.again == "clean":
            return (
                "Repaired: parameters and optimizer state taken from a majority rank; the vote taken again was clean."
            )
        if case.again == "dissent":
            return "Repair tried from a majority rank, but the vote taken again still differed."
        return "Repaired from a majority rank."
    if case.action == "stopped":
        return "The ranks agreed to stop."
    if case.action == "declined":
        return "Nothing was changed."
    return "Reported only; nothing was changed."


def _step(state: State, event: Event) -> tuple[Attempt, int]:
    attempt, step = state.roster.attempt(event.attempt), int(event.data["step"])
    if step < 0:
        raise ValueError("negative step")
    attempt.last_step = max(attempt.last_step, step)
    return attempt, step


def _rank(event: Event) -> int:
    rank = rank_of(event.source)
    if rank is None:
        raise ValueError("not from a rank")
    return rank


def _hello(state: State, event: Event) -> None:
    state.roster.hello(event)


def _guarded(state: State, event: Event) -> None:
    attempt, group = state.roster.attempt(event.attempt), group_of(event.data["group"])
    modules = [dict(m) for m in event.data["modules"]]
    attempt.groups.add(group)
    attempt.modules.setdefault(_rank(event), []).extend(modules)


def _unguarded(state: State, event: Event) -> None:
    state.roster.attempt(event.attempt).unguarded[_rank(event)] = str(event.data["reason"])


def _limit(state: State, event: Event) -> None:
    _add_limit(state.roster.attempt(event.attempt), str(event.data["text"]))


def _add_limit(attempt: Attempt, text: str) -> None:
    if text not in attempt.limits and len(attempt.limits) < MAX_LIMITS:
        attempt.limits.append(text)


def _check_off(state: State, event: Event) -> None:
    attempt = state.roster.attempt(event.attempt)
    check, reason = str(event.data["check"]), str(event.data["reason"])
    attempt.checks_off.setdefault(check, reason)
    step = event.data.get("step")
    _add_limit(attempt, f"Check {check} went off{'' if step is None else f' at step {int(step)}'}: {reason}")


def _summary(state: State, event: Event) -> None:
    attempt, data = state.roster.attempt(event.attempt), event.data
    seen = int(data["steps"]["seen"])
    attempt.last_step = max(attempt.last_step, seen - 1)
    kept = {
        "steps": {k: int(data["steps"][k]) for k in ("seen", "committed", "skipped")},
        "checks": {
            str(c): {k: float(v.get(k) or 0) for k in ("run", "fired", "seconds")} for c, v in data["checks"].items()
        },
        "parts": {str(k): float(v) for k, v in (data.get("parts") or {}).items()},
        "train_seconds": float(data["train_seconds"]),
        "last_audit_step": data.get("last_audit_step"),
        "time": event.time,
    }
    attempt.summaries[_rank(event), event.session, str(data.get("group"))] = kept


def _nonfinite(state: State, event: Event) -> None:
    _, step = _step(state, event)
    rank, group = _rank(event), group_of(event.data["group"])
    if rank not in group:
        raise ValueError("a view from outside the group")
    view = nonfinite.view_of(event.data)
    key = CaseKey(event.attempt, step, "nonfinite", group)
    if key not in state.cases:
        state.cases[key] = NonfiniteCase(event.attempt, step, group)
        state.open_cases.add(key)
    case = state.cases[key]
    case.views[rank] = view
    if case.skipped:
        state.skips.setdefault((event.attempt, group), set()).add(step)
    if case.closed:
        rejudge(state, key)
    elif case.complete:
        close(state, key)
    passed = [k for k in state.open_cases if k.attempt == event.attempt and k.group == group and k.step < step]
    for other in sorted(passed):
        late = state.cases[other]
        if rank not in late.views:
            late.passed.add(rank)
            if len(late.views) + len(late.passed) >= len(group):
                close(state, other)


def _audit(state: State, event: Event) -> None:
    _step(state, event)
    _rank(event)
    key = state.replays.add(event)
    if state.replays.skipped(key):
        state.skips.setdefault((key.attempt, key.group), set()).add(key.step)
    for other in state.replays.affected(key):
        rejudge(state, other)
    first = replace(key, check="nonfinite")
    if first in state.cases:
        rejudge(state, first)


def _vote(state: State, event: Event) -> None:
    _, step = _step(state, event)
    group, table = group_of(event.data["group"]), str(event.data["table"])
    rank = _rank(event)
    if rank not in group:
        raise ValueError("a vote from outside the group")
    history = state.votes.setdefault((event.attempt, group, table), VoteHistory())
    history.case(event.attempt, step, group, table)
    try:
        history.cases[step].add(rank, event.data)
    finally:
        changed = history.update(step)
    changed += history.plant(step, _planted(state, history, step))
    for other in sorted(set(changed)):
        rejudge(state, CaseKey(event.attempt, other, "weights", group, table))


def _planted(state: State, history: VoteHistory, step: int) -> bool:
    """Whether an injected fault explains the dissent of `step`."""
    case = history.cases[step]
    if not state.firings.all or not case.accused:
        return False
    probe = Finding(case.attempt, step, "weights", Verdict.SUSPECT, "", "", tuple(sorted(case.accused)))
    return bool(state.firings.explain(probe))


def _word(state: State, event: Event) -> None:
    _, step = _step(state, event)
    data, table = event.data, str(event.data["table"])
    index = data.get("index")
    row = {
        "tensor": str(data["tensor"]),
        "dtype": data.get("dtype"),
        "shape": data.get("shape"),
        "words": int(data["words"]),
        "index": None if index is None else int(index),
        "expected": data.get("expected"),
        "observed": data.get("observed"),
        "expected_value": data.get("expected_value"),
        "observed_value": data.get("observed_value"),
        "bits": [int(b) for b in data.get("bits") or []][:64],
        "peer": data.get("peer"),
    }
    rows = state.words.setdefault((event.attempt, step, table, int(data["rank"])), [])
    if len(rows) < MAX_WORDS and row not in rows:
        rows.append(row)
        rows.sort(key=lambda r: r["tensor"])
    for (attempt, group, other), history in state.votes.items():
        if attempt == event.attempt and other == table and step in history.cases:
            rejudge(state, CaseKey(attempt, step, "weights", group, table))


def _inject(state: State, event: Event) -> None:
    _step(state, event)
    firing = firing_of(event, _rank(event))
    state.firings.add(firing)
    last = firing.step + max(reach(state.config, "weights"), reach(state.config, "nonfinite"))
    for key in state.ledger.between(event.attempt, firing.step, last):
        again = [key.step]
        if key.check == "weights":
            history = state.votes[key.attempt, key.group, key.table]
            again = sorted({key.step, *history.plant(key.step, _planted(state, history, key.step))})
        for step in again:
            rejudge(state, replace(key, step=step))


def _checkpoint(state: State, event: Event) -> None:
    data = event.data
    step = data.get("step")
    name = str(data.get("id") or data["path"])
    state.checkpoints.pop(name, None)
    state.checkpoints[name] = {
        "path": str(data["path"]),
        "step": None if step is None else int(step),
        "state": str(data["state"]),
        "reason": str(data.get("reason") or ""),
        "attempt": event.attempt,
    }


def _bye(state: State, event: Event) -> None:
    rank = _rank(event)
    state.roster.attempt(event.attempt).byes[rank] = str(event.data["reason"])
    for key in sorted(k for k in state.open_cases if k.attempt == event.attempt and rank in k.group):
        case = state.cases[key]
        if rank not in case.views:
            case.passed.add(rank)
            if len(case.views) + len(case.passed) >= len(key.group):
                close(state, key)


def _node_up(state: State, event: Event) -> None:
    state.roster.node_up(event)


def _worker_lost(state: State, event: Event) -> None:
    state.lost.append({"time": event.time, "attempt": event.attempt, **event.data})


def _job_end(state: State, event: Event) -> None:
    code = event.data["exit_code"]
    state.ends[event.source] = {
        "exit_code": None if code is None else int(code),
        "status": str(event.data["status"]),
        "time": event.time,
    }


def _started(state: State, event: Event) -> None:
    state.starts += 1


def _command(state: State, event: Event) -> None:
    state.commands.append({"time": event.time, "attempt": event.attempt, **event.data})
    if event.data["what"] == "stop":
        code = event.data.get("code")
        state.stop = StopOrder(87 if code is None else int(code), str(event.data.get("why") or ""), recorded=True)


def _blind(state: State, event: Event) -> None:
    state.blind.append(dict(event.data))


def _gap(state: State, event: Event) -> None:
    state.gaps.append(dict(event.data))


def _approved(state: State, event: Event) -> None:
    state.approvals.append({"device": str(event.data["device"]), "by": str(event.data["by"]), "time": event.time})


_HANDLERS = {
    "hello": _hello,
    "guarded": _guarded,
    "unguarded": _unguarded,
    "limit": _limit,
    "check_off": _check_off,
    "summary": _summary,
    "nonfinite": _nonfinite,
    "audit": _audit,
    "vote": _vote,
    "word": _word,
    "inject": _inject,
    "checkpoint": _checkpoint,
    "bye": _bye,
    "node_up": _node_up,
    "worker_lost": _worker_lost,
    "job_end": _job_end,
    "started": _started,
    "command": _command,
    "blind": _blind,
    "gap": _gap,
    "approved": _approved,
}
