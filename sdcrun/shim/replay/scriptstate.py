"""What the code of a forward can reach outside its module: globals, closures, class and function attributes.

People count steps and collect losses in variables of their script. A replay runs the same code once more, so what that
code names is noted before and put back afterwards. Looked at are the methods of the classes in the module's tree, its
hooks, and the functions and classes of the script that these use; libraries' own only within the same file.
"""

from __future__ import annotations

import dis
import functools
import math
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sdcrun.shim.replay.hooks import hooks_of
from sdcrun.shim.replay.notes import Notes
from sdcrun.shim.replay.scriptobjects import (
    CODE,
    FIXED,
    FOREIGN,
    MISSING,
    content,
    has_attributes,
    is_script,
    is_scripts,
    root_of,
)
from sdcrun.shim.replay.tree import Tree

MOST = 100_000  # items of all containers outside the modules together
KNOWN = 4

_CACHED = type(functools.cache(len))
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]

# (module, name) of a global; (module, function, variable) of what a function has from around it; (module, class,
# name, "class") of an attribute of a class.
Address = tuple[str, ...]


class Reach:
    """The places that `functions` and the methods of `classes` can reach: names in dicts of globals, cells, attributes
    of classes, functions. A name that no code stores to is one only while something changeable bears it.

    `globals`, `free`, `classes`: the places that do not hold code, by addresses that hold in all ranks; `used`: all
    names of variables and attributes in the code.
    """

    def __init__(self, classes: Iterable[type], functions: Iterable[Any]) -> None:
        self.names: dict[tuple[int, str], dict] = {}
        self.cells: dict[int, types.CellType] = {}
        self.attributes: list[tuple[type, str]] = []
        self.globals: dict[Address, dict] = {}
        self.free: dict[Address, types.CellType] = {}
        self.classes: dict[Address, type | None] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.used: set[str] = set()
        self._classes: dict[int, type] = {}
        self._pending: list[types.FunctionType] = []
        for cls in classes:
            self._class(cls)
        for function in functions:
            self._function(function)
        while self._pending:
            self._look_into(self._pending.pop())

    def _class(self, cls: type) -> None:
        if id(cls) in self._classes or root_of(cls.__module__) in FOREIGN:
            return
        self._classes[id(cls)] = cls
        for name, value in vars(cls).items():
            if not name.startswith("__") and not isinstance(value, CODE):
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
        root = root_of(value.__globals__.get("__name__"))
        # A decorator of a library's has the script's function in its closure.
        if root not in FOREIGN or (value.__closure__ and root != "sdcrun"):
            self.functions[id(value)] = value
            self._pending.append(value)

    def _look_into(self, function: types.FunctionType) -> None:
        self._function(getattr(function, "__wrapped__", None))
        around = function.__globals__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self.cells[id(cell)] = cell
            self._free((str(around.get("__name__")), function.__qualname__, variable), cell)
            self._follow(content(cell), None)
        if root_of(around.get("__name__")) in FOREIGN:
            return
        named = vars(sys.modules.get(around.get("__name__"), types)) is around
        for code in _codes(function.__code__):
            self.used.update(code.co_names, code.co_freevars)
            stores = _STORE_GLOBAL in code.co_code[::2]
            for name in code.co_names:
                value = around.get(name, MISSING)
                # A tuple may hold files.
                changes = type(value) is tuple or not (value is MISSING or isinstance(value, (*CODE, *FIXED)))
                if stores or changes:
                    self.names[id(around), name] = around
                if named and value is not MISSING and not isinstance(value, CODE):
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
            if value.__globals__ is around or is_script(value.__globals__):
                self._function(value)
        elif isinstance(value, type):
            home = vars(sys.modules.get(value.__module__, types))
            if home is around or is_script(home):
                self._class(value)
        elif is_scripts(type(value)):
            self._class(type(value))

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """Inside the block functions that remember what they have returned (this process's rank) compute it again."""
        cached = [
            (around, name, around[name]) for (_, name), around in self.names.items()
            if isinstance(around.get(name), _CACHED)
        ]  # fmt: skip
        for around, name, function in cached:
            around[name] = function.__wrapped__
        try:
            yield
        finally:
            for around, name, function in cached:
                around[name] = function

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
            notes.defaults(function)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


# What was looked for last, with what it was looked for in: a forward's code does not change.
_known: list[tuple[list, Reach]] = []


def reach(trees: list[Tree], forwards: list) -> Reach:
    """What a run of the modules in `trees` can reach, and `forwards` that stand in for theirs (None: none does)."""
    parts = _parts(trees)
    kept = [value for tree in trees for _, _, value in tree.attributes if type(value) not in FIXED]
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
    with ExitStack() as stack:
        outside, inside = Notes(MOST, stack.callback, parts), Notes(math.inf, stack.callback, parts)
        reached.note(outside)
        # A replay starts from the owner's attributes: all that it may set is put back.
        for tree in trees:
            for _, _, value in tree.attributes:
                inside.contents(value)
        yield
