"""Loops that put other tensors in the place of weights and buffers, as averaging, quantising and running means do."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from record import MLP, batch, main
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 6


def weights_replaced(rank, world):
    """After each update the weights lie in new memory; every second time a transposed one."""
    model = DDP(MLP(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        for p in model.parameters():
            p.data = p.data.t().clone().t() if p.dim() == 2 and step % 2 else p.data.clone()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


class Centred(nn.Module):
    """Keeps a running mean of what comes in, by assignment, and a memory that grows."""

    def __init__(self):
        super().__init__()
        self.net = MLP(dropout=0.0)
        self.register_buffer("center", torch.zeros(12))
        self.register_buffer("seen", torch.zeros(0, 12))

    def forward(self, x):
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * x.mean(0)
            self.seen = torch.cat([self.seen, x[:1]])
        return self.net(x - self.center)


def buffers_replaced(rank, world):
    """Without broadcasts: a buffer that grows would stop them."""
    model = DDP(Centred(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        losses.append(float(model.module.center.sum()))
        losses.append(float(len(model.module.seen)))
    return losses, [model], [optimizer]


LOOPS = [weights_replaced, buffers_replaced]

if __name__ == "__main__":
    main(LOOPS)
