"""sdcrun's state for one DDP module in one rank: its parameters, its window, its buffers before the window."""

from __future__ import annotations

import weakref

import torch

RUN, SKIP = "run", "skip"
ELSEWHERE = "the weights change outside torch.optim.Optimizer.step: by a duck-typed optimizer or in the backward"

# A buffer's bits are compared in the first windows and then once in so many.
LOOKS, LOOK_EVERY = 4, 64


class Guard:
    """One guarded DDP module.

    `parameters`: name -> Parameter as `named_parameters()` of the inner module gives them, tied ones once, those that
    DDP ignores left out. `synced`: a bucket of this window has been reduced. `decision`: RUN or SKIP once the gate
    has decided the window that is closed now, None while a window is open.
    """

    def __init__(self, ddp, group, name: str) -> None:
        self._ddp = weakref.ref(ddp)
        self.module, self.group, self.name = ddp.module, group, name
        ignored = set(getattr(ddp, "parameters_to_ignore", ()) or ())
        self.ignores = any(n in ignored for n, _ in ddp.module.named_parameters())
        self.parameters = {n: p for n, p in ddp.module.named_parameters() if n not in ignored}
        self.names = {id(p): n for n, p in self.parameters.items()}
        self._ignored = ignored
        self._homes: dict[str, tuple[dict, str]] = {}
        self._find_buffers()
        self.window_open = False
        self.synced = False
        self.decision: str | None = None
        # What check 1 keeps until the gate; see checks/nonfinite.py.
        self.reductions, self.tainted = 0, False
        self.local_sums: list[tuple[int, torch.Tensor, list[torch.Tensor]]] = []
        self.reduced_sums: list[tuple[int, torch.Tensor]] = []
        self.local_bad: list[dict] = []
        self.saved_buffers: dict[str, torch.Tensor] = {}
        self.moving: set[str] = {
            f"{path}.{name}" if path else name
            for path, module in ddp.module.named_modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            for name, _ in module.named_buffers(recurse=False)
        }
        self._versions: dict[str, int] = {}
        self._windows = 0
        self.buffers_synced = False
        self.ungated = 0
        self.gated = False
        self.off_reason: str | None = None
        self.token = None
        self.sample: tuple[int, float] | None = None

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers by name, those that DDP ignores left out: what the module holds now, since a forward may well
        put a new tensor in the place of one (`self.center = ...`)."""
        found = {name: home.get(leaf) for name, (home, leaf) in self._homes.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def _find_buffers(self) -> None:
        self._homes = {}
        for name, _ in self.module.named_buffers():
            if name not in self._ignored:
                path, _, leaf = name.rpartition(".")
                self._homes[name] = self.module.get_submodule(path)._buffers, leaf

    @property
    def ddp(self):
        """The DDP module, or None when it is gone."""
        return self._ddp()

    def qualified(self, tensor: str) -> str:
        """A tensor's name in events: with the module's name in front where the group guards several."""
        return f"{self.name}.{tensor}" if self.name else tensor

    def describe(self) -> dict:
        """This module for the event `guarded`."""
        tensors = list(self.parameters.values())
        return {
            "name": self.name,
            "parameters": sum(p.numel() for p in tensors),
            "tensors": len(tensors),
            "bytes": sum(p.numel() * p.element_size() for p in tensors),
        }

    def steps_in_backward(self) -> bool:
        """Whether torch's apply_optimizer_in_backward has been at these parameters; it must come before the first
        forward."""
        return any(hasattr(parameter, "_in_backward_optimizers") for parameter in self.parameters.values())

    def open_window(self) -> None:
        """The first training forward after a decision: remember the buffers as they are now."""
        self.window_open, self.decision, self.synced = True, None, False
        self.save_buffers()

    def ends(self) -> None:
        """The module or the process ends: was no gate ever reached although the weights have moved?"""
        if self.ungated >= 2 and not self.gated:
            self.group.runtime.unguarded(ELSEWHERE)

    def close_window(self, decision: str) -> None:
        """The gate has decided; everything seen in the window is dropped."""
        self.window_open, self.decision, self.synced = False, decision, False
        # What was captured names this guard: kept, the two would outlive the script's module until the next collection.
        self.token = None
        self.ungated, self.gated = 0, True
        self.local_sums.clear()
        self.reduced_sums.clear()
        self.local_bad.clear()
        self.reductions, self.tainted = 0, False

    @torch.no_grad()
    def save_buffers(self) -> None:
        """Copies the buffers that move. Version counters do not tell: BatchNorm's kernels and DDP's sync write past
        them. A buffer counts as still until its bits are seen to change, which is looked at now and then."""
        looking = self._windows < LOOKS or self._windows % LOOK_EVERY == 0
        self._windows += 1
        kept, current = [], []
        if looking:
            self._find_buffers()
        buffers = self.buffers
        for name, buffer in buffers.items():
            saved = self.saved_buffers.get(name)
            if saved is None or saved.shape != buffer.shape or saved.dtype != buffer.dtype:
                self.saved_buffers[name] = buffer.detach().clone()
                continue
            if name not in self.moving and (
                self._versions.get(name) != buffer._version or (looking and not torch.equal(saved, buffer))
            ):
                self.moving.add(name)
            if name in self.moving:
                kept.append(saved)
                current.append(buffer)
        if kept:
            torch._foreach_copy_(kept, current)
        self._versions = {name: buffer._version for name, buffer in buffers.items()}

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Puts the buffers back as they were before the window: one NaN batch would leave BatchNorm NaN for ever."""
        for name, buffer in self.buffers.items():
            saved = self.saved_buffers.get(name)
            if saved is None:
                continue
            if saved.shape != buffer.shape or saved.dtype != buffer.dtype:
                home, leaf = self._homes[name]
                home[leaf] = saved.clone()
            elif name in self.moving or not torch.equal(saved, buffer):
                buffer.copy_(saved)

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Part of a skip: no later use of these gradients can move a weight."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()
