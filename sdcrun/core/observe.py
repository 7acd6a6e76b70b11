"""One event into the state: what each kind means. Pure; nothing is decided here, and malformed data never raises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sdcrun.core import checkpoints, nonfinite, selftests
from sdcrun.core.firings import firing_of, reach
from sdcrun.core.ledger import CaseKey
from sdcrun.core.nonfinite import NonfiniteCase
from sdcrun.core.roster import Attempt, group_of, rank_of
from sdcrun.core.state import State, StopOrder, close, rejudge
from sdcrun.core.types import Event, ExitCode, Finding, Verdict
from sdcrun.core.votes import VoteHistory

MAX_LIMITS = 200
MAX_WORDS = 64
MAX_STEP = 1 << 40


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


def _step(state: State, event: Event) -> tuple[Attempt, int]:
    attempt, step = state.roster.attempt(event.attempt), int(event.data["step"])
    if not 0 <= step < MAX_STEP:
        raise ValueError("not a step")
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
    rank = _rank(event)
    attempt.groups.add(group)
    attempt.modules.setdefault(rank, []).extend(modules)
    if rank in attempt.so_far:
        attempt.so_far.discard(rank)
        attempt.unguarded.pop(rank, None)


def _unguarded(state: State, event: Event) -> None:
    attempt, rank, reason = state.roster.attempt(event.attempt), _rank(event), str(event.data["reason"])
    if event.data.get("so_far"):
        # It trains something that is not guarded; one that is may still come, or (in another order) has come.
        if rank not in attempt.unguarded and rank not in attempt.modules:
            attempt.so_far.add(rank)
            attempt.unguarded[rank] = reason
        return
    before = None if rank in attempt.so_far else attempt.unguarded.get(rank)
    attempt.so_far.discard(rank)
    if before is None or reason not in before:
        attempt.unguarded[rank] = reason if before is None else f"{before}; {reason}"


def _limit(state: State, event: Event) -> None:
    text = str(event.data["text"])
    _add_limit(state.roster.attempt(event.attempt), text)
    if event.data.get("unfired") is not None:
        state.unfired.setdefault(int(event.data["unfired"]), text.partition("never fired: ")[2] or text)


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
    if not 0 <= seen < MAX_STEP:
        raise ValueError("not a number of steps")
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
    if rank not in group.members:
        raise ValueError("a view from outside the group")
    view = nonfinite.view_of(event.data)
    key = CaseKey(event.attempt, step, "nonfinite", group)
    if key not in state.cases:
        state.cases[key] = NonfiniteCase(event.attempt, step, group)
        state.open_cases.add(key)
    case = state.cases[key]
    case.views[rank] = view
    if view.skipped and not view.amp:
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
    if rank not in group.members:
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
        "expected": _hex(data.get("expected")),
        "observed": _hex(data.get("observed")),
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


def _hex(word: Any) -> str | None:
    """A word's hex digits with 0x in front."""
    return None if word is None else f"0x{str(word).lower().removeprefix('0x')}"


def _inject(state: State, event: Event) -> None:
    _step(state, event)
    firing = firing_of(event, _rank(event))
    state.firings.add(firing)
    last = firing.step + max(reach(state.config, "weights"), reach(state.config, "nonfinite"))
    for key in state.ledger.between(event.attempt, firing.step, last):
        again = [key.step]
        if key.of_vote:
            history = state.votes[key.attempt, key.group, key.table]
            again = sorted({key.step, *history.plant(key.step, _planted(state, history, key.step))})
        for step in again:
            rejudge(state, replace(key, step=step))


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
        state.stop = StopOrder(
            ExitCode.UNCLEAR if code is None else int(code), str(event.data.get("why") or ""), recorded=True
        )


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
    "checkpoint": checkpoints.observe,
    "loaded": checkpoints.observe_loaded,
    "selftest": selftests.observe,
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
