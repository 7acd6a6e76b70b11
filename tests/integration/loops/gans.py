"""Adversarial training in the orders in which people write it: prints one line a rank with a digest of the weights.

`tutorial`: the critic learns from real and fake samples in two backwards, the generator from the same fakes.
`wasserstein`: two steps of the critic to one of the generator, the critic frozen meanwhile, new fakes for each.
`generator_first`: the generator's update lies between its forward and the critic's step.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from record import settle
from torch.nn.parallel import DistributedDataParallel

ROUNDS = 4


def tutorial(maker, judge, optimizers, batches):
    right = nn.BCEWithLogitsLoss()
    for real, noise in batches:
        judge.zero_grad()
        right(judge(real), torch.ones(len(real), 1)).backward()
        fake = maker(noise)
        right(judge(fake.detach()), torch.zeros(len(real), 1)).backward()
        optimizers[1].step()
        maker.zero_grad()
        right(judge(fake), torch.ones(len(real), 1)).backward()
        optimizers[0].step()


def wasserstein(maker, judge, optimizers, batches):
    for real, noise in batches:
        for _ in range(2):
            optimizers[1].zero_grad()
            (judge(maker(noise).detach()).mean() - judge(real).mean()).backward()
            optimizers[1].step()
        judge.requires_grad_(False)
        optimizers[0].zero_grad()
        (-judge(maker(noise)).mean()).backward()
        optimizers[0].step()
        judge.requires_grad_(True)


def generator_first(maker, judge, optimizers, batches):
    right = nn.BCEWithLogitsLoss()
    for real, noise in batches:
        optimizers[0].zero_grad()
        fake = maker(noise)
        right(judge(fake), torch.ones(len(real), 1)).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        real_loss = right(judge(real), torch.ones(len(real), 1))
        fake_loss = right(judge(fake.detach()), torch.zeros(len(real), 1))
        ((real_loss + fake_loss) / 2).backward()
        optimizers[1].step()


def batches(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(ROUNDS):
        yield torch.randn(8, 12, generator=generator), torch.randn(8, 6, generator=generator)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    maker = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh()))
    judge = DistributedDataParallel(
        nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1)), broadcast_buffers=False)
    optimizers = [torch.optim.Adam(module.parameters(), lr=2e-3, betas=(0.5, 0.999)) for module in (maker, judge)]
    {"tutorial": tutorial, "wasserstein": wasserstein, "generator_first": generator_first}[sys.argv[1]](
        maker, judge, optimizers, batches(rank))
    digest = hashlib.sha256()
    for module in (maker, judge):
        for tensor in module.parameters():
            digest.update(tensor.detach().numpy().tobytes())
    sys.stdout.write(f"rank {rank} {digest.hexdigest()}\n")
    settle()


if __name__ == "__main__":
    main()
