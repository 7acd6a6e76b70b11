"""The way out where the script's loss cannot be computed again: a replay of the forwards alone, and a backward that
starts from the gradients that the modules' outputs got.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sdcrun.shim.replay.graph import reaches
from sdcrun.shim.replay.program import Call, Entry, Ref, prune
from sdcrun.shim.replay.tape import Tape, version_of


@dataclass
class Output:
    """A tensor with a graph that a guarded module has returned, as it was then: `node` made it as its `place`-th."""

    ref: Ref
    tensor: torch.Tensor
    version: int
    node: Any
    place: int

    @classmethod
    def of(cls, ref: Ref, tensor: torch.Tensor) -> Output:
        """`tensor` right after it was returned."""
        return cls(ref, tensor, version_of(tensor), tensor.grad_fn, tensor.output_nr)

    @property
    def intact(self) -> bool:
        """It was not changed in place since."""
        return version_of(self.tensor) == self.version


def through_outputs(
    tape: Tape, outputs: list[Output], roots: list[torch.Tensor]
) -> tuple[list[Entry], list[Output]] | str:
    """The forwards to compute again for a backward from `roots`, and the outputs of theirs that lead there; or why the
    gradients of outputs do not determine those of the parameters."""
    met, outside = reaches(roots, {output.node for output in outputs}, set(tape.parameters))
    if outside:
        return "gradients flow into parameters by other ways than the module's outputs"
    if not met:
        return "no output of a guarded module leads to this backward"
    leading = [output for output in outputs if output.node in met]
    outs = {output.ref for output in leading}
    calls = [entry for entry in tape.entries if isinstance(entry, Call) and outs.intersection(entry.outs)]
    needed = [ref for call in calls for ref in call.uses]
    # What follows the last call is the script's own and cannot have changed what the calls computed.
    last = next(i for i, entry in enumerate(tape.entries) if entry is calls[-1])
    kept = prune(tape.entries[: last + 1], [*outs, *needed], tape.alias)
    if any(not isinstance(entry, Call) for entry in kept):
        return "one module's input is computed from another's output"
    return kept, leading
