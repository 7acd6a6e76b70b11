"""Which objects hold variables of the script, and where: dicts, cells, attributes, slots."""

from __future__ import annotations

import argparse
import array
import collections
import sys
import types
from typing import Any

LONGEST = 10_000  # items of a container; of a longer list only the length is noted
LARGEST = 1 << 20  # bytes of a tensor or an array
DEEPEST = 4

FIXED = (int, float, complex, str, bytes, tuple, frozenset)
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, property, classmethod, staticmethod)
SEQUENCES = (list, set, bytearray, collections.deque, array.array)
_BUILT_IN = frozenset({*SEQUENCES, dict, collections.OrderedDict, collections.defaultdict, collections.Counter})
_BAGS = (types.SimpleNamespace, argparse.Namespace)
FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sdcrun"}) - {"__main__"}
MISSING = object()


def root_of(name: Any) -> str:
    """The outermost package of a module's name."""
    return str(name).partition(".")[0]


def is_script(globals_: dict) -> bool:
    """The file is the script's own, no installed library's."""
    path = globals_.get("__file__") or ""
    installed = "site-packages" in path or "dist-packages" in path
    name = globals_.get("__name__")
    return name == "__main__" or (root_of(name) not in FOREIGN and not installed)


def is_scripts(cls: type) -> bool:
    """The class was made in a file of the script's own."""
    home = sys.modules.get(cls.__module__)
    return home is not None and is_script(vars(home))


def base_of(value: dict) -> type:
    """The type whose methods change a dict and nothing else: a subclass may have others in their place."""
    return collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict


def has_attributes(value: Any) -> bool:
    """The attributes of this object are variables of the script: it has made its class, or it is a bag of names."""
    kind = type(value)
    return kind not in _BUILT_IN and (isinstance(value, (*_BAGS, dict)) or is_scripts(kind))


def slots(cls: type) -> list[types.MemberDescriptorType]:
    """The attributes of the script's that live outside an object's `__dict__`."""
    found = [slot for base in cls.__mro__ if is_scripts(base) for slot in vars(base).values()]
    return [slot for slot in found if isinstance(slot, types.MemberDescriptorType)]


def content(cell: types.CellType) -> Any:
    """What a cell holds, or MISSING."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
