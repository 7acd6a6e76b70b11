"""Wrong values as hardware makes them: changes elements of a tensor in place, through an integer view of their bits."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from sdcrun.core.faultspec import FaultSpec

# A random bit of an activation is worth at least 2^-12 of the value: less is often rounded away on the way to the
# gradients, and a fault without any effect proves nothing.
_ROUNDED_AWAY = 12
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Hit:
    """What was changed: `index` is the first changed element (flat), `bits` the bit numbers inverted there, `before`
    and `after` its value (text for values JSON has no number for), `elements` how many changed."""

    index: int
    bits: list[int]
    before: float | int | str
    after: float | int | str
    elements: int


def takes(tensor: torch.Tensor, kind: str) -> bool:
    """Whether a fault of this kind exists for the tensor's dtype and layout."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return True
    if tensor.dtype is torch.bool:
        return kind in ("bitflip", "zero", "stuck")
    return kind not in ("nan", "inf")


def strike(tensor: torch.Tensor, spec: FaultSpec, rng: random.Random) -> Hit | str:
    """Puts the fault into `tensor`, in place and unseen by autograd and its version counter.

    Any strided dtype; a complex element counts as two reals. Random choices come from `rng` alone. With index=random,
    elements the fault would leave as they are (zero made zero, a bit stuck where it already is) are not drawn. Returns
    the `Hit`, or why nothing changed.
    """
    if not takes(tensor, spec.kind):
        return f"kind={spec.kind} means nothing for a {_described(tensor)}"
    data = tensor.data
    if data.is_complex():
        data = torch.view_as_real(data)
    if data.dim() == 0:
        data = data.view(1)
    numel, width = data.numel(), 1 if data.dtype is torch.bool else 8 * data.element_size()
    if spec.bit is not None and spec.bit >= width:
        return f"a {_described(tensor)} has bits 0 to {width - 1}, not {spec.bit}"
    if spec.index is not None and spec.index >= numel:
        return f"index {spec.index} is past the end of {numel} elements"
    bits = data.view(_INTEGER[data.element_size()])
    start = spec.index
    if start is None:
        start = _random_start(data, bits, spec, rng)
        if start is None:
            return "no element that the fault could change has a fitting magnitude"
    start = min(start, max(0, numel - spec.count))
    run = torch.arange(start, min(numel, start + spec.count), device=data.device)
    place = torch.unravel_index(run, data.shape)
    old = bits[place]
    values = old.view(data.dtype)
    new = torch.where(_in_range(values, spec), _changed(old, values, spec, width, rng), old)
    changed = torch.nonzero(new != old).flatten().tolist()
    if not changed:
        return "the elements hit kept their values"
    bits[place] = new
    first = changed[0]
    pattern = (int(old[first]) ^ int(new[first])) & ((1 << 8 * data.element_size()) - 1)
    return Hit(
        index=start + first,
        bits=[bit for bit in range(8 * data.element_size()) if pattern >> bit & 1],
        before=_number(values[first]),
        after=_number(new.view(data.dtype)[first]),
        elements=len(changed),
    )


def _random_start(data, bits, spec: FaultSpec, rng: random.Random) -> int | None:
    """First element of the run; without a condition on values no element is read."""
    fixed_bit = spec.kind == "stuck" and spec.bit is not None
    if spec.low == 0 and spec.high == math.inf and spec.kind in ("bitflip", "nan", "stuck") and not fixed_bit:
        return rng.randrange(max(1, data.numel() - spec.count + 1))
    fit = _in_range(data, spec)
    if spec.kind in ("zero", "scale", "sign"):
        fit = fit & (data != 0)
    elif spec.kind == "inf":
        fit = fit & ~torch.isinf(data)
    elif fixed_bit:
        fit = fit & (((bits >> spec.bit) & 1) != spec.to)
    candidates = torch.nonzero(fit.reshape(-1)).flatten()
    return int(candidates[rng.randrange(len(candidates))]) if len(candidates) else None


def _in_range(values, spec: FaultSpec):
    """Mask of the elements whose magnitude lies in when=lo:hi."""
    if spec.low == 0 and spec.high == math.inf:
        return torch.ones(values.shape, dtype=torch.bool, device=values.device)
    size = values.to(torch.float64).abs()
    return (size >= spec.low) & (size <= spec.high)


def _changed(old, values, spec: FaultSpec, width: int, rng: random.Random):
    """The faulty bit patterns, from patterns `old` of `values`, both [n]."""
    if spec.kind in ("bitflip", "stuck"):
        choice = _random_bits(values.dtype, spec.site, width)
        patterns = [_with_bit(pattern, spec, choice, rng) for pattern in old.tolist()]
        return torch.tensor([_signed(p, old.dtype) for p in patterns], dtype=old.dtype, device=old.device)
    if spec.kind == "nan":
        wrong = torch.full(values.shape, math.nan, dtype=torch.float64).to(values.dtype)
    elif spec.kind == "inf":
        wrong = torch.copysign(torch.full(values.shape, math.inf), values.float().cpu()).to(values.dtype)
    elif spec.kind == "zero":
        wrong = torch.zeros(values.shape, dtype=values.dtype)
    elif spec.kind == "scale":
        wrong = (values.to(torch.float64) * spec.by).to(values.dtype)
    elif values.is_floating_point():
        return old ^ _signed(1 << (width - 1), old.dtype)
    else:
        wrong = -values
    return wrong.to(old.device).view(old.dtype)


def _random_bits(dtype: torch.dtype, site: str, width: int) -> range:
    """Bits that bit=random draws from. Of a whole number only the lowest: token numbers and counters stay in a range
    that the script can use."""
    if not dtype.is_floating_point:
        return range(1)
    mantissa = round(-math.log2(torch.finfo(dtype).eps))
    return range(max(0, mantissa - _ROUNDED_AWAY) if site in ("activation", "saved") else 0, width)


def _with_bit(pattern: int, spec: FaultSpec, choice: range, rng: random.Random) -> int:
    """One element's pattern with a bit inverted or forced."""
    if spec.bit is not None:
        bit = spec.bit
    elif spec.kind == "bitflip":
        bit = rng.choice(choice)
    else:
        free = [b for b in choice if (pattern >> b & 1) != spec.to]
        if not free:
            return pattern
        bit = rng.choice(free)
    if spec.kind == "bitflip":
        return pattern ^ (1 << bit)
    return pattern | (1 << bit) if spec.to else pattern & ~(1 << bit)


def _signed(pattern: int, dtype: torch.dtype) -> int:
    """A bit pattern as the number that `dtype` (signed, or uint8) reads it as."""
    width = torch.iinfo(dtype).bits
    pattern &= (1 << width) - 1
    return pattern - (1 << width) if dtype is not torch.uint8 and pattern >> (width - 1) else pattern


def _number(element) -> float | int | str:
    value = element.item()
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}"
