"""What a module holds besides parameters and buffers: Python attributes that a forward reads or changes.

Plain attributes (numbers, texts, containers of them) and plain tensors travel with a micro-batch, so that the replayer
starts from the owner's; anything else that a forward changes makes the micro-batch unfit for a replay.
"""

from __future__ import annotations

import collections
import copy
import hashlib
import operator
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sdcrun.shim.microbatch import dumps, tensors_of
from sdcrun.shim.replay.muted import stand_in
from sdcrun.shim.replay.tree import REGISTRIES, Tree, registry_of

_PLAIN = (int, float, str, bool, type(None))
_CONTAINERS = (dict, list, tuple, set, collections.deque, bytearray)
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_IN_PLACE = (*_MAPPINGS, list, set, collections.deque)
_NAMED = ("_buffers", "_modules", "_parameters")
LONGEST_LIST = 10_000
DEEPEST = 4

_DEVICE = re.compile(r"(cuda|xpu|npu|hpu|mps)(:[0-9]+)?")

Key = tuple[str, str]


def _plain_copy(value: Any, depth: int = 0) -> Any:
    """A copy that can be pickled and that no later change reaches, made of dicts, lists, tuples and sets; raises
    ValueError for what is not plain."""
    if isinstance(value, _PLAIN):
        return value
    kind = type(value)
    if kind not in (*_IN_PLACE, tuple) or len(value) > LONGEST_LIST or depth == DEEPEST:
        raise ValueError("not plain")
    if kind in _MAPPINGS:
        return {_plain_copy(key, depth + 1): _plain_copy(item, depth + 1) for key, item in value.items()}
    copies = [_plain_copy(item, depth + 1) for item in value]
    if kind is tuple and any(type(item) in _IN_PLACE for item in value):
        raise ValueError("a tuple of things that change")
    return copies if kind is collections.deque else kind(copies)


def _is_plain(value: Any) -> bool:
    try:
        _plain_copy(value)
    except ValueError:
        return False
    return True


def state_before(tree: Tree) -> tuple[dict[Key, Any], dict[Key, torch.Tensor], dict[Key, bytes]]:
    """What a forward may read, by (submodule's name, attribute): plain values (containers copied), tensors that are
    neither parameters nor buffers (a recurrent state, say), and digests of containers (see `opaque_digests`)."""
    plain: dict[Key, Any] = {}
    tensors: dict[Key, torch.Tensor] = {}
    digests: dict[Key, bytes] = {}
    for name, part in tree.parts:
        # A scripted module keeps it elsewhere.
        if "training" in vars(part):
            plain[name, "training"] = part.training
    for name, attribute, value in tree.attributes:
        key = name, attribute
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                tensors[key] = value
            continue
        try:
            plain[key] = _plain_copy(value)
        except ValueError:
            if isinstance(value, _CONTAINERS) and (digest := _digest(value)) is not None:
                digests[key] = digest
    return plain, tensors, digests


def by_products(tree: Tree) -> list[torch.Tensor]:
    """Tensors with a gradient that the forward left in attributes or containers (auxiliary losses), in fixed order."""
    found, seen = [], set()
    for _, _, value in tree.attributes:
        if isinstance(value, torch.Tensor) or (isinstance(value, (dict, list, tuple)) and value):
            for tensor in tensors_of(value):
                if tensor.grad_fn is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found.append(tensor)
    return found


def opaque_digests(tree: Tree) -> dict[Key, bytes]:
    """Digest of every container attribute that is not plain. A tensor in it counts by identity and version; tensors
    that hang on a graph are products of a forward, which the next one makes anew, and do not count."""
    return {
        (name, attribute): digest
        for name, attribute, value in tree.attributes
        if isinstance(value, _CONTAINERS) and not _is_plain(value) and (digest := _digest(value)) is not None
    }


def _digest(value: Any) -> bytes | None:
    if len(value) > LONGEST_LIST:
        return None
    try:
        content = dumps(_without_products(value), lambda tensor: (id(tensor), tensor._version))
    except Exception:
        # Whatever is in it may have its own way of saying that it cannot be pickled.
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


def assign(tree: Tree, values: dict[Key, Any]) -> None:
    """Sets attributes that differ; a container keeps its identity, and the name of a device stays this rank's."""
    parts = dict(tree.parts)
    for (name, attribute), value in values.items():
        held = vars(parts[name])
        current = held.get(attribute)
        if isinstance(value, torch.Tensor):
            held[attribute] = value
        elif isinstance(value, (dict, list, set)):
            # The micro-batch may be computed more than once.
            held[attribute] = _filled(current, copy.deepcopy(value))
        elif is_device(value) and is_device(current):
            continue
        elif type(current) is not type(value) or current != value:
            held[attribute] = value


def _filled(current: Any, value: Any) -> Any:
    """`value`, in the containers that are there already where they fit."""
    if type(current) in _MAPPINGS and isinstance(value, dict):
        before = dict(current)
        current.clear()
        for key, item in value.items():
            current[key] = _filled(before.get(key), item)
        return current
    if type(current) in (list, collections.deque) and isinstance(value, list):
        before = list(current) + [None] * len(value)
        current.clear()
        current.extend(map(_filled, before, value))
        return current
    if type(current) is set and isinstance(value, set):
        current.clear()
        current.update(value)
        return current
    return current if is_device(value) and is_device(current) else value


def is_device(value: Any) -> bool:
    """A text like "cuda:1"."""
    return isinstance(value, str) and _DEVICE.fullmatch(value) is not None


def silence_loggers(tree: Tree) -> None:
    """Lightning's modules log into their trainer, outside of the module: a replay must not. To be used where attributes
    are put back afterwards."""
    for _, part in tree.parts:
        if any(base.__name__ == "LightningModule" for base in type(part).__mro__):
            for name in ("log", "log_dict", "print"):
                vars(part)[name] = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for a logging method."""


@contextmanager
def preserved(tree: Tree) -> Iterator[None]:
    """Puts every attribute of every submodule back as it was: rebound, added, deleted ones, and lists' contents. Inside
    the block files are such as a replay does not write into."""
    before, parts = [], dict(tree.parts)
    for part in parts.values():
        held = vars(part)
        lists = [(value, list(value)) for value in held.values() if type(value) is list]
        named = [registry_of(part, name) for name in _NAMED]
        before.append((held, dict(held), lists, [(registry, tuple(registry.keys())) for registry in named]))
    try:
        for name, attribute, value in tree.attributes:
            if not isinstance(value, _PLAIN) and (instead := stand_in(value)) is not None:
                vars(parts[name])[attribute] = instead
        yield
    finally:
        for held, own, lists, named in before:
            for registry, known in named:
                if tuple(registry.keys()) != known:
                    for key in [key for key in registry if key not in known]:
                        del registry[key]
            if held.keys() != own.keys() or not _same(held.values(), own.values()):
                for key in [key for key in held if key not in own and key not in REGISTRIES]:
                    del held[key]
                for key, value in own.items():
                    if (key == "training" or key not in REGISTRIES) and held.get(key, _nothing) is not value:
                        held[key] = value
            for value, content in lists:
                if len(value) != len(content) or not _same(value, content):
                    value[:] = content


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Each of them is the very thing at the same place of the other."""
    return all(map(operator.is_, one, other))
