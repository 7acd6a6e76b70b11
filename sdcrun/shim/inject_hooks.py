"""Ways into a computation: a value replaced under autograd, a tensor saved for backward, names of nested tensors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sdcrun.shim.inject_values import takes
from sdcrun.shim.replay.state import puts_fault


class Replace(torch.autograd.Function):
    """The wrong value in place of a tensor; gradients pass as if nothing had happened, as they do in hardware."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, wrong: list[torch.Tensor]) -> torch.Tensor:
        """`wrong` is wrapped in a list so that autograd does not take it for an input."""
        return wrong[0]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        """Identity."""
        return gradient, None


def replaced(tensor: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """`wrong` standing where `tensor` stood in the graph."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return Replace.apply(tensor, [wrong])
    return wrong


class ModuleHook:
    """A hook on a module that the compiler does not look into. Scripts copy and pickle their modules: in the copy it
    does nothing, and whoever loads it needs nothing of ours."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    @torch._disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return getattr, (contextlib.nullcontext(), "__exit__")


def marked(parameter: torch.Tensor) -> list[int]:
    """Keys of the marked hooks on a parameter."""
    return [key for key, hook in (parameter._backward_hooks or {}).items() if puts_fault(hook)]


def marked_first(parameter: torch.Tensor) -> None:
    """Puts the marked hooks in front of all others, so that whoever looks at the gradient sees the fault."""
    hooks, keys = parameter._backward_hooks, marked(parameter)
    if keys and list(hooks)[: len(keys)] != keys:
        # C++ walks the dict in its own order and does not notice move_to_end().
        items = [(key, hooks[key]) for key in keys] + [item for item in hooks.items() if item[0] not in keys]
        hooks.clear()
        hooks.update(items)


def matching(names, glob: str) -> list[str]:
    """Names that match; the root's empty name only where nothing else does or it is what was asked for."""
    found = [name for name in names if fnmatchcase(name, glob)]
    return [name for name in found if name] or found


def first_tensor(output: Any, kind: str) -> torch.Tensor | None:
    """The first floating tensor inside `output` (any registered nesting) that a fault of `kind` can hit."""
    return next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)
                 and (leaf.is_floating_point() or leaf.is_complex()) and takes(leaf, kind)), None)


def with_tensor(output: Any, tensor: torch.Tensor, other: torch.Tensor) -> Any:
    """`output` with `other` in place of `tensor`; containers are made anew."""
    return pytree.tree_map(lambda leaf: other if leaf is tensor else leaf, output)


def named_tensors(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, torch.Tensor]]:
    """(path of keys, tensor) for every tensor in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from named_tensors(item, (*path, number))


def with_path(value: Any, path: tuple, tensor: torch.Tensor) -> Any:
    """`value` with `tensor` at `path`; only the containers on the way are copied, the caller's stay as they are."""
    if not path:
        return tensor
    item = with_path(value[path[0]], path[1:], tensor)
    if isinstance(value, tuple):
        items = [*value[: path[0]], item, *value[path[0] + 1 :]]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    other = copy.copy(value)
    other[path[0]] = item
    return other


class Saving:
    """Around one call of a module: what it saves for backward passes through `pack`, and comes back through `unpack`.

    `hit(name of the fault's tensor)` is asked at the first floating tensor that is no parameter; if it answers with a
    function, that function makes the wrong copy when the backward fetches the tensor.
    """

    def __init__(self, kind: str, hit: Callable[[], Callable[[torch.Tensor], torch.Tensor] | None]) -> None:
        self.kind, self.hit, self.asked = kind, hit, False

    def push(self) -> None:
        """Starts; only the innermost pair of torch's saved-tensor hooks is used while it lasts."""
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def pop(self) -> None:
        """Ends."""
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def pack(self, tensor: torch.Tensor):
        """What autograd keeps: the tensor, or (the tensor, what makes it wrong)."""
        if (self.asked or isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point()
                or not takes(tensor, self.kind)):
            return tensor
        self.asked = True
        make_wrong = self.hit()
        return tensor if make_wrong is None else (tensor, make_wrong)

    def unpack(self, packed) -> torch.Tensor:
        """What the backward gets."""
        if isinstance(packed, tuple):
            tensor, make_wrong = packed
            return make_wrong(tensor)
        return packed
