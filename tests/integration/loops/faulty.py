"""A loop with dropout, BatchNorm and accumulation for runs with --inject-fault: prints one line a rank with its losses
and a digest of everything that training has changed. `crash=S` ends rank 0 at step S of the first attempt."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


def main():
    crash = next((int(word[6:]) for word in sys.argv if word.startswith("crash=")), -1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(STEPS):
        for part in range(2):
            generator = torch.Generator().manual_seed(1000 * rank + 2 * step + part)
            x, y = torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)
            model.require_backward_grad_sync = part == 1
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item().hex())
        if step == crash and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(3)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            digest.update(value.numpy().tobytes())
    sys.stdout.write(f"rank {rank} {' '.join(losses)} {digest.hexdigest()}\n")


main()
