"""How eight int64 reach all ranks of a group: up a tree of point-to-point messages to the first rank, down again.

The messages are gloo's, on our own side group. Gloo's own all-reduce is a ring of 2 (N - 1) hops that also runs on a
worker thread of the group; a tree takes 2 log N hops, and its messages are sent and awaited by the caller: a quarter of
the CPU time at three ranks, a tenth at eight. Nothing here touches an accelerator or the script's own groups.

A side group of more than `SIDE_LIMIT` ranks connects lazily: a full mesh of N (N - 1) / 2 connections is impossible at
thousands of ranks, while the tree and an audit's pairs need a handful for each.
"""

from __future__ import annotations

from array import array
from datetime import timedelta

import torch

from sdcrun.core import ballot, topology

SIDE_LIMIT = 64
FAN_OUT = 8
# The exchange's own tags begin above these.
TAG_UP, TAG_DOWN = 0, 1


class BallotFailed(RuntimeError):
    """A ballot did not end in time or lost a peer."""


class _Words:
    """Eight int64 that gloo reads and writes in place, so that a ballot allocates no tensor."""

    def __init__(self) -> None:
        self.array = array("q", [0] * ballot.SIZE)
        self.tensors = [torch.frombuffer(self.array, dtype=torch.int64)]


class TreeTransport:
    """MAX of eight int64 over `pg`, a raw ProcessGroupGloo of which this is group rank `rank`; `limit` in seconds."""

    def __init__(self, pg, rank: int, limit: float) -> None:
        self.pg, self.limit = pg, timedelta(seconds=limit)
        self.parent, children = topology.tree(rank, pg.size(), FAN_OUT)
        self.mine = _Words()
        self.below = [(child, _Words()) for child in children]

    def max(self, words: list[int]) -> list[int]:
        """The element-wise maximum over all ranks. Raises BallotFailed.

        A rank that gives up takes its connections down, which is how gloo ends a wait: the others then fail at once.
        """
        try:
            return self._max(words)
        except Exception as error:
            raise BallotFailed(str(error).splitlines()[0][:200]) from error

    def _max(self, words: list[int]) -> list[int]:
        pg, limit, mine = self.pg, self.limit, self.mine
        work = [pg.recv(place.tensors, child, TAG_UP) for child, place in self.below]
        for (_, place), arrival in zip(self.below, work):
            arrival.wait(limit)
            words = list(map(max, words, place.array))
        mine.array[:] = array("q", words)
        if self.parent is not None:
            pg.send(mine.tensors, self.parent, TAG_UP).wait(limit)
            pg.recv(mine.tensors, self.parent, TAG_DOWN).wait(limit)
        for sent in [pg.send(mine.tensors, child, TAG_DOWN) for child, _ in self.below]:
            sent.wait(limit)
        return mine.array.tolist()
