"""The doctor with real interpreters, a real meeting and a real script."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


def test_this_machine_and_a_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "sdcrun.cli", "doctor", "--seconds", "120", "--", "train.py"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    out = child.stdout
    assert child.returncode == 0 and child.stderr == "", out + child.stderr
    for text in ("the shim is seen by", "gives the same bits", "agrees with the definition", "two processes met",
                 "steps on 2 ranks in", "2 of 2 ranks, one module: 72 parameters in 2 tensors", "clean",
                 "This machine can be guarded.", "This script is guarded."):  # fmt: skip
        assert text in out, out
    # The trial's own record is nobody's.
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
