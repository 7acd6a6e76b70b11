"""What a forward may change and nobody could put back: iterators, objects of libraries, large tensors.

A replay would change them once more, so a forward that does is not replayed. Whether one has is seen from outside:
where an iterator stands, which values an object of a library holds.
"""

from __future__ import annotations

import collections
import io
import itertools
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from sdcrun.shim.fingerprint import fingerprints
from sdcrun.shim.replay.generators import is_generator
from sdcrun.shim.replay.scriptobjects import DEEPEST, LONGEST, has_attributes

_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_ELSEWHERE = (torch.Tensor, torch.nn.Module, dict, list, tuple, set, frozenset, io.IOBase)
_AROUND_OTHERS = (map, filter, zip, enumerate)
_OF_CONTAINERS = ("collections", "weakref", "_weakrefset", "_thread")
_SCALARS = (bool, int, float, complex, str, bytes)

Marks = list[Any]


class Contents:
    """What is in those of some tensors that nobody trains, as it is now: a teacher follows its student by way of
    `.data`, which no version shows."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [
            tensor for tensor in tensors
            if not tensor.requires_grad and tensor.layout is torch.strided and tensor.device.type != "meta"
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        ]  # fmt: skip
        self._then = self._now()

    def _now(self) -> list:
        return fingerprints([t.detach() for t in self._tensors]).tolist() if self._tensors else []

    def changed(self) -> bool:
        """Whether something else is in one of them."""
        return self._now() != self._then


class Irrevocable:
    """The things that a forward which begins now could change for good."""

    def __init__(self) -> None:
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        self._contents: list[tuple[str, Contents]] = []
        self._things: list[tuple[str, Callable[[], Marks], Marks]] = []
        self._seen: set[int] = set()

    def tensors(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """These are not copied for a replay."""
        tensors = list(tensors)
        self._contents.append((name, Contents(tensors)))
        self._tensors += [(name, tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def thing(self, name: str, value: Any) -> None:
        """An iterator or an object of a library; anything else is passed over."""
        if value is None or id(value) in self._seen or isinstance(value, (*_SCALARS, *_CODE, *_ELSEWHERE)):
            if not _is_read(value):
                return
        self._seen.add(id(value))
        read = _reader(value)
        if read is not None:
            self._things.append((name, read, read()))

    def changed(self) -> str | None:
        """The name of one that has changed since; asked once, nothing is kept alive for longer."""
        things, self._things = self._things, []
        names = [name for name, tensor, version in self._tensors if tensor._version != version]
        names += [name for name, contents in self._contents if contents.changed()]
        names += [name for name, read, before in things if not _alike(before, read())]
        return names[0] if names else None


def _alike(one: Marks, other: Marks) -> bool:
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and type(a) in _SCALARS and a == b) for a, b in zip(one, other)
    )


def _is_read(value: Any) -> bool:
    """A file that its readers advance; one that is only written into is no such."""
    in_memory = isinstance(value, (io.StringIO, io.BytesIO))
    return isinstance(value, io.IOBase) and not (in_memory or value.closed) and value.readable() and value.seekable()


def _offset(file: Any) -> Marks:
    try:
        return [file.tell()]
    except (OSError, ValueError):
        # Under iteration, or closed: never at the same place again.
        return [object()]


def _held(values: dict) -> Marks:
    """What an object holds, and what is in its containers."""
    inner = [list(value.items() if isinstance(value, dict) else value) for value in values.values()
             if isinstance(value, (dict, list, set, collections.deque)) and len(value) <= LONGEST]  # fmt: skip
    flat = [mark for items in inner for item in items for mark in (item if type(item) is tuple else (item,))]
    return [*values.values(), *map(len, inner), *flat]


def _reader(value: Any) -> Callable[[], Marks] | None:
    """What tells whether `value` was used, or None if it is no such thing."""
    if isinstance(value, io.IOBase):
        return lambda: _offset(value)
    if hasattr(type(value), "total_changes"):
        return lambda: [value.total_changes]
    if is_generator(value) or has_attributes(value):
        return None
    kind = type(value)
    held = kind.__dictoffset__ or isinstance(value, threading.local)
    if kind.__module__ in _OF_CONTAINERS and held:
        return lambda: _held(vars(value))
    if held or hasattr(kind, "qsize"):
        queued = [value.qsize] if hasattr(kind, "qsize") else []
        return lambda: [*(vars(value).values() if held else ()), *(size() for size in queued)]
    return (lambda: _place(value)) if isinstance(value, Iterator) else None


def _place(iterator: Iterator, depth: int = 0) -> Marks:
    """Where an iterator stands. One that does not show it is never at the same place again."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return [] if frame is None else [frame.f_lasti, *frame.f_locals.values()]
    if type(iterator) is itertools.count:
        return [repr(iterator)]
    if hasattr(type(iterator), "__length_hint__"):
        return [operator.length_hint(iterator, -1)]
    if type(iterator) in _AROUND_OTHERS and depth < DEEPEST:
        inner = iterator.__reduce__()[1]
        return [mark for one in inner for mark in (_place(one, depth + 1) if isinstance(one, Iterator) else [one])]
    return [object()]
