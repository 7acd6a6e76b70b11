"""The rank that a forward is told: where it computes something else by it, a replay must be told the owner's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from sdcrun.shim.replay.state import replaying_here


def rank_here() -> int:
    """This process's rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def told_rank(rank: int) -> Iterator[None]:
    """Inside the block `torch.distributed.get_rank()` says `rank` to the thread that replays. A group's own ranks are
    those of this process."""
    original = distributed_c10d.get_rank

    def get_rank(group: Any = None) -> int:
        return rank if replaying_here() and group in (None, dist.group.WORLD) else original(group)

    dist.get_rank = distributed_c10d.get_rank = get_rank
    try:
        yield
    finally:
        dist.get_rank = distributed_c10d.get_rank = original
