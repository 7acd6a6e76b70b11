"""What is in a small tensor or array of the script: a table of scales, the weights of classes."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from sdcrun.shim.microbatch import to_bytes

LARGEST = 1 << 16  # bytes


class Filling(NamedTuple):
    """Elements in their order, `data`, with dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def filling_of(value: Any) -> Filling | None:
    """What is in `value` now; None if it is no plain tensor or array of numbers, or not a small one."""
    if type(value) is torch.Tensor:
        plain = value.layout is torch.strided and value.is_contiguous() and not value.is_quantized
        plain = plain and not (value.requires_grad or value.is_inference() or value.device.type == "meta")
        if plain and value.nbytes <= LARGEST:
            return Filling(str(value.dtype), tuple(value.shape), to_bytes(value.resolve_conj().resolve_neg()))
    elif type(value).__name__ == "ndarray" and type(value) is getattr(sys.modules.get("numpy"), "ndarray", None):
        if value.dtype.kind in "biufc" and value.flags.writeable and value.nbytes <= LARGEST:
            return Filling(str(value.dtype), value.shape, value.tobytes())
    return None


def fill(value: Any, filling: Filling) -> None:
    """Puts it into a tensor or array of the same kind; another one is left alone."""
    if isinstance(value, torch.Tensor):
        if (str(value.dtype), tuple(value.shape)) == filling[:2] and filling.data:
            # No change that a version shows: it is put back.
            value.data.copy_(torch.frombuffer(bytearray(filling.data), dtype=value.dtype).view(filling.shape))
    elif (str(value.dtype), value.shape) == filling[:2]:
        value[...] = sys.modules["numpy"].frombuffer(filling.data, dtype=value.dtype).reshape(filling.shape)
