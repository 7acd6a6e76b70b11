"""What the training loops beside this file share: small real-looking data, seeds, and the line each rank prints.

A loop is a function `loop(rank, world)` that trains something and returns `(losses, modules, optimizers)`: a list of
floats, and what its final state is to be read from. `main(loops)` runs those named on the command line (all, when none
is) one after another in one process group and prints, on every rank, one JSON line for each:

    {"loop": name, "rank": r, "losses": [hex floats], "weights": sha256 over parameters, buffers and optimizer state,
     "grads": sha256 over the gradients left behind, "rng": sha256 over the states of torch's, Python's and numpy's RNG}
"""

import hashlib
import json
import os
import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def batch(rank, step, inputs=12, classes=4, size=8):
    """One rank's batch of step `step`: float32 [size, inputs], labels int64 [size]; leaves the global RNGs alone."""
    generator = torch.Generator().manual_seed(100_000 * (rank + 1) + step)
    x = torch.randn(size, inputs, generator=generator)
    return x, (x[:, :classes].sum(1).abs() * 7).long() % classes


class MLP(nn.Module):
    """Two layers with dropout, so that a loop also draws from torch's RNG."""

    def __init__(self, inputs=12, hidden=16, outputs=4, dropout=0.1):
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.fc1(x))))


class ConvNet(nn.Module):
    """A convolution and a linear layer with BatchNorm in between, on [batch, 1, 6, 6]."""

    def __init__(self, outputs=4):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 6 * 6, outputs)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x.view(-1, 1, 6, 6)))).flatten(1))


def _feed(digest, value):
    """Add a nested structure of tensors and plain values to a running hash, bit for bit."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, dict):
        for key in value:
            digest.update(repr(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())


def sha(value):
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def rng_states():
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return [torch.get_rng_state(), repr(random.getstate()), kind, keys.tobytes().hex(), position, has_gauss, gauss]


def record(name, rank, losses, modules, optimizers):
    """Print the line of one loop, in one write so that the ranks' lines do not mix."""
    state = [[dict(m.named_parameters()), dict(m.named_buffers())] for m in modules]
    state += [o.state_dict() for o in optimizers]
    line = {
        "loop": name,
        "rank": rank,
        "losses": [float(loss).hex() for loss in losses],
        "weights": sha(state),
        "grads": sha([[p.grad for p in m.parameters()] for m in modules]),
        "rng": sha(rng_states()),
    }
    sys.stdout.flush()
    os.write(1, (json.dumps(line) + "\n").encode())


def named(loops, names):
    """The functions of `loops` called `names`, all when there are none; SystemExit on an unknown name."""
    known = {loop.__name__: loop for loop in loops}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no loop called {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names or known]


def settle():
    """Wait a moment: torch aborts now and then when the interpreter ends while gloo still frees its last work."""
    time.sleep(0.3)


def main(loops):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for loop in named(loops, sys.argv[1:]):
        seed_everything(1234 + rank)
        record(loop.__name__, rank, *loop(rank, world))
    settle()
