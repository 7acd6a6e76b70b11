"""Attempts that keep ending for reasons of corruption: restarting does not help, and a person must look. Pure."""

from __future__ import annotations

from sdcrun.core import words
from sdcrun.core.ledger import Entry
from sdcrun.core.state import State, StopOrder
from sdcrun.core.types import ExitCode, Verdict

ATTEMPTS_IN_A_ROW = 3
# A finding belongs to the end of its attempt when no more steps than this came after it.
LAST_STEPS = 10
_OPEN = (Verdict.SUSPECT, Verdict.CONFIRMED, Verdict.INCONCLUSIVE)


def endless(state: State) -> StopOrder | None:
    """The order to stop, where the newest attempt is one more after `ATTEMPTS_IN_A_ROW` that ended that way."""
    started = sorted(number for number, attempt in state.roster.attempts.items() if attempt.places)
    if state.config.campaign or len(started) <= ATTEMPTS_IN_A_ROW:
        return None
    before = started[-ATTEMPTS_IN_A_ROW - 1 : -1]
    causes = [_cause(state, number) for number in before]
    if None in causes:
        return None
    tried = "; ".join(
        f"attempt {entry.finding.attempt} at step {entry.finding.step}: {entry.finding.verdict.value}, "
        f"{words.CHECK_TITLES[entry.finding.check]}, {_who(entry)}"
        for entry in causes
        if entry is not None
    )
    return StopOrder(
        ExitCode.UNCLEAR, f"{len(before)} attempts in a row ended right after corruption was seen ({tried})"
    )


def _who(entry: Entry) -> str:
    return words.ranks(set(entry.finding.ranks)) if entry.finding.ranks else "nobody named"


def _cause(state: State, number: int) -> Entry | None:
    """The last open finding of an attempt, if it came close to its end."""
    last = state.roster.attempts[number].last_step
    for key in reversed(state.ledger.between(number, last - LAST_STEPS, last)):
        for entry in state.ledger.entries[key]:
            if entry.finding.verdict in _OPEN:
                return entry
    return None
