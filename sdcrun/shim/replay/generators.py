"""The script's own generators of random numbers, of torch, Python and numpy: their states as bytes."""

from __future__ import annotations

import pickle
import random
from typing import Any

import torch

from sdcrun.shim.microbatch import to_bytes


def is_generator(value: Any) -> bool:
    """Whether `value` draws random numbers from a state of its own."""
    kind = type(value)
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return isinstance(value, torch.Generator) or hasattr(kind, "bit_generator") or kind.__name__ == "RandomState"


def state_of(generator: Any) -> bytes:
    """Its state now."""
    if isinstance(generator, torch.Generator):
        return to_bytes(generator.get_state())
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if hasattr(generator, "bit_generator"):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.get_state(legacy=False))


def set_state(generator: Any, state: bytes) -> None:
    """Gives it a state that `state_of` has told of one of its kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(pickle.loads(state))
