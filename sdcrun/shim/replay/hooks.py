"""The user's module hooks around one micro-batch: which of them act on the computation and which only look on.

A hook that returned nothing in the recorded pass is an onlooker; it must not run a second time in a replay, where its
side effects would be seen. Tensors that an onlooker was shown may be used by the script later (features for a
distillation loss): the recorder learns them, and the replay shows the same tensors of its own at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules import module as torch_module

from sdcrun.shim.microbatch import tensors_of
from sdcrun.shim.replay.state import kept_in_replay
from sdcrun.shim.replay.tree import Tree

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ABOUT_THEM = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_GLOBAL = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip

Place = tuple[str, str, int]


def _registries(tree: Tree) -> Iterator[tuple[str, str, dict]]:
    """(submodule's name, registry's name, registry) of every registry that holds a hook, global ones included."""
    for kind in _GLOBAL:
        registry = getattr(torch_module, kind, None)
        if registry:
            yield "<global>", kind, registry
    for name, part in tree.parts:
        held = vars(part)
        for kind in _OF_MODULES:
            registry = held.get(kind)
            if registry:
                yield name, kind, registry


def hooks_of(part: torch.nn.Module) -> list[Callable]:
    """The hooks that somebody put on this module alone."""
    held = vars(part)
    return [hook for kind in _OF_MODULES if held.get(kind) for hook in held[kind].values()]


def _from_torch(hook: Callable) -> bool:
    """Hooks of torch's own (weight norm, pruning) return nothing and are still part of the computation."""
    kind = getattr(hook, "__module__", None) or type(hook).__module__
    return str(kind).split(".")[0] == "torch" or type(hook).__module__.split(".")[0] == "torch"


def _user_hooks(tree: Tree) -> Iterator[tuple[Place, dict, int, Callable]]:
    """(place, registry, key, hook) of the user's hooks; positions count the user's only, so that ranks agree."""
    for name, kind, registry in _registries(tree):
        users = [(k, hook) for k, hook in registry.items() if not (_from_torch(hook) or kept_in_replay(hook))]
        for position, (key, hook) in enumerate(users):
            yield (name, kind, position), registry, key, hook


class HookWatch:
    """Wraps every hook in a `tree` of modules from construction until `stop`. `acting`: places of hooks that returned
    something; `shown`: is told the tensors that onlookers see, while set."""

    def __init__(self, tree: Tree) -> None:
        self.acting: set[Place] = set()
        self.shown: Callable[[torch.Tensor], None] | None = None
        self._undo: list[tuple[dict, int, Callable, Callable]] = []
        for place, registry, key, hook in _user_hooks(tree):
            registry[key] = wrapper = self._wrap(hook, place)
            self._undo.append((registry, key, hook, wrapper))

    def _wrap(self, hook: Callable, place: Place) -> Callable:
        forward = "backward" not in place[1]

        def watched(*args, **kwargs):
            result = hook(*args, **kwargs)
            if result is not None:
                self.acting.add(place)
            elif forward and self.shown is not None:
                for tensor in tensors_of((args[1:], kwargs)):
                    self.shown(tensor)
            return result

        return watched

    def stop(self) -> None:
        """Puts the hooks back, but for those that were removed or replaced meanwhile."""
        for registry, key, hook, wrapper in reversed(self._undo):
            if registry.get(key) is wrapper:
                registry[key] = hook
        self._undo.clear()


@contextmanager
def preserved(tree: Tree) -> Iterator[None]:
    """Behind the block the hooks on the modules of `tree` are those from before: a forward may register its own."""
    parts = [vars(part) for _, part in tree.parts]
    registries = [held[kind] for held in parts for kind in (*_OF_MODULES, *_ABOUT_THEM) if held.get(kind) is not None]
    before = [tuple(registry.items()) if registry else () for registry in registries]
    try:
        yield
    finally:
        for registry, kept in zip(registries, before):
            if (registry or kept) and registry.keys() != dict(kept).keys():
                registry.clear()
                registry.update(kept)


@contextmanager
def onlookers_silenced(
    tree: Tree, acting: set[Place], shown: Callable[[torch.Tensor], None]
) -> Iterator[None]:
    """Inside the block hooks in a `tree` of modules that are not in `acting` only report the tensors they are shown."""
    undo = []
    for place, registry, key, hook in list(_user_hooks(tree)):
        if place in acting:
            continue
        forward = "backward" not in place[1]

        def silent(*args, _forward=forward, **kwargs):
            if _forward:
                for tensor in tensors_of((args[1:], kwargs)):
                    shown(tensor)

        registry[key] = silent
        undo.append((registry, key, hook))
    try:
        yield
    finally:
        for registry, key, hook in undo:
            registry[key] = hook
