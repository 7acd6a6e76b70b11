"""Every way of saving that training scripts use, in one training; arguments choose which, all when none is given.

Each writes into the working directory under its own name. `flip=NAME` puts a wrong bit into what that way saves: into
the weights of rank 0 (`live`, put back afterwards) or into the copy that is handed over; several with commas. `steps=N`
makes it longer.
"""

import copy
import io
import os
import shutil
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
WANTED = [word for word in sys.argv[1:] if "=" not in word]
GIVEN = dict(word.split("=") for word in sys.argv[1:] if "=" in word)
FLIPS = GIVEN.get("flip", "").split(",")


class Run:
    """The training: model, optimizer, and one step."""

    def __init__(self):
        torch.manual_seed(3)
        inner = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8))
        self.ddp = DistributedDataParallel(inner)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.average = copy.deepcopy(inner)
        self.generator = torch.Generator().manual_seed(RANK)
        self.done = 0

    def step(self):
        x = torch.randn(16, 24, generator=self.generator)
        self.optimizer.zero_grad()
        self.ddp(x).pow(2).mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.ddp.module.parameters()):
                mean.lerp_(now, 0.1)
        self.done += 1

    def contents(self):
        return {"model": self.ddp.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.done}


def flipped(tensors, name):
    """A copy of a state dict on the CPU, with one wrong bit where this way of saving was asked to have one."""
    copied = {key: value.detach().cpu().clone() for key, value in tensors.items()}
    if name in FLIPS:
        first = next(key for key in copied if key.endswith("weight"))
        copied[first].view(-1).view(torch.int32)[5] ^= 1 << 21
    return copied


def path(run):
    if RANK == 0:
        torch.save(run.contents(), "path.pt")


def copied(run):
    if RANK == 0:
        torch.save({"state": {"net": flipped(run.ddp.module.state_dict(), "copied")}}, "copied.pt")


def live(run):
    if RANK == 0:
        weight = run.ddp.module[0].weight.data.view(-1).view(torch.int32)
        if "live" in FLIPS:
            weight[7] ^= 1 << 25
        torch.save(run.ddp.module.state_dict(), "live.pt")
        if "live" in FLIPS:
            weight[7] ^= 1 << 25


def optimizer(run):
    if RANK == 0:
        state = copy.deepcopy(run.optimizer.state_dict())
        if "optimizer" in FLIPS:
            state["state"][0]["exp_avg"].view(-1).view(torch.int32)[9] ^= 1 << 22
        torch.save({"net": run.ddp.state_dict(), "adam": state}, "optimizer.pt")


def opened(run):
    if RANK == 0:
        with open("opened.pt", "wb") as file:
            torch.save(flipped(run.ddp.state_dict(), "opened"), file)


def overwritten(run):
    if RANK == 0:
        for name in (None, "overwritten"):
            contents = flipped(run.ddp.state_dict(), name)
            with open("overwritten.pt", "wb") as file:
                torch.save(contents, file)
                file.flush()
                os.fsync(file.fileno())
            if name is None:
                shutil.copyfile("overwritten.pt", "overwritten.copy")


def memory(run):
    if RANK == 0:
        buffer = io.BytesIO()
        torch.save(flipped(run.ddp.state_dict(), "memory"), buffer)
        with open("memory.pt", "wb") as file:
            file.write(buffer.getvalue())


def replaced(run):
    if RANK == 0:
        torch.save(flipped(run.ddp.state_dict(), "replaced"), "replaced.tmp")
        os.replace("replaced.tmp", "replaced.pt")


def named_temporary(run):
    if RANK == 0:
        with tempfile.NamedTemporaryFile(dir=".", delete=False, suffix=".tmp") as file:
            torch.save(flipped(run.ddp.state_dict(), "named_temporary"), file)
        os.chmod(file.name, 0o644)
        shutil.move(file.name, "named_temporary.pt")


