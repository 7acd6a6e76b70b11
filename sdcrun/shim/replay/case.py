"""What a recording hands on: the token of a forward under way, and the recorded backward."""

from __future__ import annotations

import torch

from sdcrun.shim.replay.irrevocable import Contents
from sdcrun.shim.replay.program import Call, Program, Ref
from sdcrun.shim.replay.scriptvalues import ScriptValues


class Token:
    """What `before_forward` hands to `after_forward`. `linked`: the arguments pickled with references to what the
    program computes instead of values, and those references; None where that is the same. `script`: the script's
    variables as the forward finds them; `untrained`: parameters that nobody trains."""

    def __init__(self, call: Call, script: ScriptValues) -> None:
        self.call, self.script = call, script
        self.shown: list[torch.Tensor] = []
        self.collectives: list[int] = []
        self.linked: tuple[bytes, list[Ref]] | None = None
        self.opaque: dict = {}
        self.versions: list[int] = []
        self.untrained: Contents | None = None


class Case:
    """A recorded backward: its program, and what its owner computed (`expected`: name -> fingerprint). `losses` are the
    roots as numbers; `finite`: those and all gradients were; `weights`: fingerprints of the weights right after it;
    `uncovered`: modules that got gradients though their forward was not recorded."""

    def __init__(self, program: Program, losses: list[float]) -> None:
        self.program = program
        self.losses = losses
        self.finite = True
        self.expected: dict[str, tuple[int, int]] = {}
        self.details: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.weights = torch.zeros(0, 2, dtype=torch.int64, device="cpu")
        self.uncovered: list[str] = []
