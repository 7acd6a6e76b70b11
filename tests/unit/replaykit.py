"""Records and replays a backward of a plain module in one process, the way the auditor does it between ranks."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from sdcrun.shim.checks.opinion import Parcel
from sdcrun.shim.microbatch import Random
from sdcrun.shim.patches import autograd
from sdcrun.shim.replay.record import Recorder
from sdcrun.shim.replay.run import replay


def guard_of(module, name=""):
    """What recorder and replay read of a guard."""
    return SimpleNamespace(
        module=module, ddp=module, name=name, parameters=dict(module.named_parameters()), saved_buffers={}
    )


class Probe(collections.UserList):
    """Sees what a replay does: a list of the script's, and an object of its classes, would be put back as they were
    before; nobody looks into an object of a library for what it holds in others."""


Probe.__module__ = "numpy"


class Net(nn.Module):
    """Two layers, a normalisation with buffers, dropout, and plain attributes that the forward changes."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return self.b(F.dropout(torch.tanh(self.norm(self.a(x))), 0.3))


def data(seed=1, size=5):
    """A batch of the net: inputs float32 [size, 6], labels int64 [size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


class Solo:
    """`with Solo(module) as solo:` records; `solo(x)` is the guarded forward; `solo.parcel()` what would be sent."""

    def __init__(self, *modules, pick=0, before=None, onwards=False):
        self.guards = [guard_of(m, f"module{i}" if i else "") for i, m in enumerate(modules)]
        if before is not None:
            self.guards = before.guards
        self.recorder = Recorder(self.guards, pick, before.recorder if before is not None else None, onwards)

    def __enter__(self):
        autograd.install()
        autograd.observers.append(self.recorder)
        return self

    def __exit__(self, *exc):
        autograd.observers.remove(self.recorder)
        self.recorder.finish()

    def __call__(self, *inputs, which=0, **kwargs):
        guard = self.guards[which]
        token = self.recorder.before_forward(guard, inputs, kwargs, Random.now())
        output = guard.module(*inputs, **kwargs)
        if token is not None:
            self.recorder.after_forward(token, output)
            self.recorder.left_ddp(token, output)
        return output

    def parcel(self):
        """The recorded micro-batch after a trip through bytes; AssertionError with the reason when there is none."""
        why = self.recorder.pack()
        assert why is None, why
        return Parcel.loads(Parcel.of(self.recorder.case).dumps())

    def again(self, **options):
        """(what was expected, what the replay computed)."""
        parcel = self.parcel()
        result = replay(parcel.program, self.guards, self.recorder.local, **options)
        return parcel.expected, result


def bits(module):
    """Parameters, gradients and buffers as one list that compares bit for bit."""
    tensors = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters() if p.grad is not None)]
    return [t.detach().clone() for t in tensors], torch.get_rng_state()


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True)) and torch.equal(one[1], two[1])
