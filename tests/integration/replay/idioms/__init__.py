"""Idioms of training scripts; see `base`."""

from idioms import losses, models, refused, steps
from idioms.base import COMPILED, IDIOMS, OUTPUTS, WHOLE

__all__ = ["COMPILED", "IDIOMS", "OUTPUTS", "WHOLE", "losses", "models", "refused", "steps"]
