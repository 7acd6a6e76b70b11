"""Bytes between ranks of one group, point to point, every wait bounded.

A ballot's messages keep one fixed size, because a size mismatch on gloo ends the process; whatever has another size
travels here: one tag per purpose, above the ballot's, a size header first, the payload second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch

from sdcrun.core import topology

MAX_BYTES = 1 << 34
INLINE = 4096


class ExchangeFailed(RuntimeError):
    """A peer did not answer in time, went away, or announced an impossible size."""


class Exchange:
    """Point-to-point messages on `pg` (a raw ProcessGroupGloo) for group rank `rank` of `size`; times in seconds."""

    def __init__(self, pg, rank: int, size: int, timeout: float) -> None:
        self.pg, self.rank, self.size, self.timeout = pg, rank, size, timeout

    def swap(
        self, sends: Mapping[int, bytes], receives: Iterable[int], tag: int, timeout: float | None = None
    ) -> dict[int, bytes]:
        """Sends `sends[peer]` to each peer and returns what each of `receives` sent under the same `tag`.

        All heads travel first, with the size and the first bytes in them, then what is left of longer payloads: no
        order of peers can deadlock, and a short message is one. Raises ExchangeFailed.
        """
        limit = timedelta(seconds=timeout or self.timeout)
        receives = list(receives)
        try:
            work, heads, rests = [], {}, {}
            for peer, payload in sends.items():
                head = len(payload).to_bytes(8, "little") + payload[:INLINE]
                head = torch.frombuffer(bytearray(head.ljust(8 + INLINE, b"\0")), dtype=torch.uint8)
                work.append(self.pg.send([head], peer, 2 * tag))
            for peer in receives:
                heads[peer] = torch.empty(8 + INLINE, dtype=torch.uint8)
                work.append(self.pg.recv([heads[peer]], peer, 2 * tag))
            self._wait(work, limit)
            work, got = [], {}
            for peer, payload in sends.items():
                if len(payload) > INLINE:
                    rest = torch.frombuffer(bytearray(memoryview(payload)[INLINE:]), dtype=torch.uint8)
                    work.append(self.pg.send([rest], peer, 2 * tag + 1))
            for peer in receives:
                head = _bytes_of(heads[peer])
                count = int.from_bytes(head[:8], "little")
                if count > MAX_BYTES:
                    raise ExchangeFailed(f"rank {peer} of the group announced {count} bytes")
                got[peer] = head[8 : 8 + count]
                if count > INLINE:
                    rests[peer] = torch.empty(count - INLINE, dtype=torch.uint8)
                    work.append(self.pg.recv([rests[peer]], peer, 2 * tag + 1))
            self._wait(work, limit)
        except ExchangeFailed:
            raise
        except Exception as error:
            raise ExchangeFailed(str(error).splitlines()[0][:200]) from error
        return {peer: part + _bytes_of(rests[peer]) if peer in rests else part for peer, part in got.items()}

    def gather(self, payload: bytes, tag: int, timeout: float | None = None) -> list[bytes]:
        """Every rank's `payload`, by group rank, on every rank: up a binary tree to the first rank and down again as
        one message, so that no rank speaks with more than three others. Raises ExchangeFailed."""
        if self.size == 1:
            return [payload]
        parent, children = topology.tree(self.rank, self.size, 2)
        above = [] if parent is None else [parent]
        below = self.swap({}, children, tag, timeout) if children else {}
        whole = _packed(self.rank, payload) + b"".join(below[child] for child in children)
        if above:
            self.swap(dict.fromkeys(above, whole), [], tag, timeout)
            whole = self.swap({}, above, tag, timeout)[above[0]]
        if children:
            self.swap(dict.fromkeys(children, whole), [], tag, timeout)
        parts = _unpacked(whole)
        if sorted(parts) != list(range(self.size)) or parts[self.rank] != payload:
            raise ExchangeFailed("what came back is not what was sent")
        return [parts[rank] for rank in range(self.size)]

    @staticmethod
    def _wait(work: list, limit: timedelta) -> None:
        for item in work:
            item.wait(limit)


def _packed(rank: int, payload: bytes) -> bytes:
    return rank.to_bytes(4, "little") + len(payload).to_bytes(8, "little") + payload


def _unpacked(whole: bytes) -> dict[int, bytes]:
    parts, at = {}, 0
    while at < len(whole):
        rank, count = int.from_bytes(whole[at : at + 4], "little"), int.from_bytes(whole[at + 4 : at + 12], "little")
        parts[rank] = whole[at + 12 : at + 12 + count]
        at += 12 + count
    return parts


def _bytes_of(buffer: torch.Tensor) -> bytes:
    return ctypes.string_at(buffer.data_ptr(), buffer.numel())
