"""One micro-batch as it was before the forward: inputs, random states and autocast modes, to keep, ship and restore.

Bits depend on more than values: on CPU the address of an input mod 64 decides between vectorised and scalar edges, and
kernels are chosen by strides. A shipped tensor is therefore rebuilt with the same strides at the same alignment.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import pickle
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sdcrun.shim import numpystate

ALIGNMENT = 64
LARGEST_GAP = 1 << 20
_WORDS = struct.Struct("=625I")  # of Python's generator

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors inside `value`, depth first: dicts, lists, tuples, dataclasses and plain objects of any nesting."""
    found: list[torch.Tensor] = []
    _walk(value, found, set())
    return found


def _walk(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, _PLAIN) or id(value) in seen:
        return
    elif isinstance(value, dict):
        seen.add(id(value))
        for item in value.values():
            _walk(item, found, seen)
    elif isinstance(value, (list, tuple)):
        seen.add(id(value))
        for item in value:
            _walk(item, found, seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        seen.add(id(value))
        for field in dataclasses.fields(value):
            _walk(getattr(value, field.name, None), found, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, type)) and not callable(value):
        seen.add(id(value))
        for item in vars(value).values():
            _walk(item, found, seen)


@dataclasses.dataclass
class Packed:
    """A tensor's contents and its place in memory. `payload`: the elements without broadcast copies, or (`form`
    "saved", for layouts other than strided) what torch.save wrote. `span`: number of elements from first to last."""

    form: str
    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    span: int
    alignment: int
    requires_grad: bool
    payload: bytes


def freeze(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the values now, detached, which `pack` still packs with the original's strides and alignment."""
    copy = tensor.detach().clone()
    copy._sdcrun_place = _place(tensor)
    return copy


def _place(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Strides and address mod 64; () for a layout that has no strides."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return (), 0
    return tuple(tensor.stride()), tensor.data_ptr() % ALIGNMENT


def pack(tensor: torch.Tensor, requires_grad: bool) -> Packed:
    """`tensor` (or a `freeze` of it) as bytes. Raises for a tensor that cannot be copied to the host."""
    strides, alignment = getattr(tensor, "_sdcrun_place", None) or _place(tensor)
    values = tensor.detach()
    device = values.device.type
    if values.layout is not torch.strided or type(values) is not torch.Tensor:
        stream = io.BytesIO()
        torch.save(values.clone(), stream)
        return Packed(
            "saved", values.dtype, device, tuple(values.shape), (), 0, 0, requires_grad, stream.getvalue()
        )
    values = values.resolve_conj().resolve_neg()
    shape = tuple(values.shape)
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides)) if values.numel() else 0
    distinct = 1
    for axis, (size, step) in enumerate(zip(shape, strides)):
        if step == 0 and size > 1:
            values = values.narrow(axis, 0, 1)
        else:
            distinct *= size
    # Rows that overlap, or lie far apart, are rebuilt dense: nothing that was tried depends on it.
    if distinct > span or span > 4 * distinct + LARGEST_GAP:
        values, strides, span = tensor.detach(), tuple(_dense_strides(shape)), tensor.numel()
    return Packed(
        "plain", values.dtype, device, shape, strides, span, alignment, requires_grad, to_bytes(values)
    )


