"""How eight int64 reach all ranks of a group: two transports behind one `max(words)`.

`SideTransport`: gloo on our own side group. Its all-reduce is a ring, so a ballot takes 2 (N - 1) hops: right for
jobs on CPUs and up to some dozens of ranks. `OwnTransport`: a collective on the DDP module's own process group. At
the gate all of its collectives of this step have been issued, in the same order on all ranks; NCCL's trees make that
log N hops, and a time-out there is the job's own. `SIDE_LIMIT` is where the choice changes.

A side group of more than `SIDE_LIMIT` ranks connects lazily: a full mesh of N (N - 1) / 2 connections is impossible at
thousands of ranks, while the ring and an audit's pairs need a handful for each.
"""

from __future__ import annotations

from array import array
from datetime import timedelta

import torch
import torch.distributed as dist

from sdcrun.core import ballot

SIDE_LIMIT = 64


class BallotFailed(RuntimeError):
    """The ballot's all-reduce did not end in time or lost a peer."""


def _options(limit: timedelta | None = None) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    if limit is not None:
        # Without it gloo gives up after the group's own limit, whatever `wait` is told.
        options.timeout = limit
    return options


class SideTransport:
    """MAX over `pg`, a raw ProcessGroupGloo; `limit` in seconds."""

    def __init__(self, pg, limit: float) -> None:
        self.pg, self.limit = pg, timedelta(seconds=limit)
        # The vector shares its memory with an array, so that a ballot allocates no tensor.
        self.words = array("q", [0] * ballot.SIZE)
        self.vector = torch.frombuffer(self.words, dtype=torch.int64)

    def max(self, words: list[int]) -> list[int]:
        """The element-wise maximum over all ranks. Raises BallotFailed."""
        self.words[:] = array("q", words)
        try:
            self.pg.allreduce([self.vector], _options(self.limit)).wait(self.limit)
        except Exception as error:
            raise BallotFailed(str(error).splitlines()[0][:200]) from error
        return self.words.tolist()


class OwnTransport:
    """MAX over `process_group`, the DDP module's own, with a vector on `device`."""

    def __init__(self, process_group, device: torch.device) -> None:
        self.process_group = process_group
        self.vector = torch.zeros(ballot.SIZE, dtype=torch.int64, device=device)

    def max(self, words: list[int]) -> list[int]:
        """The element-wise maximum over all ranks. Raises BallotFailed."""
        self.vector.copy_(torch.tensor(words))
        try:
            self.process_group.allreduce([self.vector], _options()).wait()
        except Exception as error:
            raise BallotFailed(str(error).splitlines()[0][:200]) from error
        return self.vector.tolist()


def transport_for(side_group, process_group, device: torch.device, limit: float) -> SideTransport | OwnTransport:
    """The ballot's transport: the module's own group where it runs on NCCL and has more than `SIDE_LIMIT` ranks."""
    if device.type == "cuda" and side_group.size() > SIDE_LIMIT and dist.get_backend(process_group) == "nccl":
        return OwnTransport(process_group, device)
    return SideTransport(side_group, limit)
