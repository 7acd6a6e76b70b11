"""The event client of a rank or a supervisor: never blocks a step, never raises, loses nothing when either end dies.

`Link.emit` appends the event to the spool and wakes a daemon thread, which does everything that may wait: it connects,
proves itself and its peer, sends, takes acknowledgements and commands, and starts over when the connection breaks.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from sdcrun import __version__
from sdcrun.core.codec import MAX_LINE, CodecError, Lines, encode_message, message_of
from sdcrun.core.types import EVENT_SCHEMA, Config
from sdcrun.wire.backlog import Backlog
from sdcrun.wire.blindness import Blindness
from sdcrun.wire.opening import connect, prove, receive, wait_messages
from sdcrun.wire.spool import Spool, spool_folder, spool_name

# A full queue of connections drops some whose client believes to be connected: not long to wait for the first word.
_HANDSHAKE_TIME = 10.0
_PING_EVERY = 5.0
_PAUSE_FIRST, _PAUSE_MOST = 0.05, 3.0
_BATCH = 256 << 10
_NOTHING: frozenset[str] = frozenset()

Address = Callable[[], "dict[str, Any] | None"]
Handler = Callable[[dict[str, Any]], Any]

_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link._become_inert()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Refused(Exception):
    """The controller is real but does not want this client (another version or schema)."""


class Link:
    """Client of one process. `source` is the event source ("rank:3", "node:host:pid"); `address()` returns the
    controller's current {host, port, secret}, or None while nobody knows it.

    In a forked child the link is inert: it has no thread, and what the child emits is nobody's event.
    """

    def __init__(self, config: Config, source: str, address: Address) -> None:
        self.source = source
        self.session = secrets.token_hex(8)
        self.stop: dict[str, Any] | None = None
        self._address = address
        path = os.path.join(spool_folder(config.job_dir), spool_name(source, self.session)) if config.job_dir else ""
        self._spool = Spool(path)
        self._backlog = Backlog(source, self.session, self._spool, self._warn)
        self._blindness = Blindness()
        self._summary_every = config.summary_every
        self._handlers: dict[str, Handler] = {}
        self._requests: deque[str] = deque()
        self._seen_command: int | None = None
        self._asks: dict[str, dict[str, Any]] = {}
        self._warned: set[str] = set()
        self._inert = False
        self._socket: socket.socket | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._awake = False
        self._started = False
        self._thread_wanted = deque([True])
        self._deadline: float | None = None
        self._finish_grace: float | None = None
        self._finished = False
        self._over = threading.Event()
        _links.add(self)

    def emit(self, kind: str, data: dict[str, Any], attempt: int = 0) -> None:
        """Hand over an event; returns after one small file append (a "summary" is only remembered). Never raises."""
        if self._inert:
            return
        try:
            if kind == "summary":
                self._backlog.put_summary(data, int(attempt))
            else:
                self._backlog.put(str(kind)[:64], data if isinstance(data, dict) else {"value": data}, int(attempt))
            self._wake()
        except Exception as error:
            self._warn(f"an event was lost ({type(error).__name__}: {error})")

    def requests(self) -> frozenset[str]:
        """What the controller has commanded since the last call, of {"audit", "vote", "skip", "stop"}."""
        if not self._requests or self._inert:
            return _NOTHING
        taken = set()
        while self._requests:
            taken.add(self._requests.popleft())
        return frozenset(taken)

    def on(self, kind: str, handler: Handler) -> None:
        """Let `handler(data)` answer queries of `kind` in the link thread; it returns a JSON value.

        The kind "stop" is the controller's order to a supervisor, {code, why}, the kind "reply" a reply that nobody
        asked for, "next" the address of the controller that would follow the job's (or None, told to supervisors);
        their return values are ignored.
        """
        self._handlers[kind] = handler

    @property
    def spool_path(self) -> str:
        """The spool file of this link, empty when there is none."""
        return self._spool.path

    def ask(self, kind: str, data: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Let every rank's handler for `kind` answer `data`; returns {source: answer} of those that did in `timeout`
        seconds, an empty dict when the controller cannot be reached. Never raises."""
        if self._inert:
            return {}
        key = secrets.token_hex(8)
        try:
            message = encode_message("ask", id=key, kind=kind, data=data, timeout=timeout)
        except CodecError:
            return {}
        pending = {"message": message, "done": threading.Event(), "answers": {}}
        self._asks[key] = pending
        self._wake()
        pending["done"].wait(timeout)
        self._asks.pop(key, None)
        return pending["answers"]

    def finish(self, timeout: float) -> bool:
        """For the supervisor that owns the controller, after everything else has ended: deliver what is left, have the
        spool files of dead ranks taken in, and let the controller exit. True when it has said that all is written."""
        self._finish_grace = max(timeout * 0.5, 0.0)
        self._wake()
        complete = self.close(timeout) and self._finished
        if complete and self._spool.path:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self._spool.path))
        return complete

    def close(self, timeout: float) -> bool:
        """Deliver what is left, within `timeout` seconds, and end. True when all is acknowledged; else the spool stays
        for the controller to take in. Events emitted later go to the spool only."""
        if self._inert:
            return True
        self._deadline = time.monotonic() + timeout
        if not self._started and self._backlog.empty and self._finish_grace is None:
            return True
        self._awake = False
        self._wake()
        if self._started:
            self._over.wait(timeout)
        return self._backlog.empty

    def _wake(self) -> None:
        if not self._started:
            # Not a Thread object: an interrupt in the middle of its start would leave it half started.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self._main, ())
                self._started = True
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"\0")

    def _warn(self, text: str) -> None:
        if text in self._warned or len(self._warned) >= 20:
            return
        self._warned.add(text)
        with contextlib.suppress(OSError):
            os.write(2, f"[sdcrun] {self.source}: {text}\n".encode("utf-8", "replace"))

    def _become_inert(self) -> None:
        # A copy of the socket in a long-lived child would hide this process's death from the controller.
        self._inert = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                os.close(self._socket.detach())
        self._spool.forget()
        for fd in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(fd)

    # All that follows runs in the link thread.

    def _main(self) -> None:
        try:
            self._thread_wanted.pop()
        except IndexError:
            # Two emits at once have started a thread each.
            return
        jitter = secrets.SystemRandom()
        pause = _PAUSE_FIRST
        self._blindness.began(time.monotonic(), time.time())
        while not self._ended():
            began = time.monotonic()
            try:
                self._connect_and_talk()
            except Refused as refusal:
                self._warn(str(refusal))
                pause = _PAUSE_MOST
                if self._deadline is not None:
                    break
            except (OSError, CodecError):
                pass
            except Exception as error:
                self._warn(f"link: {type(error).__name__}: {error}")
            if time.monotonic() - began > 2 * _PAUSE_MOST:
                # A controller that asks for rare summaries has many clients; they must not all come back at once.
                pause = max(_PAUSE_FIRST, min(self._summary_every / 100, _PAUSE_MOST))
            if not self._ended():
                self._rest(pause * jitter.uniform(0.5, 1.0))
                pause = min(pause * 2, _PAUSE_MOST)
        self._backlog.retire()
        self._over.set()

    def _ended(self) -> bool:
        if self._deadline is None:
            return False
        done = self._backlog.empty and (self._finish_grace is None or self._finished)
        return done or time.monotonic() >= self._deadline

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._backlog.drain()
        self._backlog.repair_spool(time.monotonic())
        if self._deadline is not None:
            self._backlog.promote_summary(0.0, time.monotonic())
            until = min(until, self._deadline)
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            closing = self._deadline is not None
            poll.poll(left * 1000 + 1)
            self._slept()
            if self._deadline is not None and not closing:
                return

    def _slept(self) -> None:
        # Also after a mere time-out: an interrupted `_wake` may have left its mark without writing.
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        self._awake = False
        self._backlog.drain()

    def _connect_and_talk(self) -> None:
        address = self._address()
        if address is None:
            return
        most = _HANDSHAKE_TIME
        if self._deadline is not None:
            most = max(0.01, min(most, self._deadline - time.monotonic()))
        with connect(address, most) as connection:
            self._socket = connection
            try:
                lines = prove(connection, address["secret"])
                connection.sendall(self._hello(), socket.MSG_NOSIGNAL)
                lines.limit = MAX_LINE
                welcome, *more = wait_messages(connection, lines)
                self._welcomed(welcome)
                try:
                    self._talk(connection, lines, more)
                finally:
                    self._blindness.lost(time.monotonic(), time.time())
            finally:
                self._socket = None

    def _hello(self) -> bytes:
        return encode_message(
            "hello",
            source=self.source,
            session=self.session,
            version=__version__,
            schema=EVENT_SCHEMA,
            seen=self._seen_command,
            blind=self._blindness.reconnected(time.monotonic(), time.time()),
        )

    def _welcomed(self, values: dict[str, Any]) -> None:
        if message_of(values, "welcome", "refused") == "refused":
            raise Refused(f"the controller refused this process: {str(values.get('why'))[:200]}")
        self._backlog.rewind({int(attempt): int(seq) for attempt, seq in values["acked"].items()})
        self._summary_every = float(values["summary_every"])
        if self._seen_command is None:
            self._seen_command = int(values["command"])
        self._blindness.heard(time.monotonic(), time.time())

    def _talk(self, connection: socket.socket, lines: Lines, messages: list[dict[str, Any]]) -> None:
        connection.setblocking(False)
        out = bytearray()
        told: set[str] = set()
        finishing = False
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(connection, select.POLLIN)
        self._slept()
        while True:
            for message in messages:
                out += self._handle(message)
            now = time.monotonic()
            self._backlog.repair_spool(now)
            closing = self._deadline is not None
            due = self._backlog.promote_summary(0.0 if closing else self._summary_every, now)
            for key, pending in list(self._asks.items()):
                if key not in told:
                    told.add(key)
                    out += pending["message"]
            if not out and (batch := self._backlog.next_batch(_BATCH)):
                out += batch
                self._blindness.spoke(now, time.time())
            if closing and not out and self._backlog.empty:
                if self._finish_grace is not None and not finishing:
                    finishing = True
                    out += encode_message("finish", grace=self._finish_grace)
                elif self._finish_grace is None or self._finished:
                    connection.send(encode_message("goodbye"), socket.MSG_NOSIGNAL)
                    return
            if not out and self._blindness.quiet(now) >= _PING_EVERY:
                out += encode_message("ping")
                self._blindness.spoke(now, time.time())
            if out:
                with contextlib.suppress(BlockingIOError):
                    del out[: connection.send(out, socket.MSG_NOSIGNAL)]
            if closing and now >= self._deadline:
                return
            wait = min(_PING_EVERY, (due or now + _PING_EVERY) - now, (self._deadline or now + _PING_EVERY) - now)
            more = bool(out)
            poll.modify(connection, select.POLLIN | (select.POLLOUT if more else 0))
            ready = dict(poll.poll(max(0.0, wait) * 1000 + 1))
            self._slept()
            messages = []
            if ready.get(connection.fileno(), 0) & ~select.POLLOUT:
                with contextlib.suppress(BlockingIOError):
                    messages = receive(connection, lines)
                blind = self._blindness.heard(time.monotonic(), time.time())
                if blind is not None:
                    out += encode_message("blind", **blind)

    def _handle(self, values: dict[str, Any]) -> bytes:
        """Act on one message of the controller; returns what is to be sent in answer."""
        msg = message_of(values, "ack", "pong", "command", "stop", "query", "reply", "finished", "next")
        if msg == "ack":
            self._backlog.acknowledge(int(values["attempt"]), int(values["seq"]))
        elif msg == "command":
            self._seen_command = int(values["id"])
            if values.get("what") == "stop":
                self.stop = {"code": values.get("code"), "why": values.get("why")}
            self._requests.append(str(values.get("what")))
        elif msg == "stop":
            self.stop = {"code": values.get("code"), "why": values.get("why")}
            self._run_handler("stop", self.stop)
        elif msg == "next":
            self._run_handler("next", values.get("address"))
        elif msg == "query":
            answer = self._run_handler(str(values.get("kind")), values.get("data"))
            return encode_message("answer", id=values.get("id"), data=answer)
        elif msg == "reply":
            pending = self._asks.get(str(values.get("id")))
            if pending is None:
                self._run_handler("reply", values.get("data"))
            else:
                for answer, sources in values.get("answers") or ():
                    pending["answers"].update(dict.fromkeys(sources, answer))
                pending["done"].set()
        elif msg == "finished":
            self._finished = True
        return b""

    def _run_handler(self, kind: str, data: Any) -> Any:
        handler = self._handlers.get(kind)
        if handler is None:
            return None
        try:
            return handler(data)
        except Exception as error:
            self._warn(f"handler of {kind}: {type(error).__name__}: {error}")
            return None
