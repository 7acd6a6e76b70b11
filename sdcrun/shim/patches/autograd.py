"""torch.autograd.backward and torch.autograd.grad, where a recording learns what belongs to which micro-batch.

`Tensor.backward` looks `torch.autograd.backward` up at each call, so one patch covers both. `observers` are told of the
outermost calls only: reentrant checkpoints call backward from within, and a replay's own calls are nobody's business.
What is outermost the engine knows: it makes nested calls on threads of its own as well, and scripts have theirs.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import torch
from torch.utils import _python_dispatch as dispatch

from sdcrun.shim.replay.state import replaying


class Observer(Protocol):
    """Somebody who wants to stand around a backward; must call `run` exactly once and return its result."""

    def around_backward(self, run, tensors, grad_tensors, options: dict) -> Any: ...


class CallObserver(Protocol):
    """Somebody who stands around torch.autograd.grad and a custom Function's apply; must call the original once."""

    def gradient(self, run, outputs, inputs, args: tuple, kwargs: dict) -> Any: ...

    def function(self, run, cls: type, args: tuple, kwargs: dict) -> Any: ...


observers: list[Observer] = []
_watcher: CallObserver | None = None
_watched_thread = 0
_last_root: torch.Tensor | None = None
_originals: dict[str, Any] = {}


def backward_now(*args, **kwargs) -> None:
    """torch's own backward, whether or not the patch is in place."""
    _originals.get("backward", torch.autograd.backward)(*args, **kwargs)


def grad_now(*args, **kwargs) -> Any:
    """torch's own grad, whether or not it is watched."""
    return _originals.get("grad", torch.autograd.grad)(*args, **kwargs)


def _inside_backward() -> bool:
    """Whether the engine calls us: from a hook, or from a custom Function's backward. True on its own threads, too."""
    return torch._C._current_graph_task_id() != -1


def _remember(roots: Any) -> None:
    global _last_root
    # A dispatch mode of the script's own would see the detach.
    number = type(roots) is torch.Tensor and roots.numel() == 1 and dispatch._len_torch_dispatch_stack() == 0
    _last_root = roots.detach() if number else None


def last_loss() -> torch.Tensor | None:
    """The number that the last outermost backward began with, cut off the graph, if that was one number: what a step
    returns that all ranks skip without calling the closure which it was given."""
    return _last_root


def _watching() -> bool:
    """Whether the watcher wants this call of grad or apply: it follows one thread, where that runs no backward."""
    if _watcher is None or torch.compiler.is_compiling() or replaying():
        return False
    return threading.get_ident() == _watched_thread and not _inside_backward()


def install(runtime=None) -> None:
    """Patches backward and Function.apply, once. With a runtime, the comm hook's side is told of each outermost
    backward first."""
    if "backward" in _originals:
        return
    _originals["backward"] = original = torch.autograd.backward
    if runtime is not None:
        from sdcrun.shim.patches.ddp import before_backward
    else:
        before_backward = None

    @functools.wraps(original)
    def backward(
        tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None
    ):
        options = {
            "retain_graph": retain_graph, "create_graph": create_graph,
            "grad_variables": grad_variables, "inputs": inputs,
        }  # fmt: skip
        if replaying() or _inside_backward():
            return original(tensors, grad_tensors, **options)
        if before_backward is not None:
            before_backward()
        return _around(list(observers), original, tensors, grad_tensors, options)

    torch.autograd.backward = torch._disable_dynamo(backward)
    _tell_torchscript(torch.autograd.backward, "aten::backward")
    _patch_apply()


def _patch_apply() -> None:
    # For good: a loss like `Focal.apply(model(x))` looks `apply` up before the forward in which recording begins.
    _originals["apply"] = original = torch.autograd.Function.__dict__["apply"]

    @functools.wraps(original.__func__)
    def apply(cls, *args, **kwargs):
        if not _watching():
            return original.__func__(cls, *args, **kwargs)
        return _watcher.function(original.__func__, cls, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)


def watch(watcher: CallObserver) -> None:
    """Hands this thread's calls of torch.autograd.grad and Function.apply to `watcher` until `unwatch`: the stretch
    between a forward and its backward in an audit step. Only then is grad patched, because compiled functions may trace
    the original."""
    global _watcher, _watched_thread
    unwatch()
    _watcher, _watched_thread = watcher, threading.get_ident()
    _originals["grad"] = original = torch.autograd.grad

    @functools.wraps(original)
    def grad(outputs, inputs, *args, **kwargs):
        if not _watching():
            return original(outputs, inputs, *args, **kwargs)
        return _watcher.gradient(original, outputs, inputs, args, kwargs)

    torch.autograd.grad = grad


def unwatch() -> None:
    """Ends `watch`."""
    global _watcher
    _watcher = None
    if "grad" in _originals:
        torch.autograd.grad = _originals.pop("grad")


def _around(around: list[Observer], run, tensors, grad_tensors, options: dict) -> Any:
    if not around:
        _remember(tensors)
        return run(tensors, grad_tensors, **options)

    def inner(tensors, grad_tensors, options):
        return _around(around[:-1], run, tensors, grad_tensors, options)

    return around[-1].around_backward(inner, tensors, grad_tensors, options)


def _tell_torchscript(function: Any, name: str) -> None:
    """TorchScript finds builtin functions by identity; the replaced one must be known to it too."""
    builtins = torch.jit._builtins
    if builtins._builtin_table is None:
        builtins._builtin_ops.append((function, name))
    else:
        builtins._builtin_table[id(function)] = name


def undo() -> None:
    """Restores what `install` and `watch` replaced."""
    unwatch()
    if "backward" in _originals:
        torch.autograd.backward = _originals.pop("backward")
        torch.autograd.Function.apply = _originals.pop("apply")
