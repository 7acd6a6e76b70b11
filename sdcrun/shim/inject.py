"""Puts the faults of --inject-fault into one rank's tensors and says so, firing by firing.

Never imported without --inject-fault. A step's fault is active through the whole window (every micro-batch of it, and a
recomputation under activation checkpointing), always on the same element with the same bits; one with where=device is
also active while this device replays for another rank. Where a fault is not active nothing is computed differently.

How each site is reached, and why there:
- activation, saved: hooks on the modules, on every rank alike, so that a compiled module is cut at the same places
  everywhere; they are kept in replays.
- gradient: a hook on the parameter, which sees the gradient of this backward as autograd made it. Further on, in DDP's
  bucket, the fault would come after the audit's fingerprint and no replay could show it. The hook is kept in front of
  the fingerprint's, and put on the stand-ins that a replay uses for the parameters.
- input: before DDP's forward, so that the captured micro-batch has the wrong input too.
- loss: the roots' values just before the backward.
- buffer: in the forward, after DDP has synced the buffers (earlier, the sync would undo it or spread it to everyone).
"""

from __future__ import annotations

import threading
import weakref

import torch

from sdcrun.shim.inject_aim import farthest
from sdcrun.shim.inject_base import Fault, Faults
from sdcrun.shim.inject_hooks import (
    ModuleHook,
    Saving,
    first_tensor,
    marked,
    marked_first,
    matching,
    named_tensors,
    replaced,
    with_path,
    with_tensor,
)
from sdcrun.shim.inject_values import takes
from sdcrun.shim.patches import autograd
from sdcrun.shim.replay.state import keep_in_replay, mark, replaying

IN_BACKWARD = ("gradient", "reduced", "allreduce", "loss")


