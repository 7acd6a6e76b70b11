"""Counts audits and weight votes without a fault until a false finding or enough of them.

    python tests/soak/soak.py ROUNDS [--ranks N] [--state FILE]

ROUNDS: audit steps (each compares every pair of the ring once) and as many weight votes. The state file makes a run
resumable: it holds what earlier runs counted. Prints the 95 % bound 3/n on the rate of false findings. Exit code 1 on a
finding, 2 when a launch failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TURNS = 5


def launch(ranks: int, seed: int) -> dict | None:
    """One guarded run: {audits, votes, findings}, or None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "sdcrun.cli", "--nnodes", str(ranks), "--sdc-dir", folder, "--sdc-job", "soak",
            "--sdc-audit-every", "1", "--sdc-weights-every", "1", str(HERE / "families.py"), str(TURNS), str(seed),
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=3600
        )
        report = Path(folder, "soak", "report.json")
        if done.returncode != 0 or not report.exists():
            sys.stderr.write(done.stderr[-3000:])
            return None
        found = json.loads(report.read_text())
    checks = found["checks"]
    return {
        "audits": checks["replay"]["run"],
        "votes": checks["weights"]["run"],
        "findings": [f["text"] for f in found["findings"]],
    }


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--state", type=Path, default=Path("build/soak.json"))
    options = parser.parse_args()
    state = {"audits": 0, "votes": 0, "launches": 0, "findings": []}
    if options.state.exists():
        state = json.loads(options.state.read_text())
    options.state.parent.mkdir(parents=True, exist_ok=True)
    while min(state["audits"], state["votes"]) < options.rounds and not state["findings"]:
        started = time.monotonic()
        counted = launch(options.ranks, state["launches"])
        if counted is None or not counted["audits"]:
            print("a launch failed or audited nothing")
            return 2
        state["launches"] += 1
        for key, value in counted.items():
            state[key] += value
        temporary = options.state.with_suffix(".part")
        temporary.write_text(json.dumps(state))
        temporary.replace(options.state)
        print(f"{state['audits']} audits, {state['votes']} votes, {time.monotonic() - started:.0f} s", flush=True)
    for text in state["findings"]:
        print(f"finding: {text}")
    for what in ("audits", "votes"):
        if not state["findings"] and state[what]:
            print(f"no finding in {state[what]} {what}: with 95 % confidence fewer than {3 / state[what]:.2g} each")
    return 1 if state["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
