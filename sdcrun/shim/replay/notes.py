"""Notes of the script's variables that a replay may change, and what puts each back as it was."""

from __future__ import annotations

import array
import functools
import io
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sdcrun.shim.replay.generators import is_generator, set_state, state_of
from sdcrun.shim.replay.muted import stand_in
from sdcrun.shim.replay.scriptobjects import (
    CODE,
    DEEPEST,
    FIXED,
    LARGEST,
    LONGEST,
    MISSING,
    SEQUENCES,
    base_of,
    content,
    has_attributes,
    slots,
)
from sdcrun.shim.replay.tree import REGISTRIES

Undo = Callable[[], None]


class Notes:
    """Notes values and tells `undo` what puts them back; each container once, at most about `room` items. In the place
    of files it puts such as a replay does not write into. `modules` are put back by somebody else."""

    def __init__(self, room: float, undo: Callable[[Undo], Any], modules: Iterable[torch.nn.Module] = ()) -> None:
        self._undo = undo
        self._seen: set[int] = {id(module) for module in modules}
        self._room = room

    def variable(self, value: Any, around: dict, name: str) -> None:
        """A global, which may be bound anew, deleted or made."""

        def put_back() -> None:
            if value is MISSING:
                around.pop(name, None)
            elif around.get(name, MISSING) is not value:
                around[name] = value

        self._bound(value, put_back, functools.partial(around.__setitem__, name))

    def cell(self, cell: types.CellType) -> None:
        """A variable of an enclosing function."""
        value = content(cell)

        def put_back() -> None:
            if value is not MISSING and content(cell) is not value:
                cell.cell_contents = value

        self._bound(value, put_back, functools.partial(setattr, cell, "cell_contents"))

    def attribute(self, cls: type, name: str) -> None:
        """An attribute of a class."""
        value = vars(cls).get(name, MISSING)

        def put_back() -> None:
            if value is not MISSING and vars(cls).get(name, MISSING) is not value:
                setattr(cls, name, value)

        self._bound(value, put_back, functools.partial(setattr, cls, name))

    def _bound(self, value: Any, put_back: Undo, put: Callable[[Any], None]) -> None:
        if not isinstance(value, CODE):
            self._undo(put_back)
            if (instead := stand_in(value)) is not None:
                put(instead)
            else:
                self.contents(value)

    def contents(self, value: Any, depth: int = 0) -> None:
        """A container, a small tensor or array, a generator of random numbers, an object with attributes of the
        script's, or a module that the audited ones only use."""
        if value is None or isinstance(value, FIXED) or id(value) in self._seen or depth > DEEPEST or self._room < 0:
            return
        self._seen.add(id(value))
        kind, inner = type(value), []
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, torch.nn.Module):
            inner = self._module(value)
        elif kind.__name__ in ("ndarray", "memmap"):
            self._array(value)
        elif is_generator(value):
            self._undo(functools.partial(set_state, value, state_of(value)))
        elif not isinstance(value, CODE):
            if isinstance(value, dict):
                inner = self._mapping(value)
            elif isinstance(value, SEQUENCES):
                inner = self._sequence(value)
            if has_attributes(value):
                inner = inner + self._attributes(value)
            elif kind.__dictoffset__ and not isinstance(value, dict):
                self._files(vars(value))
        self._room -= len(inner)
        for item in inner:
            self.contents(item, depth + 1)

    def _mapping(self, value: dict) -> list:
        base = base_of(value)
        if base.__len__(value) > LONGEST:
            return []
        kept = list(base.items(value))

        def put_back() -> None:
            if base.__len__(value) != len(kept) or any(
                key is not name or now is not item for (key, now), (name, item) in zip(base.items(value), kept)
            ):
                base.clear(value)
                for name, item in kept:
                    base.__setitem__(value, name, item)

        self._undo(put_back)
        for name, item in kept:
            if (instead := stand_in(item)) is not None:
                base.__setitem__(value, name, instead)
        return [item for _, item in kept]

    def _sequence(self, value: Any) -> list:
        base = next(base for base in SEQUENCES if isinstance(value, base))
        if base.__len__(value) > LONGEST:
            if base is list:
                self._longer(value)
            return []
        kept = list(base.__iter__(value))

        def put_back() -> None:
            if base.__len__(value) == len(kept) and all(a is b for a, b in zip(base.__iter__(value), kept)):
                return
            if base is array.array:
                del value[:]
            else:
                base.clear(value)
            (base.update if base is set else base.extend)(value, kept)

        self._undo(put_back)
        if base is list and any(isinstance(item, io.IOBase) for item in kept):
            list.__setitem__(value, slice(None), [item if (new := stand_in(item)) is None else new for item in kept])
        return kept

    def _files(self, held: dict) -> None:
        """Those that an object of a library writes into."""
        for name, item in list(held.items()):
            if (instead := stand_in(item)) is not None:
                self._undo(functools.partial(held.__setitem__, name, item))
                held[name] = instead

    def defaults(self, function: types.FunctionType) -> None:
        """Those of a function's arguments."""
        kept = function.__defaults__
        if kept and (instead := stand_in(kept)) is not None:
            self._undo(functools.partial(setattr, function, "__defaults__", kept))
            function.__defaults__ = instead
        for default in (*(kept or ()), *(function.__kwdefaults__ or {}).values()):
            self.contents(default)

    def _attributes(self, value: Any) -> list:
        inner = self._mapping(vars(value)) if type(value).__dictoffset__ and vars(value) is not value else []
        return inner + [self._slot(value, slot) for slot in slots(type(value))]

    def _slot(self, value: Any, slot: types.MemberDescriptorType) -> Any:
        kept = getattr(value, slot.__name__, MISSING)

        def put_back() -> None:
            if kept is not MISSING and getattr(value, slot.__name__, MISSING) is not kept:
                slot.__set__(value, kept)

        self._undo(put_back)
        return kept

    def _module(self, value: torch.nn.Module) -> list:
        """A teacher in a list, a network that measures a loss: nothing trains them, yet they may keep statistics."""
        inner = []
        for part in value.modules():
            if part is value or id(part) not in self._seen:
                self._seen.add(id(part))
                self._mapping(vars(part))
                if isinstance(part._buffers, dict):  # a scripted module's is none and cannot be emptied
                    self._mapping(part._buffers)
                inner += [item for name, item in vars(part).items() if name not in REGISTRIES]
                for buffer in part._buffers.values():
                    # BatchNorm's statistics move without a change of their version.
                    self._tensor(buffer, versioned=False)
        return inner

    def _longer(self, value: list) -> None:
        length = len(value)

        def put_back() -> None:
            del value[length:]

        self._undo(put_back)

    def _tensor(self, value: torch.Tensor | None, versioned: bool = True) -> None:
        plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
        if not plain or value.is_inference() or value.nbytes > LARGEST:
            return
        version, kept = value._version, value.clone()

        def put_back() -> None:
            if not versioned or value._version != version:
                value.data.copy_(kept)

        self._undo(put_back)

    def _array(self, value: Any) -> None:
        if value.nbytes > LARGEST or not value.flags.writeable:
            return
        kept = value.copy()

        def put_back() -> None:
            value[...] = kept

        self._undo(put_back)
