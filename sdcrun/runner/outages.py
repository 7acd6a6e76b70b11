"""When the controller did not hear its clients, gathered into few statements: pure bookkeeping over given times."""

from __future__ import annotations

from typing import Any

GATHER_FOR = 2.0
SPOOL_AFTER = 10.0
LOST_AFTER = 30.0
_NAMED = 8


class Outages:
    """Gathers intervals of blindness. Thousands of clients that lost the same controller make one statement, not
    thousands: intervals of one reason that come within `GATHER_FOR` seconds of each other are merged."""

    def __init__(self) -> None:
        self._gathered: dict[str, dict[str, Any]] = {}

    def add(self, now: float, source: str, since: float, until: float | None, reason: str) -> None:
        """`source` was not heard from `since` to `until` (wall time, None: still not); `now` is monotonic."""
        entry = self._gathered.setdefault(
            reason, {"since": since, "until": until, "sources": {}, "due": now + GATHER_FOR}
        )
        entry["since"] = min(entry["since"], since)
        entry["until"] = None if until is None or entry["until"] is None else max(entry["until"], until)
        entry["sources"][source] = None

    def due(self, now: float, everything: bool = False) -> list[dict[str, Any]]:
        """Data of the "blind" events to record now: {since, until, reason, sources (the first few), count}."""
        ready = [reason for reason, entry in self._gathered.items() if everything or entry["due"] <= now]
        statements = []
        for reason in ready:
            entry = self._gathered.pop(reason)
            sources = sorted(entry["sources"])
            statements.append(
                {
                    "since": entry["since"],
                    "until": entry["until"],
                    "reason": reason,
                    "sources": sources[:_NAMED],
                    "count": len(sources),
                }
            )
        return statements


class _Absence:
    """One client away since `now` (monotonic) and `wall`; what has been done about it so far."""

    __slots__ = ("now", "wall", "spool_read", "told")

    def __init__(self, now: float, wall: float) -> None:
        self.now, self.wall = now, wall
        self.spool_read = self.told = False


class Absences:
    """Clients that went away without a goodbye: after `SPOOL_AFTER` seconds their spool is worth reading (they may be
    dead), after `LOST_AFTER` their absence is worth a statement."""

    def __init__(self) -> None:
        self._away: dict[str, dict[str, _Absence]] = {}

    def left(self, source: str, session: str, now: float, wall: float) -> None:
        """The connection of this client broke."""
        self._away.setdefault(source, {})[session] = _Absence(now, wall)

    def came(self, source: str, session: str) -> list[str]:
        """This client is here. Returns earlier sessions of the same source: those processes are gone for good."""
        sessions = self._away.pop(source, {})
        sessions.pop(session, None)
        return list(sessions)

    def spools_due(self, now: float) -> list[tuple[str, str]]:
        """(source, session) of those whose spool should be read now; each is named once."""
        due = []
        for source, sessions in self._away.items():
            for session, absence in sessions.items():
                if not absence.spool_read and now - absence.now >= SPOOL_AFTER:
                    absence.spool_read = True
                    due.append((source, session))
        return due

    def lost(self, now: float) -> list[tuple[str, float]]:
        """(source, wall time since when) of those away for long; each is named once."""
        found = []
        for source, sessions in self._away.items():
            for absence in sessions.values():
                if not absence.told and now - absence.now >= LOST_AFTER:
                    absence.told = True
                    found.append((source, absence.wall))
        return found
