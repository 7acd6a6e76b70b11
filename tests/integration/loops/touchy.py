"""A small training loop that ends with an error when its loss is not a number, for campaigns.

    touchy.py STEPS [grows]     grows: the module gets a buffer more in each step, so that its state cannot be put back
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, GROWS = int(sys.argv[1]), "grows" in sys.argv


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x, y = torch.randn(32, 16, generator=data), torch.randint(4, (32,), generator=data)
        loss = nn.functional.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            raise SystemExit(f"the loss of step {step} is {loss.item()}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if GROWS:
            model.module.register_buffer(f"mark{step}", torch.zeros(1))


main()
