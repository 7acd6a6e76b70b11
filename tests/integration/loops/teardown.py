"""Training loops that make and destroy the process group themselves; the last one is destroyed at the very end."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import MLP, batch, named, record, seed_everything, settle
from torch.nn.parallel import DistributedDataParallel as DDP


def start(name):
    """A new process group through a file: the launcher's store still holds the keys of the last group of that name."""
    path = os.path.join(tempfile.gettempdir(), f"{name}-{os.environ['TORCHELASTIC_RUN_ID']}")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    return rank, world


def train(model, optimizer, rank, steps=6):
    losses = []
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def destroyed_and_made_again(rank, world):
    """The module outlives its group; a second one is trained in a new group."""
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer, rank)
    dist.barrier()
    dist.destroy_process_group()
    losses.append(F.cross_entropy(model.module(batch(rank, 9)[0]), batch(rank, 9)[1]).item())
    start("again")
    again = DDP(model.module)
    optimizer = torch.optim.Adam(again.parameters(), lr=0.01)
    return losses + train(again, optimizer, rank), [again], [optimizer]


def module_deleted(rank, world):
    """Everything is deleted, then trained again from the start."""
    losses = []
    for _ in range(2):
        model = DDP(MLP())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses += train(model, optimizer, rank, 3)
        del model, optimizer
    return losses, [], []


def subgroup_destroyed(rank, world):
    group = dist.new_group(list(range(world)))
    model = DDP(MLP(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer, rank)
    dist.destroy_process_group(group)
    return losses, [model], [optimizer]


LOOPS = [destroyed_and_made_again, module_deleted, subgroup_destroyed]

if __name__ == "__main__":
    for loop in named(LOOPS, sys.argv[1:]):
        rank, world = start(loop.__name__)
        seed_everything(1234 + rank)
        record(loop.__name__, rank, *loop(rank, world))
        settle()
        dist.destroy_process_group()
