"""What the code of a forward can reach outside its module: globals, closures, class and function attributes.

People count steps and collect losses in variables of their script. A replay runs the same code once more, so what that
code names is noted before and put back afterwards. Looked at are the methods of the classes in the module's tree, its
hooks, and the functions and classes of the script that these use; libraries' own only within the same file.
"""

from __future__ import annotations

import argparse
import array
import collections
import dis
import functools
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sdcrun.shim.replay.generators import is_generator, set_state, state_of
from sdcrun.shim.replay.hooks import hooks_of
from sdcrun.shim.replay.tree import REGISTRIES, Tree

LONGEST = 10_000  # items of a container; of a longer list only the length is noted
MOST = 100_000  # items of all containers outside the modules together
LARGEST = 1 << 20  # bytes of a tensor or an array
DEEPEST = 4
KNOWN = 4

_FIXED = (int, float, complex, str, bytes, tuple, frozenset)
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, property, classmethod, staticmethod)
_SEQUENCES = (list, set, bytearray, collections.deque, array.array)
_BUILT_IN = frozenset({*_SEQUENCES, dict, collections.OrderedDict, collections.defaultdict, collections.Counter})
_BAGS = (types.SimpleNamespace, argparse.Namespace)
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sdcrun"}) - {"__main__"}
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
MISSING = object()

Undo = Callable[[], None]
# (module, name) of a global; (module, function, variable) of what a function has from around it; (module, class,
# name, "class") of an attribute of a class.
Address = tuple[str, ...]


def _root(name: Any) -> str:
    return str(name).partition(".")[0]


def _is_script(globals_: dict) -> bool:
    """The file is the script's own, no installed library's."""
    path = globals_.get("__file__") or ""
    installed = "site-packages" in path or "dist-packages" in path
    name = globals_.get("__name__")
    return name == "__main__" or (_root(name) not in _FOREIGN and not installed)