def rotated(run):
    if RANK == 0:
        for number in range(3):
            torch.save(flipped(run.ddp.module.state_dict(), "rotated"), f"rotated{number}.pt")
            if number:
                os.remove(f"rotated{number - 1}.pt")
        shutil.copy("rotated2.pt", "rotated_best.pt")


def last(run):
    if RANK == 0:
        torch.save(flipped(run.ddp.state_dict(), None), "last0.pt")
        torch.save(flipped(run.ddp.state_dict(), "last"), "last1.pt")
        os.remove("last0.pt")


def emptied(run):
    if RANK == 0:
        contents = flipped(run.ddp.module.state_dict(), None)
        contents["3.weight"].zero_()
        torch.save(contents, "emptied.pt")


def everyone(run):
    torch.save(run.ddp.state_dict(), "everyone.pt")


def each(run):
    torch.save(run.ddp.state_dict(), f"each{RANK}.pt")


def threaded(run):
    if RANK == 0:
        contents = flipped(run.ddp.module.state_dict(), "threaded")
        writer = threading.Thread(target=torch.save, args=(contents, "threaded.pt"))
        writer.start()
        writer.join()


def whole(run):
    if RANK == 0:
        torch.save(run.ddp.module, "whole.pt")


def listed(run):
    if RANK == 0:
        torch.save([p.detach().cpu().clone() for p in run.ddp.parameters()], "listed.pt")


def transposed(run):
    if RANK == 0:
        torch.save({k: v.t().contiguous().t() if v.dim() == 2 else v.clone() for k, v in run.ddp.state_dict().items()},
                   "transposed.pt")


def part(run):
    if RANK == 0:
        torch.save({"head": run.ddp.module[3].state_dict()}, "part.pt")


def half(run):
    if RANK == 0:
        torch.save({k: v.half() if v.is_floating_point() else v for k, v in run.ddp.state_dict().items()}, "half.pt")


def ema(run):
    if RANK == 0:
        torch.save(run.average.state_dict(), "ema.pt")


def swapped(run):
    if RANK == 0:
        kept = copy.deepcopy(run.ddp.module.state_dict())
        run.ddp.module.load_state_dict(run.average.state_dict())
        torch.save(run.ddp.module.state_dict(), "swapped.pt")
        run.ddp.module.load_state_dict(kept)


def others(run):
    if RANK == 0:
        torch.save({"loss": torch.tensor(1.5), "weight": torch.ones(10), "names": ["a"]}, "others.pt")


def tensors(run):
    from safetensors.torch import save_file

    if RANK == 0:
        save_file(flipped(run.ddp.module.state_dict(), "tensors"), "tensors.safetensors")


def together(run):
    import torch.distributed.checkpoint as dcp

    contents = {"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()}
    if "together" in FLIPS and RANK == 0:
        contents["model"] = flipped(run.ddp.module.state_dict(), "together")
    dcp.save(contents, checkpoint_id="together")


def later(run):
    import torch.distributed.checkpoint as dcp

    run.future = dcp.async_save({"model": run.ddp.module.state_dict()}, checkpoint_id="later")


ALL = [path, copied, live, optimizer, opened, overwritten, memory, replaced, named_temporary, rotated, last, emptied,
       everyone, each, threaded, whole, listed, transposed, part, half, ema, swapped, others, tensors,
       together]  # fmt: skip


def main():
    dist.init_process_group("gloo")
    if "later" in WANTED:
        dist.new_group(backend="gloo")
    run = Run()
    for way in [way for way in [*ALL, later] if way.__name__ in WANTED] or ALL:
        run.step()
        way(run)
    if hasattr(run, "future"):
        run.future.result()
    for _ in range(int(GIVEN.get("steps", 2))):
        run.step()
    if "end" in WANTED and RANK == 0:
        torch.save(run.contents(), "end.pt")
    digest = sum(float(p.detach().double().sum()) for p in run.ddp.parameters())
    sys.stdout.write(f"rank {RANK} {digest.hex()}\n")
    # torch aborts now and then when the interpreter ends while gloo still frees its last work.
    time.sleep(0.3)


if __name__ == "__main__":
    main()
