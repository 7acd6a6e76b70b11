"""When a client could not reach the controller: pure bookkeeping over given times."""

from __future__ import annotations

from typing import Any

BLIND_AFTER = 8.0
# The peer gathers what its clients tell of their blindness for a moment before it is on record.
RECORDED_AFTER = 5.0


class Blindness:
    """Notes the silence of the peer. Every method takes the monotonic time (seconds, for durations) and most also the
    wall time (seconds since the epoch, for people). A silence counts as blindness from `BLIND_AFTER` seconds on, and
    within a connection only while the peer owes an answer: a client that had no chance to listen was not blind. What
    the peer may not have put on record before the connection broke is told again.
    """

    def __init__(self) -> None:
        self._heard: tuple[float, float] | None = None
        self._spoke: tuple[float, float] | None = None
        self._told: tuple[float, dict[str, Any]] | None = None

    def began(self, now: float, wall: float) -> None:
        """The client has begun to look for the controller."""
        self._heard = (now, wall)

    def spoke(self, now: float, wall: float) -> None:
        """Something was sent that the peer answers at once."""
        if self._spoke is None:
            self._spoke = (now, wall)

    def quiet(self, now: float) -> float:
        """Seconds since the last word in either direction; 0 while an answer is owed."""
        if self._spoke is not None or self._heard is None:
            return 0.0
        return now - self._heard[0]

    def heard(self, now: float, wall: float) -> dict[str, Any] | None:
        """The peer said something. Returns {since, until, reason} when it had been silent for too long."""
        owed = self._spoke
        self._heard, self._spoke = (now, wall), None
        if owed is None or now - owed[0] < BLIND_AFTER:
            return None
        return self._tell(now, {"since": owed[1], "until": wall, "reason": "no answer from the controller"})

    def lost(self, now: float, wall: float) -> None:
        """The connection broke: until now all was well, or until the word that was not answered."""
        self._heard, self._spoke = self._spoke or (now, wall), None
        if self._told is not None and now - self._told[0] > RECORDED_AFTER:
            self._told = None

    def reconnected(self, now: float, wall: float) -> dict[str, Any] | None:
        """A new connection stands. Returns {since, until, reason} when the time without one was too long."""
        last, before = self._heard, self._told[1] if self._told is not None else None
        if last is None or now - last[0] < BLIND_AFTER:
            return None if before is None else self._tell(now, before)
        since = last[1] if before is None else min(last[1], before["since"])
        return self._tell(now, {"since": since, "until": wall, "reason": "no connection to the controller"})

    def _tell(self, now: float, statement: dict[str, Any]) -> dict[str, Any]:
        self._told = (now, statement)
        return statement
