"""Events in, record and decisions out: duplicates dropped, gaps noted, nothing acknowledged that is not on disk.

The record is the truth: opening it folds every event on it through `decide.apply`, so that a controller that was killed
at any moment knows what its predecessor knew.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from sdcrun.core.codec import CodecError, decode_event, encode_event, event_of
from sdcrun.core.types import Action, Config, Event

LATE_SECONDS = 120.0
RETRY_WRITE_EVERY = 1.0
SOURCE = "controller"


class Record(Protocol):
    """The job's events.jsonl."""

    def append_lines(self, lines: bytes) -> None:
        """Append whole lines with one write; all of them or none. Raises OSError."""


class Decide(Protocol):
    """The module `sdcrun.core.decide`."""

    def initial(self, config: Config) -> Any: ...

    def apply(self, state: Any, event: Event) -> tuple[Any, list[Action]]: ...

    def tick(self, state: Any, now: float) -> tuple[Any, list[Action]]: ...


class Intake:
    """State of the job in the controller.

    `open_record()` makes the record if need be and returns (record, the complete lines on it); it is called at the
    first real client, because on a shared file system several nodes may offer a controller of which one is used.
    `say(text)` takes one line for a person; `log(text)` one for the controller's log.
    """

    def __init__(
        self,
        config: Config,
        decide: Decide,
        open_record: Callable[[], tuple[Record, Iterable[bytes]]],
        say: Callable[[str], None],
        log: Callable[[str], None],
        host: str = "",
    ) -> None:
        self._config, self._decide, self._open_record, self._say, self._log = config, decide, open_record, say, log
        self._host = host
        self._state = decide.initial(config)
        self._record: Record | None = None
        self._last: dict[tuple[str, str], dict[int, int]] = {}
        self.session = secrets.token_hex(8)
        self._seq: dict[int, int] = {}
        self._supervisors = 1
        self._attempt = 0
        self._unwritten: list[bytes] = []
        self._retry_at = 0.0
        self._complained = False
        self._actions: deque[Action] = deque()
        self.commands: list[dict[str, Any]] = []
        self.stop: dict[str, Any] | None = None
        self._stopped: set[str] = set()
        self._stopped_at: float | None = None

    @property
    def opened(self) -> bool:
        """Whether the record is in use."""
        return self._record is not None

    @property
    def state(self) -> Any:
        """What the events on record, and those about to be, have said."""
        return self._state

    def open(self) -> None:
        """Open or make the record and rebuild the state from it. Raises OSError; it may then be tried again."""
        record, lines = self._open_record()
        owed: deque[Action] = deque()
        restarted, before, last = False, self._host, 0.0
        for line in lines:
            try:
                event = decode_event(line)
            except CodecError as error:
                self._log(f"a line of the record is unreadable: {error}")
                continue
            restarted = True
            if event.seq <= self.acked(event.source, event.session).get(event.attempt, 0):
                continue
            self._count(event)
            last = max(last, event.time)
            if event.source == SOURCE and event.kind == "command":
                self._recall(event.data, owed)
            elif event.source == SOURCE and event.kind == "started":
                before = event.data.get("host")
            self._fold(event)
            owed.extend(action for action in self._actions if action.kind in ("command", "stop"))
            self._actions.clear()
        self._record = record
        self.own("started", {"restarted": restarted, "host": self._host})
        if before != self._host:
            why = f"the node of the controller was lost ({str(before)[:100]}); that of {self._host} took over"
            self.own("blind", {"since": last, "until": time.time(), "reason": why, "sources": [SOURCE], "count": 1})
            self._say(why)
        # A command whose cause is on record but which is not itself: its controller died in between.
        self._actions.extendleft(reversed(owed))

    def _recall(self, data: dict[str, Any], owed: deque[Action]) -> None:
        """A command found on the record: it has been given, so it is owed no more."""
        kind = "stop" if data.get("to") == "supervisors" else "command"
        for action in owed:
            if action.kind == kind and action.data.get("what", "stop") == data.get("what"):
                owed.remove(action)
                break
        self._give(kind, data)

    def _give(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "stop":
            self.stop = {"code": data.get("code"), "why": data.get("why")}
            self._stopped = {source for source, _ in self._last}
        else:
            self.commands.append({"id": len(self.commands) + 1, **data})

    def owes_stop(self, source: str) -> bool:
        """Whether this supervisor must be told to stop: it was part of the job when that was decided, or comes soon
        after, because its ranks had only just led it here. A later one, that runs the same job again, need not."""
        late = self._stopped_at is not None and time.monotonic() - self._stopped_at < LATE_SECONDS
        return self.stop is not None and (late or source in self._stopped)

    def acked(self, source: str, session: str) -> dict[int, int]:
        """Per attempt the last sequence number on record; only valid while nothing is unwritten."""
        return self._last.get((source, session), {})

    def take(self, values: dict[str, Any], line: bytes) -> Event:
        """Take an event (its decoded and its raw line). Raises CodecError for what is none."""
        event = event_of(values)
        if self._is_new(event):
            # The record stays ASCII and one line per event, whatever spelling of JSON was sent.
            clean = line.isascii() and b"\r" not in line
            self._unwritten.append(line + b"\n" if clean else encode_event(event))
            self._fold(event)
        return event

    def _is_new(self, event: Event) -> bool:
        last = self.acked(event.source, event.session).get(event.attempt, 0)
        if event.seq <= last:
            return False
        if event.seq > last + 1:
            self.own("gap", {"source": event.source, "after": last, "upto": event.seq - 1}, attempt=event.attempt)
        self._count(event)
        return True

    def _count(self, event: Event) -> None:
        seqs = self._last.setdefault((event.source, event.session), {})
        seqs[event.attempt] = max(event.seq, seqs.get(event.attempt, 0))
        self._attempt = max(self._attempt, event.attempt)
        nodes, here = event.data.get("nnodes"), event.data.get("local_nodes")
        if event.kind == "node_up" and type(nodes) is int and here == 1:
            self._supervisors = nodes

    @property
    def awaits_supervisors(self) -> bool:
        """Whether a job of a fixed number of nodes has some of whose supervisor nothing is on record."""
        return len({source for source, _ in self._last if source.startswith("node:")}) < self._supervisors

    def own(self, kind: str, data: dict[str, Any], attempt: int | None = None) -> None:
        """Record an event of the controller's own."""
        attempt = self._attempt if attempt is None else attempt
        seq = self._seq[attempt] = self._seq.get(attempt, 0) + 1
        event = Event(kind, SOURCE, attempt, seq, time.time(), data, self.session)
        self._count(event)
        self._unwritten.append(encode_event(event))
        self._fold(event)

    def _fold(self, event: Event) -> None:
        try:
            self._state, actions = self._decide.apply(self._state, event)
        except Exception as error:
            # The record has the event; a state machine that trips over it must not take the job's record down.
            self._log(f"event {event.kind} of {event.source} not understood: {type(error).__name__}: {error}")
            return
        self._actions.extend(actions)

    def tick(self, now: float) -> None:
        """Let time pass (seconds since the epoch)."""
        try:
            self._state, actions = self._decide.tick(self._state, now)
        except Exception as error:
            self._log(f"tick: {type(error).__name__}: {error}")
            return
        self._actions.extend(actions)

    def actions(self) -> Iterable[Action]:
        """The actions due; commands are put among what is to be written, and have their "id" then."""
        while self._actions:
            action = self._actions.popleft()
            if action.kind == "record":
                self.own(action.data["kind"], action.data["data"])
                continue
            if action.kind == "command":
                self.own("command", dict(action.data))
                self._give("command", action.data)
                action = Action("command", self.commands[-1])
            elif action.kind == "stop":
                self.own("command", {"what": "stop", "to": "supervisors", **action.data})
                self._give("stop", action.data)
                self._stopped_at = time.monotonic()
            yield action

    @property
    def unwritten(self) -> int:
        """Bytes of lines that are in the state but not on the record."""
        return sum(map(len, self._unwritten))

    def write(self, now: float) -> bool:
        """Put what is unwritten on the record; True when nothing is left over. A failure is said once and tried again
        every `RETRY_WRITE_EVERY` seconds (`now` monotonic)."""
        if not self._unwritten:
            return True
        if self._record is None or now < self._retry_at:
            return False
        try:
            self._record.append_lines(b"".join(self._unwritten))
        except OSError as error:
            self._retry_at = now + RETRY_WRITE_EVERY
            if not self._complained:
                self._complained = True
                self._say(f"cannot write the record ({error.strerror or error}); training goes on, trying again")
            return False
        self._unwritten.clear()
        if self._complained:
            self._complained = False
            self._say("the record can be written again")
        return True
