"""Training loops with torch.compile around, inside and beside DistributedDataParallel.

The backend is taken from COMPILE_BACKEND ("aot_eager" when unset: no code is generated, the graphs are the same).
"""

import os

import torch
import torch.nn.functional as F
from record import MLP, ConvNet, batch, main
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 5
BACKEND = os.environ.get("COMPILE_BACKEND", "aot_eager")


def train(model, optimizer, rank, inputs=12):
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step, inputs)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled_inside(rank, world):
    model = DDP(torch.compile(MLP(), backend=BACKEND))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train(model, optimizer, rank), [model], [optimizer]


def compiled_in_place(rank, world):
    net = ConvNet()
    net.compile(backend=BACKEND)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train(model, optimizer, rank, 36), [model], [optimizer]


def compiled_outside(rank, world):
    net = DDP(MLP())
    model = torch.compile(net, backend=BACKEND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train(model, optimizer, rank), [net], [optimizer]


def compiled_outside_eager(rank, world):
    net = DDP(ConvNet())
    model = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train(model, optimizer, rank, 36), [net], [optimizer]


def compiled_loss(rank, world):
    """The loss around the wrapped module is compiled, the wrapper with it."""
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @torch.compile(backend=BACKEND)
    def loss_of(x, y):
        return F.cross_entropy(model(x), y)

    losses = []
    for step in range(STEPS):
        loss = loss_of(*batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def compiled_step(rank, world):
    """The optimizer's step is compiled."""
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    step_optimizer = torch.compile(optimizer.step, backend="eager", fullgraph=False)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step_optimizer()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [model], [optimizer]


LOOPS = [
    compiled_inside,
    compiled_in_place,
    compiled_outside,
    compiled_outside_eager,
    compiled_loss,
    compiled_step,
]

if __name__ == "__main__":
    main(LOOPS)
