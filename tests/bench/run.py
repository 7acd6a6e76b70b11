"""Every bench in this folder, one after another; the figures of all go to one file.

    python tests/bench/run.py [--full] [--json bench.json]
    python tests/bench/run.py --table bench.json       the figures as the table in README.md
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run(full: bool, log: Any = sys.stderr) -> list[dict[str, Any]]:
    """What each bench_*.py says, in the order of their names. Raises CalledProcessError for one that fails."""
    results = []
    for bench in sorted(HERE.glob("bench_*.py")):
        with tempfile.TemporaryDirectory(prefix="sdcrun-bench-") as folder:
            out = Path(folder) / "figures.json"
            command = [sys.executable, str(bench), "--json", str(out), *(["--full"] if full else [])]
            print(f"== {bench.name}", file=log, flush=True)
            subprocess.run(command, check=True, stdout=log)
            results.append(json.loads(out.read_text()))
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The figures that matter to who runs a job, in Markdown: the cost of steps, the speed of fingerprints."""
    lines = []
    for result in results:
        if result["bench"] == "steps":
            lines += ["| script | ranks | step | plain step | audit step | a vote adds | at 100/10 | launch | memory |",
                      "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
            for row in result["figures"]:
                lines.append(
                    f"| {row['script']} | {row['ranks']} | {row['step_ms']:.0f} ms | {_ratio(row['plain_step'])} | "
                    f"{_ratio(row['audit_step'])} | {_percent(row['vote_extra'])} | "
                    f"{row['percent_at_100_10']['median']:.1f} % | +{row['launch_extra_s']['median']:.1f} s | "
                    f"+{row['peak_extra_mib']['median']:.0f} MiB |"
                )
            lines.append("")
        elif result["bench"] == "twins":
            lines += ["| twins in one process | ranks | step | plain step | audit step | vote step | at 100/10 |",
                      "|---|---|---|---|---|---|---|"]  # fmt: skip
            for row in result["figures"]:
                kinds = (_ratio(row[kind], 3) for kind in ("plain_step", "audit_step", "vote_step"))
                lines.append(
                    f"| {row['script']} | {row['ranks']} | {row['step_ms']:.0f} ms | {' | '.join(kinds)} | "
                    f"{row['percent_at_100_10']:.1f} % |"
                )
            lines.append("")
        elif result["bench"] == "growth":
            lines += ["| in forwards and backwards | ranks | of ms | every step | audit: ship | compare | a vote |",
                      "|---|---|---|---|---|---|---|"]  # fmt: skip
            for row in result["figures"]:
                parts = (f"{row[key]:.3f}" for key in ("every_step", "ship", "compare", "vote"))
                lines.append(f"| {row['name']} | {row['ranks']} | {row['replay_ms']:.0f} | {' | '.join(parts)} |")
            lines.append("")
        elif result["bench"] == "fingerprint":
            lines += ["| fingerprints of | tensors | MiB | ms | times reading them |", "|---|---|---|---|---|"]
            for row in result["figures"]:
                cells = (row["name"], row["tensors"], row["mib"], row["ms"], row["ratio"])
                lines.append("| " + " | ".join(map(str, cells)) + " |")
            machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
            lines += ["", f"Measured on: {machine}.", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _ratio(spread: dict[str, float], digits: int = 2) -> str:
    middle, low, high = (f"{spread[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def _percent(spread: dict[str, float]) -> str:
    return f"{100 * spread['median']:.0f} %"


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the sweeps")
    parser.add_argument("--json", default="bench.json", help="file to write to")
    parser.add_argument("--table", metavar="FILE", help="print the table of a file, measure nothing")
    asked = parser.parse_args()
    if asked.table:
        sys.stdout.write(table(json.loads(Path(asked.table).read_text())))
        return
    results = run(asked.full)
    Path(asked.json).write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
