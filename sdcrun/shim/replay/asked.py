"""What a script asks of torch, operator by operator, in a replay with the owner's variables and in one without.

A forward that depends on the rank is no fault. One that flips bits on a rank is: somebody tries whether the guard sees
it, and means the device.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch as dispatch

from sdcrun.shim.fingerprint import fingerprints
from sdcrun.shim.microbatch import tensors_of
from sdcrun.shim.replay.tape import storage_of, written_by

_BITS = ("aten.view.dtype", "aten.bitwise_", "aten.__xor__", "aten.__ixor__", "aten.__and__", "aten.__or__")


class Asked(dispatch.TorchDispatchMode):
    """`bits`: operators that look at the bits of numbers, with digests of what they were given; `changed`: how often a
    value was another one when an operator took it than when the last one left it."""

    def __init__(self) -> None:
        super().__init__()
        self.bits: set[str] = set()
        self.changed = 0
        # By storage: what was left in the tensors that lie there.
        self._left: dict[Any, dict[tuple, str]] = {}
        # While one is known, no other storage gets its identity.
        self._known: dict[Any, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            self._taken(str(func), tensors_of((args, kwargs)))
        except Exception:
            # What cannot be looked at says nothing.
            self._left.clear()
        result = func(*args, **kwargs)
        try:
            for tensor in written_by(func, args, kwargs):
                self._left.pop(storage_of(tensor), None)
            for tensor in tensors_of((args, kwargs, result)):
                storage = storage_of(tensor)
                if storage not in self._known:
                    self._known[storage] = StorageWeakRef(tensor.untyped_storage())
                self._left.setdefault(storage, {})[_place(tensor)] = _value(tensor)
        except Exception:
            self._left.clear()
        return result

    def _taken(self, name: str, given: list[torch.Tensor]) -> None:
        values = list(map(_value, given))
        for tensor, value in zip(given, values):
            self.changed += self._left.get(storage_of(tensor), {}).get(_place(tensor), value) != value
        if name.startswith(_BITS) and any(tensor.dtype is not torch.bool for tensor in given):
            self.bits.add(hashlib.blake2b(repr((name, values)).encode(), digest_size=16).hexdigest())


def flips_bits(theirs: Asked, ours: Asked) -> bool:
    """Whether a replay with the owner's variables (`theirs`) looks at bits, or changes values behind torch's back,
    where one with ours does not."""
    return bool(theirs.bits - ours.bits) or theirs.changed > ours.changed


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _value(tensor: torch.Tensor) -> str:
    first, second = fingerprints([tensor])[0].tolist()
    return f"{first:x}.{second:x}"
