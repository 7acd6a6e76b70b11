"""The controller's state machine: events in, actions out. Pure: no clock, no file, no socket; time comes in as `now`.

`apply` is a fold: the record (`events.jsonl`) folded through it gives the same findings, suspects and strikes in the
controller, in a controller that was restarted, and in `sdcrun report`. Duplicates must have been dropped. Events of
different ranks may come in any order. `apply` and `tick` change the state they are given and return it.
"""

from __future__ import annotations

from dataclasses import replace

from sdcrun.core import checkpoints, policy, restarts, selftests, words
from sdcrun.core.ledger import CaseKey
from sdcrun.core.observe import observe
from sdcrun.core.state import State, close
from sdcrun.core.types import Action, Config, Event

__all__ = ["State", "apply", "fold", "initial", "finish", "pending", "tick"]

ANSWER_SECONDS = 10.0
DETAIL_SECONDS = 1.0
TRIAGE_SECONDS = 5.0
HELLO_SECONDS = 30.0


def initial(config: Config) -> State:
    """The state before the first event."""
    return State(config)


def apply(state: State, event: Event) -> tuple[State, list[Action]]:
    """Take one event in and say what must be done. Malformed data never raises; it is counted in `state.malformed`."""
    observe(state, event)
    actions = _act(state)
    if event.kind == "hello" and state.stop is None and len(state.roster.attempt(event.attempt).places) == 1:
        state.stop = restarts.endless(state)
        actions += policy.stop_actions(state.stop)
    if state.checkpoints and event.kind in checkpoints.STIRRING:
        actions += checkpoints.transitions(state)
    elif event.kind == "left":
        actions += checkpoints.pass_on(event)
    if event.kind == "job_end" and state.ended:
        actions += finish(state)
    return state, actions


def fold(state: State, event: Event) -> None:
    """Like `apply` for a record that is only read: nothing is decided or said."""
    observe(state, event)
    state.changed.clear()


def tick(state: State, now: float) -> tuple[State, list[Action]]:
    """Time has passed (`now`: seconds on any steady clock): wait no longer for what is late.

    Ten seconds for the views of a non-finite step, five for its audit, one for the details of a vote, thirty for ranks
    that never say hello.
    """
    state.clock = now
    for key in sorted(state.open_cases):
        since = state.since.setdefault(key, now)
        if now - since > ANSWER_SECONDS:
            close(state, key)
    state.since = {key: since for key, since in state.since.items() if key in state.open_cases}
    actions = _act(state)
    for key, since in list(state.waiting.items()):
        if since is None:
            state.waiting[key] = now
        elif now - since > (TRIAGE_SECONDS if key.check == "nonfinite" else DETAIL_SECONDS):
            actions += _tell(state, key)
    return state, actions + _name_the_missing(state, now)


def finish(state: State) -> list[Action]:
    """Nothing more will come: close every open case and say what was held back. Nothing is decided any more."""
    for key in sorted(state.open_cases):
        close(state, key)
    held = list(dict.fromkeys([*state.waiting, *state.changed]))
    state.waiting.clear()
    state.changed.clear()
    return [action for key in held for action in policy.speak(state, key)]


def pending(state: State) -> list[Action]:
    """Actions decided whose execution is not in the record: what a controller must still do after its restart."""
    return [policy.stop_action(state.stop)] if state.stop is not None and not state.stop.recorded else []


def _act(state: State) -> list[Action]:
    """Decide on everything that changed; speak at once where the account is complete, else after a moment."""
    keys, state.changed = list(dict.fromkeys(state.changed)), []
    actions = [*selftests.decide(state), *policy.decide(state, keys)]
    for key in keys:
        state.waiting.setdefault(key, None)
    for key in [k for k in state.waiting if _told_in_full(state, k)]:
        actions += _tell(state, key)
    return actions


def _tell(state: State, key: CaseKey) -> list[Action]:
    del state.waiting[key]
    return [*policy.speak(state, key), *policy.ask_for_audit(state, key)]


def _told_in_full(state: State, key: CaseKey) -> bool:
    """Whether nobody who could add to a case is still to be heard."""
    if key.check == "replay" or key.check == "weights" and not key.of_vote:
        return True
    if key.check == "nonfinite":
        quiet = all(entry.finding.verdict in policy.QUIET for entry in state.ledger.entries.get(key, ()))
        return quiet or not policy.audits(state, key.attempt) or replace(key, check="replay") in state.replays.audits
    case = state.votes[key.attempt, key.group, key.table].cases[key.step]
    heard = set().union(*case.said.values()) if case.said else set()
    speakers = case.accused or case.group[1:2]
    return heard >= case.accused and all((key.attempt, key.step, key.table, rank) in state.words for rank in speakers)


def _name_the_missing(state: State, now: float) -> list[Action]:
    """UNGUARDED, said once an attempt, when ranks are still missing half a minute after the first hello."""
    attempt = state.roster.last
    if attempt is None or attempt.missing_said or not attempt.places:
        return []
    if attempt.first_seen is None:
        attempt.first_seen = now
    if now - attempt.first_seen < HELLO_SECONDS:
        return []
    attempt.missing_said = True
    rows = state.roster.unguarded(attempt, ended=False)
    if not rows:
        return []
    reasons: dict[str, list[int]] = {}
    for row in rows:
        reasons.setdefault(row["reason"], []).append(row["rank"])
    lines = [f"UNGUARDED: {words.ranks(who)}: {words.clean(why, 400)}" for why, who in reasons.items()]
    return [action for line in lines for action in policy.say(line, "warning")]
