"""Check 1: non-finite gradients, each rank's own before the all-reduce and the reduced ones after it.

A sum per bucket carries every NaN and Inf at a tenth of the cost of `isfinite().all()`; half-precision buckets are
summed in fp32 so that the sum itself cannot overflow. Only on a hit is it asked elementwise which parameter, how
many, and whether the values really are non-finite.

A window may reduce several times (a GAN's critic, SAM, accumulation without no_sync). What the first reduction brought
to all ranks is in everybody's gradients or weights at the next one: from then on a rank's own gradients say nothing
about the rank. Guards count a window's `reductions`, from 1.
"""

from __future__ import annotations

import torch

_HALF = (torch.float16, torch.bfloat16)
MAX_NAMED = 64


def bucket_sum(buffer: torch.Tensor) -> torch.Tensor | None:
    """The sum of a bucket's buffer as a 0-dim tensor on its device, without a host sync; None for integers."""
    if buffer.layout != torch.strided:
        buffer = buffer._values() if buffer.is_sparse else buffer.values()
    if not (buffer.is_floating_point() or buffer.is_complex()):
        return None
    return buffer.sum(dtype=torch.float32) if buffer.dtype in _HALF else buffer.sum()


def sum_is_finite(total: torch.Tensor) -> bool:
    """Reads a sum (a host sync on an accelerator)."""
    value = total.item()
    return value - value == 0


def describe(name: str, gradient: torch.Tensor) -> dict | None:
    """How much of a gradient is not finite: {tensor, elements, nan, inf, numel}, or None when all of it is finite."""
    if gradient.layout != torch.strided:
        gradient = gradient._values() if gradient.is_sparse else gradient.values()
    if not (gradient.is_floating_point() or gradient.is_complex()):
        return None
    bad = int((~torch.isfinite(gradient)).sum())
    if bad == 0:
        return None
    nan = int(torch.isnan(gradient).sum())
    return {"tensor": name, "elements": bad, "nan": nan, "inf": bad - nan, "numel": gradient.numel()}


def gradients_of(bucket, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, its gradient, a view of the bucket's buffer) for all of a bucket. `bucket.gradients()` is not to be
    had for complex parameters: it counts their elements in a buffer of real numbers, and ends in the middle."""
    parameters = bucket.parameters()
    pairs = [p.is_complex() and not buffer.is_complex() for p in parameters]
    lengths = [p.numel() * (1 + pair) for p, pair in zip(parameters, pairs)]
    if not any(pairs) or sum(lengths) != buffer.numel():
        return list(zip(parameters, bucket.gradients()))
    pieces = buffer.view(-1).split(lengths)
    views = [torch.view_as_complex(piece.view(-1, 2)) if pair else piece for piece, pair in zip(pieces, pairs)]
    return list(zip(parameters, views))


def local_bucket(guard, bucket, buffer: torch.Tensor, finite: bool | None = None) -> None:
    """Called in the comm hook before the all-reduce, every step. `finite`: whether the buffer is, if that is known.

    On the CPU the sum is read at once, since the buffer is overwritten by the reduction; on an accelerator it is kept
    for the gate, and the parameters of the bucket are named from the reduced gradients.
    """
    # Buckets are reduced in the order of their numbers.
    if bucket.index() == 0:
        guard.reductions += 1
        earlier = [total for _, total in guard.reduced_sums if total.device.type == "cpu"]
        guard.tainted = guard.tainted or not _finite(earlier)
    if finite is None:
        total = bucket_sum(buffer)
        if total is None:
            return
        if buffer.device.type != "cpu":
            guard.local_sums.append((guard.reductions, total, bucket.parameters()))
            return
        finite = sum_is_finite(total)
    if not finite and not guard.tainted:
        for parameter, gradient in gradients_of(bucket, buffer):
            bad = describe(guard.qualified(guard.names.get(id(parameter), "?")), gradient)
            if bad is not None and len(guard.local_bad) < MAX_NAMED:
                guard.local_bad.append(bad)


def reduced_bucket(guard, result) -> None:
    """Called when a bucket has been reduced, on whatever thread completes the future."""
    total = bucket_sum(result)
    if total is not None:
        guard.reduced_sums.append((guard.reductions, total))


def flags(guards) -> tuple[bool, bool]:
    """(local, reduced): whether these guards saw non-finite gradients in this window. Reads what was kept.

    A sum of huge but finite values can overflow: what a sum says is asked again of the elements before anybody skips.
    """
    local = any(guard.local_bad for guard in guards)
    kept_local = not _finite([total for guard in guards for _, total, _ in guard.local_sums])
    suspicious = not _finite([total for guard in guards for _, total in guard.reduced_sums])
    if kept_local and suspicious:
        for guard in guards:
            guard.local_sums = _untainted(guard)
        kept_local = any(map(seen_locally, guards))
    if not (kept_local or suspicious):
        return local, False
    bad = any(
        describe(name, parameter.grad) is not None
        for guard in guards for name, parameter in guard.parameters.items() if parameter.grad is not None
    )  # fmt: skip
    return local or (kept_local and bad), suspicious and bad


def seen_locally(guard) -> bool:
    """Whether this rank's own gradients were not finite in this window, before any reduced ones were."""
    return bool(guard.local_bad) or not _finite([total for _, total, _ in guard.local_sums])


def _untainted(guard) -> list[tuple[int, torch.Tensor, list[torch.Tensor]]]:
    bad = [number for number, total in guard.reduced_sums if not sum_is_finite(total)]
    return [kept for kept in guard.local_sums if not bad or kept[0] <= min(bad)]


def _finite(totals: list[torch.Tensor]) -> bool:
    """Whether all sums are finite: one read of an accelerator, a read each on the CPU, where it costs nothing."""
    if not totals:
        return True
    if len(totals) == 1 or totals[0].device.type == "cpu":
        return all(sum_is_finite(total) for total in totals)
    return sum_is_finite(torch.stack([total.to(totals[0].device, torch.float32) for total in totals]).sum())


def observe(guards) -> tuple[list[dict], list[dict]]:
    """After a hit: (local, reduced) lists of what is not finite, by parameter, at most `MAX_NAMED` each."""
    local = [bad for guard in guards for bad in guard.local_bad]
    reduced = []
    for guard in guards:
        for name, parameter in guard.parameters.items():
            if parameter.grad is not None and len(reduced) < MAX_NAMED:
                bad = describe(guard.qualified(name), parameter.grad)
                if bad is not None:
                    reduced.append(bad)
        hit = [parameters for _, total, parameters in guard.local_sums if not sum_is_finite(total)]
        ours = {guard.qualified(guard.names.get(id(p), "?")) for params in hit for p in params}
        local += [bad for bad in reduced if bad["tensor"] in ours]
    return local, reduced
