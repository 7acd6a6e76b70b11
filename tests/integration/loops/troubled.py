"""A small DDP training in which things go wrong by themselves, without --inject-fault: flips, NaN, crashes, restarts.

Arguments, each `what=RESTART.RANK.STEP` (RESTART may be *, STEP a range A-B): `flip` inverts a bit of a weight after
the update, `nan` makes the loss NaN, `crash` ends the rank with code 3 at the start of a step; `steps=N` (default 16).
Every rank appends each step it finished to the file steps.RESTART.RANK.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RESTART = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def due(what, rank, step):
    """Whether one of the arguments says that `what` happens now."""
    for argument in sys.argv[1:]:
        name, _, place = argument.partition("=")
        if name == what:
            restart, at, when = place.split(".")
            first, _, last = when.partition("-")
            if restart in ("*", RESTART) and at == str(rank) and int(first) <= step <= int(last or first):
                return True
    return False


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Keys of their own for each restart: torchrun's store outlives the ranks, and torch trips over what it still holds.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"restart {RESTART}", store), rank=rank, world_size=world)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    steps = next((int(a.partition("=")[2]) for a in sys.argv[1:] if a.startswith("steps=")), 16)
    with open(f"steps.{RESTART}.{rank}", "a", buffering=1) as file:
        for step in range(steps):
            if due("crash", rank, step):
                time.sleep(0.5)
                os._exit(3)
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            optimizer.zero_grad()
            (loss * float("nan") if due("nan", rank, step) else loss).backward()
            optimizer.step()
            if due("flip", rank, step):
                with torch.no_grad():
                    net[2].weight.view(torch.int32)[0, 0] ^= 1 << 22
            file.write(f"{step}\n")
            time.sleep(0.02)
    sys.stdout.write(f"rank {rank} has trained\n")


if __name__ == "__main__":
    main()
