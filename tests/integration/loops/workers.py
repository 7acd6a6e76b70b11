"""Training loops that start processes and threads of their own."""

import multiprocessing
import queue
import random
import subprocess
import sys
import threading

import numpy as np
import torch
import torch.nn.functional as F
from record import MLP, main
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class Vectors(Dataset):
    """Vectors with noise drawn in the worker, so that the workers' seeds show in the result."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(12, generator=generator) + 0.01 * torch.randn(12) + 0.01 * random.random()
        return x + 0.01 * float(np.random.random()), int(x[:4].sum().abs() * 7) % 4


class Stream(IterableDataset):
    """The same vectors as a stream, each worker its share."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for index in range(info.id, 32, info.num_workers):
            yield Vectors()[index]


def seed_worker(worker):
    random.seed(torch.initial_seed() % 2**32)
    np.random.seed(torch.initial_seed() % 2**32)


def train(loader, sampler=None, epochs=2):
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, [model], [optimizer]


def loader_fork(rank, world):
    sampler = DistributedSampler(Vectors())
    loader = DataLoader(Vectors(), 8, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
    return train(loader, sampler)


def loader_spawn(rank, world):
    sampler = DistributedSampler(Vectors())
    loader = DataLoader(
        Vectors(),
        8,
        sampler=sampler,
        num_workers=1,
        worker_init_fn=seed_worker,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    return train(loader, sampler)


def loader_stream(rank, world):
    """The workers are started before the module is wrapped and live on until after the next loop has begun."""
    loader = DataLoader(Stream(), 8, num_workers=2, worker_init_fn=seed_worker, persistent_workers=True)
    iter(loader)
    return train(loader)


def square(x):
    return x * x


CHILD = "import os, torch; print(os.path.basename(torch.optim.Optimizer.profile_hook_step.__code__.co_filename))"


def other_processes(rank, world):
    """A pool, a Python child that imports torch, and a shell command, in the middle of training."""
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        x = torch.randn(8, 12)
        loss = model(x).square().mean()
        loss.backward()
        if step == 1:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                losses += [float(v) for v in pool.map(square, range(3))]
        if step == 2:
            child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
            losses.append(float(child.stdout.strip() == "optimizer.py"))
            losses.append(float(subprocess.run("exit 5", shell=True).returncode))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def threads(rank, world):
    """A thread prepares the batches, another one computes something with gradients and an optimizer of its own."""
    batches = queue.Queue(2)

    def produce():
        generator = torch.Generator().manual_seed(rank)
        for _ in range(6):
            batches.put(torch.randn(8, 12, generator=generator))
        batches.put(None)

    side = torch.nn.Parameter(torch.ones(3))
    side_optimizer = torch.optim.SGD([side], lr=0.1)

    def compute():
        for _ in range(20):
            side_optimizer.zero_grad()
            side.square().sum().backward()
            side_optimizer.step()

    started = [threading.Thread(target=produce), threading.Thread(target=compute)]
    for thread in started:
        thread.start()
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    while (x := batches.get()) is not None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for thread in started:
        thread.join()
    return losses + side.tolist(), [model], [optimizer, side_optimizer]


LOOPS = [loader_fork, loader_spawn, loader_stream, other_processes, threads]

if __name__ == "__main__":
    main(LOOPS)
