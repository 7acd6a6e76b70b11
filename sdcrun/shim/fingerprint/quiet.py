"""Running torch operations in the middle of somebody else's program without leaving a trace in it.

`quiet()` is the surrounding of every operation of this package: no graph, no Python function or dispatch mode of the
user sees it (both kinds are excluded through torch's own guards, `DisableTorchFunction` and `_DisableTorchDispatch`, so
that profilers of the user, `FakeTensorMode`, a recorder or `torch.set_default_device` are neither called nor obeyed),
no tensor made inside becomes an inference tensor, and CPU kernels run on the calling thread alone.

Why one thread: with two, on a host where other ranks keep the cores busy, the barriers of many small parallel regions
turned a 54 ms pass into 4.6 s. Whether cores are idle cannot be known, a stall cannot be afforded.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import torch


def _openmp_setter() -> Callable[[int], object] | None:
    """`omp_set_num_threads` of the OpenMP runtime that torch's CPU kernels use, or None.

    It changes the calling thread's own setting and nothing else. `torch.set_num_threads` would also store the number
    for threads that are yet to start: one started while a fingerprint is taken would compute other bits for ever.
    """
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        setter = ctypes.CDLL(library).omp_set_num_threads
    except (OSError, AttributeError):
        return None
    setter.argtypes, setter.restype = [ctypes.c_int], None
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    setter(other)
    works = torch.get_num_threads() == other
    setter(before)
    return setter if works and torch.get_num_threads() == before else None


class _Threads:
    """Lazy access to the right way of changing the calling thread's number of CPU threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set: Callable[[int], object] | None = None

    def set(self, count: int) -> None:
        """Give the calling thread `count` threads for CPU kernels."""
        if self._set is None:
            with self._lock:
                if self._set is None:
                    self._set = _openmp_setter() or torch.set_num_threads
        self._set(count)


_threads = _Threads()


class quiet:  # noqa: N801  (used like a function: `with quiet():`)
    """Context manager, re-entrant by nesting, cheap enough for one call per gradient (about 2 µs)."""

    __slots__ = ("_function", "_dispatch", "_inference", "_grad", "_count")

    def __enter__(self) -> None:
        # The function guard comes first: torch shows grad-mode changes to function modes.
        self._function = torch._C.DisableTorchFunction()
        self._function.__enter__()
        self._dispatch = torch._C._DisableTorchDispatch()
        self._dispatch.__enter__()
        self._inference = None
        if torch.is_inference_mode_enabled():
            self._inference = torch._C._InferenceMode(False)
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch._C._set_grad_enabled(False)
        self._count = torch.get_num_threads()
        if self._count != 1:
            _threads.set(1)

    def __exit__(self, *exc: object) -> None:
        if self._count != 1:
            _threads.set(self._count)
        if self._grad:
            torch._C._set_grad_enabled(True)
        if self._inference is not None:
            self._inference.__exit__(*exc)
        self._dispatch.__exit__(*exc)
        self._function.__exit__(*exc)
