"""How eight int64 reach all ranks of a group: up a tree of connections to the first rank and down again.

A ballot is held in every step, so it may cost nothing: gloo's all-reduce, a ring of 2 (N - 1) hops, takes 1 ms of CPU
time at 3 ranks, of a 20 ms step. Here it is a tenth of that, in 2 log N hops, and nothing touches an accelerator or the
script's own groups.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time

from sdcrun.core import ballot, topology
from sdcrun.shim.links import LEFT, Links, PeerGone, hang_up, whole

FAN_OUT = 8
PURPOSE = 0
_WORDS = struct.Struct(f"<{ballot.SIZE}q")


class BallotFailed(RuntimeError):
    """A ballot did not end in time or lost a peer."""


class Tree:
    """MAX of eight int64 over the ranks 0 to `size` - 1, over `links`, whose doors are known. Making it takes `seconds`
    at most, a ballot waits for `limit` seconds. Raises OSError."""

    def __init__(self, links: Links, size: int, seconds: float, limit: float) -> None:
        end = time.monotonic() + seconds
        self.limit = limit
        parent, children = topology.tree(links.rank, size, FAN_OUT)
        self._above: socket.socket | None = None if parent is None else links.call(parent, PURPOSE, seconds)
        self._below = [links.answer(child, PURPOSE, end) for child in children]
        self._poll = select.poll()
        for connection in self._connections():
            connection.settimeout(limit)
            self._poll.register(connection, select.POLLRDHUP)

    def max(self, words: list[int]) -> list[int]:
        """The element-wise maximum over all ranks. Raises BallotFailed.

        A rank that gives up, or is interrupted in the middle, takes its connections down, and whoever waits while one
        of its own goes down does the same: all fail at once instead of waiting for it.
        """
        try:
            return self._max(words)
        except Exception as error:
            self.close()
            raise BallotFailed(str(error)[:200]) from error
        except BaseException:
            self.close()
            raise

    def _max(self, words: list[int]) -> list[int]:
        for child in self._below:
            words = list(map(max, words, self._words_of(child)))
        # A rank that comes after the others' limit finds what they had said; it must not decide with it alone.
        if self._below and self._poll.poll(0):
            raise PeerGone(LEFT)
        if self._above is not None:
            self._above.sendall(_WORDS.pack(*words), socket.MSG_NOSIGNAL)
            words = list(self._words_of(self._above))
        said = _WORDS.pack(*words)
        for child in self._below:
            # What has been decided holds, also where a child has gone by now.
            with contextlib.suppress(OSError):
                child.sendall(said, socket.MSG_NOSIGNAL)
        return words

    def _words_of(self, connection: socket.socket) -> tuple[int, ...]:
        """What comes next on this connection, while all of them stand."""
        self._poll.modify(connection, select.POLLIN | select.POLLRDHUP)
        ready = dict(self._poll.poll(1e3 * self.limit))
        self._poll.modify(connection, select.POLLRDHUP)
        if not ready:
            raise TimeoutError(f"not all ranks were there within {self.limit:.0f} s")
        if not ready.get(connection.fileno(), 0) & select.POLLIN:
            raise PeerGone(LEFT)
        return _WORDS.unpack(whole(connection, _WORDS.size))

    def close(self) -> None:
        """Ends all connections; a ballot from then on fails."""
        for connection in self._connections():
            hang_up(connection)

    def _connections(self) -> list[socket.socket]:
        return self._below + ([self._above] if self._above is not None else [])
