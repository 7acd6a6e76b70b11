"""Training loops that differ in how they use DistributedDataParallel."""


import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from record import MLP, ConvNet, batch, main, seed_everything
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

STEPS = 6


def train(model, optimizer, rank, steps=STEPS, inputs=12):
    losses = []
    for step in range(steps):
        x, y = batch(rank, step, inputs)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def no_sync(rank, world):
    """Gradient accumulation over three micro-batches, the last one synchronises."""
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        for micro in range(3):
            x, y = batch(rank, 3 * step + micro)
            if micro < 2:
                with model.no_sync():
                    loss = F.cross_entropy(model(x), y) / 3
                    loss.backward()
            else:
                loss = F.cross_entropy(model(x), y) / 3
                loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, [model], [optimizer]


def sync_switch(rank, world):
    """Gradient accumulation by setting the attribute, with the forward passes before the backward passes."""
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        for micro in range(4):
            x, y = batch(rank, 4 * step + micro)
            model.require_backward_grad_sync = micro == 3
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, [model], [optimizer]


def accumulate_with_sync(rank, world):
    """Accumulation by someone who does not know no_sync: every backward all-reduces."""
    model = DDP(MLP())
    optimizer = sgd(model)
    losses = []
    for step in range(8):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        losses.append(loss.item())
        if (step + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [model], [optimizer]


class Branches(nn.Module):
    """One of three branches is used, another one in each call and on each rank."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x, which):
        return self.branches[which](torch.relu(self.stem(x)))


def find_unused_parameters(rank, world):
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, (step + rank) % 2), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def static_graph(rank, world):
    model = DDP(MLP(), static_graph=True)
    optimizer = sgd(model)
    return train(model, optimizer, rank), [model], [optimizer]


class Checkpointed(nn.Module):
    """Activations are computed again in backward; the same layer is used twice."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(12, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def static_graph_checkpointed(rank, world):
    model = DDP(Checkpointed(use_reentrant=True), static_graph=True)
    optimizer = sgd(model)
    return train(model, optimizer, rank), [model], [optimizer]


def checkpointed(rank, world):
    model = DDP(Checkpointed(use_reentrant=False))
    optimizer = sgd(model)
    return train(model, optimizer, rank), [model], [optimizer]


def bucket_view(rank, world):
    model = DDP(MLP(), gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
    optimizer = sgd(model)
    losses = train(model, optimizer, rank, 3)
    for step in range(3, STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def many_buckets(rank, world):
    """A deep module cut into many small buckets."""
    net = nn.Sequential(nn.Linear(12, 16), *[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)])
    model = DDP(nn.Sequential(net, nn.Linear(16, 4)), bucket_cap_mb=0.0008)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train(model, optimizer, rank), [model], [optimizer]


def frozen_part_way(rank, world):
    """A layer is frozen for two steps in the middle, the way fine-tuning scripts do; its gradients stay None."""
    model = DDP(MLP(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train(model, optimizer, rank, 2)
    model.module.fc1.requires_grad_(False)
    losses += train(model, optimizer, rank, 2)
    model.module.fc1.requires_grad_(True)
    return losses + train(model, optimizer, rank, 2), [model], [optimizer]


def frozen_from_the_start(rank, world):
    """A frozen feature extractor and a head; later the module is wrapped anew with everything trainable."""
    net = MLP()
    net.fc1.requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = train(model, optimizer, rank, 3)
    net.fc1.requires_grad_(True)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    return losses + train(model, optimizer, rank, 3), [model], [optimizer]


def batchnorm_buffers_broadcast(rank, world):
    model = DDP(ConvNet())
    optimizer = sgd(model)
    return train(model, optimizer, rank, inputs=36), [model], [optimizer]


def batchnorm_buffers_local(rank, world):
    model = DDP(ConvNet(), broadcast_buffers=False)
    optimizer = sgd(model)
    return train(model, optimizer, rank, inputs=36), [model], [optimizer]


def evaluate_on_rank_0(rank, world):
    """Evaluation through the wrapper on rank 0 only, while the others go on to the next step."""
    model = DDP(MLP())
    optimizer = sgd(model)
    losses = []
    for step in range(3):
        losses += train(model, optimizer, rank, 2)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                x, y = batch(7, step)
                losses.append(F.cross_entropy(model(x), y).item())
            model.train()
    return losses, [model], [optimizer]


def train_mode_forward_on_rank_0(rank, world):
    """Rank 0 alone looks at the loss of one more batch, in training mode and with gradients enabled."""
    model = DDP(MLP(), broadcast_buffers=False)
    optimizer = sgd(model)
    losses = []
    for _ in range(3):
        losses += train(model, optimizer, rank, 2)
        if rank == 0:
            x, y = batch(7, 0)
            losses.append(F.cross_entropy(model(x), y).item())
            losses.append(F.cross_entropy(model.module(x), y).item())
    return losses, [model], [optimizer]


def evaluate_everywhere(rank, world):
    model = DDP(ConvNet())
    optimizer = sgd(model)
    losses = []
    for step in range(3):
        losses += train(model, optimizer, rank, 2, inputs=36)
        model.eval()
        with torch.inference_mode():
            x, y = batch(rank + 7, step, 36)
            total = F.cross_entropy(model(x), y)
            dist.all_reduce(total)
        losses.append(total.item())
        model.train()
    return losses, [model], [optimizer]


def hook_fp16(rank, world):
    model = DDP(MLP())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = sgd(model)
    return train(model, optimizer, rank), [model], [optimizer]


def hook_fp16_wrapped(rank, world):
    model = DDP(MLP())
    hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    model.register_comm_hook(dist.group.WORLD, hook)
    optimizer = sgd(model)
    return train(model, optimizer, rank), [model], [optimizer]


def hook_custom(rank, world):
    """A hook with state of its own that clips each bucket before the reduction."""
    seen = []

    def clipped(state: list, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        state.append((bucket.index(), buffer.numel(), bucket.is_last(), len(bucket.parameters())))
        buffer.div_(dist.get_world_size()).clamp_(-0.05, 0.05)
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    model = DDP(MLP())
    model.register_comm_hook(state=seen, hook=clipped)
    optimizer = sgd(model)
    losses = train(model, optimizer, rank)
    return losses + [float(v) for call in seen for v in call], [model], [optimizer]


def hook_builtin(rank, world):
    model = DDP(MLP())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    optimizer = sgd(model)
    return train(model, optimizer, rank), [model], [optimizer]


def hook_builtin_fp16(rank, world):
    model = DDP(MLP())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    optimizer = sgd(model)
    return train(model, optimizer, rank), [model], [optimizer]


def hook_powersgd(rank, world):
    model = DDP(MLP())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = sgd(model)
    return train(model, optimizer, rank, 8), [model], [optimizer]


def small_group(rank, world):
    """The last rank has another job and does not train."""
    group = dist.new_group(list(range(world - 1)))
    if rank == world - 1:
        seed_everything(5)
        return [torch.rand(1).item()], [], []
    model = DDP(MLP(), process_group=group)
    optimizer = sgd(model)
    return train(model, optimizer, rank), [model], [optimizer]


def two_groups(rank, world):
    """Two separate trainings in one job, of ranks 0..world-2 and of the last one alone."""
    groups = [dist.new_group(list(range(world - 1))), dist.new_group([world - 1])]
    model = DDP(MLP(), process_group=groups[rank == world - 1])
    optimizer = sgd(model)
    return train(model, optimizer, rank, 4 + 2 * (rank == world - 1)), [model], [optimizer]


def uneven(rank, divide):
    """Ranks have different numbers of batches."""
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=divide):
        losses = train(model, optimizer, rank, 4 + rank)
    losses += train(model, optimizer, rank, 2)
    return losses, [model], [optimizer]


def join_initial_world(rank, world):
    return uneven(rank, True)


def join_effective_world(rank, world):
    return uneven(rank, False)


def join_context(rank, world):
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer, rank, 2)
    with Join([model]):
        losses += train(model, optimizer, rank, 6 - rank)
    return losses, [model], [optimizer]


LOOPS = [
    no_sync,
    sync_switch,
    accumulate_with_sync,
    find_unused_parameters,
    static_graph,
    static_graph_checkpointed,
    checkpointed,
    bucket_view,
    many_buckets,
    frozen_part_way,
    frozen_from_the_start,
    batchnorm_buffers_broadcast,
    batchnorm_buffers_local,
    evaluate_on_rank_0,
    train_mode_forward_on_rank_0,
    evaluate_everywhere,
    hook_fp16,
    hook_fp16_wrapped,
    hook_custom,
    hook_builtin,
    hook_builtin_fp16,
    hook_powersgd,
    small_group,
    two_groups,
    join_initial_world,
    join_effective_world,
    join_context,
]

if __name__ == "__main__":
    main(LOOPS)
