"""What a guarded step costs, told finely: a guarded and an unguarded copy of one model train in turn in one process.

    python tests/bench/bench_twins.py [--full] [--json FILE]

Between two runs of a script this kind of machine differs by more than the guard costs; between a step and the next it
hardly does. A figure is the median, over all steps of a kind and all ranks, of a guarded step's CPU time by that of the
unguarded ones before and behind it; beside it the quartiles.
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
AUDIT_EVERY, VOTE_EVERY, WARM = 10, 7, 8

# name, size, sequences, steps
SHORT = [("gpt small", "small", 16, 200), ("gpt medium", "medium", 4, 70), ("gpt medium, 4 x batch", "medium", 16, 56)]
FULL = [("gpt small", "small", 16, 800), ("gpt medium", "medium", 4, 200), ("gpt medium, 4 x batch", "medium", 16, 150)]


def kinds(step: int) -> set[str]:
    """What happens in a guarded step, counted from 0."""
    return {name for name, every in (("audit", AUDIT_EVERY), ("vote", VOTE_EVERY)) if step % every == 0}


def ratios(times: dict[str, list[float]], wanted: set[str]) -> list[float]:
    """Of the guarded steps of exactly the `wanted` kinds, each by the mean of the two plain ones around it."""
    guarded, plain = times["guarded"], times["plain"]
    steps = [step for step in range(WARM, len(guarded)) if kinds(step) == wanted]
    return [guarded[step] / ((plain[step - 1] + plain[step]) / 2) for step in steps]


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def figure(name: str, size: str, batch: int, steps: int, folder: Path, ranks: int = 3) -> dict:
    """One row; times in CPU seconds."""
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "sdcrun.cli", "--sdc-dir", out / "jobs", "--sdc-quiet"]
    command += ["--sdc-audit-every", AUDIT_EVERY, "--sdc-weights-every", VOTE_EVERY, "--nproc-per-node", ranks]
    subprocess.run(
        [*map(str, command), str(HERE / "twins.py"), str(out), size, str(batch), str(steps)], check=True, timeout=900,
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    rows = [json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    found = {
        kind: spread([ratio for row in rows for ratio in ratios(row, wanted)])
        for kind, wanted in (("plain_step", set()), ("audit_step", {"audit"}), ("vote_step", {"vote"}))
    }
    plain, audit, vote = (found[kind]["median"] for kind in ("plain_step", "audit_step", "vote_step"))
    # One audit in 100 steps and one vote in 10.
    percent = 100 * (plain - 1 + (audit - plain) / 100 + (vote - plain) / 10)
    return {
        "script": name, "ranks": ranks, "steps": steps, **found, "percent_at_100_10": round(percent, 2),
        "step_ms": round(1e3 * statistics.median(t for row in rows for t in row["plain"][WARM:]), 2),
    }  # fmt: skip


def run(full: bool = False) -> dict:
    """{bench, figures: [{script, ranks, steps, step_ms, plain_step, audit_step, vote_step, percent_at_100_10}]}."""
    with tempfile.TemporaryDirectory(prefix="sdcrun-bench-") as folder:
        return {"bench": "twins", "figures": [figure(*one, Path(folder)) for one in (FULL if full else SHORT)]}


if __name__ == "__main__":
    main(run, __doc__)
