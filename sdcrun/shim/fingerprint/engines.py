"""Which implementation of FP1 works on a device, decided once per device by trying it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sdcrun.shim.fingerprint import torch_ops
from sdcrun.shim.fingerprint.layout import Span, span
from sdcrun.shim.fingerprint.quiet import quiet


class Engine(Protocol):
    """What fingerprints tensors on one device. Used inside `quiet()`. `judged`: dtypes whose elements it can judge
    while it reads them; one with such dtypes has `finite`, whether all of them were finite."""

    judged: frozenset[torch.dtype]

    def add(self, spans: list[Span], slots: list[int], first: int = 0) -> None:
        """Read tensors now (on CUDA: in the order of the current stream); they add to the rows `slots`. `first`: the
        number of their first chunk; other than 0 on the CPU alone. One that judges has another argument, `judge`."""

    def add_to(self, result: Tensor) -> None:
        """Add the fingerprints to the rows of `result`, int64 [n, 2] on the device."""


# By type of device: the name and the module of what is faster than torch's operations.
_FAST = {"cuda": ("triton", "triton_kernel"), "cpu": ("native", "native")}

_lock = threading.Lock()
_chosen: dict[torch.device, tuple[Callable[[torch.device], Engine], str]] = {}


def engine(device: torch.device) -> Engine:
    """A fresh engine for a device. Call inside `quiet()`."""
    return _choice(device)[0](device)


def implementation(device: torch.device) -> str:
    """What fingerprints tensors on a device: "triton" or "native", or "torch" and in brackets why not one of these."""
    with quiet():
        return _choice(device)[1]


def _choice(device: torch.device) -> tuple[Callable[[torch.device], Engine], str]:
    found = _chosen.get(device)
    if found is None:
        with _lock:
            found = _chosen.get(device) or _chosen.setdefault(device, _choose(device))
    return found


def _choose(device: torch.device) -> tuple[Callable[[torch.device], Engine], str]:
    fast = _FAST.get(device.type)
    if fast is None:
        return torch_ops.Sums, "torch"
    name, module = fast
    try:
        # It may be there and not work (no compiler for Triton's launcher, another processor): only a run tells.
        sums = importlib.import_module(f"sdcrun.shim.fingerprint.{module}").Sums
        if not agree(sums, torch_ops.Sums, device):
            return torch_ops.Sums, f"torch ({name} gave other bits)"
    except Exception as error:
        return torch_ops.Sums, f"torch ({name} does not work here: {type(error).__name__}: {error})"[:200]
    return sums, name


def agree(
    one: Callable[[torch.device], Engine], other: Callable[[torch.device], Engine], device: torch.device
) -> bool:
    """Whether two implementations give the same bits on a device, for every class of alignment and length."""
    data = torch.arange(1 << 17, dtype=torch.int32, device=device).mul_(-1640531527).view(torch.uint8)
    tensors = [data, data[1:301], data[2:70_003], data[4:], data[16:262_160]]
    tables = []
    for kind in (one, other):
        result = torch.zeros(len(tensors) + 1, 2, dtype=torch.int64, device=device)
        made = kind(device)
        made.add([span(t) for t in tensors], list(range(len(tensors))))
        made.add([span(tensors[0])], [len(tensors)])
        made.add_to(result)
        tables.append(result.cpu())
    return bool(torch.equal(*tables))
