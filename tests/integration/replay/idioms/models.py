"""What is inside the module and what it is given."""

from __future__ import annotations

import collections
import functools
import random
import types
from collections import namedtuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from idioms.base import (
    CLASSES,
    WHOLE,
    WIDTH,
    Net,
    batch,
    classify,
    idiom,
    tokens,
    train,
)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history = 0, []

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        return super().forward(x) * (1 + 0.01 * self.calls)


@idiom(WHOLE)
def counter_in_forward(rank):
    net = Counting()
    losses, models, optimizers = classify(DDP(net))
    return [*losses, net.calls, *net.history], models, optimizers


@idiom(WHOLE)
def hooks_that_look_on_and_that_act(rank):
    net, seen = Net(), []
    net.first.register_forward_hook(lambda module, args, output: seen.append("forward"))
    net.second.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    net.head.register_forward_hook(lambda module, args, output: output * 1.5)
    net.first.weight.register_hook(lambda gradient: gradient * 0.5)
    losses, models, optimizers = classify(DDP(net))
    return [*losses, len(seen)], models, optimizers


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.recur = nn.LSTM(16, 16, batch_first=True, dropout=0.1, num_layers=2)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x.unsqueeze(-1).expand(-1, -1, 5))))
        return self.out(self.recur(x.transpose(1, 2))[0][:, -1])


@idiom(WHOLE)
def convolution_and_lstm(rank):
    return classify(DDP(Layers()))


def _images(model):
    def step_loss(step):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        x = torch.randn(4, 3, 9, 9, generator=generator).to(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(x), torch.arange(4))
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def channels_last(rank):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = nn.Sequential(net, nn.Linear(8, CLASSES)).to(memory_format=torch.channels_last)
    return _images(DDP(net))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 16, sparse=True), nn.Linear(16, CLASSES)

    def forward(self, ids):
        return self.out(self.embed(ids).mean(1))


@idiom(WHOLE)
def sparse_gradients(rank):
    model = DDP(Sparse())

    def step_loss(step):
        ids = tokens(step)
        loss = F.cross_entropy(model(ids), ids[:, 0] % CLASSES)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def weight_and_spectral_norm(rank):
    net = Net()
    nn.utils.parametrizations.weight_norm(net.first)
    nn.utils.parametrizations.spectral_norm(net.second)
    nn.utils.spectral_norm(net.head)
    return classify(DDP(net))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.state = nn.GRUCell(WIDTH, 16), nn.Linear(16, CLASSES), None

    def forward(self, x):
        hidden = self.cell(x, self.state)
        self.state = hidden.detach()
        return self.out(hidden)


@idiom(WHOLE)
def state_in_an_attribute(rank):
    return classify(DDP(Recurrent()))


class Lucky(Net):
    def forward(self, x):
        return super().forward(x) * (1 + random.random()) * (1 + float(np.random.rand()))


@idiom(WHOLE)
def python_and_numpy_random(rank):
    return classify(DDP(Lucky()))


@idiom(WHOLE)
def batches_of_other_shapes_and_empty_ones(rank):
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step, size=(0 if step == 2 and rank == 1 else 3 + rank + step))
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        return loss

    return train(model, step_loss)


Pair = namedtuple("Pair", "x scale")


class Nested(Net):
    def forward(self, *, batch, scale=1.0):
        pair = batch["x"][0]
        return {"logits": super().forward(pair.x * scale + batch["shift"]), "scales": [pair.scale]}


@idiom(WHOLE)
def nested_keyword_inputs(rank):
    model = DDP(Nested())

    def step_loss(step):
        x, y = batch(step)
        out = model(batch={"x": [Pair(x, 3)], "shift": x[:, :1]}, scale=2.0)
        loss = F.cross_entropy(out["logits"], y)
        loss.backward()
        return loss

    return train(model, step_loss)


class Chatty(Net):
    def forward(self, x):
        self.first.extra = getattr(self.first, "extra", 0) + 1
        return super().forward(x)


@idiom(WHOLE)
def attribute_on_a_submodule(rank):
    net = Chatty()
    losses, models, optimizers = classify(DDP(net))
    return [*losses, net.first.extra], models, optimizers


class Cooling(Net):
    """What it computes depends on what it has counted, from another number on each rank, in nested containers."""

    def __init__(self):
        super().__init__()
        self.counts = {"calls": dist.get_rank(), "sizes": collections.defaultdict(list)}
        self.recent = collections.deque(maxlen=2)

    def forward(self, x):
        self.counts["calls"] += 1
        self.counts["sizes"][len(x) % 2].append(len(x))
        self.recent.append(self.counts["calls"])
        seen = sum(map(sum, self.counts["sizes"].values()))
        return super().forward(x) / (1 + 0.1 * sum(self.recent) + 0.01 * seen)


@idiom(WHOLE)
def counts_in_containers(rank):
    net = Cooling()
    losses, models, optimizers = classify(DDP(net))
    return [*losses, *net.recent, *net.counts["sizes"][0], net.counts["calls"]], models, optimizers


class ByRank(Net):
    """Computes something else on rank 0, as a variable of the script says."""

    def forward(self, x):
        return super().forward(x * 1.01 if SETTINGS.rank == 0 else x)


SETTINGS = types.SimpleNamespace(rank=None)


@idiom(WHOLE)
def other_computation_on_one_rank(rank):
    SETTINGS.rank = rank
    return classify(DDP(ByRank()))


def is_main():
    return dist.get_rank() == 0


class AsksForTheRank(Net):
    """The same, as torch says."""

    def forward(self, x):
        return super().forward(x * 1.01 if is_main() else x)


@idiom(WHOLE)
def other_computation_on_the_main_rank(rank):
    return classify(DDP(AsksForTheRank()))


@functools.cache
def rank_once():
    return dist.get_rank()


class AsksOnce(Net):
    """The same, where nobody can see it in a variable."""

    def forward(self, x):
        return super().forward(x * 1.01 if rank_once() == 0 else x)


@idiom(WHOLE)
def rank_that_is_remembered(rank):
    return classify(DDP(AsksOnce()))


class OwnConstant(Net):
    """Works with a tensor of the script that differs on one rank."""

    def forward(self, x):
        return super().forward(x) * CONSTANT[0]


CONSTANT = []


@idiom(WHOLE)
def constant_of_one_rank(rank):
    CONSTANT[:] = [torch.full((CLASSES,), 1.5 if rank == 1 else 1.0)]
    return classify(DDP(OwnConstant()))


class Collecting(Net):
    """Counts its calls and collects what it saw in variables of the script."""

    calls = 0

    def __init__(self):
        super().__init__(dropout=0.1)
        self.noise = torch.Generator().manual_seed(dist.get_rank())

    def forward(self, x, y):
        Collecting.calls += 1
        torch.rand(3, generator=self.noise)
        loss = F.cross_entropy(super().forward(x), y)
        COLLECTED.append(loss.item())
        return loss


COLLECTED: list[float] = []


@idiom(WHOLE)
def variables_of_the_script(rank):
    Collecting.calls = 0
    COLLECTED.clear()
    model = DDP(Collecting())

    def step_loss(step):
        loss = model(*batch(step))
        loss.backward()
        return loss

    losses, modules, optimizers = train(model, step_loss)
    return [*losses, *COLLECTED, Collecting.calls, model.module.noise.get_state()], modules, optimizers
