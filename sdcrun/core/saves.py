"""When the next save will come, so that its step can be voted on and audited before it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

SHORTEST = 4


def next_save(steps: Sequence[int]) -> int | None:
    """The step after which the next save is expected, from the steps (window numbers, ascending) of those so far.

    Two equal distances make an interval; one does where the first save fits it as well (after step interval - 1, or
    interval, counted from 0). Intervals under four steps are not foreseen: an audit for each would cost too much.
    """
    if len(steps) < 2:
        return None
    gap = steps[-1] - steps[-2]
    if gap < SHORTEST:
        return None
    regular = steps[-2] - steps[-3] == gap if len(steps) > 2 else (steps[-2] + 1) % gap in (0, 1)
    return steps[-1] + gap if regular else None


def wanted(step: int, steps: Sequence[int]) -> str | None:
    """What the gate of window `step` should ask all ranks for: "audit" (of the window after it), "vote" (after this
    one), or None."""
    expected = next_save(steps)
    if expected is None:
        return None
    return "audit" if step == expected - 1 else "vote" if step == expected else None
