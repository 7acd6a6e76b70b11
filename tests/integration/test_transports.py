"""The ballot's transports and the exchange between real ranks."""

import os
import subprocess
import sys
from pathlib import Path


def test_transports_agree_and_every_wait_is_bounded():
    script = Path(__file__).parent / "ranks" / "transports.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "6", script],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("fine") == 6