class Reach:
    """The places that `functions` and the methods of `classes` can reach: names in dicts of globals, cells, attributes
    of classes, functions. A name that no code stores to is one only while something changeable bears it.

    `globals`, `free`, `classes`: the places that do not hold code, by addresses that hold in all ranks.
    """

    def __init__(self, classes: Iterable[type], functions: Iterable[Any]) -> None:
        self.names: dict[tuple[int, str], dict] = {}
        self.cells: dict[int, types.CellType] = {}
        self.attributes: list[tuple[type, str]] = []
        self.globals: dict[Address, dict] = {}
        self.free: dict[Address, types.CellType] = {}
        self.classes: dict[Address, type | None] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self._classes: dict[int, type] = {}
        self._pending: list[types.FunctionType] = []
        for cls in classes:
            self._class(cls)
        for function in functions:
            self._function(function)
        while self._pending:
            self._look_into(self._pending.pop())

    def _class(self, cls: type) -> None:
        if id(cls) in self._classes or _root(cls.__module__) in _FOREIGN:
            return
        self._classes[id(cls)] = cls
        for name, value in vars(cls).items():
            if not name.startswith("__") and not isinstance(value, _CODE):
                self.attributes.append((cls, name))
                address = (cls.__module__, cls.__qualname__, name, "class")
                # Several classes made by one function have the same address, and none of them then.
                self.classes[address] = None if address in self.classes else cls
            for inner in (value, *(getattr(value, part, None) for part in ("__func__", "fget", "func"))):
                self._function(inner)

    def _function(self, value: Any) -> None:
        value = getattr(value, "__func__", value)
        if not isinstance(value, types.FunctionType) or id(value) in self.functions:
            return
        root = _root(value.__globals__.get("__name__"))
        # A decorator of a library's has the script's function in its closure.
        if root not in _FOREIGN or (value.__closure__ and root != "sdcrun"):
            self.functions[id(value)] = value
            self._pending.append(value)

    def _look_into(self, function: types.FunctionType) -> None:
        self._function(getattr(function, "__wrapped__", None))
        around = function.__globals__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self.cells[id(cell)] = cell
            self._free((str(around.get("__name__")), function.__qualname__, variable), cell)
            self._follow(content(cell), None)
        if _root(around.get("__name__")) in _FOREIGN:
            return
        named = vars(sys.modules.get(around.get("__name__"), types)) is around
        for code in _codes(function.__code__):
            stores = _STORE_GLOBAL in code.co_code[::2]
            for name in code.co_names:
                value = around.get(name, MISSING)
                if stores or not (value is MISSING or isinstance(value, (*_CODE, *_FIXED))):
                    self.names[id(around), name] = around
                if named and value is not MISSING and not isinstance(value, _CODE):
                    self.globals[around["__name__"], name] = around
                self._follow(value, around)

    def _free(self, address: Address, cell: types.CellType) -> None:
        """Several functions made by one have the same address, and none of them then."""
        known = self.free.setdefault(address, cell)
        if known is not cell:
            self.free[address] = types.CellType()

    def _follow(self, value: Any, around: dict | None) -> None:
        """Functions and classes of the same file (`around`: its globals) and of the script, also those of objects."""
        if isinstance(value, types.FunctionType):
            if value.__globals__ is around or _is_script(value.__globals__):
                self._function(value)
        elif isinstance(value, type):
            home = vars(sys.modules.get(value.__module__, types))
            if home is around or _is_script(home):
                self._class(value)
        elif _is_scripts(type(value)):
            self._class(type(value))

    def note(self, notes: Notes) -> None:
        """Adds all of it, as it is now."""
        for (_, name), around in self.names.items():
            notes.variable(around.get(name, MISSING), around, name)
        for cell in self.cells.values():
            notes.cell(cell)
        for cls, name in self.attributes:
            notes.attribute(cls, name)
        for function in self.functions.values():
            notes.contents(vars(function))
            for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                notes.contents(default)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def content(cell: types.CellType) -> Any:
    """What a cell holds, or MISSING."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


class Notes:
    """Notes values and collects in `undo` what puts them back; each container once, at most about `room` items.
    `modules` are put back by somebody else."""

    def __init__(self, room: float, modules: Iterable[torch.nn.Module] = ()) -> None:
        self.undo: list[Undo] = []
        self._seen: set[int] = {id(module) for module in modules}
        self._room = room

    def variable(self, value: Any, around: dict, name: str) -> None:
        """A global, which may be bound anew, deleted or made."""

        def put_back() -> None:
            if value is MISSING:
                around.pop(name, None)
            elif around.get(name, MISSING) is not value:
                around[name] = value

        self._bound(value, put_back)

    def cell(self, cell: types.CellType) -> None:
        """A variable of an enclosing function."""
        value = content(cell)

        def put_back() -> None:
            if value is not MISSING and content(cell) is not value:
                cell.cell_contents = value

        self._bound(value, put_back)

    def attribute(self, cls: type, name: str) -> None:
        """An attribute of a class."""
        value = vars(cls).get(name, MISSING)

        def put_back() -> None:
            if value is not MISSING and vars(cls).get(name, MISSING) is not value:
                setattr(cls, name, value)

        self._bound(value, put_back)

    def _bound(self, value: Any, put_back: Undo) -> None:
        if not isinstance(value, _CODE):
            self.undo.append(put_back)
            self.contents(value)

    def contents(self, value: Any, depth: int = 0) -> None:
        """A container, a small tensor or array, a generator of random numbers, an object with attributes of the
        script's, or a module that the audited ones only use."""
        if value is None or isinstance(value, _FIXED) or id(value) in self._seen or depth > DEEPEST or self._room < 0:
            return
        self._seen.add(id(value))
        kind, inner = type(value), []
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, torch.nn.Module):
            inner = self._module(value)
        elif kind.__name__ == "ndarray":
            self._array(value)
        elif is_generator(value):
            self.undo.append(functools.partial(set_state, value, state_of(value)))
        elif not isinstance(value, _CODE):
            if isinstance(value, dict):
                inner = self._mapping(value)
            elif isinstance(value, _SEQUENCES):
                inner = self._sequence(value)
            if has_attributes(value):
                inner = inner + self._attributes(value)
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
                key is not name or item is not content for (key, item), (name, content) in zip(base.items(value), kept)
            ):
                base.clear(value)
                for name, content in kept:
                    base.__setitem__(value, name, content)

        self.undo.append(put_back)
        return [content for _, content in kept]

    def _sequence(self, value: Any) -> list:
        base = next(base for base in _SEQUENCES if isinstance(value, base))
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

        self.undo.append(put_back)
        return kept

    def _attributes(self, value: Any) -> list:
        inner = self._mapping(vars(value)) if type(value).__dictoffset__ and vars(value) is not value else []
        return inner + [self._slot(value, slot) for slot in slots(type(value))]

    def _slot(self, value: Any, slot: types.MemberDescriptorType) -> Any:
        kept = getattr(value, slot.__name__, MISSING)

        def put_back() -> None:
            if kept is not MISSING and getattr(value, slot.__name__, MISSING) is not kept:
                slot.__set__(value, kept)

        self.undo.append(put_back)
        return kept

    def _module(self, value: torch.nn.Module) -> list:
        """A teacher in a list, a network that measures a loss: nothing trains them, yet they may keep statistics."""
        inner = []
        for part in value.modules():
            if part is value or id(part) not in self._seen:
                self._seen.add(id(part))
                self._mapping(vars(part))
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

        self.undo.append(put_back)

    def _tensor(self, value: torch.Tensor | None, versioned: bool = True) -> None:
        plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
        if not plain or value.is_inference() or value.nbytes > LARGEST:
            return
        version, kept = value._version, value.clone()

        def put_back() -> None:
            if not versioned or value._version != version:
                value.data.copy_(kept)

        self.undo.append(put_back)

    def _array(self, value: Any) -> None:
        if value.nbytes > LARGEST or not value.flags.writeable:
            return
        kept = value.copy()

        def put_back() -> None:
            value[...] = kept

        self.undo.append(put_back)


