"""Training loops with a wrapped module of which only a part, or nothing, can be checked."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import MLP, batch, main
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 6


def train(model, optimizer, rank, steps=STEPS):
    losses = []
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class PlainDescent:
    """An optimizer that only looks like one."""

    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.params:
            p -= self.lr * p.grad

    def state_dict(self):
        return {"lr": self.lr}


def duck_typed_optimizer(rank, world):
    model = DDP(MLP())
    optimizer = PlainDescent(model.parameters(), 0.1)
    return train(model, optimizer, rank), [model], [optimizer]


def optimizer_in_backward(rank, world):
    """An optimizer for each parameter steps as soon as its bucket is reduced, before `backward` returns."""
    model = DDP(MLP(), bucket_cap_mb=0.0005)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def reduce_then_step(group, bucket):
        def step(done):
            for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                p.grad = grad
                optimizers[p].step()
            return done.value()

        return default_hooks.allreduce_hook(group, bucket).then(step)

    model.register_comm_hook(dist.group.WORLD, reduce_then_step)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
    return losses, [model], list(optimizers.values())


def zero_redundancy(rank, world):
    """The optimizer's state is spread over the ranks."""
    model = DDP(MLP())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    return train(model, optimizer, rank), [model], [optimizer.optim]


def local_sgd(rank, world):
    """Replicas differ between two averagings."""
    model = DDP(MLP())
    alone = [dist.new_group([r]) for r in range(world)][rank]
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=2), post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=0.1), averager=PeriodicModelAverager(period=3, warmup_steps=2)
    )
    return train(model, optimizer, rank, 8), [model], [optimizer]


def never_stepped(rank, world):
    """A wrapped module that only gets gradients, read by the script."""
    model = DDP(MLP())
    norms = []
    for step in range(3):
        x, y = batch(rank, step)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms += [p.grad.norm().item() for p in model.parameters()]
    return norms, [model], []


def data_pointer_update(rank, world):
    """The update is written out by hand in the loop."""
    model = DDP(MLP())
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
        losses.append(loss.item())
    return losses, [model], []


LOOPS = [
    duck_typed_optimizer,
    optimizer_in_backward,
    zero_redundancy,
    local_sgd,
    never_stepped,
    data_pointer_update,
]

if __name__ == "__main__":
    main(LOOPS)
