"""Collective operations around a replay: counted where the script runs, refused where its micro-batch is run again.

A rank that replays stands alone: a collective inside would wait for ranks that are elsewhere, or mix with theirs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")


class CollectiveRefused(RuntimeError):
    """The micro-batch runs a collective operation of its own."""


def collective_counts() -> list[int]:
    """How many collectives were started on each process group."""
    counts = []
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            counts.append(group._get_sequence_number_for_group())
        except RuntimeError:
            counts.append(-1)
    return counts


class NoCollectives(TorchDispatchMode):
    """Raises CollectiveRefused at every collective operation of this thread; compiled graphs run without it."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo ignores such modes."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled graphs are left alone."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in NAMESPACES:
            raise CollectiveRefused(f"the micro-batch runs a collective operation: {func}")
        return func(*args, **(kwargs or {}))


def has_own_functions(roots: list[torch.Tensor]) -> bool:
    """Whether a custom autograd.Function lies in the graph below the roots: its backward can do anything."""
    seen, pending = set(), [root.grad_fn for root in roots if root.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        pending.extend(below for below, _ in node.next_functions if below is not None)
    return False
