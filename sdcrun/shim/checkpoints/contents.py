"""The tensors in what a script hands to a save, and where in it each one is.

A place is a path of texts: keys of mappings, positions in lists and tuples, attributes of objects. A file read back
without its classes (see `reader`) is walked by the same rules and gives the same paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

MAX_NODES = 2_000_000
LONG = 4096
SEPARATOR = "/"


class Leaf(NamedTuple):
    """One tensor of a save. `path` joined with "/" is its name in the sidecar."""

    path: tuple[str, ...]
    tensor: Any

    @property
    def name(self) -> str:
        """The path as one text."""
        return SEPARATOR.join(self.path)


def leaves(
    contents: Any,
    is_tensor: Callable[[Any], bool] = lambda value: isinstance(value, torch.Tensor),
    unfold: Callable[[Any], Any] = lambda value: None,
) -> list[Leaf]:
    """All tensors in `contents`, in order; each container is entered once, so cycles end.

    Entered are mappings, lists, tuples, sets and the attributes of other objects. A long list that begins with plain
    values is data and is not looked through. Stops after two million values. `unfold` may
    give the container that a value stands for.
    """
    found: list[Leaf] = []
    seen: set[int] = set()
    keep: list[Any] = []
    stack: list[tuple[tuple[str, ...], Any]] = [((), contents)]
    nodes = 0
    while stack and nodes < MAX_NODES:
        path, value = stack.pop()
        nodes += 1
        if is_tensor(value):
            found.append(Leaf(path, value))
            continue
        inner = _inner(unfold(value) or value)
        if inner is None or id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        stack.extend((path + (str(key),), item) for key, item in reversed(inner) if not _plain(item))
    return found


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes, bool, int, float, complex, type))


def _inner(value: Any) -> list[tuple[Any, Any]] | None:
    """(key, item) of everything in a container, None for what is none."""
    if _plain(value):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        if len(value) > LONG and _plain(value[0]) and _plain(value[-1]):
            return None
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return list(enumerate(value)) if len(value) <= LONG else None
    if callable(value) and not hasattr(value, "state_dict"):
        return None
    state = getattr(value, "__dict__", None)
    return list(state.items()) if isinstance(state, dict) and state else None
