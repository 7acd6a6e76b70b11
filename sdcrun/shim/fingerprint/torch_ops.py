"""FP1 in torch operations: for the CPU where `native` is not there, and for any device that has no kernel of its own.

32-bit words are widened into a reused int64 scratch, 4 chunks at a time, and reduced there. What is shorter than a
chunk (most tensors, and the tail of every other one) is gathered into one int64 area of rows of 1,024 words and
reduced in one go; the mixing at the end is done for all chunks of all tensors together. Widening first is a must:
torch has no integer reduction that reads 32-bit words without making a copy of them twice as large.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from sdcrun.shim.fingerprint import fp1
from sdcrun.shim.fingerprint.fp1 import CHUNK_BYTES, CHUNK_WORDS, MASK32
from sdcrun.shim.fingerprint.layout import Span, view

GROUP_CHUNKS = 4
ROW_WORDS = 1024
SMALL_ROWS = 256
_KEPT_VIEWS = 2048
_FEW_CHUNKS = 48  # up to here the final mixing is faster in Python's integers than in some twenty torch operations

_tables: dict[torch.device, Tensor] = {}


def table(device: torch.device) -> Tensor:
    """The weights T, int64 [65536], on a device; made once. Call inside `quiet()`."""
    found = _tables.get(device)
    if found is None:
        if device.type != "cpu":
            found = table(torch.device("cpu")).to(device)
        else:
            h = torch.arange(fp1.WEIGHT_SEED, fp1.WEIGHT_SEED + CHUNK_WORDS, dtype=torch.int64, device="cpu")
            h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK32
            h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK32
            found = (h ^ (h >> 16)) >> 1
            if found.sort().values.diff().min() <= 0:
                raise RuntimeError("the fingerprint's weights are not distinct: this processor computes wrongly")
        _tables[device] = found
    return found


def mix64(z: Tensor) -> Tensor:
    """`fp1.mix64` of every element of an int64 tensor, in place; returns it."""
    for shift, factor in ((30, fp1.MIX64_A), (27, fp1.MIX64_B)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(fp1.signed64(factor))
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def mixed(sums: Tensor, numbers: Tensor) -> Tensor:
    """The term that each chunk adds to the second value: int64 [k] from its sums (int64 [2, k]) and number r (int64
    [k])."""
    inner = mix64((numbers + 1).mul_(fp1.signed64(fp1.PHI64)).add_(sums[0]))
    return mix64(inner.bitwise_xor_(sums[1]))


def follow(device: torch.device, previous: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
    """Let the current stream of a CUDA device wait for what was done on `previous`; returns the current stream. Scratch
    and results are handed from stream to stream this way. None on other devices, which have no streams here."""
    if device.type != "cuda":
        return None
    current = torch.cuda.current_stream(device)
    if previous is not None and previous != current:
        current.wait_stream(previous)
    return current


class Scratch:
    """Memory for one computation at a time on one device: 2 MiB for groups of chunks, 2 MiB for small pieces, and 256
    KiB of bytes when something misaligned comes."""

    def __init__(self, device: torch.device) -> None:
        self.weights = table(device)
        self.group = torch.empty(GROUP_CHUNKS, CHUNK_WORDS, dtype=torch.int64, device=device)
        self.rows = torch.empty(SMALL_ROWS, ROW_WORDS, dtype=torch.int64, device=device)
        self.bytes: Tensor | None = None
        self.stream: torch.cuda.Stream | None = None
        self._flat = self.rows.view(-1)
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor | None, Tensor]] = {}

    def place(self, row: int, words: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """For a piece of `words` words that starts at `row`: where it goes, what must be zero behind it, its
        weights."""
        found = self._views.get((row, words))
        if found is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            start = row * ROW_WORDS
            end, filled = start + words, (row - -words // ROW_WORDS) * ROW_WORDS
            gap = self._flat[end:filled] if filled > end else None
            found = self._views[row, words] = (self._flat[start:end], gap, self.weights[:words])
        return found


class _Pool:
    """Scratches that wait for their next use, at most two (8.5 MiB), never more than threads were ever at work at
    once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[torch.device, Scratch]] = []

    def take(self, device: torch.device) -> Scratch:
        with self._lock:
            for i, (where, _) in enumerate(self._idle):
                if where == device:
                    return self._idle.pop(i)[1]
        return Scratch(device)

    def give(self, device: torch.device, scratch: Scratch) -> None:
        with self._lock:
            self._idle.append((device, scratch))
            del self._idle[:-2]


pool = _Pool()


