"""Training loops that do not use DistributedDataParallel."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import MLP, batch, main
from torch.distributed.fsdp import fully_shard

STEPS = 6


def every_rank_its_own(rank, world):
    """Every rank trains a model of its own, as sweeps and reinforcement learning do."""
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (rank + 1))
    losses = []
    for step in range(STEPS + rank):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def all_reduce_by_hand(rank, world):
    model = MLP()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def optimizer_in_backward_by_hand(rank, world):
    """As in the tutorial that saves the memory of the gradients, with an all-reduce in the hook."""
    model = MLP()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

    def reduce_and_step(p):
        dist.all_reduce(p.grad)
        p.grad /= world
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(reduce_and_step)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
    return losses, [model], list(optimizers.values())


def sharded(rank, world):
    """Fully sharded data parallel; each rank holds a part of every weight."""
    torch.manual_seed(3)
    model = MLP(dropout=0.0)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses + [p.to_local().sum().item() for p in model.parameters()], [], []


LOOPS = [every_rank_its_own, all_reduce_by_hand, optimizer_in_backward_by_hand, sharded]

if __name__ == "__main__":
    main(LOOPS)
