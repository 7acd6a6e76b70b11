"""When to audit, when to vote on weights, which micro-batch of a window, and how a budget becomes intervals. Pure.

Symbols in the formulas below: A and W are the intervals of the audit and the weight vote in steps, t the seconds of a
plain step, a and w the seconds that an audit or a vote adds to its step, r what the guard adds to every step, B the
budget as a fraction of step time.

    overhead = (a / A + w / W + r) / t

A fault that is there in every step is caught after (A + 1) / 2 steps by the audit, counted with the step that catches
it, when it starts at a random place between two audits; a changed weight after (W + 1) / 2 by the vote. The intervals
make the sum of these two delays smallest under overhead = B. By Lagrange:

    A = sqrt(a) (sqrt(a) + sqrt(w)) / (B t - r),    W = sqrt(w) (sqrt(a) + sqrt(w)) / (B t - r)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LONGEST = 100_000  # steps; where the budget asks for longer intervals it cannot be kept, which `overhead_percent` shows
RATES = (1.0, 1e-2, 1e-4)


def audit_due(step: int, every: int) -> bool:
    """Whether `step` (counted from 0 within the attempt) is audited: the first guarded step, and then each `every`-th.
    0 switches the audit off."""
    return every > 0 and step % every == 0


def vote_due(step: int, every: int) -> bool:
    """Whether the weights are voted on after `step`; as `audit_due`."""
    return every > 0 and step % every == 0


def audited_position(step: int, every: int, window: int) -> int:
    """Place (0 first) of the micro-batch to audit in an accumulation window of `window` micro-batches.

    `window` is the length of the longest of the last windows (1 where none is known). The k-th audit takes place k mod
    `window`, so that any `window` scheduled audits in a row cover all of them; k is taken from the step alone, so that
    all ranks agree also on audits that were asked for. Of a window that ends before that place its last one is audited.
    """
    if window <= 1:
        return 0
    return (step // max(every, 1)) % window


def overhead_percent(
    audit_every: int,
    weights_every: int,
    step_seconds: float,
    audit_extra_seconds: float,
    vote_extra_seconds: float,
    plain_extra_seconds: float = 0.0,
) -> float:
    """Per cent of a plain step's time that the checks take at these intervals (0: check off, costs nothing)."""
    extra = plain_extra_seconds
    if audit_every:
        extra += audit_extra_seconds / audit_every
    if weights_every:
        extra += vote_extra_seconds / weights_every
    return 100.0 * extra / step_seconds if step_seconds > 0 else (math.inf if extra > 0 else 0.0)


def intervals_for(
    budget_percent: float,
    step_seconds: float,
    audit_extra_seconds: float,
    vote_extra_seconds: float,
    plain_extra_seconds: float = 0.0,
) -> tuple[int, int]:
    """(audit_every, weights_every) with the smallest sum of expected delays whose overhead stays under the budget.

    Times are seconds per step of one rank; `audit_extra_seconds` and `vote_extra_seconds` are what such a step takes
    longer than a plain one. Ranks that are to agree must put in the same numbers (the largest of all ranks, say). Both
    intervals are at least 1 and at most `LONGEST`; when even that is too often, or `plain_extra_seconds` alone exceeds
    the budget, the overhead is over it and `overhead_percent` says so. ValueError for a budget that is not positive.
    """
    if not budget_percent > 0:
        raise ValueError("the budget must be more than 0 per cent")
    audit, vote = max(audit_extra_seconds, 0.0), max(vote_extra_seconds, 0.0)
    room = budget_percent / 100.0 * step_seconds - max(plain_extra_seconds, 0.0)
    if audit == 0 and vote == 0:
        return 1, 1
    if not room > 0:
        return LONGEST, LONGEST
    total = math.sqrt(audit) + math.sqrt(vote)
    audit_every = _whole(math.sqrt(audit) * total / room)
    weights_every = _whole(math.sqrt(vote) * total / room)
    # Rounding up left some room, and an interval held at its least or longest left more: the other one may use it.
    left = room - audit / audit_every
    if left > 0:
        weights_every = min(weights_every, _whole(vote / left))
    left = room - vote / weights_every
    if left > 0:
        audit_every = min(audit_every, _whole(audit / left))
    return audit_every, weights_every


def _whole(steps: float) -> int:
    return min(max(math.ceil(steps - 1e-9), 1), LONGEST)


def next_intervals(
    current: tuple[int, int],
    budget_percent: float,
    step_seconds: float,
    audit_extra_seconds: float,
    vote_extra_seconds: float,
    plain_extra_seconds: float = 0.0,
    slack: float = 0.75,
    headroom: float = 0.9,
) -> tuple[int, int]:
    """Intervals after new measurements: `current` while its overhead lies between `slack` and all of the budget.

    Over the budget they are set anew by `intervals_for`. With more than a quarter of the budget unused they are made
    shorter, for `headroom` of the budget, if that gives shorter ones at all: so noise of less than a tenth in the
    measured times never moves them back and forth.
    """
    costs = (step_seconds, audit_extra_seconds, vote_extra_seconds, plain_extra_seconds)
    spent = overhead_percent(*current, *costs)
    if spent > budget_percent:
        return intervals_for(budget_percent, *costs)
    if spent >= slack * budget_percent:
        return current
    wanted = intervals_for(headroom * budget_percent, *costs)
    return wanted if sum(wanted) < sum(current) else current


def expected_steps_to_detection(p: float, audit_every: int, window: int = 1, computations: int = 2) -> float:
    """Mean number of steps from the onset of a fault to the audit that sees it, this one included; inf when never.

    The fault corrupts each step's computation of its device with probability `p`, independently, at a random one of the
    `window` micro-batches of a step when p is small: a micro-batch is hit with 1 - (1 - p)^(1/window). An audited
    device takes part with `computations` micro-batches, its own and the one it replays. So an audit sees it with q =
    1 - (1 - p)^(computations / window), and with the onset at a random place between two audits

        E = (A + 1) / 2 + A (1 / q - 1)
    """
    if audit_every <= 0 or p <= 0:
        return math.inf
    if p >= 1:
        return (audit_every + 1) / 2
    q = -math.expm1(math.log1p(-p) * computations / max(window, 1))
    return (audit_every + 1) / 2 + audit_every * (1 / q - 1)


def delay_table(audit_every: int, window: int = 1, rates: Sequence[float] = RATES) -> list[dict[str, float | None]]:
    """What the interval buys, for the report: rows {p, steps, corrupted} for faults of rate p per step.

    `steps` is the mean number of steps until the fault is caught (`expected_steps_to_detection`), `corrupted` the mean
    number of corrupted steps that pass before; None: never.
    """
    rows: list[dict[str, float | None]] = []
    for p in rates:
        steps = expected_steps_to_detection(p, audit_every, window)
        known = math.isfinite(steps)
        rows.append({"p": p, "steps": steps if known else None, "corrupted": p * (steps - 1) if known else None})
    return rows


def expected_steps_to_vote(weights_every: int) -> float:
    """Mean number of steps until a changed weight is seen by a vote, this one included; inf when votes are off."""
    return (weights_every + 1) / 2 if weights_every > 0 else math.inf
