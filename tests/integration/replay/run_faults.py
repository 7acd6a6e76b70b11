"""Audits of a small model with one thing wrong in each case; rank 0 prints one JSON line per case.

{"case", "lockstep": weights equal on all ranks at the end, "mismatches": [per audit], "events": [audit data], "off",
 "offs": of all ranks, "votes": [per audit], "trace_free": bits of a run without audit on this rank, where the case
 computes nothing wrong}
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

import stage  # noqa: E402

from sdcrun.core.types import Config  # noqa: E402
from sdcrun.shim.checks import replay, rounds  # noqa: E402
from sdcrun.shim.checks.opinion import Parcel  # noqa: E402
from sdcrun.shim.replay.state import replaying  # noqa: E402

STEPS = 4
KEPT = torch.zeros(1 << 15)  # more than travels with a micro-batch


class Case:
    """What goes wrong: `site` on `rank` at `step` (None: always), in replays too if `again`. `by`: what says which
    device this is."""

    def __init__(self, site="", rank=1, step=2, again=False, by=None, **more):
        self.site, self.rank, self.step, self.again, self.more = site, rank, step, again, more
        self.by = by

    def now(self, site):
        here = OWN_RANK if self.by == "variable" else dist.get_rank() if self.by == "get_rank" else device()
        if self.site != site or here != self.rank or (replaying() and not self.again):
            return False
        return self.step is None or HERE_STAGE.step == self.step


def device():
    """The number of the device that computes: no variable of the script, which may travel with a micro-batch."""
    return int(os.environ["RANK"])


OWN_RANK = int(os.environ["RANK"])  # a variable of the script, which may travel


def flip(tensor, bit=18):
    """A copy with one bit of its largest element flipped."""
    tensor = tensor.detach().clone()
    place = int(tensor.abs().argmax())
    tensor.view(-1).view(torch.int32)[place] ^= 1 << bit
    return tensor


class Passing(torch.autograd.Function):
    """Lets a fault into a forward's output, or into the gradient that comes back through it."""

    @staticmethod
    def forward(ctx, x, case, site):
        ctx.case, ctx.site = case, site
        return flip(x) if case.now(site) else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.site == "activation" and ctx.case.now("backward"):
            gradient = flip(gradient)
        if ctx.site == "activation" and ctx.case.site == "noise":
            gradient = gradient + time.perf_counter_ns() % 997 * 1e-5
        return gradient, None, None


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 20), nn.Linear(20, 20), nn.Linear(20, 4)
        self.case, self.calls = case, 0

    def forward(self, x):
        case = self.case
        hidden = Passing.apply(torch.tanh(self.first(x)), case, "activation")
        weight = Passing.apply(self.second.weight, case, "weight")
        hidden = torch.tanh(F.linear(hidden, weight, self.second.bias))
        if case.site == "state":
            hidden = hidden * (1 + 0.01 * KEPT.add_(1)[0].item())
        if case.now("nan"):
            hidden = hidden * float("nan")
        loose = case.site == "kernel" and not torch.are_deterministic_algorithms_enabled()
        if case.site == "clock" or loose:
            hidden = hidden + time.perf_counter_ns() % 997 * 1e-3
        out = self.head(hidden)
        return out * (1 + 0.1 * device()) if case.site == "by-rank" else out


