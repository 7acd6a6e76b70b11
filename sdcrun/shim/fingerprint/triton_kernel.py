"""FP1 on CUDA: one launch for all tensors.

A table of chunks, int64 [chunks, 4] (address, bytes, number r, row of the result), drives one program per chunk of
256 KiB. A program sums its words, mixes, and adds to its row with two relaxed 64-bit atomics: integer addition modulo
2^64 has no order, so the bits are those of every other implementation. The weights are computed, not read: memory is
the bottleneck. A misaligned 4-byte read is a fault on CUDA, hence the alignment classes: 16 bytes (whole chunks,
vector loads), 4 bytes, 2 bytes, 1 byte; the 1–3 bytes of a last unfinished word are read one by one.

Importing this module needs Triton; with TRITON_INTERPRET=1 it runs on CPU tensors too (for tests).
"""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdcrun.shim.fingerprint import fp1
from sdcrun.shim.fingerprint.layout import Span
from sdcrun.shim.fingerprint.torch_ops import follow

_BLOCK = 1024
_WARPS = 4
_KEPT_TABLES = 8
_ROWS = 1024

_CHUNK_BYTES = tl.constexpr(fp1.CHUNK_BYTES)
_CHUNK_WORDS = tl.constexpr(fp1.CHUNK_WORDS)
_SEED = tl.constexpr(fp1.WEIGHT_SEED)
_PHI64 = tl.constexpr(fp1.PHI64)
_MIX64_A = tl.constexpr(fp1.MIX64_A)
_MIX64_B = tl.constexpr(fp1.MIX64_B)


@triton.jit
def _weight(c):
    """T[c] of int32 positions, as int32."""
    h = c.to(tl.uint32) + _SEED
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    h ^= h >> 16
    return (h >> 1).to(tl.int32)


@triton.jit
def _mix64(z):
    """splitmix64's finaliser of a uint64."""
    z = (z ^ (z >> 30)) * _MIX64_A
    z = (z ^ (z >> 27)) * _MIX64_B
    return z ^ (z >> 31)


@triton.jit
def _chunk(address, nbytes, number, result, BLOCK: tl.constexpr):
    """Add the terms of one chunk (`nbytes` bytes at `address`) to a row of the result, int64 [2]."""
    s0 = tl.zeros([BLOCK], tl.int64)
    s1 = tl.zeros([BLOCK], tl.int64)
    words = nbytes.to(tl.int32) // 4
    if (address % 16 == 0) & (nbytes == _CHUNK_BYTES):
        p32 = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
        for start in range(0, _CHUNK_WORDS, BLOCK):
            c = start + tl.arange(0, BLOCK)
            w = tl.load(p32 + c).to(tl.int64)
            s0 += w
            s1 += w * _weight(c).to(tl.int64)
    elif address % 4 == 0:
        p32 = address.to(tl.pointer_type(tl.int32))
        for start in range(0, words, BLOCK):
            c = start + tl.arange(0, BLOCK)
            w = tl.load(p32 + c, mask=c < words, other=0).to(tl.int64)
            s0 += w
            s1 += w * _weight(c).to(tl.int64)
    elif address % 2 == 0:
        p16 = address.to(tl.pointer_type(tl.uint16))
        for start in range(0, words, BLOCK):
            c = start + tl.arange(0, BLOCK)
            low = tl.load(p16 + 2 * c, mask=c < words, other=0).to(tl.uint32)
            high = tl.load(p16 + 2 * c + 1, mask=c < words, other=0).to(tl.uint32)
            w = (low | (high << 16)).to(tl.int32, bitcast=True).to(tl.int64)
            s0 += w
            s1 += w * _weight(c).to(tl.int64)
    else:
        p8 = address.to(tl.pointer_type(tl.uint8))
        for start in range(0, words, BLOCK):
            c = start + tl.arange(0, BLOCK)
            w32 = tl.zeros([BLOCK], tl.uint32)
            for k in tl.static_range(4):
                w32 |= tl.load(p8 + 4 * c + k, mask=c < words, other=0).to(tl.uint32) << (8 * k)
            w = w32.to(tl.int32, bitcast=True).to(tl.int64)
            s0 += w
            s1 += w * _weight(c).to(tl.int64)
    sum0 = tl.sum(s0)
    sum1 = tl.sum(s1)
    if nbytes % 4 != 0:
        p8 = address.to(tl.pointer_type(tl.uint8)) + 4 * words
        k = tl.arange(0, 4)
        tail = tl.load(p8 + k, mask=4 * words + k < nbytes, other=0).to(tl.int64) << (8 * k).to(tl.int64)
        word = tl.sum(tail)
        sum0 += word
        sum1 += word * _weight(words).to(tl.int64)
    inner = _mix64(sum0.to(tl.uint64) + (number + 1).to(tl.uint64) * _PHI64)
    term = _mix64(sum1.to(tl.uint64) ^ inner)
    tl.atomic_add(result, sum0, sem="relaxed")
    tl.atomic_add(result + 1, term.to(tl.int64), sem="relaxed")


