"""Bytes between ranks of one group, point to point, every wait bounded.

Collectives on the ballot's group keep one fixed size, because a size mismatch on gloo ends the process; whatever has
another size travels here: one tag per purpose, a size header first, the payload second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch

MAX_BYTES = 1 << 34


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

        All sizes travel first, then all payloads, so that no order of peers can deadlock. Raises ExchangeFailed.
        """
        limit = timedelta(seconds=timeout or self.timeout)
        receives = list(receives)
        try:
            work, sizes = [], {}
            for peer, payload in sends.items():
                work.append(self.pg.send([torch.tensor([len(payload)])], peer, 2 * tag))
            for peer in receives:
                sizes[peer] = torch.zeros(1, dtype=torch.int64)
                work.append(self.pg.recv([sizes[peer]], peer, 2 * tag))
            self._wait(work, limit)
            work, buffers, keep = [], {}, []
            for peer, payload in sends.items():
                if payload:
                    keep.append(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
                    work.append(self.pg.send([keep[-1]], peer, 2 * tag + 1))
            for peer in receives:
                count = int(sizes[peer])
                if not 0 <= count <= MAX_BYTES:
                    raise ExchangeFailed(f"rank {peer} of the group announced {count} bytes")
                buffers[peer] = torch.empty(count, dtype=torch.uint8)
                if count:
                    work.append(self.pg.recv([buffers[peer]], peer, 2 * tag + 1))
            self._wait(work, limit)
        except ExchangeFailed:
            raise
        except Exception as error:
            raise ExchangeFailed(str(error).splitlines()[0][:200]) from error
        return {peer: ctypes.string_at(buffer.data_ptr(), buffer.numel()) for peer, buffer in buffers.items()}

    def gather(self, payload: bytes, tag: int, timeout: float | None = None) -> list[bytes]:
        """Every rank's `payload`, by group rank, on every rank: to the first rank and back as one message."""
        if self.size == 1:
            return [payload]
        if self.rank == 0:
            got = self.swap({}, range(1, self.size), tag, timeout)
            parts = [payload, *(got[peer] for peer in range(1, self.size))]
            whole = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
            self.swap(dict.fromkeys(range(1, self.size), whole), [], tag, timeout)
            return parts
        self.swap({0: payload}, [], tag, timeout)
        whole, parts, at = self.swap({}, [0], tag, timeout)[0], [], 0
        while at < len(whole):
            count = int.from_bytes(whole[at : at + 8], "little")
            parts.append(whole[at + 8 : at + 8 + count])
            at += 8 + count
        if len(parts) != self.size or parts[self.rank] != payload:
            raise ExchangeFailed("what came back is not what was sent")
        return parts

    @staticmethod
    def _wait(work: list, limit: timedelta) -> None:
        for item in work:
            item.wait(limit)