CASES = {
    "clean": Case(),
    "activation-persistent": Case("activation", again=True),
    "activation-transient": Case("activation", rank=0),
    "activation-by-variable": Case("activation", again=True, by="variable"),
    "backward-by-get-rank": Case("backward", again=True, by="get_rank"),
    "activation-by-get-rank": Case("activation", rank=0, again=True, by="get_rank"),
    "backward-persistent": Case("backward", rank=2, again=True),
    "backward-transient": Case("backward"),
    "weight-persistent": Case("weight", rank=0, again=True),
    "first-audit": Case("activation", rank=2, step=1, again=True),
    "loss": Case("loss", rank=1),
    "data-nan-audited": Case("data", rank=1),
    "data-nan-between": Case("data", rank=1, step=0),
    "device-nan-between": Case("nan", rank=1, step=0),
    "device-nan-audited": Case("nan", rank=2, step=2, again=True),
    "own-weights": Case("drift", rank=1, step=2),
    "clock": Case("clock", rank=None),
    "kernel": Case("kernel", rank=None),
    "noise": Case("noise", rank=None),
    "state": Case("state", rank=None),
    "by-rank": Case("by-rank", rank=None),
    "late": Case("late", rank=1, step=2),
}
# What one rank alone cannot do in its part of the audit of step 2, and whether the others then wait for it in vain.
ALONE = {
    "alone-packs": (Parcel, "dumps", False),
    "alone-ships": (rounds.Rounds, "_ship", True),
    "alone-compares": (rounds, "compare", False),
    "alone-weighs": (replay.Auditor, "_weights", False),
}
CASES |= {name: Case(name, rank=1, step=2) for name in ALONE}


def no_room(*args, **kwargs):
    raise MemoryError("no room")


@contextlib.contextmanager
def broken(case):
    """While an optimizer steps, which is where the audit is held."""
    owner, part, _ = ALONE.get(case.site, (None, "", False))
    if owner is None or not case.now(case.site):
        yield
        return
    whole = vars(owner)[part]
    setattr(owner, part, no_room)
    try:
        yield
    finally:
        setattr(owner, part, whole)


def run(case, audited):
    HERE_STAGE.fresh(audited)
    in_vain = case.site == "late" or ALONE.get(case.site, ("", "", False))[2]
    HERE_STAGE.config = Config(exchange_timeout=2.0 if in_vain else 60.0)
    replay.SLOWER = 0 if in_vain else 30
    torch.manual_seed(3)
    model = DDP(Net(case))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(HERE_STAGE.rank)
    for step in range(STEPS):
        x, y = torch.randn(8, 12), torch.randint(0, 4, (8,))
        if case.site == "data" and case.now("data"):
            x[0, 0] = float("inf")
        if case.now("drift"):
            with torch.no_grad():
                model.module.first.weight[0, 0] += 1e-3
        optimizer.zero_grad()
        out = model(x)
        loss = Passing.apply(F.cross_entropy(out, y), case, "loss")
        loss.backward()
        local = any(p.grad is not None and not torch.isfinite(p.grad).all() for p in model.parameters())
        bad = case.site in ("data", "nan") and HERE_STAGE.rank == case.rank and step == case.step
        HERE_STAGE.hit = local
        HERE_STAGE.before_audit = (lambda: time.sleep(6.0)) if case.now("late") else None
        if bad:
            HERE_STAGE.guards[0].local_bad.append({"tensor": "first.weight"})
        if local:
            optimizer.zero_grad(set_to_none=False)
        with broken(case):
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


HERE_STAGE = None


def main():
    global HERE_STAGE
    HERE_STAGE = here = stage.start()
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        plain = run(Case(case.site, case.rank, case.step), False) if name in ("clean", *ALONE) else None
        weights = run(case, True)
        everyone = [torch.empty_like(weights) for _ in range(here.size)]
        torch.distributed.all_gather(everyone, weights)
        offs = [None] * here.size
        torch.distributed.all_gather_object(offs, here.auditor.off or here.off)
        if here.rank == 0:
            line = {
                "case": name,
                "lockstep": all(torch.equal(w, everyone[0]) for w in everyone),
                "mismatches": [outcome.mismatch for outcome in here.outcomes],
                "votes": [outcome.vote for outcome in here.outcomes],
                "events": [outcome.event for outcome in here.outcomes if outcome.event],
                "off": offs[here.rank],
                "offs": offs,
                "said": here.said,
                "trace_free": plain is None or torch.equal(plain, weights),
            }
            sys.stdout.flush()
            os.write(1, (json.dumps(line) + "\n").encode())
    torch.distributed.barrier()
    os._exit(0)


main()