def _dense_strides(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in logical order."""
    host = tensor.detach().to("cpu").contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""


def unpack(packed: Packed, device: torch.device) -> torch.Tensor:
    """A fresh leaf tensor with the packed values, strides and alignment; on `device` if it was not on a CPU."""
    target = torch.device("cpu") if packed.device == "cpu" else device
    if packed.form == "saved":
        tensor = torch.load(io.BytesIO(packed.payload), map_location=target, weights_only=False)
    else:
        size = torch.empty((), dtype=packed.dtype).element_size()
        room = torch.empty(packed.span + ALIGNMENT // size + 1, dtype=packed.dtype, device=target)
        offset = ((packed.alignment - room.data_ptr()) % ALIGNMENT) // size
        tensor = torch.empty(0, dtype=packed.dtype, device=target)
        tensor.set_(room.untyped_storage(), offset, packed.shape, packed.strides)
        if packed.payload:
            narrow = tensor
            for axis, (length, step) in enumerate(zip(packed.shape, packed.strides)):
                if step == 0 and length > 1:
                    narrow = narrow.narrow(axis, 0, 1)
            values = torch.frombuffer(bytearray(packed.payload), dtype=packed.dtype)
            narrow.copy_(values.view(narrow.shape))
    return tensor.requires_grad_(packed.requires_grad)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, refer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(stream, protocol=5)
        self._refer = refer

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ("tensor", self._refer(value))
        if isinstance(value, torch.device):
            return ("device", value.type)
        if isinstance(value, torch.Generator):
            return ("generator", value.device.type, to_bytes(value.get_state()))
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, resolve: Callable[[Any], torch.Tensor], device: torch.device) -> None:
        super().__init__(stream)
        self._resolve, self._device = resolve, device

    def persistent_load(self, name: Any) -> Any:
        if name[0] == "tensor":
            return self._resolve(name[1])
        local = torch.device("cpu") if name[1] == "cpu" else self._device
        if name[0] == "device":
            return local
        generator = torch.Generator(local)
        generator.set_state(torch.frombuffer(bytearray(name[2]), dtype=torch.uint8))
        return generator


def dumps(value: Any, refer: Callable[[torch.Tensor], Any]) -> bytes:
    """`value` pickled, each tensor replaced by `refer(tensor)`. Raises what pickle raises."""
    stream = io.BytesIO()
    _Pickler(stream, refer).dump(value)
    return stream.getvalue()


def loads(data: bytes, resolve: Callable[[Any], torch.Tensor], device: torch.device) -> Any:
    """Inverse of `dumps`; devices other than the CPU become `device`."""
    return _Unpickler(io.BytesIO(data), resolve, device).load()


@dataclasses.dataclass
class Random:
    """States of the random generators: torch's on the CPU and on every CUDA device, Python's, NumPy's if imported.
    `current` is the CUDA device that was current, which becomes the current one of whoever restores. Without `python`
    and `numpy` (None) theirs are left alone."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    current: int
    python: tuple | None = None
    numpy: numpystate.State | None = None

    @classmethod
    def of_torch(cls) -> Random:
        """Those of torch, now; reading them disturbs nothing and waits for no device."""
        devices, current = [], 0
        if torch.cuda.is_initialized():
            devices = [generator.get_state() for generator in torch.cuda.default_generators]
            current = torch.cuda.current_device()
        return cls(torch.get_rng_state(), devices, current)

    @classmethod
    def now(cls, exact: bool = True) -> Random:
        """All of them, now. Not `exact`: see `numpystate.glance`."""
        found = cls.of_torch()
        found.python, found.numpy = random.getstate(), numpystate.exact() if exact else numpystate.glance()
        return found

    def shipped(self) -> Random:
        """Without the states of devices other than the current one."""
        kept = [self.cuda[self.current]] if self.cuda else []
        return dataclasses.replace(self, cuda=kept, current=0)

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: pickling a tensor costs ten times as much, and 625 numbers one by one four times.
        python = self.python
        if python is not None:
            version, words, normal = python
            python = version, _WORDS.pack(*words), normal
        return {**vars(self), "cpu": to_bytes(self.cpu), "python": python}

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values, cpu=torch.frombuffer(bytearray(values["cpu"]), dtype=torch.uint8))
        if self.python is not None:
            version, words, normal = self.python
            self.python = version, _WORDS.unpack(words), normal

    def restore(self, foreign: bool = False) -> None:
        """Puts the states back; `foreign`: they come from a `shipped` copy of another rank."""
        torch.set_rng_state(self.cpu)
        if self.cuda and torch.cuda.is_initialized():
            if foreign:
                torch.cuda.default_generators[torch.cuda.current_device()].set_state(self.cuda[0])
            else:
                for generator, state in zip(torch.cuda.default_generators, self.cuda):
                    generator.set_state(state)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None and "numpy.random" in sys.modules:
            numpystate.restore(self.numpy)


@dataclasses.dataclass
class Autocast:
    """Autocast per device type (enabled, dtype) and its cache switch."""

    modes: dict[str, tuple[bool, torch.dtype]]
    cache: bool

    @classmethod
    def now(cls) -> Autocast:
        kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        return cls(
            {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds},
            torch.is_autocast_cache_enabled(),
        )

    @classmethod
    def off(cls) -> Autocast:
        """No autocast: operations recorded below it carry their casts themselves."""
        now = cls.now()
        return cls({kind: (False, dtype) for kind, (_, dtype) in now.modes.items()}, now.cache)

    @property
    def on(self) -> bool:
        """Some device type casts."""
        return any(enabled for enabled, _ in self.modes.values())

    def _set(self) -> None:
        for kind, (enabled, dtype) in self.modes.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """These modes inside the block, those from before after it. Leaves the cache of casts alone."""
        before = Autocast.now()
        self._set()
        try:
            yield
        finally:
            before._set()
