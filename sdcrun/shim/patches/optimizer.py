"""The gate at `Optimizer.step`, and at `GradScaler.step`, which with an inf on one rank alone never calls it there.

Every concrete optimizer class's `step` passes through `Optimizer.profile_hook_step` when its first instance is made:
also subclasses that override it, scheduler wrappers, fused and compiled ones. Patching instances or step pre-hooks
fails for schedulers, closures and classes that do not call super().step().
"""

from __future__ import annotations

import functools

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim.optimizer import Optimizer

from sdcrun.shim import gate
from sdcrun.shim.guard import RUN, SKIP
from sdcrun.shim.replay.state import replaying

_originals: dict[str, object] = {}


def _once(closure, first):
    """A closure that gives `first` at its first call: the gate has evaluated it already."""
    pending = [first]

    def evaluate():
        return pending.pop() if pending else closure()

    return evaluate


def install(runtime) -> None:
    """Lays the patches; `undo()` takes them off."""
    original_profile = Optimizer.profile_hook_step
    original_scaler = GradScaler.step
    _originals.update(profile=original_profile, scaler=original_scaler)
    decided: dict[int, str] = {}

    decide = torch._disable_dynamo(gate.quiet(lambda optimizer, amp=None: gate.decide(runtime, optimizer, amp)))
    clocks_of = torch._disable_dynamo(gate.quiet(lambda optimizer: gate.clocks_of(runtime, optimizer)))
    moment = torch._disable_dynamo(gate.quiet(gate.moment))
    after = torch._disable_dynamo(gate.quiet(lambda optimizer: gate.after_step(runtime, optimizer)))

    def gated(call, optimizer, args, kwargs):
        """One outermost step: the gate, the step itself unless all ranks skip, what follows it."""
        closure = args[0] if args else kwargs.get("closure")
        loss = None
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
            if args:
                args = (_once(closure, loss), *args[1:])
            else:
                kwargs = {**kwargs, "closure": _once(closure, loss)}
        decision = decided.pop(id(optimizer), None) or decide(optimizer)
        if decision == SKIP:
            return loss
        clocks = clocks_of(optimizer) or ()
        for clock in clocks:
            clock.begin()
        runtime.inside_step = True
        try:
            result = call(optimizer, *args, **kwargs)
        finally:
            runtime.inside_step = False
            for clock in clocks:
                clock.written()
        try:
            after(optimizer)
        finally:
            for clock in clocks:
                clock.end(moment(optimizer))
        return result

    def profile_hook_step(func):
        call = original_profile(func)

        @functools.wraps(call)
        def step(*args, **kwargs):
            if runtime.inside_step or not args or not runtime.active or replaying():
                return call(*args, **kwargs)
            return gated(call, args[0], args[1:], kwargs)

        return step

    @functools.wraps(original_scaler)
    def scaler_step(self, optimizer, *args, **kwargs):
        if not self._enabled or not runtime.active or runtime.inside_step or "closure" in kwargs:
            return original_scaler(self, optimizer, *args, **kwargs)
        amp = look_at_overflow(self, optimizer)
        if amp is not None:
            decided[id(optimizer)] = decide(optimizer, amp) or RUN
        try:
            return original_scaler(self, optimizer, *args, **kwargs)
        finally:
            decided.pop(id(optimizer), None)

    @gate.quiet
    def look_at_overflow(scaler, optimizer):
        """What the scaler found, asked for now instead of inside its step: the same calls in the same order."""
        if not runtime.guards_of(optimizer):
            return None
        state = scaler._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            return None
        if state["stage"] is OptState.READY:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                scaler._check_inf_per_device(optimizer)
            else:
                scaler.unscale_(optimizer)
        found = list(state["found_inf_per_device"].values())
        return gate.AmpState(found) if found else None

    Optimizer.profile_hook_step = staticmethod(profile_hook_step)
    GradScaler.step = scaler_step


def undo() -> None:
    """Restores what `install` replaced; classes whose step was wrapped meanwhile stay wrapped."""
    Optimizer.profile_hook_step = staticmethod(_originals["profile"])
    GradScaler.step = _originals["scaler"]
