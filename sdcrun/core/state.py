"""The controller's memory: everything that the events of one job have said, and what its cases mean so far. Pure.

`core.observe` fills it. Every rank's statement is filed under (attempt, step, group), so that the order in which ranks
speak does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sdcrun.core import nonfinite
from sdcrun.core.firings import Firings
from sdcrun.core.ledger import CaseKey, Entry, Ledger
from sdcrun.core.nonfinite import NonfiniteCase
from sdcrun.core.replays import ReplayBook
from sdcrun.core.roster import MAX_PEERS, Roster
from sdcrun.core.types import Config, Finding
from sdcrun.core.votes import VoteCase, VoteHistory


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
    unfired: dict[int, str] = field(default_factory=dict)
    selftests: dict[tuple[int, int, str], tuple[bool, str]] = field(default_factory=dict)
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


def file_findings(state: State, key: CaseKey, entries: list[Entry]) -> None:
    """File the findings of one case, with their `injected` marks."""
    marked = [replace(entry, finding=_mark(state, entry.finding)) for entry in entries]
    if state.ledger.put(key, marked):
        state.changed.append(key)


def rejudge(state: State, key: CaseKey) -> None:
    """Work out the findings of one case again and file them."""
    if key.check == "weights" and not key.of_vote:
        file_findings(state, key, state.ledger.entries.get(key, []))
        return
    if key.check == "nonfinite":
        case = state.cases[key]
        found, done = _judge_nonfinite(state, key, case), _done_nonfinite(case)
    elif key.check == "weights":
        history = state.votes[key.attempt, key.group, key.table]
        case = history.cases[key.step]
        speakers = case.group[:MAX_PEERS] if case.no_majority else case.accused
        places = {rank: (key.attempt, key.step, key.table, rank) for rank in speakers}
        known = {rank: state.words[place] for rank, place in places.items() if place in state.words}
        found, done = history.judge(key.step, known), _done_vote(case)
    else:
        found = state.replays.judge(key, _accused_before(state, key), _voting(state, key))
        done = state.replays.done(key)
    if key.check == "replay":
        state.replays.remember(key, [_mark(state, finding) for finding in found])
    file_findings(state, key, [Entry(finding, done) for finding in found])


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


def _done_vote(case: VoteCase) -> str:
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
        return "Nothing was changed: the replicas differ from here on."
    return "Reported only; nothing was changed."
