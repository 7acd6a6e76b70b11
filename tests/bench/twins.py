"""Two copies of one model train on the same data in turn, step by step: one guarded, the other as under torchrun.

    sdcrun … twins.py OUT SIZE BATCH STEPS

Writes OUT/<rank>.json: {guarded: [CPU seconds per step], plain: [CPU seconds per step]}, all threads of the process,
from the drawing of a batch to the end of the update and of what follows it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from sdcrun.shim.patches.autograd import backward_now
from sdcrun.shim.patches.ddp import cell_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_gpt  # noqa: E402

SEED = 7


@contextmanager
def unguarded(runtime):
    """Inside the block the shim lets everything through."""
    runtime.active = False
    try:
        yield
    finally:
        runtime.active = True


class Trainer:
    """A model with its optimizer as in the GPT example. `aside`: what surrounds all that is done with it."""

    def __init__(self, config: train_gpt.GPTConfig, data: torch.Tensor, batch: int, backward: Callable, aside) -> None:
        self.config, self.data, self.batch, self.backward, self.aside = config, data, batch, backward, aside
        torch.manual_seed(SEED)
        with aside():
            self.model = DDP(train_gpt.GPT(config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def seconds(self, step: int) -> float:
        """CPU seconds of one step."""
        before = time.process_time()
        with self.aside():
            torch.manual_seed(SEED + 1000 * step + dist.get_rank())
            _, loss = self.model(*train_gpt.get_batch(self.data, self.batch, self.config.context, "cpu"))
            self.optimizer.zero_grad()
            self.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return time.process_time() - before


def main(out: str, size: str, batch: int, steps: int) -> None:
    """See the module."""
    dist.init_process_group("gloo")
    text, characters = train_gpt.load_text()
    config = train_gpt.GPTConfig(vocab=len(characters), dropout=0.0, **train_gpt.SIZES[size])
    guarded = Trainer(config, text, batch, torch.Tensor.backward, nullcontext)
    runtime = cell_of(guarded.model).guard.group.runtime
    plain = Trainer(config, text, batch, backward_now, lambda: unguarded(runtime))
    times = {"guarded": [], "plain": []}
    for step in range(steps):
        times["guarded"].append(guarded.seconds(step))
        times["plain"].append(plain.seconds(step))
    same = all(map(torch.equal, guarded.model.parameters(), plain.model.parameters()))
    assert same, "the guard has changed what the model learnt"
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(times), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