class Injector(Faults):
    """The faults of this rank at their sites; guards are attached as DDP makes them."""

    def __init__(self, runtime) -> None:
        super().__init__(runtime)
        self._inside: weakref.ref | None = None
        self._thread = threading.get_ident()

    # -- places -------------------------------------------------------------------------------------------------------

    def attach(self, guard) -> None:
        """Binds each fault that is not bound yet to this guard if it has what the fault wants, and lays the hooks."""
        if not self._settled:
            self._settle(guard)
        if guard.group not in self.groups:
            self.groups.append(guard.group)
        for fault in self.faults:
            if any(other.group is not guard.group for other in fault.guards):
                continue
            site = fault.spec.site
            known = _names(guard, site)
            fault.known = known or fault.known
            names = matching(known, fault.spec.tensor) if known else []
            if not names and site not in ("optimizer", "loss", "input", "checkpoint"):
                continue
            fault.bind(guard, names)
            if site in ("activation", "saved"):
                self._hook_modules(fault, guard)
            elif site == "gradient":
                self._hook_gradients(fault, guard)
            elif site == "input" and self._mine(fault):
                guard.ddp.register_forward_pre_hook(self._input_hook(fault, weakref.ref(guard)), with_kwargs=True)
            if site in IN_BACKWARD and self not in autograd.observers:
                autograd.observers.insert(0, self)

    # -- which module -------------------------------------------------------------------------------------------------

    def forward_begins(self, guard, step: int) -> None:
        """A training forward of `guard` in window `step`, after DDP's sync of the buffers and before they are
        remembered."""
        self._inside, self._thread = weakref.ref(guard), threading.get_ident()
        for fault in self.faults:
            if guard in fault.places:
                fault.aim.forward(guard, step)
        self._buffer(guard, step)

    def forward_ends(self) -> None:
        """The forward has returned."""
        self._inside = None

    def _live(self, guard) -> bool:
        """Whether what this module computes now belongs to its window: a forward without gradient does not, unless it
        is a part of a training forward that activation checkpointing computes again."""
        if guard is None or not guard.window_open:
            return False
        if replaying():
            return True
        inside = self._inside is not None and self._inside() is guard
        return guard.module.training and (inside or torch.is_grad_enabled())

    # -- activation, saved --------------------------------------------------------------------------------------------

    def _hook_modules(self, fault: Fault, guard) -> None:
        modules, reference = dict(guard.module.named_modules()), weakref.ref(guard)
        for name in fault.places[guard].names:
            if fault.spec.site == "activation":
                modules[name].register_forward_hook(self._kept(self._activation_hook(fault, reference, name)))
            else:
                before, after = self._saving_hooks(fault, reference, name)
                modules[name].register_forward_pre_hook(self._kept(before))
                modules[name].register_forward_hook(self._kept(after), always_call=True)

    def _kept(self, hook):
        """A module hook that the compiler does not look into and that also runs in replays."""
        return keep_in_replay(ModuleHook(hook))

    def _activation_hook(self, fault: Fault, reference, name: str):
        def hook(module, inputs, output):
            guard = reference()
            if not self._live(guard) or not fault.falls_on(guard, guard.group.step):
                return None
            tensor = first_tensor(output, fault.spec.kind)
            if tensor is None:
                fault.why = fault.why or f"{name} returns no floating-point tensor"
                return None
            step, place = guard.group.step, fault.places[guard]
            if not replaying():
                place.saw(step, name)
            if not self._active(fault, step) or not place.choose(step, name, self._rng(fault, step, "tensor")):
                return None
            wrong = self._wrong_copy(fault, guard, tensor, name, step)
            return None if wrong is None else with_tensor(output, tensor, replaced(tensor, wrong))

        return hook

    def _saving_hooks(self, fault: Fault, reference, name: str):
        """All matching modules are watched through an active step, also those not hit: activation checkpointing counts
        what is saved, and the count must be the same when it computes the part again."""
        stack: list[Saving | None] = []

        def before(module, inputs):
            guard = reference()
            live = self._live(guard) and fault.falls_on(guard, guard.group.step)
            step = guard.group.step if live else -1
            if not live or not self._active(fault, step):
                stack.append(None)
                return
            phase = "replay" if replaying() else "step"

            def hit():
                place = fault.places[guard]
                if phase == "step":
                    place.saw(step, name)
                if not place.choose(step, name, self._rng(fault, step, "tensor")):
                    return None

                def make_wrong(tensor):
                    wrong = self._wrong_copy(fault, guard, tensor, name, step, phase)
                    return tensor if wrong is None else wrong

                return make_wrong

            saving = Saving(fault.spec.kind, hit)
            saving.push()
            stack.append(saving)

        def after(module, inputs, output):
            saving = stack.pop() if stack else None
            if saving is not None:
                saving.pop()
                if not saving.asked:
                    fault.why = fault.why or f"{name} saves no floating-point activation for its backward"

        return before, after

    # -- gradient -----------------------------------------------------------------------------------------------------

    def _hook_gradients(self, fault: Fault, guard) -> None:
        reference = weakref.ref(guard)
        if self._mine(fault):
            for name in fault.places[guard].names:
                guard.parameters[name].register_hook(self._gradient_hook(fault, reference, name))
        guard.module.register_forward_pre_hook(self._kept(self._shadow_hook(fault, reference)))

    def _gradient_hook(self, fault: Fault, reference, name: str):
        def hook(gradient):
            guard = reference()
            if guard is None or not guard.window_open or not fault.falls_on(guard, guard.group.step):
                return None
            step, place = guard.group.step, fault.places[guard]
            if not replaying():
                place.saw(step, name)
            if not self._active(fault, step) or not place.choose(step, name, self._rng(fault, step, "tensor")):
                return None
            wrong = self._wrong_copy(fault, guard, gradient, name, step)
            return None if wrong is None else replaced(gradient, wrong)

        return mark(hook)

    def _shadow_hook(self, fault: Fault, reference):
        """A replay computes on stand-ins of the parameters: each gets the hook when the module is called with them."""

        def hook(module, inputs):
            guard = reference()
            if guard is None or not replaying() or not self._active(fault, guard.group.step):
                return
            for name, parameter in module.named_parameters():
                if name in fault.places[guard].names and parameter.requires_grad and not marked(parameter):
                    parameter.register_hook(self._gradient_hook(fault, reference, name))
                    marked_first(parameter)

        return hook

    def around_backward(self, run, tensors, grad_tensors, options: dict):
        """Observer of outermost backwards, the innermost of all: fingerprints of gradients are in place by now, and the
        faults must come before them; the loss is made wrong where the script still reads it."""
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        beside = threading.get_ident() != self._thread
        for fault in self.faults:
            if fault.spec.site not in IN_BACKWARD:
                continue
            if beside or len(fault.places) > 1:
                owners = {id(p): guard for guard in fault.guards for p in guard.parameters.values()}
                reached = farthest(roots, owners)
                if reached is not None:
                    fault.aim.backward(reached, reached.group.step)
                elif beside:
                    continue  # another thread trains something of its own
            for guard in fault.guards:
                step = guard.group.step
                if not guard.window_open or not fault.falls_on(guard, step) or not self._active(fault, step):
                    continue
                if fault.spec.site == "gradient":
                    for name in fault.places[guard].names:
                        marked_first(guard.parameters[name])
                elif fault.spec.site == "loss":
                    root = next((t for t in roots if isinstance(t, torch.Tensor) and takes(t, fault.spec.kind)), None)
                    if root is not None:
                        self._strike(fault, guard, root, "loss", step)
        return run(tensors, grad_tensors, options)

    def gradient(self, guard, bucket) -> None:
        """In the comm hook, before the reduction. Gradient faults are already in, by the parameters' hooks; noted here
        are the parameters that DDP reduces in this window: `reduced` and `allreduce` draw among them."""
        step = guard.group.step
        for fault in self._of(guard, "reduced", "allreduce"):
            place = fault.places[guard]
            for parameter in bucket.parameters():
                name = guard.names.get(id(parameter), "")
                if name in place.names:
                    place.saw(step, name)

    # -- after the local computation ----------------------------------------------------------------------------------

    def reduced(self, guard, tensor: torch.Tensor, parameters) -> None:
        """A reduced bucket, as flat as DDP made it; `parameters` lie in it one behind the other."""
        step = guard.group.step
        for fault in self._of(guard, "reduced", "allreduce"):
            if not self._active(fault, step) or not fault.falls_on(guard, step):
                continue
            offset, place = 0, fault.places[guard]
            flat = tensor.layout is torch.strided and tensor.numel() == sum(p.numel() for p in parameters)
            for parameter in parameters:
                name = guard.names.get(id(parameter), "")
                part = tensor.view(-1)[offset : offset + parameter.numel()] if flat else tensor
                offset += parameter.numel()
                if name in place.names and place.choose(step, name, self._rng(fault, step, "tensor")):
                    self._strike(fault, guard, part, name, step)

    def weight(self, guard, step: int) -> None:
        """After the update of window `step`."""
        for fault in self._of(guard, "weight"):
            self._strike_one(fault, guard, {n: guard.parameters[n] for n in fault.places[guard].names}, step)

    def _buffer(self, guard, step: int) -> None:
        for fault in self._of(guard, "buffer"):
            if fault.falls_on(guard, step):
                buffers = dict(guard.module.named_buffers())
                names = [name for name in fault.places[guard].names if name in buffers]
                self._strike_one(fault, guard, {name: buffers[name] for name in names}, step)

    def optimizer(self, guard, optimizer, step: int) -> None:
        """After the update of window `step`; state is named `parameter.key`. Step counters are hit only by name."""
        for fault in self.faults:
            if fault.spec.site != "optimizer" or not self._active(fault, step):
                continue
            state = {
                f"{guard.names[id(parameter)]}.{key}": value
                for parameter, entries in optimizer.state.items() if id(parameter) in guard.names
                for key, value in entries.items() if isinstance(value, torch.Tensor)
            }  # fmt: skip
            counted = {name: value for name, value in state.items() if not name.endswith(".step")}
            fault.known = sorted(state) or fault.known
            names = matching(counted, fault.spec.tensor) or matching(state, fault.spec.tensor)
            if names:
                self._strike_one(fault, guard, {name: state[name] for name in names}, step)

    def _strike_one(self, fault: Fault, guard, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Hits one of `tensors`, drawn among those the kind can hit; once a step, however often it is called (a step of
        two optimizers has two updates, and a bit inverted twice is no fault)."""
        if not self._active(fault, step) or fault.done == step:
            return
        fault.done = step
        fitting = sorted(name for name, tensor in tensors.items() if takes(tensor, fault.spec.kind))
        if not fitting:
            if tensors:
                fault.why = f"kind={fault.spec.kind} fits none of {', '.join(sorted(tensors)[:4])}"
            return
        name = self._rng(fault, step, "tensor").choice(fitting)
        self._strike(fault, guard, tensors[name], name, step)

    # -- input -------------------------------------------------------------------------------------------------------

    def _input_hook(self, fault: Fault, reference):
        def hook(module, args, kwargs):
            guard = reference()
            if guard is None or not guard.module.training or not torch.is_grad_enabled() or guard.group.off_reason:
                return None
            step = guard.group.step
            if not self._active(fault, step) or not fault.falls_on(guard, step):
                return None
            found = {_joined(path[1:]): (path, tensor) for path, tensor in named_tensors((args, kwargs))}
            fault.known = sorted(found)
            names = [n for n in matching(found, fault.spec.tensor) if takes(found[n][1], fault.spec.kind)]
            # Whole numbers are often indices: a wrong one ends the script instead of disturbing it.
            names = [n for n in names if found[n][1].is_floating_point()] or names
            if not names:
                return None
            name = self._rng(fault, step, "tensor").choice(sorted(names))
            path, tensor = found[name]
            wrong = self._wrong_copy(fault, guard, tensor, name, step)
            return None if wrong is None else with_path((args, kwargs), path, replaced(tensor, wrong))

        return ModuleHook(hook)

    # -- checkpoint ---------------------------------------------------------------------------------------------------

    def checkpoint(self, contents, step: int):
        """What is written instead of `contents` (nested dicts, lists, tuples) by a save after window `step`: the same
        object, or one in which a tensor is a wrong copy. A fault with one step fires at the first save from it on."""
        for fault in self.faults:
            spec = fault.spec
            if spec.site != "checkpoint" or not fault.guards:
                continue
            once = spec.first == spec.last
            due = step >= spec.first and not fault.fired and self._mine(fault) if once else self._active(fault, step)
            if not due:
                continue
            found = {_joined(path): (path, tensor) for path, tensor in named_tensors(contents)}
            fault.known = sorted(found)
            names = [n for n in matching(found, spec.tensor) if takes(found[n][1], spec.kind)]
            names = [n for n in names if found[n][1].numel() > 1] or names
            if names:
                name = self._rng(fault, step, "tensor").choice(sorted(names))
                path, tensor = found[name]
                wrong = self._wrong_copy(fault, fault.guards[0], tensor, name, step)
                contents = contents if wrong is None else with_path(contents, path, wrong)
        return contents

def _names(guard, site: str) -> list[str]:
    """What a module has for a site, where that is known before the first step."""
    if site in ("activation", "saved"):
        return [name for name, _ in guard.module.named_modules()]
    if site in ("gradient", "reduced", "allreduce"):
        return [name for name, parameter in guard.parameters.items() if parameter.requires_grad]
    if site == "weight":
        return list(guard.parameters)
    if site == "buffer":
        return [name for name, _ in guard.module.named_buffers()]
    return []


def _joined(path: tuple) -> str:
    return ".".join(str(part) for part in path)
