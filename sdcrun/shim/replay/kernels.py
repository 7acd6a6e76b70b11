"""Switches that choose between kernels, which scripts set for the length of a forward (`sdpa_kernel(...)`,
`mkldnn.flags(...)`, `parametrize.cached()`): other kernels round otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import parametrize

_SWITCHES = (
    *((f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}")
      for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")),
    *((f"_get_{name}", f"_set_{name}")
      for name in ("math_sdp_allow_fp16_bf16_reduction", "sdp_priority_order", "mkldnn_enabled", "cudnn_enabled",
                   "float32_matmul_precision")),
)  # fmt: skip
_HERE = tuple((get, put) for get, put in _SWITCHES if hasattr(torch._C, get) and hasattr(torch._C, put))


def _read(get: str) -> Any:
    try:
        return getattr(torch._C, get)()
    except RuntimeError:
        # Precisions that were set in the old and the new way at once cannot be told.
        return None


@dataclass
class Kernels:
    """The switches by the names of their getters, the default dtype, and whether parametrizations are cached."""

    switches: dict[str, Any]
    dtype: torch.dtype
    cached: bool

    @classmethod
    def now(cls) -> Kernels:
        """As they are set in this moment."""
        switches = {get: _read(get) for get, _ in _HERE}
        return cls(switches, torch.get_default_dtype(), parametrize._cache_enabled > 0)

    def _set(self) -> None:
        for get, put in _HERE:
            wanted = self.switches.get(get)
            if wanted is not None and _read(get) != wanted:
                getattr(torch._C, put)(wanted)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """These inside the block, those from before after it; the script's cached parametrizations are not touched."""
        before, cache, depth = Kernels.now(), parametrize._cache, parametrize._cache_enabled
        self._set()
        parametrize._cache, parametrize._cache_enabled = {}, int(self.cached)
        try:
            yield
        finally:
            parametrize._cache, parametrize._cache_enabled = cache, depth
            before._set()
