"""TCP connections of our own between the ranks of a group, for ballots and for whatever an audit ships.

Not gloo's: whatever gloo does wakes a thread or two beside the caller, even while nothing happens, and it connects all
with all. Here the caller reads and writes by itself, and who never speaks to one another is not connected.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import time

_HELLO = struct.Struct("<16sII")
_HELLO_SECONDS = 2.0
_WAITING = 128
_SIOCGIFADDR = 0x8915
_FAR = "192.0.2.1"  # reserved for documents: as good as any that is not here
LEFT = "another rank has left or given up"


class PeerGone(ConnectionError):
    """The other end has left or given up."""


def own_address() -> str:
    """The address at which other ranks reach this one: of the interface that gloo is told to use, where that has one of
    IPv4, else of the one that routes to the master, else of the host's name. Raises OSError."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    target = os.environ.get("MASTER_ADDR") or socket.gethostname()
    address = _source_towards(target)
    if _loops_back(address) and not _loops_back(target) and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        # Debian's /etc/hosts gives a host's own name such an address, which means another host to other nodes.
        with contextlib.suppress(OSError):
            address = _source_towards(_FAR)
    return address


def _source_towards(target: str) -> str:
    """The address of this host on the way to `target`; nothing is sent."""
    family, kind, *_, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def _loops_back(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


class Links:
    """The connections of group rank `rank`. `door`: what all others must be told, as JSON has it: [host, port, secret];
    `doors`: everyone's, by rank, once they are known. A connection has a purpose, a small number; two ranks have at
    most one in each direction for each. Raises OSError where there is no address to listen at."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.doors: list[list] = []
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family, backlog=_WAITING)
        self._secret = secrets.token_bytes(16)
        self.door = [host, self.listener.getsockname()[1], self._secret.hex()]
        self._here: dict[tuple[int, int], socket.socket] = {}
        self._made: list[socket.socket] = []

    def call(self, peer: int, purpose: int, seconds: float) -> socket.socket:
        """A new connection to `peer`'s door, within `seconds`. Raises OSError."""
        host, port, secret = self.doors[peer]
        connection = socket.create_connection((host, port), timeout=seconds)
        self._adopt(connection)
        connection.sendall(_HELLO.pack(bytes.fromhex(secret), purpose, self.rank), socket.MSG_NOSIGNAL)
        return connection

    def answered(self, peer: int, purpose: int) -> socket.socket | None:
        """The connection that `peer` has made, if it has been let in by now."""
        return self._here.pop((purpose, peer), None)

    def answer(self, peer: int, purpose: int, end: float) -> socket.socket:
        """The same, waited for until the monotonic time `end`. Raises OSError."""
        while True:
            connection = self.answered(peer, purpose)
            if connection is not None:
                return connection
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"rank {peer} of the group did not call in time")
            self.listener.settimeout(left)
            self.let_in()

    def let_in(self) -> None:
        """Takes the next one at the door; a stranger is sent away, and not waited for long. Raises OSError."""
        caller = self.listener.accept()[0]
        caller.settimeout(_HELLO_SECONDS)
        try:
            secret, purpose, rank = _HELLO.unpack(whole(caller, _HELLO.size))
        except OSError:
            caller.close()
            return
        if secrets.compare_digest(secret, self._secret):
            self._here[purpose, rank] = self._adopt(caller)
        else:
            caller.close()

    def _adopt(self, connection: socket.socket) -> socket.socket:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Between two audits a firewall may forget a silent connection.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._made.append(connection)
        return connection

    def let_go(self) -> None:
        """Closes this process's ends. In a forked child that is all: the connections are its parent's."""
        self.listener.close()
        for connection in self._made:
            connection.close()


def hang_up(connection: socket.socket) -> None:
    """Ends a connection, also where a forked child holds it too: the other end knows at once."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def whole(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes. Raises OSError; PeerGone where there will be no more."""
    data = connection.recv(count)
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise PeerGone(LEFT)
        data += more
    return data
