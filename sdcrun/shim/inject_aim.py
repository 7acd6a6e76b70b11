"""Which of several modules a fault falls on: the one whose step it is, as in a GAN or with an actor and a critic.

Before a backward nobody knows which module will be updated: forwards are hit in the module that the window calls first.
A backward tells by its graph: of the modules that its gradients reach it is the one computed first, for a generator's
loss goes through the critic.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class Aim:
    """A fault's module of the step, the same on all ranks, whose scripts call modules in the same order."""

    def __init__(self) -> None:
        self._step = -1
        self._guard: weakref.ref | None = None
        self._backward = False

    def at(self, guard, step: int) -> bool:
        """Whether `guard` is hit in `step`."""
        return self._step == step and self._guard() is guard

    def forward(self, guard, step: int) -> None:
        """A training forward of `guard` begins in `step`."""
        if self._step != step:
            self._step, self._guard, self._backward = step, weakref.ref(guard), False

    def backward(self, guard, step: int) -> None:
        """A backward of `step` has `guard` at its far end; the step's first one counts."""
        if self._step != step or not self._backward:
            self._step, self._guard, self._backward = step, weakref.ref(guard), True


def farthest(roots: Iterable[torch.Tensor], owners: dict[int, object]):
    """The owner (by id of its parameters) whose operators ran first among those that gradients from the roots reach;
    None if they reach nobody's."""
    order: dict[int, tuple[int, object]] = {}
    pending, seen = [root.grad_fn for root in roots if root.grad_fn is not None], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for below, _ in node.next_functions:
            owner = owners.get(id(getattr(below, "variable", None)))
            if owner is None:
                pending += [below] if below is not None else []
            else:
                place = (node._sequence_nr(), owner)
                order[id(owner)] = min(order.get(id(owner), place), place, key=lambda known: known[0])
    return min(order.values(), key=lambda known: known[0])[1] if order else None
