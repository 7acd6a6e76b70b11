"""What a module holds besides parameters and buffers: Python attributes that a forward reads or changes.

Plain attributes (numbers, texts, lists of them) and plain tensors travel with a micro-batch, so that the replayer
starts from the owner's; anything else that a forward changes makes the micro-batch unfit for a replay.
"""

from __future__ import annotations

import collections
import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sdcrun.shim.microbatch import dumps, tensors_of

_PLAIN = (int, float, str, bool, type(None))
_CONTAINERS = (dict, list, tuple, set, collections.deque, bytearray)
REGISTRIES = frozenset(vars(torch.nn.Module()))
_NAMED = ("_buffers", "_modules", "_parameters")
LONGEST_LIST = 10_000

Key = tuple[str, str]


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    return (
        type(value) in (list, tuple) and len(value) <= LONGEST_LIST and all(isinstance(item, _PLAIN) for item in value)
    )


def _attributes(module: torch.nn.Module) -> Iterator[tuple[Key, Any]]:
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute == "training" or attribute not in REGISTRIES:
                yield (name, attribute), value


def state_before(module: torch.nn.Module) -> tuple[dict[Key, Any], dict[Key, torch.Tensor], dict[Key, bytes]]:
    """What a forward may read, by (submodule's name, attribute): plain values (lists copied), tensors that are neither
    parameters nor buffers (a recurrent state, say), and digests of containers (see `opaque_digests`)."""
    plain: dict[Key, Any] = {}
    tensors: dict[Key, torch.Tensor] = {}
    digests: dict[Key, bytes] = {}
    for key, value in _attributes(module):
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                tensors[key] = value
        elif _is_plain(value):
            plain[key] = list(value) if type(value) is list else value
        elif isinstance(value, _CONTAINERS) and (digest := _digest(value)) is not None:
            digests[key] = digest
    return plain, tensors, digests


def by_products(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors with a gradient that the forward left in attributes or containers (auxiliary losses), in fixed order."""
    found, seen = [], set()
    for _, value in _attributes(module):
        if isinstance(value, torch.Tensor) or (isinstance(value, (dict, list, tuple)) and value):
            for tensor in tensors_of(value):
                if tensor.grad_fn is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found.append(tensor)
    return found


def opaque_digests(module: torch.nn.Module) -> dict[Key, bytes]:
    """Digest of every container attribute that is not plain. A tensor in it counts by identity and version; tensors
    that hang on a graph are products of a forward, which the next one makes anew, and do not count."""
    return {
        key: digest
        for key, value in _attributes(module)
        if isinstance(value, _CONTAINERS) and not _is_plain(value) and (digest := _digest(value)) is not None
    }


def _digest(value: Any) -> bytes | None:
    if len(value) > LONGEST_LIST:
        return None
    try:
        content = dumps(_without_products(value), lambda tensor: (id(tensor), tensor._version))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return None
    return hashlib.blake2b(content, digest_size=16).digest()


def _without_products(value: Any) -> Any:
    def product(item: Any) -> bool:
        return isinstance(item, torch.Tensor) and item.grad_fn is not None

    if isinstance(value, dict):
        return {key: item for key, item in value.items() if not product(item)}
    if isinstance(value, (list, tuple)):
        return [item for item in value if not product(item)]
    return value


def assign(module: torch.nn.Module, values: dict[Key, Any]) -> None:
    """Sets attributes that differ; a list keeps its identity."""
    parts = dict(module.named_modules())
    for (name, attribute), value in values.items():
        held = vars(parts[name])
        current = held.get(attribute)
        if isinstance(value, torch.Tensor):
            held[attribute] = value
        elif type(current) is not type(value) or current != value:
            if type(current) is list and type(value) is list:
                current[:] = value
            else:
                held[attribute] = value


def silence_loggers(module: torch.nn.Module) -> None:
    """Lightning's modules log into their trainer, outside of the module: a replay must not. To be used where attributes
    are put back afterwards."""
    for part in module.modules():
        if any(base.__name__ == "LightningModule" for base in type(part).__mro__):
            for name in ("log", "log_dict", "print"):
                vars(part)[name] = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for a logging method."""


@contextmanager
def preserved(module: torch.nn.Module) -> Iterator[None]:
    """Puts every attribute of every submodule back as it was: rebound, added, deleted ones, and lists' contents."""
    before = []
    for part in module.modules():
        own = {key: value for key, value in vars(part).items() if key == "training" or key not in REGISTRIES}
        contents = {key: list(value) for key, value in own.items() if type(value) is list}
        before.append((part, own, contents, [set(vars(part)[name]) for name in _NAMED]))
    try:
        yield
    finally:
        for part, own, contents, names in before:
            held = vars(part)
            for name, known in zip(_NAMED, names):
                for key in [key for key in held[name] if key not in known]:
                    del held[name][key]
            for key in [key for key in held if key not in own and key not in REGISTRIES]:
                del held[key]
            for key, value in own.items():
                if key not in held or held[key] is not value:
                    held[key] = value
            for key, content in contents.items():
                if len(own[key]) != len(content) or any(a is not b for a, b in zip(own[key], content)):
                    own[key][:] = content
