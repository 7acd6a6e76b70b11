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
from sdcrun.shim.patches import autograd
from sdcrun.shim.replay.state import replaying

_originals: dict[str, object] = {}


class _Withheld(BaseException):
    """Leaves an optimizer's step after its closure, because all ranks skip; `except Exception` does not stop it."""


def _once(closure, first):
    """A closure that gives `first` at its first call: the gate has evaluated it already."""
    pending = [first]

    def evaluate():
        return pending.pop() if pending else closure()

    return evaluate


def _evaluates_first(optimizer) -> bool:
    """torch's own optimizers begin with their closure; of others (SAM: perturb, then evaluate) nothing is known."""
    return str(getattr(type(optimizer).step, "__module__", "")).startswith("torch.optim")


def _places(optimizer) -> list[tuple[int, int]]:
    """Where the weights lie and how often they were changed."""
    return [(p._version, p.data_ptr()) for group in optimizer.param_groups for p in group["params"]]


def install(runtime) -> None:
    """Lays the patches; `undo()` takes them off."""
    original_profile = Optimizer.profile_hook_step
    original_scaler = GradScaler.step
    _originals.update(profile=original_profile, scaler=original_scaler)
    decided: dict[int, str] = {}

    ready = torch._disable_dynamo(gate.quiet(lambda optimizer: gate.ready(runtime, optimizer)))
    decide = torch._disable_dynamo(gate.quiet(lambda optimizer, amp=None: gate.decide(runtime, optimizer, amp)))
    clocks_of = torch._disable_dynamo(gate.quiet(lambda optimizer: gate.clocks_of(runtime, optimizer)))
    moment = torch._disable_dynamo(gate.quiet(gate.moment))
    after = torch._disable_dynamo(gate.quiet(lambda optimizer: gate.after_step(runtime, optimizer)))

    def gated(call, optimizer, args, kwargs):
        """One outermost step: the gate, the step itself unless all ranks skip, what follows it."""
        closure = args[0] if args else kwargs.get("closure")
        loss, decision = None, decided.pop(id(optimizer), None)
        if callable(closure):
            if _evaluates_first(optimizer):
                with torch.enable_grad():
                    loss = closure()
                closure = _once(closure, loss)
            elif not ready(optimizer):
                closure, decision = gate_inside(closure, optimizer), RUN
            if args:
                args = (closure, *args[1:])
            else:
                kwargs = {**kwargs, "closure": closure}
        if (decision or decide(optimizer)) == SKIP:
            # A script that hands over a closure expects its loss, also where it has called backward before (SAM).
            return autograd.last_loss() if loss is None and callable(closure) else loss
        clocks = clocks_of(optimizer) or ()
        for clock in clocks:
            clock.begin()
        runtime.inside_step, result, withheld = True, None, False
        try:
            result = call(optimizer, *args, **kwargs)
        except _Withheld as leaving:
            withheld, result = True, leaving.args[0]
        finally:
            runtime.inside_step = False
            for clock in clocks:
                clock.written()
        try:
            if not withheld:
                after(optimizer)
        finally:
            for clock in clocks:
                clock.end(moment(optimizer))
        return result

    def gate_inside(closure, optimizer):
        """A closure that is evaluated where the optimizer wants it; the gate stands behind its first evaluation."""
        pending = [_places(optimizer)]

        def evaluate():
            if not pending:
                return closure()
            untouched = pending.pop() == _places(optimizer)
            clocks = clocks_of(optimizer) or ()
            runtime.inside_step = False
            # Ranks meet in here, and no lock is held where they do.
            for clock in clocks:
                clock.written()
            try:
                loss = closure()
                decision = decide(optimizer)
            finally:
                for clock in clocks:
                    clock.begin()
                runtime.inside_step = True
            # Weights that the optimizer has already moved are its own to put back: with zeroed gradients it goes on.
            if decision == SKIP and untouched:
                raise _Withheld(loss)
            return loss

        return evaluate

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
