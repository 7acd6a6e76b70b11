"""Bytes between ranks of one group, point to point, every wait bounded.

Each direction between two ranks is a connection of its own, made when it is first needed; messages on it are read in
the order in which they were sent, and a tag says what each is for.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping

from sdcrun.core import topology
from sdcrun.shim.links import LEFT, Links, PeerGone, hang_up

MAX_BYTES = 1 << 34
PURPOSE = 1
_HEAD = struct.Struct("<qQ")
# No system call takes more than 2 GiB.
_PIECE = 1 << 30


class ExchangeFailed(RuntimeError):
    """A peer did not answer in time, went away, was at another place, or announced an impossible size."""


class _Sending:
    """What a peer has not taken yet."""

    def __init__(self, connection: socket.socket, tag: int, payload: bytes) -> None:
        self.connection = connection
        self.rest = [memoryview(_HEAD.pack(tag, len(payload))), memoryview(payload)]

    def done(self) -> bool:
        """Sends what the system takes without waiting; whether that was all."""
        while self.rest:
            try:
                taken = self.connection.sendmsg([part[:_PIECE] for part in self.rest], [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            while self.rest and taken >= len(self.rest[0]):
                taken -= len(self.rest.pop(0))
            if self.rest:
                self.rest[0] = self.rest[0][taken:]
        return True


class _Receiving:
    """What a peer has sent so far."""

    def __init__(self, peer: int, connection: socket.socket, tag: int) -> None:
        self.peer, self.connection, self.tag = peer, connection, tag
        self.data: bytearray | None = None
        self.room = memoryview(bytearray(_HEAD.size))
        self.at = 0

    def done(self) -> bool:
        """Reads what is there without waiting; whether that was all."""
        while True:
            while self.at < len(self.room):
                try:
                    count = self.connection.recv_into(self.room[self.at : self.at + _PIECE])
                except BlockingIOError:
                    return False
                if not count:
                    raise PeerGone(LEFT)
                self.at += count
            if self.data is not None:
                return True
            tag, size = _HEAD.unpack(self.room)
            if tag != self.tag:
                raise ExchangeFailed(f"rank {self.peer} of the group was at another place")
            if size > MAX_BYTES:
                raise ExchangeFailed(f"rank {self.peer} of the group announced {size} bytes")
            self.data, self.at = bytearray(size), 0
            self.room = memoryview(self.data)


class Exchange:
    """Messages between the ranks 0 to `size` - 1 of a group over `links`, whose doors are known by the first of them;
    `timeout` in seconds."""

    def __init__(self, links: Links, size: int, timeout: float) -> None:
        self.links, self.rank, self.size, self.timeout = links, links.rank, size, timeout
        self._out: dict[int, socket.socket] = {}
        self._in: dict[int, socket.socket] = {}
        self._failed: str | None = None

    def swap(
        self, sends: Mapping[int, bytes], receives: Iterable[int], tag: int, timeout: float | None = None
    ) -> dict[int, bytes]:
        """Sends `sends[peer]` to each peer and returns what each of `receives` sent under the same `tag`.

        All go on at the same time: no order of peers can deadlock. Raises ExchangeFailed; a rank that gives up takes
        its connections down, so that the others need not wait for it, and no exchange works from then on.
        """
        if self._failed is not None:
            raise ExchangeFailed(self._failed)
        try:
            return self._swap(sends, list(receives), tag, timeout or self.timeout)
        except Exception as error:
            self.close(str(error)[:200] or repr(error))
            raise ExchangeFailed(self._failed) from error
        except BaseException:
            self.close("interrupted")
            raise

    def _swap(self, sends: Mapping[int, bytes], receives: list[int], tag: int, limit: float) -> dict[int, bytes]:
        end = time.monotonic() + limit
        watched: dict[int, _Sending | _Receiving] = {}
        poll = select.poll()
        for peer, payload in sends.items():
            sending = _Sending(self._to(peer, limit), tag, payload)
            if not sending.done():
                watched[sending.connection.fileno()] = sending
                poll.register(sending.connection, select.POLLOUT)
        expected, begun = set(receives), []
        door = self.links.listener if not expected <= self._in.keys() else None
        if door is not None:
            door.settimeout(0.0)
            poll.register(door, select.POLLIN)
        while watched or expected:
            for peer in list(expected):
                connection = self._from(peer)
                if connection is not None:
                    expected.discard(peer)
                    begun.append(_Receiving(peer, connection, tag))
                    watched[connection.fileno()] = begun[-1]
                    poll.register(connection, select.POLLIN)
            if door is not None and not expected:
                # Whoever calls now is for later.
                poll.unregister(door)
                door = None
            left = end - time.monotonic()
            # Strangers at the door, or a peer that sends byte by byte, do not extend the limit.
            ready = poll.poll(1e3 * left) if left > 0 else []
            if not ready:
                waiting = sorted(expected | {one.peer for one in watched.values() if isinstance(one, _Receiving)})
                raise ExchangeFailed(f"no answer within {limit:.0f} s from ranks {waiting[:8]} of the group")
            for place, _ in ready:
                if door is not None and place == door.fileno():
                    with contextlib.suppress(BlockingIOError):
                        self.links.let_in()
                elif watched[place].done():
                    poll.unregister(place)
                    del watched[place]
        return {one.peer: bytes(one.data) for one in begun}

    def _to(self, peer: int, limit: float) -> socket.socket:
        if peer not in self._out:
            self._out[peer] = self.links.call(peer, PURPOSE, limit)
            self._out[peer].setblocking(False)
        return self._out[peer]

    def _from(self, peer: int) -> socket.socket | None:
        if peer not in self._in:
            connection = self.links.answered(peer, PURPOSE)
            if connection is None:
                return None
            connection.setblocking(False)
            self._in[peer] = connection
        return self._in[peer]

    def close(self, reason: str) -> None:
        """No exchange from then on."""
        self._failed = reason
        for connection in (*self._out.values(), *self._in.values()):
            hang_up(connection)

    def gather(self, payload: bytes, tag: int, timeout: float | None = None) -> list[bytes]:
        """Every rank's `payload`, by group rank, on every rank: up a binary tree to the first rank and down again as
        one message, so that no rank speaks with more than three others. Raises ExchangeFailed."""
        if self.size == 1:
            return [payload]
        parent, children = topology.tree(self.rank, self.size, 2)
        below = self.swap({}, children, tag, timeout) if children else {}
        whole = _packed(self.rank, payload) + b"".join(below[child] for child in children)
        if parent is not None:
            whole = self.swap({parent: whole}, [parent], tag, timeout)[parent]
        if children:
            self.swap(dict.fromkeys(children, whole), [], tag, timeout)
        parts = _unpacked(whole)
        if sorted(parts) != list(range(self.size)) or parts[self.rank] != payload:
            raise ExchangeFailed("what came back is not what was sent")
        return [parts[rank] for rank in range(self.size)]


def _packed(rank: int, payload: bytes) -> bytes:
    return rank.to_bytes(4, "little") + len(payload).to_bytes(8, "little") + payload


def _unpacked(whole: bytes) -> dict[int, bytes]:
    parts, at = {}, 0
    while at < len(whole):
        rank, count = int.from_bytes(whole[at : at + 4], "little"), int.from_bytes(whole[at + 4 : at + 12], "little")
        parts[rank] = whole[at + 12 : at + 12 + count]
        at += 12 + count
    return parts
