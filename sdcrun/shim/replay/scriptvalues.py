"""Values of the script that a forward reads from outside its module: a temperature, a step, a table of scales.

Every rank has its own, and they are the same by the time of a replay, with two exceptions. What the script has moved
between the forward and the update is put in for the replay. And where a forward depends on the rank, a replay on
another one starts from the owner's variables (see `Rounds`). As a rule it does not: they name devices and files, too.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from sdcrun.shim.replay.filling import Filling, fill, filling_of
from sdcrun.shim.replay.generators import is_generator, set_state, state_of
from sdcrun.shim.replay.irrevocable import Irrevocable
from sdcrun.shim.replay.modulestate import is_device
from sdcrun.shim.replay.scriptobjects import (
    DEEPEST,
    LARGEST,
    LONGEST,
    MISSING,
    base_of,
    content,
    has_attributes,
    slots,
)
from sdcrun.shim.replay.scriptstate import Reach
from sdcrun.shim.replay.tree import Tree

LONGEST_LIST = 100  # longer ones are histories
LONGEST_TEXT = 1000
MOST = 2000
_CLOSED = (torch.nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType)
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


@dataclass
class Draws:
    """The state of a generator of random numbers, which belongs into the same generator of another rank."""

    state: bytes


Values = dict[tuple, Any]


@dataclass
class _Variable:
    """One place that holds a value: `name` in `holder`, a dict, a list, a class, a cell or an object; or the state of
    `holder`, a generator of random numbers, or what is in `holder`, a tensor or an array."""

    address: tuple
    value: Any
    holder: Any
    name: Any

    def put(self, value: Any) -> None:
        """Binds it to another value; MISSING: to none."""
        holder, name = self.holder, self.name
        if isinstance(value, Draws):
            set_state(holder, value.state)
            return
        if isinstance(value, Filling):
            fill(holder, value)
            return
        if isinstance(holder, types.CellType):
            holder.cell_contents = value
        elif isinstance(holder, dict):
            base = base_of(holder)
            base.pop(holder, name, None) if value is MISSING else base.__setitem__(holder, name, value)
        elif isinstance(holder, (list, collections.deque)):
            if name < len(holder):
                holder[name] = value
        elif isinstance(holder, type):
            setattr(holder, name, value)
        else:
            object.__setattr__(holder, name, value)


def _variables(reach: Reach, tree: Tree) -> Iterator[_Variable]:
    """The variables within a `reach`, and those in objects that the modules of `tree` keep (a configuration); then what
    is in their containers and objects, each of which is looked into once."""
    found = [_Variable(address, around.get(address[-1], MISSING), around, address[-1])
             for address, around in reach.globals.items()]  # fmt: skip
    found += [_Variable(address, content(cell), cell, None) for address, cell in reach.free.items()]
    found += [_Variable(address, vars(cls).get(address[2], MISSING), cls, address[2])
              for address, cls in reach.classes.items() if cls is not None]  # fmt: skip
    yield from found
    for place, name, value in tree.attributes:
        if type(value) not in _SCALARS and (has_attributes(value) or is_generator(value)):
            found.append(_Variable(("", place, name), value, None, None))
    room, seen, depth = MOST, set(), 0
    while found and depth < DEEPEST:
        inner = [variable for outer in found for variable in _inside(outer, seen)][: max(room, 0)]
        depth += 1
        room -= len(inner)
        yield from inner
        found = inner


def _inside(outer: _Variable, seen: set[int]) -> list[_Variable]:
    value, inner = outer.value, []
    if type(value) in _SCALARS or id(value) in seen or isinstance(value, (Draws, Filling)):
        return inner
    seen.add(id(value))
    if (filling := filling_of(value)) is not None:
        return [_Variable((outer.address, "filling"), filling, value, None)]
    if isinstance(value, _CLOSED):
        return inner
    if is_generator(value):
        return [_Variable((outer.address, "state"), Draws(state_of(value)), value, None)]
    if isinstance(value, dict) and len(value) <= LONGEST:
        items = list(base_of(value).items(value))
        inner += [_Variable((outer.address, k), v, value, k) for k, v in items if type(k) in _SCALARS]
    elif isinstance(value, (list, collections.deque)) and len(value) <= LONGEST_LIST:
        inner += [_Variable((outer.address, i), item, value, i) for i, item in enumerate(value)]
    if has_attributes(value):
        held = vars(value) if type(value).__dictoffset__ and vars(value) is not value else {}
        inner += [_Variable((outer.address, "", name), item, held, name) for name, item in list(held.items())]
        for slot in slots(type(value)):
            name = slot.__name__
            inner.append(_Variable((outer.address, "", name), getattr(value, name, MISSING), value, name))
    return inner


def _travels(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= LONGEST_LIST and all(map(_travels, value))
    if type(value) in (str, bytes):
        return len(value) <= LONGEST_TEXT and not is_device(value)
    return type(value) in _SCALARS or type(value) in (Draws, Filling)


def _large(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes > LARGEST


def _differ(one: Any, other: Any) -> bool:
    return type(one) is not type(other) or one != other


class ScriptValues:
    """The values that a forward of the modules in `tree` finds within its `reach`, in `then`, by address."""

    def __init__(self, reach: Reach, tree: Tree) -> None:
        self._reach, self._module = reach, tree.module
        self._irrevocable = Irrevocable()
        self.then: Values = {}
        for variable in _variables(reach, tree):
            if _travels(variable.value):
                self.then[variable.address] = variable.value
            else:
                self._watch(reach, variable.address[2 if variable.address[-1] == "class" else -1], variable.value)
        for _, name, value in tree.attributes:
            if type(value) not in _SCALARS and not isinstance(value, torch.Tensor):
                self._watch(reach, name, value)
                # A teacher that shall be no part of the module is often kept in a list.
                items = value.values() if isinstance(value, dict) else value
                for item in items if isinstance(value, (dict, list, tuple)) and len(value) <= LONGEST_LIST else ():
                    if isinstance(item, torch.nn.Module):
                        self._watch(reach, name, item)

    def _watch(self, reach: Reach, name: Any, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            self._irrevocable.tensors(str(name), value.parameters())
        elif isinstance(value, torch.Tensor):
            self._irrevocable.tensors(str(name), [value] if _large(value) else [])
        elif name in reach.used or not isinstance(name, str):
            self._irrevocable.thing(str(name), value)

    def moved(self) -> Values:
        """Where the script has put another value since: the value from then."""
        now = {v.address: v.value for v in _variables(self._reach, Tree(self._module))}
        return {
            address: value for address, value in self.then.items()
            if address in now and not is_device(now[address]) and _differ(now[address], value)
        }  # fmt: skip

    def changed(self) -> str | None:
        """The name of something that has changed since and would not be put back after a replay."""
        return self._irrevocable.changed()


def place(values: Values, reach: Reach, tree: Tree, undo: ExitStack) -> None:
    """Puts values where they belong in this rank, as far as it has such places; `undo` puts its own back."""
    changed = []

    def put_back() -> None:
        for variable in reversed(changed):
            variable.put(variable.value)

    undo.callback(put_back)
    for variable in _variables(reach, tree) if values else ():
        value = values.get(variable.address, MISSING)
        absent = variable.value is MISSING and not isinstance(variable.holder, dict)
        if not absent and value is not MISSING and _differ(variable.value, value) and not is_device(variable.value):
            changed.append(variable)
            variable.put(value)
