"""The start-up self-test: before the first step each check proves, on scratch copies, that it fires and that it keeps
quiet otherwise. The ranks do it together, and each says what came of it.

Nothing of the run is touched: no weight, no gradient, no random number. What a check does here is what it does in
training: the same functions, on this device, over the same connections.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sdcrun.core import ballot
from sdcrun.core.audit import RING
from sdcrun.core.vote import weight_vote
from sdcrun.shim import fingerprint
from sdcrun.shim.checks import divide, nonfinite
from sdcrun.shim.checks.opinion import Parcel, compare
from sdcrun.shim.checks.weights import Table, unpack_rows
from sdcrun.shim.exchange import ExchangeFailed
from sdcrun.shim.patches.autograd import backward_now
from sdcrun.shim.replay.collect import GradientTable
from sdcrun.shim.replay.run import Result
from sdcrun.shim.transport import BallotFailed

ELEMENTS = 1 << 16
MANY = 32
TAG = 90


def run(group, guard) -> None:
    """All self-tests of one guarded module; a collective of its group. A check that fails is said by the rank on which
    it failed; the controller then stops the job. Never raises."""
    found = {"nonfinite": _quietly(lambda: _nonfinite(guard))}
    if group.config.weights_every or group.config.budget is not None:
        found["weights"] = _quietly(lambda: _fingerprints(guard))
    if group.auditor is not None and group.auditor.off is None:
        found["replay"] = _quietly(lambda: _replay(guard))
    try:
        found["ballot"] = _ballot(group)
        vote = _vote(group, guard)
        if "weights" in found:
            found["weights"] = found["weights"] or vote
    except (BallotFailed, ExchangeFailed) as error:
        found["ballot"] = f"the ranks did not meet: {error}"
        group.turn_off(f"the self-test failed: {error}")
    for check, failure in found.items():
        group.emit(
            "selftest",
            {"check": check, "passed": failure is None, "text": failure or "fires, and keeps quiet otherwise",
             "module": guard.name},
        )  # fmt: skip


def _quietly(test: Callable[[], str | None]) -> str | None:
    """What went wrong, None when nothing did; trouble within the test is a failure of it."""
    try:
        return test()
    except Exception as error:
        return f"the self-test itself failed: {type(error).__name__}: {error}"[:200]


def _samples(guard) -> dict[torch.dtype, torch.Tensor]:
    """A scratch copy of some weights for each type of number that the module has."""
    found: dict[torch.dtype, torch.Tensor] = {}
    for tensor in [*guard.parameters.values(), *guard.buffers.values()]:
        if tensor.layout is torch.strided and tensor.numel() and tensor.dtype not in found:
            found[tensor.dtype] = tensor.detach().reshape(-1)[:ELEMENTS].clone()
    return found


def _flip(tensor: torch.Tensor, element: int) -> torch.Tensor:
    """A copy with the lowest bit of one element inverted."""
    copy = tensor.clone()
    copy.view(torch.uint8)[element * tensor.element_size()] ^= 1
    return copy


def _places(tensor: torch.Tensor) -> list[int]:
    return sorted({0, tensor.numel() // 2, tensor.numel() - 1})


def _nonfinite(guard) -> str | None:
    """The look at a bucket: fires for one NaN or infinity anywhere, and not for large values that are finite."""
    for dtype, sample in _samples(guard).items():
        if not dtype.is_floating_point or sample.element_size() < 2:
            continue
        # As large as can be: a sum in the wide type must not overflow where the values themselves are finite.
        largest = torch.finfo(torch.float32).max / (2.0 * sample.numel())
        quiet = torch.full_like(sample, min(torch.finfo(dtype).max / 4, largest))
        if not _finite(quiet):
            return f"it fires for {dtype} values that are all finite"
        for value in (float("nan"), float("inf"), float("-inf")):
            for place in _places(sample):
                bad = quiet.clone()
                bad[place] = value
                if _finite(bad):
                    return f"it does not see {value} in element {place} of {bad.numel()} ({dtype})"
    return None


def _finite(bucket: torch.Tensor) -> bool:
    """As the comm hook finds out: by the sum, or while it divides."""
    by_sum = nonfinite.sum_is_finite(nonfinite.bucket_sum(bucket))
    judged = divide.multiplied(bucket.clone(), 0.5)
    if judged is not None and judged != by_sum:
        raise ValueError(f"the sum says {by_sum} and the division {judged}")
    return by_sum


def _fingerprints(guard) -> str | None:
    """Weights: equal bits have equal fingerprints, and one flipped bit another one, whatever the type of number."""
    for dtype, sample in _samples(guard).items():
        rows = fingerprint.fingerprints([sample, sample.clone()])
        if not torch.equal(rows[0], rows[1]):
            return f"equal {dtype} tensors have different fingerprints"
        for place in _places(sample):
            if torch.equal(fingerprint.fingerprints([_flip(sample, place)])[0], rows[0]):
                return f"a flipped bit in element {place} of {sample.numel()} ({dtype}) does not change the fingerprint"
    return None


def _replay(guard) -> str | None:
    """The comparison of a replay: a gradient computed twice agrees, and differs once a bit of it was flipped."""
    for dtype, sample in _samples(guard).items():
        if not dtype.is_floating_point or sample.element_size() < 2:
            continue
        tables = []
        for element in (None, None, sample.numel() - 1):
            stand_in = torch.nn.Parameter(sample.clone())
            if element is not None:
                stand_in.register_hook(lambda gradient, place=element: _flip(gradient.contiguous(), place))
            table = GradientTable()
            table.watch("0:scratch", stand_in)
            if element is not None:
                # The table looks first; here it must see what the fault left.
                hooks = stand_in._backward_hooks
                items = list(hooks.items())
                hooks.clear()
                hooks.update(reversed(items))
            with torch.enable_grad():
                backward_now((stand_in * stand_in.detach()).sum())
            tables.append(Result(table.take(), dict(table.details)))
        expected = Parcel(None, tables[0].table, tables[0].details)
        for result, agrees in ((tables[1], True), (tables[2], False)):
            said = compare(0, 1, RING, expected, result, frozenset(), lambda name: name)
            if said.agrees is not agrees:
                seen = "equal gradients differ" if agrees else "a flipped bit in a gradient is not seen"
                return f"{seen} ({dtype})"
    return None


def _probed(group) -> list[int]:
    """Group ranks that are asked to raise their flag, all of them where they are few."""
    if group.size <= MANY:
        return list(range(group.size))
    return sorted({round(place * (group.size - 1) / (MANY - 1)) for place in range(MANY)})


def _ballot(group) -> str | None:
    """The flag of each rank is seen by all, nothing is seen where nobody raises one, a rank elsewhere is noticed."""
    for place in (None, *_probed(group)):
        mine = group.rank == place
        paper = ballot.Ballot(tag=ballot.tag(0 if place is None else place, 0, ballot.PHASE_STEP), local=mine)
        seen = ballot.outcome(group.all_reduce_max(paper.words()))
        if not seen.lockstep or seen.local is not (place is not None):
            return "a flag is seen that nobody raised" if place is None else f"the flag of rank {place} is not seen"
        apart = ballot.Ballot(tag=ballot.tag(1 + int(mine), 0, ballot.PHASE_STEP))
        if group.size > 1 and ballot.outcome(group.all_reduce_max(apart.words())).lockstep is not (place is None):
            return "ranks at the same place seem apart" if place is None else f"rank {place} elsewhere is not noticed"
    return None


def _vote(group, guard) -> str | None:
    """The vote on weights: a replica with one flipped bit dissents, and with three or more it is the minority."""
    device = next((tensor.device for tensor in guard.parameters.values()), torch.device("cpu"))
    scratch = (torch.arange(1024, device=device) % 251).to(torch.float32)
    for place in (None, *_probed(group)[:4], group.size - 1):
        held = _flip(scratch, 512) if group.rank == place else scratch
        table = Table("scratch", {"scratch": held})
        words = ballot.digest_words(table.read(), ballot.tag(0, 0, ballot.PHASE_VOTE))
        agree = ballot.digests_agree(group.all_reduce_max(words))
        if agree is not (place is None or group.size == 1):
            return "equal replicas differ" if place is None else f"a flipped bit on rank {place} is not seen"
        if place is None or group.size < 3:
            continue
        packed = group.exchange.gather(table.pack(), TAG)
        result = weight_vote({rank: unpack_rows(payload)[1] for rank, payload in enumerate(packed)}, ["scratch"])
        if result.minority != {"scratch": [place]}:
            return f"the vote does not find rank {place} in the minority"
    return None
