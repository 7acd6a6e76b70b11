"""Deterministic kernels for the time of a replay, or of the step that it will be compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StrictKernels:
    """Switches deterministic kernels on until `off`; what was set before comes back.

    The private setter is used because the public one imports inductor (a second of start-up). With `warn_only` false,
    flash attention's backward is deterministic, so nothing falls back to the quadratic math kernel. `empty()` is not
    filled: that would cost time and does not concern determinism of what is read.
    """

    def __init__(self) -> None:
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )
        torch._C._set_deterministic_algorithms(True, warn_only=False)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False

    def off(self) -> None:
        """Puts the settings back."""
        enabled, warn_only, fill, deterministic, benchmark = self._before
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def strict_kernels() -> Iterator[None]:
    """Deterministic kernels inside the block."""
    strict = StrictKernels()
    try:
        yield
    finally:
        strict.off()
