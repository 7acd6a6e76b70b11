"""FP1 the slow way, in numpy, written from the definition: what the fast implementations are tested against.

numpy is needed here alone and imported when called; nothing in a training run does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np


def canonical_bytes(tensor: Tensor) -> bytes:
    """The bytes that stand for a strided tensor.

    Dimensions of stride 0 count once; the rest is read by falling strides if that passes over memory without gap or
    overlap, in logical order otherwise.
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    for dim in range(tensor.dim()):
        if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim) if tensor.shape[dim] > 1 else 0)
    by_memory = tensor.permute(order)
    if tensor.numel() and by_memory.is_contiguous():
        tensor = by_memory
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def words(data: bytes) -> np.ndarray:
    """Bytes as int32 words, little-endian, zero tail."""
    import numpy as np

    return np.frombuffer(data + bytes(-len(data) % 4), dtype="<i4")


def weights() -> np.ndarray:
    """T, as int64 [65536]."""
    import numpy as np

    h = np.arange(65536, dtype=np.uint64) + np.uint64(131073)
    mask = np.uint64(0xFFFFFFFF)
    h ^= h >> np.uint64(16)
    h = h * np.uint64(0x85EBCA6B) & mask
    h ^= h >> np.uint64(13)
    h = h * np.uint64(0xC2B2AE35) & mask
    h ^= h >> np.uint64(16)
    return (h >> np.uint64(1)).astype(np.int64)


def fingerprint_of_bytes(data: bytes) -> tuple[int, int]:
    """The fingerprint of bytes, as two signed 64-bit integers; sums as Python's unbounded integers, reduced at the
    end."""
    import numpy as np

    modulus, table = 1 << 64, weights()
    all_words = words(data)
    first = second = 0
    for r in range(0, -(-len(all_words) // 65536)):
        w = all_words[r * 65536 : (r + 1) * 65536].astype(np.int64)
        # Each product is below 2^62; its halves are summed apart so that no sum of 65,536 of them can overflow.
        product = w * table[: len(w)]
        s0 = int(w.sum())
        s1 = (int((product >> 32).sum()) << 32) + int((product & 0xFFFFFFFF).sum())
        first += s0
        second += _mix64(s1 % modulus ^ _mix64((s0 + (r + 1) * 0x9E3779B97F4A7C15) % modulus))
    return _signed(first % modulus), _signed(second % modulus)


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """The fingerprint of one strided tensor, as two signed 64-bit integers."""
    return fingerprint_of_bytes(canonical_bytes(tensor))


def _mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    z = (z ^ z >> 27) * 0x94D049BB133111EB % (1 << 64)
    return z ^ z >> 31


def _signed(z: int) -> int:
    return z - (1 << 64) if z >= 1 << 63 else z