@triton.jit
def table_kernel(table, result, BLOCK: tl.constexpr):
    """One program per row of the chunk table, int64 [chunks, 4]; result int64 [n, 2]."""
    entry = table + 4 * tl.program_id(0).to(tl.int64)
    row = tl.load(entry + 3)
    _chunk(tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), result + 2 * row, BLOCK)


@triton.jit(do_not_specialize=["address", "nbytes", "row"])
def tensor_kernel(address, nbytes, result, row, BLOCK: tl.constexpr):
    """One program per chunk of one tensor of `nbytes` bytes at `address`; no table has to be sent to the device."""
    number = tl.program_id(0).to(tl.int64)
    start = number * _CHUNK_BYTES
    size = tl.minimum(nbytes.to(tl.int64) - start, _CHUNK_BYTES)
    _chunk(address.to(tl.int64) + start, size, number, result + 2 * row.to(tl.int64), BLOCK)


def chunk_table(spans: list[Span], rows: list[int]) -> Tensor:
    """The chunk table, int64 [chunks, 4] on the CPU, of tensors that add to the given rows of the result."""
    address, nbytes, row = torch.tensor(
        [(s.address, s.nbytes, row) for s, row in zip(spans, rows)], dtype=torch.int64, device="cpu"
    ).unbind(1)
    count = (nbytes + (fp1.CHUNK_BYTES - 1)) // fp1.CHUNK_BYTES
    which = torch.arange(len(spans), device="cpu").repeat_interleave(count)
    number = torch.arange(len(which), device="cpu") - (count.cumsum(0) - count)[which]
    start = number * fp1.CHUNK_BYTES
    size = (nbytes[which] - start).clamp(max=fp1.CHUNK_BYTES)
    return torch.stack((address[which] + start, size, number, row[which]), 1)


_lock = threading.Lock()
_tables: dict[tuple, Tensor] = {}


def _table_on(device: torch.device, spans: list[Span], rows: list[int]) -> Tensor:
    """The chunk table on the device; kept for the last few lists of (address, size), since weights stay where they
    are."""
    key = (device, tuple((s.address, s.nbytes, row) for s, row in zip(spans, rows)))
    with _lock:
        found = _tables.pop(key, None)
        if found is None:
            found = chunk_table(spans, rows).to(device)
        _tables[key] = found
        if len(_tables) > _KEPT_TABLES:
            del _tables[next(iter(_tables))]
    return found


class Sums:
    """Fingerprints of tensors on one device, as `torch_ops.Sums`, with launches in the order of the current stream."""

    judged: frozenset[torch.dtype] = frozenset()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._result = torch.zeros(_ROWS, 2, dtype=torch.int64, device=device)
        self._stream = follow(device, None)

    def add(self, spans: list[Span], slots: list[int]) -> None:
        """Launch the reading of tensors; `slots` are the rows of the result that they add to."""
        work = [(s, slot) for s, slot in zip(spans, slots) if s.nbytes]
        if not work:
            return
        if self.device.type == "cuda":
            self._stream = follow(self.device, self._stream)
            with torch.cuda.device(self.device):
                self._launch([s for s, _ in work], [slot for _, slot in work])
        else:
            self._launch([s for s, _ in work], [slot for _, slot in work])

    def _launch(self, spans: list[Span], slots: list[int]) -> None:
        if max(slots) >= len(self._result):
            grown = torch.zeros(2 * (max(slots) + 1), 2, dtype=torch.int64, device=self.device)
            grown[: len(self._result)] = self._result
            self._result = grown
        if len(spans) == 1:
            grid = (-(-spans[0].nbytes // fp1.CHUNK_BYTES),)
            tensor_kernel[grid](
                spans[0].address, spans[0].nbytes, self._result, slots[0], BLOCK=_BLOCK, num_warps=_WARPS
            )
        else:
            table = _table_on(self.device, spans, slots)
            table_kernel[(len(table),)](table, self._result, BLOCK=_BLOCK, num_warps=_WARPS)

    def add_to(self, result: Tensor) -> None:
        """Add the fingerprints to the rows of `result`, int64 [n, 2] on this device."""
        follow(self.device, self._stream)
        n = min(len(result), len(self._result))
        result[:n] += self._result[:n]
