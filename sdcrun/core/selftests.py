"""What the ranks said of their start-up self-test, and what follows: a check that does not fire stops the job before
anything is lost. Pure."""

from __future__ import annotations

from typing import Any

from sdcrun.core import policy, words
from sdcrun.core.roster import rank_of
from sdcrun.core.state import State, StopOrder
from sdcrun.core.types import Action, Event, ExitCode

TITLES = {
    "nonfinite": words.CHECK_TITLES["nonfinite"],
    "replay": words.CHECK_TITLES["replay"],
    "weights": words.CHECK_TITLES["weights"],
    "ballot": "the vote of all ranks",
}
LAST = "ballot"


def observe(state: State, event: Event) -> None:
    """One check's result on one rank; a failure is not forgotten when another module of the rank passes."""
    rank, check = rank_of(event.source), str(event.data["check"])
    if rank is None or check not in TITLES:
        raise ValueError("not a self-test")
    passed, text = bool(event.data["passed"]), str(event.data["text"])
    known = state.selftests.get((event.attempt, rank, check))
    if known is None or known[0]:
        state.selftests[event.attempt, rank, check] = (passed, text)


def failures(state: State) -> list[tuple[int, str, str]]:
    """(rank, check, what went wrong), in order."""
    return [(rank, check, text) for (_, rank, check), (passed, text) in sorted(state.selftests.items()) if not passed]


def decide(state: State) -> list[Action]:
    """The order to stop at the first failure; one line when all ranks have passed."""
    if not state.selftests:
        return []
    failed = failures(state)
    if failed and state.stop is None:
        rank, check, text = failed[0]
        more = f" ({len(failed) - 1} more failures)" if len(failed) > 1 else ""
        why = f"the self-test failed: {TITLES[check]} on rank {rank}: {words.clean(text, 200)}{more}"
        state.stop = StopOrder(ExitCode.UNCLEAR, why)
        return [policy.stop_action(state.stop), *policy.say(policy.stop_text(state.stop), "alarm")]
    number = max(attempt for attempt, _, _ in state.selftests)
    done = {rank for attempt, rank, check in state.selftests if attempt == number and check == LAST}
    world = state.roster.attempt(number).world_size
    if failed or len(done) < world or ("selftest", number) in state.said:
        return []
    state.said["selftest", number] = True
    names = [TITLES[check] for check in TITLES if any(check == c for _, _, c in state.selftests)]
    return policy.say(f"self-test passed on {words.count(world, 'rank')}: {'; '.join(names)}", "info")


def summary(state: State) -> dict[str, Any] | None:
    """For the report: {ranks, checks, failed: [{rank, check, text}]}; None where there was no self-test."""
    if not state.selftests:
        return None
    return {
        "ranks": len({rank for _, rank, _ in state.selftests}),
        "checks": sorted({check for _, _, check in state.selftests}),
        "failed": [
            {"rank": rank, "check": check, "text": words.clean(text, 400)} for rank, check, text in failures(state)
        ],
    }
