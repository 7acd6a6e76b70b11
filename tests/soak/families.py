"""Trains ten model families one after another, over and over; started by `soak.py`. Argument: turns."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "replay"))

import idioms  # noqa: E402

FAMILIES = (
    "batchnorm_and_dropout", "attention_with_dropout", "tied_embedding", "checkpoint_modern", "convolution_and_lstm",
    "channels_last", "sparse_gradients", "weight_and_spectral_norm", "autocast_grad_scaler_clip", "contrastive",
)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    turns, seed = int(sys.argv[1]), int(sys.argv[2])
    for turn in range(turns):
        for family in FAMILIES:
            torch.manual_seed(1000 * seed + turn)
            idioms.IDIOMS[family][0](dist.get_rank())
    time.sleep(0.3)


main()
