"""What a guarded step costs: the same script under torchrun and under sdcrun in alternating runs.

    python tests/bench/bench_steps.py [--full] [--json FILE]

Figures are CPU seconds per rank (all threads of the process), because on a shared host wall time is noise. So is a part
of the CPU time, where neighbours use the caches, and that part only adds: of a run's steps of one kind the lower
quartile is taken, which from run to run varies half as much as the median, then the median over ranks. A ratio pairs a
run under sdcrun with the run under torchrun before it, and the spread is over the pairs. `parts` are sdcrun's own
counters from the report.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
AUDIT_EVERY, VOTE_EVERY, WARM = 10, 5, 6

SCRIPTS = {
    "gpt small": [EXAMPLES / "train_gpt.py", "--size", "small", "--steps", "122", "--log-every", "1000"],
    "gpt medium": [EXAMPLES / "train_gpt.py", "--size", "medium", "--batch", "4", "--steps", "42", "--log-every", "99"],
    # A step that computes four times as much with the same parameters: nearer to what is trained in earnest.
    "gpt medium, 4 x batch": [EXAMPLES / "train_gpt.py", "--size", "medium", "--batch", "16", "--steps", "27",
                              "--log-every", "99"],
    "resnet": [EXAMPLES / "train_resnet.py", "--epochs", "4"],
}


def launch(command: list, ranks: int, script: list, folder: Path) -> list[dict]:
    """One run; what each rank wrote, and the seconds from the command to the end of the first step."""
    out = Path(tempfile.mkdtemp(dir=folder))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = time.time()
    subprocess.run(
        [sys.executable, *command, "--nproc-per-node", str(ranks), HERE / "timed.py", out, *script],
        env=environment, cwd=folder, check=True, timeout=900, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    rows = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
    for row in rows:
        row["launch"] = row["first"] - started
    return rows


def kinds(step: int) -> set[str]:
    """What happens in entry `step` - 1 of a rank's list (see `timed.py`): this step's audit, the vote before it."""
    found = set()
    if step % AUDIT_EVERY == 0:
        found.add("audit")
    if (step - 1) % VOTE_EVERY == 0:
        found.add("vote")
    return found


def usual(rows: list[dict], wanted: set[str]) -> float:
    """Median over ranks of the lower quartile over steps of exactly the `wanted` kinds, in CPU seconds."""
    steps = [[t for i, t in enumerate(row["cpu"], 1) if i > WARM and kinds(i) == wanted] for row in rows]
    return statistics.median(sorted(times)[len(times) // 4] for times in steps)


def spread(values: list[float]) -> dict:
    """Median and range of ratios."""
    return {"median": round(statistics.median(values), 3), "low": round(min(values), 3), "high": round(max(values), 3)}


def figure(name: str, ranks: int, pairs: int, folder: Path) -> dict:
    """All ratios of one script at one number of ranks."""
    plain, audit, vote, launch_extra, memory, all_steps = [], [], [], [], [], []
    guard = ["-m", "sdcrun.cli", "--sdc-audit-every", str(AUDIT_EVERY), "--sdc-weights-every", str(VOTE_EVERY)]
    guard += ["--sdc-dir", str(folder / "jobs")]
    for _ in range(pairs):
        without = launch(["-m", "torch.distributed.run"], ranks, SCRIPTS[name], folder)
        guarded = launch(guard, ranks, SCRIPTS[name], folder)
        base, quiet = usual(without, set()), usual(guarded, set())
        plain.append(quiet / base)
        audit.append(usual(guarded, {"audit"}) / base)
        vote.append((usual(guarded, {"vote"}) - quiet) / base)
        # One audit in 100 steps and one vote in 10, from the figures of this pair.
        all_steps.append(100 * ((plain[-1] - 1) + (audit[-1] - plain[-1]) / 100 + vote[-1] / 10))
        first = [statistics.median(row["launch"] for row in rows) for rows in (guarded, without)]
        launch_extra.append(first[0] - first[1])
        memory.append(max(r["peak"] for r in guarded) - max(r["peak"] for r in without))
    newest = max((folder / "jobs").iterdir(), key=lambda path: path.stat().st_mtime)
    overhead = json.loads((newest / "report.json").read_text())["overhead"]
    return {
        "script": name, "ranks": ranks, "pairs": pairs, "step_ms": round(1e3 * base, 2),
        "plain_step": spread(plain), "audit_step": spread(audit), "vote_extra": spread(vote),
        "percent_at_100_10": spread(all_steps), "launch_extra_s": spread(launch_extra),
        "peak_extra_mib": spread(memory), "overhead": overhead,
    }  # fmt: skip


def run(full: bool = False) -> dict:
    """The bench's figures. Short: the GPT in both sizes on 3 ranks."""
    plan = [("gpt small", 3, 5), ("gpt medium", 3, 4), ("gpt medium, 4 x batch", 3, 3)]
    if full:
        plan = [(name, ranks, 4) for name in SCRIPTS for ranks in (3, 4)]
    with tempfile.TemporaryDirectory(prefix="sdcrun-bench-") as folder:
        figures = [figure(name, ranks, pairs, Path(folder)) for name, ranks, pairs in plan]
    return {"bench": "steps", "figures": figures}


def main(run: Callable[[bool], dict], description: str) -> None:
    """The command line of a bench: prints the figures of `run` as JSON."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    text = json.dumps(run(options.full), indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(run, __doc__)
