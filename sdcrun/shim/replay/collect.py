"""Fingerprints of per-parameter gradients, taken while a backward makes them.

A hook on the parameter sees the gradient of this backward alone, before it is accumulated into `.grad`. It runs before
the user's own hooks on that parameter, so that both sides of a comparison see what autograd computed.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from sdcrun.shim.fingerprint import Collector, digest, fingerprints, metadata
from sdcrun.shim.replay.state import puts_fault

Pair = tuple[int, int]

SMALL_BYTES = 64 << 10
HELD_BYTES = 1 << 20


class GradientTable:
    """Collects from `watch` until `take`. A parameter that gets several gradients in one backward (nested backwards)
    has names with "#1", "#2" behind the first.

    `details`: name -> (dtype, shape), in the order in which gradients appeared. `keep`: names whose gradients are kept
    whole in `kept`. `altered`: names whose gradients somebody changed in place before they were read. `others`: what
    `values` read, once `take` was called.

    Small gradients on the CPU are held, at most 1 MiB of them, and read together: in the middle of a backward each
    would cost several times as much. While one is held autograd copies it into `.grad` instead of handing it over, so
    that what happens to `.grad` does not reach it.
    """

    def __init__(self, keep: Iterable[str] = ()) -> None:
        self.details: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.altered: list[str] = []
        self.others: dict[str, Pair] = {}
        self._keep = frozenset(keep)
        self._collector = Collector()
        self._rows: list[str] = []
        # (name, gradient, its version); in the place of one that was read at once, its numbered name and None.
        self._held: list[tuple[str, torch.Tensor | None, int]] = []
        self._held_bytes = 0
        self._at_once: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._seen: dict[str, int] = {}
        self._watched: list[tuple[torch.nn.Parameter, tuple, bool]] = []
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def watch(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Hooks a parameter, in front of whatever hooks it has but those that put a fault in."""
        hooks, key = parameter._backward_hooks, (self, name)
        if hooks:
            # C++ walks the dict's own order and does not notice move_to_end().
            others = list(hooks.items())
            hooks.clear()
            hooks.update(item for item in others if puts_fault(item[1]))
            # A hook behind ours might change the gradient in place: such a gradient is read at once.
            hooks[key] = functools.partial(self._safely, self._read, name)
            hooks.update(item for item in others if not puts_fault(item[1]))
        else:
            nbytes = parameter.nbytes
            if nbytes <= SMALL_BYTES and parameter.device.type == "cpu" and name not in self._keep:
                hook = self._holding(name, nbytes)
            else:
                hook = functools.partial(self._safely, self._read, name)
            # What register_hook() does for a leaf, at a third of the price.
            if hooks is None:
                parameter._backward_hooks = OrderedDict({key: hook})
            else:
                hooks[key] = hook
        self._watched.append((parameter, key, hooks is None))

    def _holding(self, name: str, nbytes: int) -> Callable[[torch.Tensor], None]:
        held = self._held

        def hold(gradient: torch.Tensor) -> None:
            # Of other kinds the version does not tell every change.
            if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
                self._safely(self._read, name, gradient)
                return
            held.append((name, gradient, gradient._version))
            self._held_bytes += nbytes
            if self._held_bytes > HELD_BYTES:
                self._safely(self._read_held)

        return hold

    def _safely(self, part: Callable[..., None], *args: Any) -> None:
        """In the middle of a backward, which is the script's: trouble is kept for `take`."""
        # Gradients of several devices come from several threads.
        with self._lock:
            try:
                part(*args)
            except Exception as error:
                self._failure = self._failure or error

    def _read(self, name: str, gradient: torch.Tensor) -> None:
        name = self._numbered(name)
        gradient = dense(gradient)
        self._at_once[name] = _detail(gradient)
        self._held.append((name, None, 0))
        self._rows.append(name)
        self._collector.add(gradient, judge=True)
        if name in self._keep:
            self.kept[name] = gradient.clone()

    def _numbered(self, name: str) -> str:
        count = self._seen.get(name, 0)
        self._seen[name] = count + 1
        return f"{name}#{count}" if count else name

    def values(self, prefix: str, tensors: Iterable[torch.Tensor]) -> None:
        """Reads plain values (losses, outputs) as "prefix", "prefix1", ... of `others`."""
        with self._lock:
            for name, tensor in zip(_numbers(prefix), tensors):
                self._rows.append(name)
                self._collector.add(dense(tensor))

    def _read_held(self) -> None:
        gradients = []
        for name, gradient, version in self._held:
            if gradient is None:
                self.details[name] = self._at_once[name]
                continue
            name = self._numbered(name)
            if gradient._version != version:
                self.altered.append(name)
            gradients.append(gradient)
            self.details[name] = _detail(gradient)
            self._rows.append(name)
        self._held.clear()
        self._held_bytes = 0
        self._collector.extend(gradients, judge=True)

    def take(self) -> dict[str, Pair]:
        """Removes the hooks; name -> (S0, S1) fingerprint of each gradient, in the order in which they appeared. Raises
        what kept one from being read."""
        self.drop()
        if self._failure is not None:
            raise self._failure
        with self._lock:
            self._read_held()
            pairs = dict(zip(self._rows, _pairs(self._collector.table())))
        self.others = {name: pair for name, pair in pairs.items() if name not in self.details}
        return {name: pairs[name] for name in self.details}

    def finite(self) -> bool:
        """Whether all gradients that `take` gave were finite; waits for the device."""
        return self._collector.finite()

    def drop(self) -> None:
        """Removes the hooks, leaving the parameters as they were."""
        for parameter, key, bare in self._watched:
            hooks = parameter._backward_hooks
            if hooks:
                hooks.pop(key, None)
            if bare and not hooks:
                parameter._backward_hooks = None
        self._watched.clear()


def _detail(gradient: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return _dtype_name(gradient.dtype), tuple(gradient.shape)


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Detached; a sparse one as its values laid out, since the order of its entries means nothing."""
    tensor = tensor.detach()
    return tensor.coalesce().to_dense() if tensor.is_sparse else tensor


def _pairs(rows: torch.Tensor) -> list[Pair]:
    return [(first, second) for first, second in rows.tolist()]


def weights_rows(guards: list) -> torch.Tensor:
    """Fingerprints of all parameters as they are now, int64 [n, 2]."""
    return fingerprints([parameter.detach() for guard in guards for parameter in guard.parameters.values()])


def weights_digests(guards: list, rows: torch.Tensor) -> dict[str, list[int]]:
    """Guard's name -> digest of all its parameters, of which `rows` are the fingerprints."""
    digests, at = {}, 0
    for guard in guards:
        end = at + len(guard.parameters)
        digests[guard.name] = list(digest(rows[at:end], [metadata(tensor) for tensor in guard.parameters.values()]))
        at = end
    return digests


def values_table(prefix: str, tensors: list[torch.Tensor]) -> dict[str, Pair]:
    """Fingerprints of plain values under "prefix", "prefix1", ..."""
    pairs = _pairs(fingerprints([dense(tensor) for tensor in tensors])) if tensors else []
    return dict(zip(_numbers(prefix), pairs))


def _numbers(prefix: str) -> Iterator[str]:
    yield prefix
    for number in itertools.count(1):
        yield f"{prefix}{number}"
