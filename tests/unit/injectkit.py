"""One rank of a job with faults on a real DDP module of one process, driven by hand as the guard drives it."""

import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sdcrun.core.types import Config
from sdcrun.shim.guard import Guard
from sdcrun.shim.inject import Injector
from sdcrun.shim.patches import autograd


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def backward_watched():
    autograd.install()
    yield
    autograd.observers.clear()
    autograd.undo()


class Net(nn.Module):
    """Two layers, a normalisation with buffers, a parameter nobody uses."""

    def __init__(self, unused=True):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        if unused:
            self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))


class Rank:
    """One rank of a job with these faults, driven by hand."""

    def __init__(self, *faults, model=None, rank=0, attempt=0, job_dir="", seed=0):
        self.events = []
        runtime = types.SimpleNamespace(
            config=Config(faults=faults, job_dir=job_dir, seed=seed), rank=rank, attempt=attempt, campaign=None,
            emit=lambda kind, data: self.events.append((kind, data)))
        torch.manual_seed(5)
        self.model = model if model is not None else Net()
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=hasattr(self.model, "unused"))
        self.group = types.SimpleNamespace(step=0, runtime=runtime, off_reason=None)
        self.guard = Guard(self.ddp, self.group, "")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.injector = Injector(runtime) if faults else None
        if self.injector:
            self.injector.attach(self.guard)

    def forward(self, x):
        if self.injector:
            self.injector.forward_begins(self.guard, self.group.step)
        self.guard.window_open = True
        output = self.ddp(x)
        if self.injector:
            self.injector.forward_ends()
        return output

    def step(self, micro_batches=1):
        """One window as the guard drives it; returns the losses."""
        losses = []
        for _ in range(micro_batches):
            torch.manual_seed(100 + self.group.step)
            loss = self.forward(torch.randn(5, 6)).square().mean()
            loss.backward()
            losses.append(loss.item())
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        if self.injector:
            self.injector.optimizer(self.guard, self.optimizer, self.group.step)
            self.injector.weight(self.guard, self.group.step)
        self.optimizer.zero_grad()
        self.guard.window_open = False
        self.group.step += 1
        return losses

    def injected(self):
        return [data for kind, data in self.events if kind == "inject"]


def differences(a, b):
    """Flat numbers of the elements whose bits differ, by name."""
    return {n: torch.nonzero(a[n].view(torch.int32).flatten() != b[n].view(torch.int32).flatten()).flatten().tolist()
            for n in a if not torch.equal(a[n].view(torch.int32), b[n].view(torch.int32))}


def state(rank):
    return {n: t.detach().clone() for n, t in rank.model.state_dict().items() if t.is_floating_point()}
