"""The rank that a forward is told: where it computes something else by it, a replay must be told the owner's.

The environment's RANK and LOCAL_RANK stay those of the process that replays: they name its device, and whoever tries
how a bad device is found puts the fault in by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from sdcrun.shim.replay.state import replaying_here


def rank_here() -> int:
    """This process's rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def told_rank(rank: int) -> Iterator[None]:
    """Inside the block torch tells the thread that replays that it is `rank`. The rank in another group than that of
    all ranks is this process's own."""
    if not dist.is_available():
        yield
        return
    kind = dist.ProcessGroup
    # As it lies in the class: what getattr() gives of a method of C++ cannot be put back.
    before, original = vars(kind)["rank"], kind.rank

    def told(group: Any) -> int:
        return rank if replaying_here() and group is dist.group.WORLD else original(group)

    kind.rank = told
    try:
        yield
    finally:
        kind.rank = before
