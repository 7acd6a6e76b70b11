"""How the parts of the cost grow: with the number of ranks and the length of the sequences.

    python tests/bench/bench_growth.py [--full] [--json FILE]

Every run is the GPT example under sdcrun, audited and voted on every other step. The figures come from sdcrun's own
counters (CPU time of the training thread; median over ranks) and are ratios to `replay`, the time of one forward and
backward in the same run: a ballot, and per audit what shipping and comparing add, and a weight vote. How fingerprints
grow with parameters and tensors is in bench_fingerprint.py.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_steps import main

HERE = Path(__file__).parent
EVERY, STEPS = 2, 24


def counters(ranks: int, script: list, folder: Path) -> list[dict]:
    """One run; of each rank its last summary: {steps, checks, parts}, times in seconds."""
    job = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "sdcrun.cli", "--sdc-dir", job, "--sdc-job", "bench", "--sdc-quiet"]
    command += ["--sdc-audit-every", str(EVERY), "--sdc-weights-every", str(EVERY), "--nproc-per-node", str(ranks)]
    subprocess.run(
        [*map(str, command), *map(str, script)], check=True, timeout=900, cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    last = {}
    for line in (job / "bench" / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] == "summary":
            last[event["source"]] = event["data"]
    return list(last.values())


def figure(name: str, ranks: int, script: list, folder: Path) -> dict:
    """One row: milliseconds of a replay, and the other parts as ratios to it."""
    rows = []
    for row in counters(ranks, script, folder):
        steps, parts = row["steps"]["seen"], row["parts"]
        audits, votes = row["checks"]["replay"]["run"], row["checks"]["weights"]["run"]
        # In its first audit a rank also computes its own micro-batch again.
        replay = parts["replay"] / (audits + 1)
        rows.append({
            "replay_ms": 1e3 * replay,
            "every_step": sum(parts.get(part, 0.0) for part in ("capture", "hook", "ballot")) / steps / replay,
            "ship": parts["ship"] / audits / replay,
            "compare": parts["compare"] / audits / replay,
            "vote": parts["vote"] / votes / replay,
        })  # fmt: skip
    middle = {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
    spread = {key: [round(min(r[key] for r in rows), 4), round(max(r[key] for r in rows), 4)] for key in rows[0]}
    return {"name": name, "ranks": ranks, **middle, "over_ranks": spread}


def run(full: bool = False) -> dict:
    """{bench, figures: [{name, ranks, replay_ms, every_step, ship, compare, vote, over_ranks}]}."""
    rest = ["--steps", str(STEPS), "--log-every", "1000"]
    gpt = HERE.parent.parent / "examples" / "train_gpt.py"
    plan = [(f"{n} ranks", n, [gpt, *rest]) for n in ((2, 4, 8) if full else (2, 8))]
    lengths = (64, 128, 256, 512) if full else (64, 256)
    plan += [(f"sequences of {n}", 3, [HERE / "sized.py", str(n), "--batch", "4", *rest]) for n in lengths]
    with tempfile.TemporaryDirectory(prefix="sdcrun-bench-") as folder:
        return {"bench": "growth", "figures": [figure(*one, Path(folder)) for one in plan]}


if __name__ == "__main__":
    main(run, __doc__)
