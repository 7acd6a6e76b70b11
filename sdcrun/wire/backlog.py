"""What a client still owes the controller: numbering, spooling, sending order and acknowledgement of its events.

An event enters through `put`, which may be called by any thread, also by a signal handler that interrupts another
`put`: it goes into an inbox (one atomic append), and whoever holds the lock numbers and spools what is in there, in
order. The state of a half-numbered item lives in the item, so that an exception thrown by a signal handler (Ctrl-C)
loses nothing; a line written or queued twice by that has one sequence number and counts once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from sdcrun.core.codec import encode_event, plain
from sdcrun.core.types import Event
from sdcrun.wire.spool import Spool

MEMORY_LIMIT = 32 << 20
REPAIR_SPOOL_EVERY = 30.0


class _Item:
    """One event on its way; `seq` is 0 and `line` empty until it is numbered."""

    __slots__ = ("kind", "data", "attempt", "time", "seq", "line", "spooled")

    def __init__(self, kind: str, data: dict[str, Any], attempt: int) -> None:
        self.kind, self.data, self.attempt = kind, data, attempt
        self.time = time.time()
        self.seq = 0
        self.line = b""
        self.spooled = False


class Backlog:
    """The unacknowledged events of one (source, session), in memory and in the spool.

    Memory is bounded by `limit` bytes of lines; what does not fit is dropped and counted in `dropped`, and a "limit"
    event says so once there is room again. `warn` gets one line for a person when the spool cannot be written.
    """

    def __init__(
        self, source: str, session: str, spool: Spool, warn: Callable[[str], None], limit: int = MEMORY_LIMIT
    ) -> None:
        self.source, self.session, self.spool, self.limit = source, session, spool, limit
        self.dropped = 0
        self._warn = warn
        self._warned = False
        self._lock = threading.RLock()
        self._draining = 0
        self._inbox: deque[_Item] = deque()
        self._unsent: deque[_Item] = deque()
        self._sent: deque[_Item] = deque()
        self._bytes = 0
        self._numbered: dict[int, int] = {}
        self._acked: dict[int, int] = {}
        self._summary: _Item | None = None
        self._summary_flying: _Item | None = None
        self._summary_at = float("-inf")
        self._repair_at = 0.0

    def put(self, kind: str, data: dict[str, Any], attempt: int) -> None:
        """Take an event; when this returns it is in the spool, unless that failed. Blocks for one small append."""
        self._inbox.append(_Item(kind, data, attempt))
        self.drain()

    def put_summary(self, data: dict[str, Any], attempt: int) -> None:
        """Take a cumulative summary, replacing the one that has not been sent; nothing is written yet."""
        self._summary = _Item("summary", plain(data), attempt)

    def drain(self) -> None:
        """Number and spool what is in the inbox."""
        while self._inbox:
            with self._lock:
                # While this thread holds the lock, another's mark can only be a leftover of an interrupt.
                if self._draining == threading.get_ident():
                    return
                try:
                    self._draining = threading.get_ident()
                    while self._inbox:
                        self._number(self._inbox[0])
                        self._inbox.popleft()
                finally:
                    self._draining = 0

    def _number(self, item: _Item) -> None:
        if not item.line:
            if self._bytes > self.limit:
                self.dropped += 1
                return
            item.seq = self._numbered.get(item.attempt, 0) + 1
            item.line = encode_event(
                Event(item.kind, self.source, item.attempt, item.seq, item.time, item.data, self.session)
            )
        if not item.spooled:
            self.spool.append(item.line)
            item.spooled = True
            if self.spool.error is not None and not self._warned:
                self._warned = True
                self._warn(f"cannot write {self.spool.path} ({self.spool.error}); events are kept in memory")
        self._bytes += len(item.line)
        self._unsent.append(item)
        self._numbered[item.attempt] = item.seq

    def promote_summary(self, every: float, now: float) -> float | None:
        """Make the waiting summary an event when the last one is acknowledged and at least `every` seconds old.

        Returns the time (on `now`'s clock) from which a waiting summary may go, None when nothing waits for that.
        """
        item = self._summary
        if item is None or self._summary_flying is not None:
            return None
        if now < self._summary_at + every:
            return self._summary_at + every
        self._summary = None
        self._summary_flying, self._summary_at = item, now
        self._inbox.append(item)
        self.drain()
        if not item.line:
            self._summary_flying = None
        return None

    @property
    def empty(self) -> bool:
        """Whether nothing is owed."""
        return not (self._inbox or self._unsent or self._sent or self._summary)

    def next_batch(self, most: int) -> bytes:
        """Lines to send next, about `most` bytes of them (at least one line when there is any)."""
        lines: list[bytes] = []
        with self._lock:
            while self._unsent and most > 0:
                item = self._unsent.popleft()
                self._sent.append(item)
                lines.append(item.line)
                most -= len(item.line)
        return b"".join(lines)

    def rewind(self, acked: Mapping[int, int]) -> None:
        """A new connection: drop what its controller has (`acked`: attempt → seq), send everything else again."""
        with self._lock:
            self._sent.extend(self._unsent)
            self._unsent, self._sent = self._sent, self._unsent
            self._sent.clear()
            self._acked.update(acked)
            kept = deque(item for item in self._unsent if item.seq > self._acked.get(item.attempt, 0))
            self._unsent = kept
            self._bytes = sum(len(item.line) for item in kept)
            self._settled()

    def acknowledge(self, attempt: int, seq: int) -> None:
        """The controller has written everything of `attempt` up to `seq`."""
        with self._lock:
            self._acked[attempt] = max(seq, self._acked.get(attempt, 0))
            while self._sent and self._sent[0].seq <= self._acked.get(self._sent[0].attempt, 0):
                self._bytes -= len(self._sent.popleft().line)
            self._settled()

    def _settled(self) -> None:
        flying = self._summary_flying
        if flying is not None and flying.seq <= self._acked.get(flying.attempt, 0):
            self._summary_flying = None
        if not (self._unsent or self._sent):
            self._bytes = 0
            self.spool.clear()
        elif self.spool.bloated and self._bytes * 4 < self.spool.size:
            self.spool.rewrite(self._lines())
        if self.dropped and self._bytes < self.limit // 2:
            text = f"{self.dropped} events of {self.source} were dropped: no controller took them for too long"
            self.dropped = 0
            self._inbox.append(_Item("limit", {"text": text, "check": None}, max(self._numbered, default=0)))

    def retire(self) -> None:
        """The client ends: delete the spool if nothing is owed. A later event makes a new one."""
        with self._lock:
            if self.empty:
                self.spool.remove()

    def _lines(self) -> list[bytes]:
        return [item.line for queue in (self._sent, self._unsent) for item in queue]

    def repair_spool(self, now: float) -> None:
        """Try again, now and then, to put the backlog into a spool that could not be written."""
        if self.spool.error is None or now < self._repair_at:
            return
        self._repair_at = now + REPAIR_SPOOL_EVERY
        with self._lock:
            self.spool.rewrite(self._lines())
