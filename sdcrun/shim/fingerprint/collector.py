"""The package's front: fingerprints of tensors, one by one or all at once, and of streams of bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sdcrun.shim.fingerprint.engines import Engine, engine
from sdcrun.shim.fingerprint.fp1 import CHUNK_BYTES, signed64
from sdcrun.shim.fingerprint.layout import Span, parts, span
from sdcrun.shim.fingerprint.quiet import quiet

_STREAM_CHUNKS = 4
_COPIED_BYTES = 1 << 20


class Collector:
    """Fingerprints of tensors that come one by one, say in autograd hooks.

    `add` reads the tensor at once and may be called from any thread; it costs about 10 µs for a small tensor, because
    the last steps wait for `table`. On CUDA nothing waits for the device before `table`, and tensors must be added with
    the stream current on which they were made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[torch.device, Engine] = {}
        self._count = 0
        self._finite = True
        self._extremes: list[Tensor] = []

    def __len__(self) -> int:
        return self._count

    def add(self, tensor: Tensor, judge: bool = False) -> int:
        """Take one tensor; returns the row that it will have in the table. ValueError if it has no data. `judge`: for
        `finite`."""
        with quiet(), self._lock:
            s = span(tensor)
            slot = self._count
            if judge:
                self._judge(tensor, s)
            self._read({s.device: ([s], [slot])}, judge)
            self._count += 1
            return slot

    def extend(self, tensors: Iterable[Tensor], judge: bool = False) -> None:
        """Take many tensors in order: cheaper than one by one. ValueError if one has no data; drop the collector
        then. `judge`: for `finite`."""
        with quiet(), self._lock:
            waiting: dict[torch.device, tuple[list[Span], list[int]]] = {}
            copied = 0
            for tensor in tensors:
                s = span(tensor)
                if judge:
                    self._judge(tensor, s)
                found = waiting.get(s.device)
                if found is None:
                    found = waiting[s.device] = ([], [])
                found[0].append(s)
                found[1].append(self._count)
                self._count += 1
                if s.copied:
                    copied += s.nbytes
                    if copied > _COPIED_BYTES:
                        self._read(waiting, judge)
                        waiting, copied = {}, 0
            self._read(waiting, judge)

    def table(self) -> Tensor:
        """The fingerprints in the order of adding, int64 [n, 2] on the CPU; empties the collector."""
        with quiet(), self._lock:
            result = torch.zeros(self._count, 2, dtype=torch.int64, device="cpu")
            for device, sums in self._engines.items():
                if sums.judged and not sums.finite:
                    self._finite = False
                if device.type == "cpu":
                    sums.add_to(result)
                else:
                    there = torch.zeros(self._count, 2, dtype=torch.int64, device=device)
                    sums.add_to(there)
                    result += there.cpu()
            self._engines, self._count = {}, 0
            return result

    def finite(self) -> bool:
        """Whether all elements of tensors that were to be judged, and are in tables already, were finite; waits for the
        device. Where the engine cannot tell, by the smallest and the largest element, which cost a tenth of what
        isfinite().all() does and, unlike a sum, do not overflow."""
        with quiet():
            found: dict[torch.device, list[Tensor]] = {}
            for value in self._extremes:
                found.setdefault(value.device, []).append(value.to(torch.float64))
            return self._finite and all(bool(torch.stack(values).isfinite().all()) for values in found.values())

    def _judge(self, tensor: Tensor, s: Span) -> None:
        if s.dtype in self._engine(s.device).judged:
            return
        # Wrappers have no operations of their own inside `quiet()`.
        for part in parts(tensor):
            if part.numel():
                real = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
                self._extremes += torch.aminmax(real)

    def _read(self, waiting: dict[torch.device, tuple[list[Span], list[int]]], judge: bool) -> None:
        for device, (spans, slots) in waiting.items():
            sums = self._engine(device)
            if judge and sums.judged:
                sums.add(spans, slots, judge=True)
            else:
                sums.add(spans, slots)

    def _engine(self, device: torch.device) -> Engine:
        found = self._engines.get(device)
        if found is None:
            found = self._engines[device] = engine(device)
        return found


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """FP1 of each tensor: int64 [n, 2] on the CPU, the unsigned results reinterpreted. ValueError if one has no data.

    Any dtype, device and strides (see `layout.span` for which bytes are read). No graph, no random numbers, no
    inference tensors; the user's function and dispatch modes do not see it (`quiet`). On the CPU it runs on the
    calling thread alone; without the compiled library with 4.3 MiB of scratch, two threads at once with twice that;
    tensors with gaps are copied besides.
    """
    collector = Collector()
    collector.extend(tensors)
    return collector.table()


def fingerprint_bytes(chunks: Iterable[bytes | bytearray | memoryview]) -> tuple[int, int]:
    """FP1 of a stream of bytes, cut anywhere, as two signed 64-bit integers; holds 1 MiB of it at a time.

    Equal to `fingerprints([tensor])[0].tolist()` of a tensor that has these bytes.
    """
    buffer = bytearray(_STREAM_CHUNKS * CHUNK_BYTES)
    filled = number = 0
    first = second = 0

    def reduce() -> None:
        nonlocal filled, number, first, second
        with quiet():
            sums = engine(torch.device("cpu"))
            sums.add([span(torch.frombuffer(buffer, dtype=torch.uint8)[:filled])], [0], number)
            result = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
            sums.add_to(result)
            more = result[0].tolist()
        first, second = first + more[0], second + more[1]
        number += _STREAM_CHUNKS
        filled = 0

    for chunk in chunks:
        data = memoryview(chunk).cast("B")
        while data:
            taken = min(len(data), len(buffer) - filled)
            buffer[filled : filled + taken] = data[:taken]
            filled += taken
            data = data[taken:]
            if filled == len(buffer):
                reduce()
    if filled:
        reduce()
    return signed64(first), signed64(second)
