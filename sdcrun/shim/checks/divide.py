"""Dividing a bucket by the number of ranks and looking for what is not finite in it: one pass over memory instead of
two, where the compiled library is there and gives torch's bits.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

import torch


def multiplied(buffer: torch.Tensor, factor: float) -> bool | None:
    """Does `buffer.mul_(factor)` and returns whether all elements are finite; None where nothing was done: another
    dtype or device than float32 on the CPU, gaps, or no library."""
    plain = buffer.dtype is torch.float32 and buffer.device.type == "cpu" and buffer.layout is torch.strided
    if not plain or not buffer.is_contiguous():
        return None
    scale = _scale()
    return None if scale is None else not scale(buffer.data_ptr(), buffer.numel(), factor)


@functools.cache
def _scale() -> Callable[[int, int, float], int] | None:
    """(address, number of elements, factor) -> whether there was one that is not finite. Decided once, by trying."""
    try:
        from sdcrun.shim.fingerprint.native import library

        scale = library.sdcrun_scale
        scale.restype, scale.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float]
        return scale if agrees(scale) else None
    except Exception:
        return None


def agrees(scale: Callable[[int, int, float], int]) -> bool:
    """Whether it gives the bits of torch's multiplication, for numbers of every size and at every alignment."""
    with torch.no_grad():
        patterns = torch.arange(-(1 << 31), 1 << 31, 2_000_003, dtype=torch.int64, device="cpu").to(torch.int32)
        every = patterns.view(torch.float32)
        numbers = every[every.isfinite()]
        for factor in (1 / 3, 1 / 7, 1.0, 1 / 16384):
            for start in range(4):
                ours, theirs = numbers[start:].clone(), numbers[start:].clone()
                judged = scale(ours.data_ptr(), ours.numel(), factor)
                if judged or not torch.equal(ours.view(torch.int32), theirs.mul_(factor).view(torch.int32)):
                    return False
                for bad in (math.nan, math.inf, -math.inf):
                    one = torch.full((9,), 1.0, device="cpu")
                    one[start] = bad
                    if not scale(one.data_ptr(), 9, factor) or one.isfinite().sum() != 8:
                        return False
    return True
