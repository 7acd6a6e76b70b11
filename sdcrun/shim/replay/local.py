"""What a rank must know of its own last forward of a module to be able to run another rank's."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field
from typing import Any

import torch

from sdcrun.shim.replay import compiled


@dataclass
class Local:
    """`callback`: dynamo's, in force when the forward was called. `forward`: what stood in for the module's forward
    then, where a framework puts another function there for the length of one call (a training step, say). `context`:
    the variables of the module contextvars that it ran under."""

    callback: Any = None
    forward: Any = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    @classmethod
    def of(cls, module: torch.nn.Module) -> Local:
        """As it is right before a forward of `module`."""
        return cls(compiled.noted, vars(module).get("forward"))

    @property
    def compiled(self) -> bool:
        """Called from compiled code, or from code that is being compiled."""
        return self.callback is not None and self.callback is not False
