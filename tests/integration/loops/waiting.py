"""Rank 0 saves alone while the other ranks are busy with something else; each save has the name of what that is.

`damaged` leaves a wrong bit in a weight of rank 2 for the length of one save; `load=FILE` loads that file first.
"""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

RANK = int(os.environ["RANK"])
WORDS = [word for word in sys.argv[1:] if "=" not in word]
GIVEN = dict(word.split("=") for word in sys.argv[1:] if "=" in word)


class Slow(torch.utils.data.Dataset):
    """Data that takes its time."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.randn(16)


def busy(seconds):
    until, count = time.time() + seconds, 0
    while time.time() < until:
        count += 1


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
    if "load" in GIVEN:
        model.module.load_state_dict(torch.load(GIVEN["load"], map_location="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slow = [0.0]
    optimizer.register_step_pre_hook(lambda *_: time.sleep(slow[0]))

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()

    def save(name):
        if RANK == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{name}.pt")

    step()
    step()
    save("backward")
    step()
    save("barrier")
    dist.barrier()
    step()
    save("sleep")
    time.sleep(0.4 if RANK else 0)
    step()
    save("python")
    busy(0.4 if RANK else 0)
    step()
    save("loader")
    if RANK:
        for _ in DataLoader(Slow(), num_workers=1):
            pass
    step()
    save("broadcast")
    number = torch.zeros(1000)
    dist.broadcast(number, 0)
    number.sum().item()
    slow[0] = 0.6 if RANK == 2 else 0.0
    step()
    save("slow")
    slow[0] = 0.0
    with model.no_sync():
        model(torch.randn(8, 16)).square().mean().backward()
    step()
    save("accumulation")
    step()
    if "damaged" in WORDS:
        weight = model.module[0].weight.data.view(-1).view(torch.int32)
        weight[3] ^= (1 << 22) * (RANK == 2)
        dist.barrier()
        save("damaged")
        dist.barrier()
        weight[3] ^= (1 << 22) * (RANK == 2)
    step()
    if RANK == 0 and "ahead" in WORDS:
        contents = {key: value.cpu().clone() for key, value in model.state_dict().items()}
        late = threading.Timer(0.5, torch.save, (contents, "ahead.pt"))
        late.start()
    for _ in range(6):
        step()
    if RANK == 0 and "ahead" in WORDS:
        late.join()
    if RANK == 0:
        time.sleep(1.0)
    save("ended")
    digest = sum(float(p.detach().double().sum()) for p in model.parameters())
    sys.stdout.write(f"rank {RANK} {digest.hex()}\n")
    # torch aborts now and then when the interpreter ends while gloo still frees its last work.
    time.sleep(0.3)


if __name__ == "__main__":
    main()
