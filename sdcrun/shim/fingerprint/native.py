"""FP1 on the CPU by the library that is compiled from `native.c` when sdcrun is installed, if there is a C compiler.

One read at nearly the speed of memory: 1.6 times what `sum()` takes, where torch's operations (`torch_ops`) take 6 to 9
times that, since torch has no integer reduction that reads 32-bit words without widening them in memory first, and
each operation costs as much as a thousand words. A loop compiled by numba came to 1.5 times the speed of torch's.
"""

from __future__ import annotations

import ctypes
from array import array
from pathlib import Path

import torch
from torch import Tensor

from sdcrun.shim.fingerprint import torch_ops
from sdcrun.shim.fingerprint.layout import Span


def _load() -> ctypes.CDLL:
    """Raises FileNotFoundError where nothing was compiled, OSError where it is for another machine."""
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        raise FileNotFoundError("there was no C compiler when sdcrun was installed")
    # ctypes lets other threads run meanwhile.
    return ctypes.CDLL(str(found[0]))


library = _load()
_fp1 = library.sdcrun_fp1
_fp1.restype = ctypes.c_int
_fp1.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
_weights = torch_ops.table(torch.device("cpu")).to(torch.int32)


# By dtype: its place in the library's table of exponents.
_EXPONENTS = {torch.float32: 1, torch.complex64: 1, torch.float16: 2, torch.bfloat16: 3}


class Sums:
    """Collects fingerprints of tensors in this machine's memory. Call everything inside `quiet()`.

    A tensor's bytes are read when `add` is called: it may be freed or overwritten right after.
    """

    judged = frozenset(_EXPONENTS)

    def __init__(self, device: torch.device) -> None:
        self.finite = True
        self._slots: list[int] = []
        self._rows = array("q")

    def add(self, spans: list[Span], slots: list[int], first: int = 0, judge: bool = False) -> None:
        """Read tensors; `slots` are the rows of the result that they add to; `first`: the number of their first chunk,
        where they are parts of something longer. `judge`: `finite` says whether those of dtypes in `judged` are."""
        exponents = _EXPONENTS if judge else {}
        table = array("q")
        for row, s in enumerate(spans, len(self._slots)):
            table.extend((s.address, s.nbytes, row, first, exponents.get(s.dtype, 0)))
        self._slots += slots
        self._rows.frombytes(bytes(16 * len(spans)))
        if _fp1(table.buffer_info()[0], len(spans), _weights.data_ptr(), self._rows.buffer_info()[0]):
            self.finite = False

    def add_to(self, result: Tensor) -> None:
        """Add the fingerprints to the rows of `result`, int64 [n, 2] on the CPU."""
        if self._slots:
            rows = torch.frombuffer(self._rows, dtype=torch.int64).view(-1, 2)
            if self._slots == list(range(len(result))):
                result += rows
            else:
                result.index_add_(0, torch.tensor(self._slots, device="cpu"), rows)