def _is_scripts(cls: type) -> bool:
    home = sys.modules.get(cls.__module__)
    return home is not None and _is_script(vars(home))


def base_of(value: dict) -> type:
    """The type whose methods change a dict and nothing else: a subclass may have others in their place."""
    return collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict


def has_attributes(value: Any) -> bool:
    """The attributes of this object are variables of the script: it has made its class, or it is a bag of names."""
    kind = type(value)
    return kind not in _BUILT_IN and (isinstance(value, (*_BAGS, dict)) or _is_scripts(kind))


def slots(cls: type) -> list[types.MemberDescriptorType]:
    """The attributes of the script's that live outside an object's `__dict__`."""
    found = [slot for base in cls.__mro__ if _is_scripts(base) for slot in vars(base).values()]
    return [slot for slot in found if isinstance(slot, types.MemberDescriptorType)]


# What was looked for last, with what it was looked for in: a forward's code does not change.
_known: list[tuple[list, Reach]] = []


def reach(trees: list[Tree], forwards: list) -> Reach:
    """What a run of the modules in `trees` can reach, and `forwards` that stand in for theirs (None: none does)."""
    parts = _parts(trees)
    kept = [value for tree in trees for _, _, value in tree.attributes if type(value) not in _FIXED]
    kinds = dict.fromkeys(map(type, (*parts, *filter(has_attributes, kept))))
    sources = list({cls: None for kind in kinds for cls in kind.__mro__})
    functions = [*forwards, *(function for part in parts for function in (vars(part).get("forward"), *hooks_of(part)))]
    functions = [getattr(function, "__func__", function) for function in functions if function is not None]
    wanted = [*sources, *functions]
    for looked_in, found in _known:
        if len(looked_in) == len(wanted) and all(a is b for a, b in zip(looked_in, wanted)):
            return found
    _known.insert(0, (wanted, Reach(sources, functions)))
    del _known[KNOWN:]
    return _known[0][1]


def _parts(trees: list[Tree]) -> list[torch.nn.Module]:
    return list({id(part): part for tree in trees for _, part in tree.parts}.values())


@contextmanager
def preserved(trees: list[Tree], reached: Reach) -> Iterator[None]:
    """Inside the block the modules in `trees` may run, which reach `reached`; behind it the script's variables are as
    they were."""
    parts = _parts(trees)
    outside, inside = Notes(MOST, parts), Notes(math.inf, parts)
    reached.note(outside)
    # A replay starts from the owner's attributes: all that it may set is put back.
    for tree in trees:
        for _, _, value in tree.attributes:
            inside.contents(value)
    with ExitStack() as stack:
        for put_back in (*outside.undo, *inside.undo):
            stack.callback(put_back)
        yield
