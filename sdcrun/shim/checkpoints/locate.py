"""Which word of a tensor is wrong, worked out from its fingerprint alone.

When exactly one 32-bit word differs, the two halves of the fingerprint (see `fingerprint.fp1`) determine it. The first
half gives the difference d = observed - expected. For each chunk r as it would have been with its word at c less by d,
the second half gives mix64's argument (mix64 is a bijection), hence S1_r, hence T[c] = (S1 observed - S1 expected) / d.
A quotient that is one of the 65,536 weights names the word; that a wrong chunk gives one has a chance near 2^-48.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from sdcrun.shim.fingerprint import torch_ops
from sdcrun.shim.fingerprint.fp1 import (
    CHUNK_BYTES,
    CHUNK_WORDS,
    MASK32,
    MASK64,
    MIX64_A,
    MIX64_B,
    PHI64,
    mix64,
    signed64,
    weight,
)
from sdcrun.shim.fingerprint.layout import parts, span
from sdcrun.shim.fingerprint.quiet import quiet

_BATCH = 4 * CHUNK_BYTES


@dataclass(frozen=True)
class Word:
    """One 32-bit word that differs: its number in the tensor's bytes (storage order), both values as unsigned integers,
    and the flipped bits (0 = lowest)."""

    index: int
    expected: int
    observed: int

    @property
    def bits(self) -> list[int]:
        """Numbers of the flipped bits."""
        return [bit for bit in range(32) if (self.expected ^ self.observed) >> bit & 1]

    def text(self, itemsize: int) -> str:
        """For a person: "word 7 (element 7), bit 30 flipped: 0x3f800000 became 0x7f800000"; both in storage order."""
        bits = ", ".join(map(str, self.bits))
        element = self.index * 4 // itemsize if itemsize else self.index
        return (
            f"word {self.index} (element {element}), bit{'s' if len(self.bits) > 1 else ''} {bits} flipped: "
            f"0x{self.expected:08x} became 0x{self.observed:08x}"
        )


def locate(pieces: Callable[[], Iterable[bytes | memoryview]], expected: tuple[int, int]) -> Word | None:
    """The one word in which a stream of bytes differs from what had the fingerprint `expected`; None if not one word.

    `pieces()` gives the stream from its start, cut anywhere; it is called once, and a second time to read the word.
    Keeps 16 bytes for each 256 KiB.
    """
    sums = _chunk_sums(pieces())
    first = sum(s0 for s0, _ in sums)
    second = sum(_term(s0, s1, r) for r, (s0, s1) in enumerate(sums))
    difference = signed64(first - expected[0])
    if difference == 0 or abs(difference) >= 1 << 32:
        return None
    for r, (s0, s1) in enumerate(sums):
        wanted = (expected[1] - second + _term(s0, s1, r)) & MASK64
        inner = mix64(s0 - difference + (r + 1) * PHI64)
        moved = signed64(s1 - (_unmix64(wanted) ^ inner))
        place = _places().get(moved // difference) if moved % difference == 0 else None
        if place is None:
            continue
        observed = _word_at(pieces(), r * CHUNK_WORDS + place)
        if observed is not None and -(1 << 31) <= observed - difference < 1 << 31:
            return Word(r * CHUNK_WORDS + place, (observed - difference) & MASK32, observed & MASK32)
    return None


def locate_in_tensor(tensor: torch.Tensor, expected: tuple[int, int]) -> Word | None:
    """As `locate`, for a tensor; its words are numbered in the order of its storage."""
    inner = parts(tensor)
    if len(inner) != 1:
        return None
    with quiet():
        plain = inner[0].cpu()
        s = span(plain)
        raw = (ctypes.c_char * s.nbytes).from_address(s.address) if s.nbytes else b""

        def pieces() -> Iterable[memoryview]:
            whole = memoryview(raw).cast("B")
            for start in range(0, s.nbytes, _BATCH):
                yield whole[start : start + _BATCH]

        return locate(pieces, expected)


def _chunk_sums(pieces: Iterable[bytes | memoryview]) -> list[tuple[int, int]]:
    """(S0, S1) of each chunk of a stream, as signed 64-bit integers."""
    found: list[tuple[int, int]] = []
    buffer, filled = bytearray(_BATCH), 0

    def reduce() -> None:
        with quiet():
            sums = torch_ops.Sums(torch.device("cpu"))
            sums.add([span(torch.frombuffer(buffer, dtype=torch.uint8)[:filled])], [0])
            pairs, _, numbers = sums.sums()
            order = numbers.argsort().tolist()
            first, second = pairs.tolist()
            found.extend((first[i], second[i]) for i in order)

    for piece in pieces:
        data = memoryview(piece).cast("B")
        while data:
            taken = min(len(data), _BATCH - filled)
            buffer[filled : filled + taken] = data[:taken]
            filled, data = filled + taken, data[taken:]
            if filled == _BATCH:
                reduce()
                filled = 0
    if filled:
        reduce()
    return found


def _word_at(pieces: Iterable[bytes | memoryview], index: int) -> int | None:
    """The signed word `index` of a stream, its tail filled with zeros; None past the end."""
    start, collected = 4 * index, b""
    for piece in pieces:
        data = memoryview(piece).cast("B")
        if start < len(data):
            collected += bytes(data[start : start + 4 - len(collected)])
            start = 0
            if len(collected) == 4:
                break
        else:
            start -= len(data)
    return int.from_bytes(collected.ljust(4, b"\0"), "little", signed=True) if collected else None


def _term(s0: int, s1: int, r: int) -> int:
    """What chunk r adds to the fingerprint's second half."""
    return mix64((s1 ^ mix64(s0 + (r + 1) * PHI64)) & MASK64)


@lru_cache(maxsize=1)
def _places() -> dict[int, int]:
    """Weight -> position in a chunk."""
    return {weight(c): c for c in range(CHUNK_WORDS)}


def _unmix64(z: int) -> int:
    """Inverse of `fp1.mix64`."""
    z = _unshift(z, 31)
    z = z * pow(MIX64_B, -1, 1 << 64) & MASK64
    z = _unshift(z, 27)
    z = z * pow(MIX64_A, -1, 1 << 64) & MASK64
    return _unshift(z, 30)


def _unshift(z: int, shift: int) -> int:
    """Inverse of z ^ (z >> shift)."""
    found = z
    for _ in range(64 // shift):
        found = z ^ (found >> shift)
    return found
