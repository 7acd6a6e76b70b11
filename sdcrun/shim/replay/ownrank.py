"""The rank that a forward is told: where it computes something else by it, a replay must be told the owner's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from sdcrun.shim.replay.state import replaying_here

_NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A process's `rank` and the variables of its environment that tell it."""

    rank: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Place:
        """This process's; rank 0 where there is no process group."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return cls(rank, {name: os.environ[name] for name in _NAMES if name in os.environ})


@contextmanager
def told(place: Place) -> Iterator[None]:
    """Inside the block torch and `os.environ` tell the thread that replays that it is at `place`. The rank in a group
    is that of this place, too, but for groups that this process has no part in."""
    kind = dist.ProcessGroup if dist.is_available() else None

    def rank(original: Any) -> Any:
        def told_rank(group: Any) -> int:
            return place.rank if replaying_here() and group is dist.group.WORLD else original(group)

        return told_rank

    def variable(original: Any) -> Any:
        def getitem(environment: Any, name: Any) -> str:
            told = place.environment.get(name) if replaying_here() and environment is os.environ else None
            return original(environment, name) if told is None else told

        return getitem

    with ExitStack() as stack:
        for holder, name, instead in ((kind, "rank", rank), (type(os.environ), "__getitem__", variable)):
            if holder is not None:
                # As it lies in the class: what getattr() gives of a method of C++ cannot be put back.
                stack.callback(setattr, holder, name, vars(holder)[name])
                setattr(holder, name, instead(getattr(holder, name)))
        yield
