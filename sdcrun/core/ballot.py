"""The vote of all ranks at the gate: the maxima of eight int64 each, small enough for every step.

MAX does not depend on the order in which ranks are heard and cannot mix two ranks' words into a third. Two
complementary slots (`x`, `-x` or `x`, `~x`) carry what must be equal on all ranks: equal iff max(x) == -max(-x).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZE = 8
LOCAL, REDUCED, FINITE, ASK, DECLINE, COMMAND, TAG, NEGATED_TAG = range(SIZE)

ASK_NOTHING, ASK_VOTE, ASK_AUDIT = 0, 1, 2
# MAX lets the strongest command win: skip this step, all ranks go off together, stop the job.
COMMAND_NONE, COMMAND_SKIP, COMMAND_OFF, COMMAND_STOP = range(4)

PHASE_STEP, PHASE_AMP, PHASE_VOTE, PHASE_REVOTE, PHASE_STATE = range(5)

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Ballot:
    """What one rank says at the gate. `decline`: this rank cannot audit the window although an audit is due."""

    tag: int
    local: bool = False
    reduced: bool = False
    ask: int = ASK_NOTHING
    decline: bool = False
    command: int = COMMAND_NONE

    def words(self) -> list[int]:
        """The eight int64 to be reduced with MAX."""
        return [
            int(self.local), int(self.reduced), int(not self.reduced), self.ask, int(self.decline), self.command,
            self.tag, -self.tag,
        ]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What all ranks know after the ballot; the same on each of them.

    `lockstep` is false when ranks were not at the same place (step, optimizer, phase): then no other field means
    anything and nobody may skip. `reduced_everywhere`: no rank has finite reduced gradients.
    """

    lockstep: bool
    local: bool
    reduced: bool
    reduced_everywhere: bool
    ask: int
    decline: bool
    command: int

    @property
    def hit(self) -> bool:
        """Somebody saw a non-finite gradient."""
        return self.local or self.reduced


def tag(step: int, optimizer: int, phase: int) -> int:
    """Where a rank is: step (< 2^48), number of the optimizer in the group (mod 256), phase of the guarded step."""
    return (step << 16) | ((optimizer & 0xFF) << 8) | phase


def outcome(maxima: Sequence[int]) -> Outcome:
    """Reads the reduced vector."""
    return Outcome(
        lockstep=maxima[TAG] == -maxima[NEGATED_TAG],
        local=maxima[LOCAL] > 0,
        reduced=maxima[REDUCED] > 0,
        reduced_everywhere=maxima[REDUCED] > 0 and maxima[FINITE] == 0,
        ask=maxima[ASK],
        decline=maxima[DECLINE] > 0,
        command=maxima[COMMAND],
    )


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def digest_words(digest: tuple[int, int], place: int) -> list[int]:
    """Eight int64 for the question "is this 128-bit digest the same on all ranks, at the same place (a `tag`)?"."""
    first, second = _signed(digest[0]), _signed(digest[1])
    return [first, ~first, second, ~second, 0, 0, place, -place]


def digests_agree(maxima: Sequence[int]) -> bool | None:
    """Reads the reduced `digest_words`: True or False; None if the ranks were not at the same place."""
    if maxima[TAG] != -maxima[NEGATED_TAG]:
        return None
    return maxima[0] == ~maxima[1] and maxima[2] == ~maxima[3]
