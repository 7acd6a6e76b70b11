"""What is recorded beside a fingerprint, one digest of a whole table, and where two tensors differ."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from sdcrun.shim.fingerprint.layout import parts
from sdcrun.shim.fingerprint.quiet import quiet

_BLOCK_BYTES = 1 << 22


def metadata(tensor: Tensor) -> tuple:
    """(dtype, shape, strides, nbytes) as (str, tuple, tuple, int): what a fingerprint does not see.

    Strides of dimensions of size 1 mean nothing and are given as 0. Sparse and wrapper tensors give
    (kind, shape, metadata of each part, nbytes); quantised ones have their scheme and parameters in the dtype text.
    """
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        with torch._C.DisableTorchFunction():
            if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
                return _strided(tensor)
    with quiet():
        inner = parts(tensor)
        if len(inner) == 1 and inner[0].layout is torch.strided:
            return _strided(inner[0])
        each = tuple(_strided(part) for part in inner)
        kind = str(tensor.layout) if type(tensor) is Tensor else type(tensor).__name__
        return kind, () if tensor.is_nested else tuple(tensor.shape), each, sum(meta[3] for meta in each)


def _strided(tensor: Tensor) -> tuple:
    dtype = str(tensor.dtype)
    if tensor.is_quantized:
        dtype += f" {_quantisation(tensor)}"
    shape = tuple(tensor.shape)
    strides = tensor.stride()
    if 1 in shape:
        strides = tuple(stride if size != 1 else 0 for size, stride in zip(shape, strides))
    return dtype, shape, strides, tensor.numel() * tensor.element_size()


def _quantisation(tensor: Tensor) -> str:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"scale {tensor.q_scale()!r} zero {tensor.q_zero_point()}"
    scales, zeros = tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()
    return f"axis {tensor.q_per_channel_axis()} scales {scales!r} zeros {zeros!r}"


def digest(rows: Tensor, metas: Sequence[tuple] | bytes = ()) -> tuple[int, int]:
    """One 128-bit digest (two signed 64-bit integers) of a table: rows, int64 [n, 2] on the CPU, and their metadata.

    BLAKE2b over the bytes: it depends on the order of the rows and on nothing but its arguments, so it is the same in
    every process and on every machine. `metas` may be given encoded (`encode_metas`) when they do not change.
    """
    with quiet():
        values = rows.reshape(-1).tolist()
    h = hashlib.blake2b(struct.pack(f"<q{len(values)}q", len(values), *values), digest_size=16)
    h.update(metas if isinstance(metas, bytes) else encode_metas(metas))
    return struct.unpack("<2q", h.digest())


def encode_metas(metas: Sequence[tuple]) -> bytes:
    """The metadata of the tensors of a table as bytes for `digest`."""
    return repr([tuple(meta) for meta in metas]).encode()


@dataclass(frozen=True)
class Difference:
    """How an observed tensor differs from the expected one, both read in logical (C) order.

    `words` 32-bit words differ (0: the tensors are equal, and all else is empty). `index` is the flat index of the
    first element that differs, `*_word` that element's first differing 32-bit word as 8 hex digits, `bits` the
    flipped bits in it (0 = lowest); `element_bits` the flipped bits counted within the element; `*_value` the element
    (bool, int, float, complex).
    """

    words: int
    index: int | None = None
    expected_word: str = ""
    observed_word: str = ""
    bits: tuple[int, ...] = ()
    element_bits: tuple[int, ...] = ()
    expected_value: bool | int | float | complex | None = None
    observed_value: bool | int | float | complex | None = None

    def as_dict(self) -> dict:
        """The same, of JSON values only: what JSON has no number for (nan, inf, complex) becomes its text."""
        data = asdict(self)
        data["bits"], data["element_bits"] = list(self.bits), list(self.element_bits)
        for name in ("expected_value", "observed_value"):
            value = data[name]
            if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
                data[name] = str(value)
        return data


def differing_words(expected: Tensor, observed: Tensor) -> Difference:
    """Compare two tensors of one dtype and shape bit by bit (so NaNs can be equal, and +0 differs from -0).

    They may lie on different devices and have different strides; both are copied to the CPU. ValueError if dtype or
    shape differ.
    """
    with quiet():
        a, b = _flat(expected), _flat(observed)
        if expected.dtype != observed.dtype or expected.shape != observed.shape or a.numel() != b.numel():
            raise ValueError(
                f"cannot compare {expected.dtype} {tuple(expected.shape)} with {observed.dtype} {tuple(observed.shape)}"
            )
        if a.dtype != b.dtype:
            raise ValueError(f"cannot compare parts of {a.dtype} with parts of {b.dtype}")
        x, y = a.view(torch.uint8), b.view(torch.uint8)
        count, first = 0, None
        for start in range(0, x.numel(), _BLOCK_BYTES):
            unequal = x[start : start + _BLOCK_BYTES] != y[start : start + _BLOCK_BYTES]
            if unequal.any():
                if first is None:
                    first = start + int(unequal.nonzero()[0])
                count += len(unequal.nonzero().view(-1).div_(4, rounding_mode="floor").unique())
        if first is None:
            return Difference(words=0)
        size = a.element_size()
        index, word = first // size, first // 4 * 4
        return Difference(
            words=count,
            index=index,
            expected_word=f"{_integer(x, word, 4):08x}",
            observed_word=f"{_integer(y, word, 4):08x}",
            bits=_bits(_integer(x, word, 4) ^ _integer(y, word, 4)),
            element_bits=_bits(_integer(x, index * size, size) ^ _integer(y, index * size, size)),
            expected_value=_value(a[index]),
            observed_value=_value(b[index]),
        )


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's elements in logical order, flat, contiguous, on the CPU; several parts as bytes one after the
    other."""
    inner = []
    for part in parts(tensor):
        part = part.int_repr() if part.is_quantized else part.resolve_conj().resolve_neg()
        # as_strided, because a view as bytes looks at the stride even of a single element.
        inner.append(part.cpu().contiguous().as_strided((part.numel(),), (1,)))
    return inner[0] if len(inner) == 1 else torch.cat([part.view(torch.uint8) for part in inner])


def _integer(data: Tensor, start: int, size: int) -> int:
    """`size` bytes from `start` (fewer at the end) as a little-endian unsigned integer."""
    return int.from_bytes(bytes(data[start : start + size].tolist()), "little")


def _bits(flipped: int) -> tuple[int, ...]:
    return tuple(bit for bit in range(flipped.bit_length()) if flipped >> bit & 1)


def _value(element: Tensor) -> bool | int | float | complex:
    """A 0-dim tensor as a Python number; its raw integer for types that convert to none (packed 4-bit floats)."""
    try:
        return element.item()
    except (RuntimeError, NotImplementedError):
        return element.view(torch.uint8).item()
