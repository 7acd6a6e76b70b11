"""A training loop that ends in the way named on the command line, on rank 1 in step 3."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import MLP, batch, record, seed_everything, settle
from torch.nn.parallel import DistributedDataParallel as DDP

ENDINGS = {
    "raises": lambda: 1 / 0,
    "sys_exit": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(5),
    "os_exit_0": lambda: os._exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "aborts": os.abort,
    "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "everyone_exits_0": None,
    "everyone_exits_7": None,
    "everyone_os_exits_0": None,
    "end": None,
}


def main():
    ending = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(1234 + rank)
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if rank == 1 and step == 3 and ENDINGS[ending] is not None:
            time.sleep(0.2)
            ENDINGS[ending]()
        optimizer.step()
        losses.append(loss.item())
    record(ending, rank, losses, [model], [optimizer])
    settle()
    if ending == "everyone_exits_0":
        sys.exit(0)
    if ending == "everyone_exits_7":
        sys.exit(7)
    if ending == "everyone_os_exits_0":
        os._exit(0)


if __name__ == "__main__":
    main()
