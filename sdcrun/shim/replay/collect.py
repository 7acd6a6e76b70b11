"""Fingerprints of per-parameter gradients, taken while a backward makes them.

A hook on the parameter sees the gradient of this backward alone, before it is accumulated into `.grad`. It runs before
the user's own hooks on that parameter, so that both sides of a comparison see what autograd computed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from sdcrun.shim.fingerprint import Collector, digest, fingerprints, metadata
from sdcrun.shim.replay.state import puts_fault

Pair = tuple[int, int]

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class GradientTable:
    """Collects from `watch` until `take`. A parameter that gets several gradients in one backward (nested backwards)
    has names with "#1", "#2" behind the first.

    `details`: name -> (dtype, shape), in the order in which gradients appeared. `keep`: names whose gradients are kept
    whole in `kept`.
    """

    def __init__(self, keep: Iterable[str] = ()) -> None:
        self.details: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self._keep = frozenset(keep)
        self._sums: list[torch.Tensor] = []
        self._collector = Collector()
        self._seen: dict[str, int] = {}
        self._handles: list = []
        self._lock = threading.Lock()

    def watch(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Hooks a parameter, in front of whatever hooks it has but those that put a fault in."""
        bare = parameter._backward_hooks is None
        handle = parameter.register_hook(lambda gradient: self._see(name, gradient))
        hooks = parameter._backward_hooks
        if len(hooks) > 1:
            # C++ walks the dict's own order and does not notice move_to_end().
            mine = hooks.pop(handle.id)
            others = list(hooks.items())
            hooks.clear()
            hooks.update(item for item in others if puts_fault(item[1]))
            hooks[handle.id] = mine
            hooks.update(item for item in others if not puts_fault(item[1]))
        self._handles.append((handle, parameter if bare else None))

    def _see(self, name: str, gradient: torch.Tensor) -> None:
        gradient = dense(gradient)
        # Gradients of several devices come from several threads.
        with self._lock:
            count = self._seen.get(name, 0)
            self._seen[name] = count + 1
            if count:
                name = f"{name}#{count}"
            self.details[name] = (str(gradient.dtype).removeprefix("torch."), tuple(gradient.shape))
            self._collector.add(gradient)
            # A sum is a tenth of what isfinite().all() costs, and NaN and infinities go through it.
            self._sums.append(gradient.sum(dtype=_WIDE.get(gradient.dtype)))
        if name in self._keep:
            self.kept[name] = gradient.clone()

    def take(self) -> dict[str, Pair]:
        """Removes the hooks; name -> (S0, S1) fingerprint of each gradient."""
        self.drop()
        return dict(zip(self.details, _pairs(self._collector.table())))

    def finite(self) -> bool:
        """Whether all gradients were finite; waits for the device."""
        return all(bool(torch.isfinite(value)) for value in self._sums)

    def drop(self) -> None:
        """Removes the hooks, leaving the parameters as they were."""
        for handle, bare in self._handles:
            handle.remove()
            if bare is not None and not bare._backward_hooks:
                bare._backward_hooks = None
        self._handles.clear()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Detached; a sparse one as its values laid out, since the order of its entries means nothing."""
    tensor = tensor.detach()
    return tensor.coalesce().to_dense() if tensor.is_sparse else tensor


def _pairs(rows: torch.Tensor) -> list[Pair]:
    return [(first, second) for first, second in rows.tolist()]


def weights_digests(guards: list) -> dict[str, list[int]]:
    """Guard's name -> digest of all its parameters, as they are now."""
    tensors = [parameter.detach() for guard in guards for parameter in guard.parameters.values()]
    rows, digests, at = fingerprints(tensors), {}, 0
    for guard in guards:
        end = at + len(guard.parameters)
        digests[guard.name] = list(digest(rows[at:end], [metadata(tensor) for tensor in tensors[at:end]]))
        at = end
    return digests


def values_table(prefix: str, tensors: list[torch.Tensor]) -> dict[str, Pair]:
    """Fingerprints of plain values (losses, outputs) under "prefix", "prefix1", ..."""
    pairs = _pairs(fingerprints([dense(tensor) for tensor in tensors])) if tensors else []
    return {prefix if i == 0 else f"{prefix}{i}": pair for i, pair in enumerate(pairs)}
