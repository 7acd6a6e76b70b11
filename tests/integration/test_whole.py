"""The whole of it in two launches of the GPT example: a healthy run is torchrun's, a faulty one names the devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
ARGUMENTS = ["--nproc-per-node", "3", str(SCRIPT), "--steps", "12", "--log-every", "1"]


def launch(folder, *command):
    """Runs `python -m command` in `folder` and returns what it was."""
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=500,
    )  # fmt: skip


def losses(text):
    return [line.split("loss")[1].split()[0] for line in text.splitlines() if line.startswith("step")]


def report(folder):
    (path,) = (folder / "sdcrun_jobs").glob("*/report.json")
    return json.loads(path.read_text())


def test_a_healthy_run_is_torchruns(tmp_path):
    plain = launch(tmp_path, "torch.distributed.run", *ARGUMENTS)
    guarded = launch(tmp_path, "sdcrun.cli", "--sdc-audit-every", "2", "--sdc-weights-every", "1", *ARGUMENTS)
    assert plain.returncode == 0 == guarded.returncode, guarded.stderr[-3000:]
    assert len(losses(plain.stdout)) == 12 and losses(plain.stdout) == losses(guarded.stdout)
    found = report(tmp_path)
    assert found["findings"] == [] and found["guarded_ranks"] == 3 and found["unguarded"] == []
    assert found["checks"]["replay"]["run"] == 6 and found["checks"]["weights"]["run"] == 12
    by_check, by_part = found["overhead"]["by_check"], found["overhead"]["by_part"]
    assert 0 < by_check["nonfinite"] < by_check["replay"], "an audit is counted once, as the audit's"
    assert by_part["replay"] < by_check["replay"] and 0 < by_part["ballot"] < by_check["nonfinite"]


def test_faults_are_caught_and_the_devices_named(tmp_path):
    faults = ["weight:rank=1,step=3,kind=bitflip,bit=20", "gradient:rank=2,step=7,kind=bitflip,bit=22"]
    options = [token for fault in faults for token in ("--inject-fault", fault)]
    done = launch(tmp_path, "sdcrun.cli", *options, *ARGUMENTS)
    assert done.returncode == 0, done.stderr[-3000:]
    found = report(tmp_path)
    assert sorted(suspect["rank"] for suspect in found["suspects"]) == [1, 2]
    assert [row["caught_by"] for row in found["injected"]] == ["weights", "replay"]
    assert all(row["named_right"] for row in found["injected"])
    assert found["steps"]["seen"] == 12 and found["steps"]["skipped"] == 1