class Sums:
    """Collects the per-chunk sums (S0, S1) of tensors on one device. Call everything inside `quiet()`.

    A tensor's bytes are read when `add` is called: it may be freed or overwritten right after.
    """

    judged: frozenset[torch.dtype] = frozenset()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch: Scratch | None = None
        self._blocks: list[Tensor] = []
        self._runs: list[tuple[int, int, int]] = []  # (chunks, slot, first chunk's number), in the order of the blocks
        self._row = 0
        self._small: list[tuple[int, int, int, int]] = []  # (row, words, slot, chunk's number)

    def add(self, spans: list[Span], slots: list[int], first: int = 0) -> None:
        """Read tensors; `slots` are the rows of the result that they add to; `first`: the number of their first chunk,
        where they are parts of something longer."""
        if self._scratch is None:
            self._scratch = pool.take(self.device)
        self._scratch.stream = follow(self.device, self._scratch.stream)
        into: list[Tensor] = []
        source: list[Tensor] = []
        gaps: list[Tensor] = []
        for s, slot in zip(spans, slots):
            aligned = s.address % 4 == 0
            full, rest = divmod(s.nbytes, CHUNK_BYTES)
            if full:
                self._full(s, slot, full, aligned, first)
            if not rest:
                continue
            words = (rest + 3) // 4
            if self._row - -words // ROW_WORDS > SMALL_ROWS:
                _copy(into, source, gaps)
                into, source, gaps = [], [], []
                self._flush()
            place, gap, _ = self._scratch.place(self._row, words)
            self._small.append((self._row, words, slot, first + full))
            self._row -= -words // ROW_WORDS
            into.append(place)
            if aligned and rest % 4 == 0:
                source.append(view(s, torch.int32, full * CHUNK_BYTES, words))
            else:
                source.append(self._staged(s, full * CHUNK_BYTES, rest))
                _copy(into, source, gaps)
                into, source = [], []
            if gap is not None:
                gaps.append(gap)
        _copy(into, source, gaps)

    def _full(self, s: Span, slot: int, count: int, aligned: bool, first: int) -> None:
        """The sums of the `count` whole chunks at the start of a span."""
        sums = torch.empty(2, count, dtype=torch.int64, device=self.device)
        words = view(s, torch.int32, 0, count * CHUNK_WORDS).view(count, CHUNK_WORDS) if aligned else None
        step = GROUP_CHUNKS if aligned else 1
        for start in range(0, count, step):
            end = min(start + step, count)
            group = self._scratch.group[: end - start]
            if words is not None:
                group.copy_(words[start:end])
            else:
                group[0].copy_(self._staged(s, start * CHUNK_BYTES, CHUNK_BYTES))
            torch.sum(group, 1, out=sums[0, start:end])
            torch.mv(group, self._scratch.weights, out=sums[1, start:end])
        self._blocks.append(sums)
        self._runs.append((count, slot, first))

    def _staged(self, s: Span, start: int, nbytes: int) -> Tensor:
        """Misaligned bytes, or such as end within a word, as aligned words with a zero tail; valid until the next
        call."""
        if self._scratch.bytes is None:
            self._scratch.bytes = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=self.device)
        filled = (nbytes + 3) // 4 * 4
        staged = self._scratch.bytes[:filled]
        staged[nbytes:].zero_()
        staged[:nbytes].copy_(view(s, torch.uint8, start, nbytes))
        return staged.view(torch.int32)

    def _flush(self) -> None:
        """Reduce the gathered small pieces."""
        if not self._small:
            return
        rows = self._scratch.rows[: self._row]
        sums = torch.empty(2, self._row, dtype=torch.int64, device=self.device)
        torch.sum(rows, 1, out=sums[0])
        places = [self._scratch.place(row, words) for row, words, _, _ in self._small]
        torch._foreach_mul_([p[0] for p in places], [p[2] for p in places])
        torch.sum(rows, 1, out=sums[1])
        if len(self._small) < self._row:
            ends = [row - -words // ROW_WORDS - 1 for row, words, _, _ in self._small]
            sums = sums.cumsum(1)[:, torch.tensor(ends, device=self.device)]
            sums[:, 1:] -= sums[:, :-1].clone()
        self._blocks.append(sums)
        self._runs += [(1, slot, number) for _, _, slot, number in self._small]
        self._small, self._row = [], 0

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Everything collected: (S0 and S1, int64 [2, k]; each chunk's slot, int64 [k]; its number r, int64 [k])."""
        if self._scratch is not None:
            self._scratch.stream = follow(self.device, self._scratch.stream)
            self._flush()
            pool.give(self.device, self._scratch)
            self._scratch = None
        if not self._blocks:
            none = torch.empty(2, 0, dtype=torch.int64, device=self.device)
            return none, none[0], none[0]
        sums = self._blocks[0] if len(self._blocks) == 1 else torch.cat(self._blocks, 1)
        counts, slots, first = torch.tensor(self._runs, dtype=torch.int64, device=self.device).unbind(1)
        if len(self._runs) == sums.shape[1]:
            return sums, slots, first
        # A run's chunks are numbered first, first + 1, …: the position in the whole list, less where the run starts.
        shift = (counts.cumsum(0) - counts - first).repeat_interleave(counts)
        numbers = torch.arange(sums.shape[1], dtype=torch.int64, device=self.device) - shift
        return sums, slots.repeat_interleave(counts), numbers

    def add_to(self, result: Tensor) -> None:
        """Add the fingerprints to the rows of `result`, int64 [n, 2] on this device."""
        sums, slots, numbers = self.sums()
        if not slots.numel():
            return
        if self.device.type == "cpu" and slots.numel() <= _FEW_CHUNKS:
            rows = [[0, 0] for _ in range(len(result))]
            for s0, s1, slot, number in zip(*sums.tolist(), slots.tolist(), numbers.tolist()):
                rows[slot][0] += s0
                rows[slot][1] += fp1.mix64(s1 ^ fp1.mix64(s0 + (number + 1) * fp1.PHI64))
            result += torch.tensor([[fp1.signed64(first), fp1.signed64(second)] for first, second in rows])
        else:
            result.index_add_(0, slots, torch.stack((sums[0], mixed(sums, numbers)), 1))


def _copy(into: list[Tensor], source: list[Tensor], gaps: list[Tensor]) -> None:
    """Widen `source` into `into` and zero `gaps`, in one call each."""
    if len(into) == 1:
        into[0].copy_(source[0])
    elif into:
        torch._foreach_copy_(into, source)
    if gaps:
        torch._foreach_zero_(gaps)
