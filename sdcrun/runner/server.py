"""Sockets of the controller: one thread, an authenticated line protocol, and strangers who can do no harm.

Whatever a stranger sends costs at most one short line of memory, one logged line and his own connection. The number of
strangers and their time are bounded, so that they cannot keep real clients out.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from sdcrun.core.codec import (
    MAX_HANDSHAKE_LINE,
    MAX_LINE,
    CodecError,
    Lines,
    decode_line,
    encode_message,
    message_of,
    proof,
    proven,
)

MAX_STRANGERS = 4096
STRANGER_TIME = 10.0
_CROWDED_STRANGER_TIME = 4.0
_MAX_OWED = 8 << 20
# The system queues few thousand connections; those of a large job that all come back at once must not overflow it.
_ACCEPTS_A_TURN = 2048
_READ = 1 << 16


class Connection:
    """One client. `source` and `session` are empty until its hello; `known` once it has proven the secret."""

    __slots__ = ("socket", "peer", "born", "known", "source", "session", "nonce", "lines", "out", "watching")

    def __init__(self, sock: socket.socket, peer: str, born: float) -> None:
        self.socket, self.peer, self.born = sock, peer, born
        self.known = False
        self.source = self.session = ""
        self.nonce = secrets.token_hex(16)
        self.lines = Lines(MAX_HANDSHAKE_LINE)
        self.out = bytearray()
        self.watching = selectors.EVENT_READ


class Handler(Protocol):
    """What the server calls; an exception of type CodecError closes the connection with one logged line."""

    def lines(self, connection: Connection, lines: list[bytes]) -> None:
        """Whole lines of a client that has proven itself."""

    def gone(self, connection: Connection) -> None:
        """A client that had proven itself is away; nothing more will come from it."""


class Server:
    """Owns the listening socket and every connection. `log(text)` takes one line about a connection that was closed."""

    def __init__(self, listener: socket.socket, secret: str, handler: Handler, log: Callable[[str], None]) -> None:
        self._listener, self._secret, self._handler, self._log = listener, secret, handler, log
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[Connection, None] = {}
        self._accepting = False
        self._reading = True
        self.clients: set[Connection] = set()
        listener.setblocking(False)
        self._accept_more(True)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        return self._listener.getsockname()[:2]

    def turn(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for something to do, then do all of it once."""
        if not self._accepting:
            timeout = min(timeout, 0.05)
        for key, mask in self._selector.select(timeout):
            connection = key.data
            if connection is None:
                self._accept()
                continue
            if mask & selectors.EVENT_WRITE and connection.socket.fileno() >= 0:
                self._push(connection)
            if mask & selectors.EVENT_READ and connection.socket.fileno() >= 0:
                self._read(connection)
        self._expire(time.monotonic())

    def hold_reading(self, hold: bool) -> None:
        """Stop or resume reading from clients: back-pressure while the record cannot be written."""
        if self._reading == (not hold):
            return
        self._reading = not hold
        for connection in self.clients:
            self._watch(connection)

    def send(self, connection: Connection, line: bytes) -> None:
        """Queue a line. A client that does not read is closed once it owes too much."""
        if connection.socket.fileno() < 0:
            return
        connection.out += line
        if len(connection.out) > _MAX_OWED:
            self.close(connection, "does not read what it is sent")
            return
        if connection.watching & selectors.EVENT_WRITE == 0:
            self._push(connection)

    def close(self, connection: Connection, why: str = "") -> None:
        """Close a connection; `why` makes it one logged line."""
        if connection.socket.fileno() < 0:
            return
        if why:
            self._log(f"connection of {connection.source or connection.peer} closed: {why}")
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        self._strangers.pop(connection, None)
        if connection in self.clients:
            self.clients.discard(connection)
            self._handler.gone(connection)

    def shut(self, linger: float) -> None:
        """Stop listening, push out what is owed within `linger` seconds, close everything."""
        self._accept_more(False)
        self._listener.close()
        until = time.monotonic() + linger
        while any(connection.out for connection in self.clients) and time.monotonic() < until:
            for key, mask in self._selector.select(0.05):
                if mask & selectors.EVENT_WRITE:
                    self._push(key.data)
                elif self._drained(key.data.socket):
                    self.close(key.data)
        for connection in [*self.clients, *self._strangers]:
            self.close(connection)
        self._selector.close()

    @staticmethod
    def _drained(sock: socket.socket) -> bool:
        try:
            return not sock.recv(_READ)
        except OSError as error:
            return not isinstance(error, BlockingIOError)

    def _accept_more(self, accept: bool) -> None:
        if accept == self._accepting:
            return
        self._accepting = accept
        if accept:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        else:
            self._selector.unregister(self._listener)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            if len(self._strangers) >= MAX_STRANGERS:
                self._accept_more(False)
                return
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, most likely: wait until some stranger's time is up.
                self._log(f"cannot accept a connection: {error}")
                self._accept_more(False)
                return
            sock.setblocking(False)
            connection = Connection(sock, f"{peer[0]}:{peer[1]}", time.monotonic())
            self._strangers[connection] = None
            try:
                _keep_alive(sock)
                self._selector.register(sock, selectors.EVENT_READ, connection)
            except OSError as error:
                self.close(connection, str(error))
                continue
            self.send(connection, encode_message("challenge", nonce=connection.nonce))

    def _expire(self, now: float) -> None:
        crowded = not self._accepting
        most = _CROWDED_STRANGER_TIME if crowded else STRANGER_TIME
        # Insertion order is age: the first one that is young enough ends the search.
        late = list(itertools.takewhile(lambda stranger: now - stranger.born >= most, self._strangers))
        for connection in late:
            self.close(connection, "did not prove itself in time")
        if crowded and len(self._strangers) < MAX_STRANGERS:
            self._accept_more(True)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(connection, "" if connection.known else f"{error.strerror} before it had proven itself")
            return
        if not data:
            self.close(connection, "" if connection.known else "went away before it had proven itself")
            return
        try:
            lines = connection.lines.feed(data)
            if not lines:
                return
            if connection.known:
                self._handler.lines(connection, lines)
            elif len(lines) > 1:
                raise CodecError("spoke before it was asked")
            else:
                self._prove(connection, decode_line(lines[0]))
        except CodecError as error:
            self.close(connection, str(error))

    def _prove(self, connection: Connection, values: dict[str, Any]) -> None:
        message_of(values, "proof")
        theirs = values.get("nonce")
        if type(theirs) is not str or not 16 <= len(theirs) <= 64:
            raise CodecError("no nonce")
        if not proven(self._secret, "client", connection.nonce, theirs, values.get("proof")):
            raise CodecError("wrong secret")
        connection.known = True
        connection.lines.limit = MAX_LINE
        del self._strangers[connection]
        self.clients.add(connection)
        self._watch(connection)
        self.send(connection, encode_message("proof", proof=proof(self._secret, "server", connection.nonce, theirs)))

    def _push(self, connection: Connection) -> None:
        try:
            if connection.out:
                del connection.out[: connection.socket.send(connection.out)]
        except BlockingIOError:
            pass
        except OSError:
            self.close(connection, "" if connection.known else "went away before it had proven itself")
            return
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        read = self._reading or not connection.known
        wanted = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if connection.out else 0)
        if wanted == connection.watching:
            return
        if not wanted:
            self._selector.unregister(connection.socket)
        elif not connection.watching:
            self._selector.register(connection.socket, wanted, connection)
        else:
            self._selector.modify(connection.socket, wanted, connection)
        connection.watching = wanted


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on `host` (name, IPv4 or IPv6 address) and `port` (0: any free one). Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A restarted controller must get its port back although old connections linger in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener
