"""Everything that training has changed, kept in memory and put back in place: weights, buffers, optimizer state, loss
scales, random generators. Only a campaign's launches use it.

What a scheduler sets anew in every step (learning rate, momentum, ...) is left alone: the script's own counter of steps
goes on, and its schedule with it.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import random
import sys
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from sdcrun.shim import fingerprint

SCHEDULED = frozenset(
    ("params", "lr", "initial_lr", "momentum", "betas", "weight_decay", "max_lr", "min_lr", "max_momentum",
     "base_momentum")
)  # fmt: skip


class CannotRewind(Exception):
    """The state cannot be put back; the text says why."""


class Snapshot:
    """The state of `group`'s modules and of all optimizers that update them, as it was when this was made."""

    def __init__(self, group) -> None:
        self.group = group
        self.scalers = [found for found in gc.get_objects() if type(found) is GradScaler and found.is_enabled()]
        self.kept = {name: kept(value) for name, value in self._parts().items()}
        self.random = _random()
        self.before = self.digest()

    def _parts(self) -> dict[str, Any]:
        """Live values by name; tensors inside are the ones that training works on."""
        parts: dict[str, Any] = {}
        for guard in self.group.guards:
            if guard.ddp is not None:
                parts[f"parameters of {guard.name or 'the module'}"] = dict(guard.module.named_parameters())
                parts[f"buffers of {guard.name or 'the module'}"] = dict(guard.module.named_buffers())
        for number, reference in enumerate(self.group.optimizers):
            optimizer = reference()
            if optimizer is not None:
                parts[f"optimizer {number}"] = _by_place(optimizer)
                parts[f"settings of optimizer {number}"] = [
                    {key: value for key, value in group.items() if key not in SCHEDULED}
                    for group in optimizer.param_groups
                ]
        for number, scaler in enumerate(self.scalers):
            parts[f"loss scale {number}"] = scaler.state_dict()
        return parts

    def digest(self) -> str:
        """One text for all bits of the live state, random generators left out."""
        tensors, rest = [], []
        for name, value in sorted(self._parts().items()):
            _leaves(value, name, tensors, rest)
        rows = fingerprint.fingerprints([tensor.detach() for _, tensor in tensors])
        metas = [fingerprint.metadata(tensor) for _, tensor in tensors]
        names = [name for name, _ in tensors]
        whole = repr((fingerprint.digest(rows, metas), names, rest)).encode()
        return hashlib.sha256(whole).hexdigest()[:32]

    @torch.no_grad()
    def put_back(self) -> str | None:
        """Restores everything in place; None when every bit is proven to be what it was, else why not."""
        now = self._parts()
        if now.keys() != self.kept.keys():
            return f"other modules or optimizers than before: {', '.join(sorted(now.keys() ^ self.kept.keys()))[:200]}"
        try:
            for name, value in self.kept.items():
                if name.startswith("optimizer "):
                    self._optimizer(int(name.split()[1]), value)
                elif name.startswith("settings of "):
                    self._settings(int(name.split()[-1]), value)
                elif name.startswith("loss scale"):
                    self.scalers[int(name.split()[-1])].load_state_dict(value)
                else:
                    back(now[name], value, name)
        except CannotRewind as error:
            return str(error)
        _set_random(self.random)
        return None if self.digest() == self.before else "the state's fingerprint is another one after the restore"

    def _optimizer(self, number: int, value: dict[str, Any]) -> None:
        optimizer = self.group.optimizers[number]()
        places = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(places):
            state = value.get(str(place))
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = back(optimizer.state.get(parameter, {}), state, f"optimizer {number}")

    def _settings(self, number: int, value: list[dict[str, Any]]) -> None:
        for group, settings in zip(self.group.optimizers[number]().param_groups, value, strict=True):
            for key in [key for key in group if key not in SCHEDULED and key not in settings]:
                del group[key]
            for key, setting in settings.items():
                group[key] = back(group.get(key), setting, f"setting {key}")


def _by_place(optimizer) -> dict[str, Any]:
    """The optimizer's state by the place of its parameter: parameters have no name in it."""
    places = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {str(place): optimizer.state[p] for place, p in enumerate(places) if p in optimizer.state}


def kept(value: Any) -> Any:
    """A copy that later changes do not reach."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def back(live: Any, value: Any, name: str) -> Any:
    """`value` (from `kept`) put into `live`, in place where that is possible; returns what stands there now.

    Raises CannotRewind where a tensor of a module is another one than it was.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(live, torch.Tensor) and (live.shape, live.dtype, live.device) == (
            value.shape, value.dtype, value.device
        ):  # fmt: skip
            # `data`: the script may hold a graph over these weights already, and the version counter would break it.
            live.data.copy_(value)
            return live
        if name.startswith(("parameters of", "buffers of")):
            raise CannotRewind(f"{name}: a tensor has another shape, type or device than before")
        return value.clone()
    if isinstance(value, dict):
        if not isinstance(live, dict):
            return {key: back(None, item, name) for key, item in value.items()}
        for key in [key for key in live if key not in value]:
            if name.startswith(("parameters of", "buffers of")):
                raise CannotRewind(f"{name}: {key} was not there before")
            del live[key]
        for key, item in value.items():
            live[key] = back(live.get(key), item, name)
        return live
    if isinstance(value, list):
        old = live if isinstance(live, (list, tuple)) and len(live) == len(value) else [None] * len(value)
        items = [back(one, item, name) for one, item in zip(old, value)]
        return tuple(items) if isinstance(live, tuple) else items
    return copy.deepcopy(value) if isinstance(value, (set, bytearray)) else value


def _leaves(value: Any, name: str, tensors: list, rest: list) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append((name, value))
    elif isinstance(value, dict):
        for key, item in value.items():
            _leaves(item, f"{name}.{key}", tensors, rest)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            _leaves(item, f"{name}.{place}", tensors, rest)
    elif isinstance(value, (int, float, str, bool, type(None))):
        rest.append((name, repr(value)))


def _random() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if numpy is not None else None,
    }


def _set_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
