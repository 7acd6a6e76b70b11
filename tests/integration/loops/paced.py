"""A small DDP training at a steady pace, for tests that do something to it from outside.

Usage: paced.py STEPS SECONDS: that many steps, each at least so long; STEPS 0: until there is a file `enough` in the
working folder of rank 0. Every rank appends the wall time of each step to the file steps.RESTART.RANK in its own.
"""

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def enough():
    """Whether rank 0 has the file, on all ranks alike."""
    there = torch.tensor([float(os.path.exists("enough"))])
    dist.broadcast(there, 0)
    return bool(there)


def main(steps, seconds):
    # A rank whose peer never comes up is not to wait for half an hour.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank = dist.get_rank()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    with open(f"steps.{attempt}.{rank}", "a", buffering=1) as file:
        made = 0
        while (made < steps) if steps else not enough():
            made += 1
            began = time.monotonic()
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            file.write(f"{time.time():.3f}\n")
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))
    sys.stdout.write(f"rank {rank} trained {made} steps\n")
    # torch aborts now and then when the interpreter ends while gloo still frees its last work.
    time.sleep(0.3)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
