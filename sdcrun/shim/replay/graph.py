"""Looking along the autograd graph: from which of the modules' outputs do a backward's roots get their gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def reaches(
    roots: Iterable[torch.Tensor], borders: set, parameters: set[int]
) -> tuple[set, bool]:
    """Walks from the roots towards the leaves and stops at the nodes `borders`.

    Returns the border nodes met, and whether a leaf whose id is in `parameters` was met without crossing one: then
    gradients flow into the modules on other ways than through their outputs.
    """
    met, seen, outside = set(), set(), False
    pending = []
    for root in roots:
        if root.grad_fn is not None:
            pending.append(root.grad_fn)
        elif id(root) in parameters:
            outside = True
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in borders:
            met.add(node)
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in parameters:
            outside = True
        pending.extend(below for below, _ in node.next_functions if below is not None)
    return met, outside
