"""Reads the structure in a pickle without running anything from it: every class and function becomes an inert stand-in.

Only the shape of the data is wanted: which tensor lies where. Nothing that the pickle names is imported or called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_DTYPES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip


@dataclass(frozen=True)
class StorageRef:
    """A storage of the file: the key of its record and the dtype of its elements ("" for untyped ones)."""

    key: str
    dtype: str


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the file: `offset`, `shape` and `strides` in elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Opaque:
    """A tensor of a kind that is not taken apart here (sparse, quantised, of another class)."""

    kind: str


class Mapping(dict):
    """A dict that swallows attributes."""

    def __setstate__(self, state: Any) -> None:
        """Nothing: an OrderedDict's `_metadata` holds no tensors."""


@dataclass
class Stand:
    """Stands for an instance of a class that is not looked up: how it was made and what it was given."""

    kind: str
    args: tuple = ()
    entries: dict = field(default_factory=dict)
    items: list = field(default_factory=list)
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        try:
            self.entries[key] = value
        except TypeError:
            self.entries[repr(key)] = value

    def append(self, value: Any) -> None:
        """List items."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """List items."""
        self.items.extend(values)

    def add(self, value: Any) -> None:
        """Set items."""
        self.items.append(value)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _stand(kind: str):
    """A class whose instances are `Stand`s of this kind, whatever it is called with."""

    class Made(Stand):
        def __new__(cls, *args: Any, **kwargs: Any):
            made = object.__new__(cls)
            Stand.__init__(made, kind, args)
            return made

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

    Made.__name__ = kind
    return Made


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    if not isinstance(storage, StorageRef):
        return Opaque("tensor")
    dtype = storage.dtype
    if len(rest) >= 3 and not dtype:
        dtype = str(getattr(rest[2], "kind", rest[2])).rpartition(".")[2]
    return TensorRef(storage, dtype, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _first(data: Any, *rest: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, args: Any, state: Any = None) -> Any:
    return function(*args) if function in (_tensor, _first) else Opaque("tensor subclass")


_KNOWN: dict[tuple[str, str], Callable] = {
    ("torch._utils", "_rebuild_tensor"): _tensor, ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor, ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first, ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("collections", "OrderedDict"): Mapping, ("builtins", "dict"): Mapping, ("builtins", "list"): list,
    ("builtins", "tuple"): tuple, ("builtins", "set"): set, ("builtins", "frozenset"): frozenset,
    ("torch", "Size"): tuple,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if name.startswith("_rebuild_"):
            return lambda *args: Opaque(name)
        return _stand(f"{module}.{name}")

    def persistent_load(self, reference: Any) -> Any:
        kind, storage_class, key, *_ = reference
        if kind != "storage":
            raise pickle.UnpicklingError("an unknown reference")
        name = storage_class if isinstance(storage_class, str) else storage_class.__name__
        return StorageRef(str(key), _DTYPES.get(name.rpartition(".")[2], ""))


def read(data: bytes) -> Any:
    """The structure of a pickle; raises pickle.UnpicklingError when it cannot be read."""
    try:
        return _Unpickler(io.BytesIO(data), encoding="utf-8").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
