"""The micro-batches of the window now open, by reference: what triage needs when a gradient turns out not to be finite.

Nothing is copied in a plain step. Inputs and the small gradients of the modules' outputs are held until the window
closes; what the script has changed in place by then cannot be used any more, and that is said.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from sdcrun.shim.checks.opinion import Parcel
from sdcrun.shim.microbatch import Autocast, Random, dumps, freeze, pack, tensors_of
from sdcrun.shim.replay.local import Local
from sdcrun.shim.replay.ownrank import rank_here
from sdcrun.shim.replay.program import FALLBACK, FORWARD, Backward, Call, Entry, Packed, Program, Ref
from sdcrun.shim.replay.run import all_finite
from sdcrun.shim.replay.tape import version_of

HOLD_BYTES = 64 << 20
HOLD_BATCHES = 64
SMALL_BYTES = 1 << 20

TAIL = "the non-finite values came from behind the module's outputs, which only an audit step can compute again"


@dataclass
class Held:
    """One micro-batch. `outputs`: the module's, not kept alive; `gradients`: (place among them, gradient) of those that
    got a small one; `too_large`: some got a large one, or none can be watched."""

    guard: Any
    inputs: tuple
    kwargs: dict
    versions: list[int]
    random: Random
    autocast: Autocast
    compiled: bool
    outputs: list[weakref.ref] = field(default_factory=list)
    gradients: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    too_large: bool = False


class LastBatches:
    """What this rank has computed since the window opened; `whole` says whether nothing was left out."""

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.whole = True
        self._bytes = 0

    def clear(self) -> None:
        """Drops everything."""
        self.held.clear()
        self.whole, self._bytes = True, 0

    def begin(self, guard: Any, inputs: tuple, kwargs: dict, random: Random) -> Held | None:
        """The forward of a guard's module begins, in these random states."""
        tensors = tensors_of((inputs, kwargs))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self.held and (self._bytes + size > HOLD_BYTES or len(self.held) >= HOLD_BATCHES):
            self.whole = False
            return None
        self._bytes += size
        held = Held(
            guard, inputs, kwargs, [version_of(tensor) for tensor in tensors], random, Autocast.now(),
            Local.of(guard.module).compiled,
        )  # fmt: skip
        self.held.append(held)
        return held

    def end(self, held: Held, output: Any) -> None:
        """The forward has returned: watch for the gradients of its outputs."""
        tensors = tensors_of(output)
        held.outputs = [weakref.ref(tensor) for tensor in tensors]
        if held.compiled:
            held.too_large = True
            return
        for number, tensor in enumerate(tensors):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(_keeping(held, number, tensor.output_nr))

    def parcel(self, guards: list) -> Parcel | str:
        """Everything held as one program, or why it cannot be; to be called where this rank's gradients are not finite.

        Where the gradients of the modules' outputs were small and finite, forwards and backwards are computed again.
        Else only the forwards, and only if the outputs of this rank were not finite already: what happened behind
        them would be needed to judge the rest.
        """
        if not self.held:
            return "no micro-batch of this window was kept"
        if not self.whole:
            return "the micro-batches of this window were too many or too large to be kept"
        externals: dict[Ref, Packed] = {}
        entries: list[Entry] = []
        backward = not any(held.too_large for held in self.held) and all(
            all_finite(gradient) for held in self.held for _, gradient in held.gradients
        )
        if not backward and not self._seen_bad():
            return TAIL
        try:
            for number, held in enumerate(self.held):
                if [version_of(tensor) for tensor in tensors_of((held.inputs, held.kwargs))] != held.versions:
                    return "the inputs were changed in place before they could be computed again"
                call = self._call(number, held, guards.index(held.guard), externals)
                entries.append(call)
                if backward:
                    given = [(call.outs[out], _ship(gradient, externals)) for out, gradient in held.gradients]
                    if given:
                        entries.append(Backward(given=given))
        except Exception as error:
            return f"the inputs cannot be shipped: {type(error).__name__}: {error}"[:160]
        covered = sorted({guards.index(held.guard) for held in self.held})
        kind = FALLBACK if backward else FORWARD
        names = [guard.name for guard in guards]
        program = Program(entries, externals, names, covered, kind, window=len(self.held), rank=rank_here())
        return Parcel(program, {}, finite=False)

    def _seen_bad(self) -> bool:
        """Outputs of this window that are still there show non-finite values."""
        alive = [tensor for held in self.held for reference in held.outputs if (tensor := reference()) is not None]
        return not all(all_finite(tensor) for tensor in alive)

    @staticmethod
    def _call(number: int, held: Held, place: int, externals: dict) -> Call:
        def refer(tensor: torch.Tensor) -> Ref:
            return _ship(tensor, externals)

        call = Call(
            blob=dumps((held.inputs, held.kwargs), refer),
            outs=[("v", (number, out)) for out in range(len(held.outputs))],
            random=held.random.shipped(), guard=place, autocast=held.autocast, compiled=held.compiled,
            strict_outs=False, acting=None,
        )  # fmt: skip
        for name, buffer in held.guard.saved_buffers.items():
            call.buffers[name] = _ship(buffer, externals)
        return call


def _ship(tensor: torch.Tensor, externals: dict[Ref, Packed]) -> Ref:
    ref = ("x", len(externals))
    externals[ref] = pack(freeze(tensor), tensor.requires_grad)
    return ref


def _keeping(held: Held, number: int, place: int):
    def prehook(gradients):
        gradient = gradients[place]
        if gradient is None:
            return
        if gradient.numel() * gradient.element_size() <= SMALL_BYTES:
            held.gradients.append((number, gradient.detach()))
        else:
            held.too_large = True

    return prehook
