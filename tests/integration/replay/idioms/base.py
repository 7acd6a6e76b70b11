"""Ways in which people write one training step, each with what the replay audit must make of it.

`@idiom(WHOLE)`: loss and gradients are audited; `OUTPUTS`: the loss is out of reach, gradients from the module's
outputs back and the outputs themselves are; a text: declined, and the reason contains it. A function `f(rank)` returns
(losses, modules, optimizers).
"""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WHOLE, OUTPUTS = "whole", "outputs"
IDIOMS: dict[str, tuple[typing.Callable, str]] = {}
COMPILED: set[str] = set()
WIDTH, CLASSES, STEPS = 24, 7, 4


def idiom(expected: str, compiled: bool = False):
    def register(function):
        IDIOMS[function.__name__] = (function, expected)
        if compiled:
            COMPILED.add(function.__name__)
        return function

    return register


class Net(nn.Module):
    """Three layers, with BatchNorm and dropout if wanted."""

    def __init__(self, norm: bool = False, dropout: float = 0.0, outputs: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 40)
        self.norm = nn.BatchNorm1d(40) if norm else nn.Identity()
        self.second = nn.Linear(40, 40)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(40, outputs)

    def body(self, x):
        return self.drop(F.gelu(self.second(torch.relu(self.norm(self.first(x))))))

    def forward(self, x):
        return self.head(self.body(x))


class Language(nn.Module):
    """Two attention blocks over tokens; `again`: how activations are recomputed; `tied`: input and output embedding."""

    def __init__(self, tokens: int = 30, again: str = "", tied: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.out = nn.Linear(16, tokens, bias=False)
        self.again = again
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, use_reentrant=self.again == "reentrant")
            else:
                x = block(x)
        return self.out(x)


def batch(step: int, size: int = 6):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


def tokens(step: int):
    return torch.randint(0, 30, (3, 8), generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


def train(model, step_loss, optimizer=None, steps=STEPS):
    """Plain loop: `step_loss(step)` runs forward and backward and returns a number."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(torch.as_tensor(step_loss(step)).detach()))
        optimizer.step()
    return losses, [model], [optimizer]


def classify(model, steps=STEPS, call=None):
    def step_loss(step):
        x, y = batch(step)
        loss = F.cross_entropy((model if call is None else call)(x), y)
        loss.backward()
        return loss

    return train(model, step_loss, steps=steps)


def next_token(model):
    def step_loss(step):
        ids = tokens(step)
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
        loss.backward()
        return loss

    return train(model, step_loss, torch.optim.AdamW(model.parameters(), lr=0.01))
