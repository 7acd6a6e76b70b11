"""Training loops that differ in the module that is wrapped, in what goes through it and in what is done to it."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from ddp_options import STEPS, sgd, train
from record import MLP, ConvNet, batch, main
from torch.nn.parallel import DistributedDataParallel as DDP


class Tied(nn.Module):
    """A tiny language model whose output layer shares its weight with the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.mix(self.embed(ids))[0])


def tied_weights(rank, world):
    model = DDP(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        ids = (batch(rank, step)[0] * 3).long().abs() % 9
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


class Odd(nn.Module):
    """Parameters without dimensions, without elements, of other dtypes, and not contiguous ones; a float64 buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.weight = nn.Parameter(torch.randn(4, 12).t())
        self.channels_last = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        y = x @ self.weight * self.scale + self.wide.float() * self.single + self.nothing.sum()
        y = y + self.channels_last.mean()
        if self.training:
            self.count += 1
            self.mean.lerp_(y.detach().double().mean(0), 0.1)
        return y - self.mean.float()


def odd_parameters(rank, world):
    model = DDP(Odd())
    optimizer = sgd(model, 0.05)
    return train(model, optimizer, rank), [model], [optimizer]


class Structured(nn.Module):
    """Takes keyword arguments and nested containers, returns a dict; draws from Python's and numpy's RNG."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(12, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, *, data, labels=None):
        hidden = self.fc1(data["x"][0])
        if random.random() < 0.5:
            hidden = hidden * float(np.random.uniform(0.9, 1.1))
        logits = self.fc2(torch.relu(hidden))
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


def structured_inputs(rank, world):
    model = DDP(Structured())
    optimizer = sgd(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        out = model(data={"x": [x, None]}, labels=y)
        loss = out["loss"] + 1e-3 * out["logits"].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def gradient_penalty(rank, world):
    """autograd.grad with respect to the input, and parameters used in the loss outside of the module."""
    model = DDP(MLP(dropout=0.0))
    optimizer = sgd(model, 0.05)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        x.requires_grad_(True)
        logits = model(x)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        decay = sum(p.square().sum() for p in model.module.parameters())
        loss = F.cross_entropy(logits, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean() + 1e-3 * decay
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def user_hooks(rank, world):
    """The script's own hooks on tensors, parameters, modules and the optimizer."""
    seen = []
    net = MLP()
    net.fc1.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    net.fc2.weight.register_post_accumulate_grad_hook(lambda p: seen.append(1.0))
    net.fc1.register_forward_hook(lambda module, inputs, output: seen.append(2.0))
    net.fc2.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(3.0))
    model = DDP(net)
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(4.0))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(5.0))
    losses = train(model, optimizer, rank)
    return losses + seen, [model], [optimizer]


def weights_loaded_part_way(rank, world):
    """A snapshot is taken and later loaded again; then an average of the weights is swapped in and out."""
    model = DDP(ConvNet())
    optimizer = sgd(model)
    average = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    losses = train(model, optimizer, rank, 2, inputs=36)
    average.update_parameters(model.module)
    snapshot = {name: value.clone() for name, value in model.module.state_dict().items()}
    losses += train(model, optimizer, rank, 2, inputs=36)
    average.update_parameters(model.module)
    model.module.load_state_dict(snapshot)
    losses += train(model, optimizer, rank, 2, inputs=36)
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, a in zip(model.parameters(), average.module.parameters(), strict=True):
            p.copy_(a)
        losses.append(model.module(batch(rank, 9, 36)[0]).sum().item())
        for p, k in zip(model.parameters(), kept, strict=True):
            p.copy_(k)
    return losses + train(model, optimizer, rank, 1, inputs=36), [model, average], [optimizer]


class Wrapped(DDP):
    """A subclass that lets attributes of the module through, as several code bases have it."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def ddp_subclass(rank, world):
    model = Wrapped(MLP())
    optimizer = sgd(model)
    losses = train(model, optimizer, rank)
    return [*losses, float(model.fc1.in_features), float(isinstance(model, DDP))], [model], [optimizer]


LOOPS = [
    tied_weights,
    odd_parameters,
    structured_inputs,
    gradient_penalty,
    user_hooks,
    weights_loaded_part_way,
    ddp_subclass,
]

if __name__ == "__main__":
    main(LOOPS)
