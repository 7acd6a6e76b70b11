"""A campaign on a real job: cells share a launch and do not disturb each other, one that ends the script is a result,
and what is on record is not run again."""

import json
import os
import subprocess
import sys

import pytest
from harness import LOOPS

pytestmark = pytest.mark.slow

SCRIPT = LOOPS / "touchy.py"
FAULTS = """
warmup: 8
horizon: 2
faults:
  - {site: gradient, rank: 1, bit: [12, 30]}
  - {site: weight, rank: 2, bit: 3}
"""
# The first of these makes the loss not a number, at which the script ends.
MORE = """  - {site: activation, rank: 0, tensor: '3', kind: nan, count: 128}
  - {site: reduced, rank: 0, bit: 25}
  - {site: allreduce, bit: 22}
"""


def campaign(folder, *arguments, code=0):
    """Run one in `folder`; returns the table, the lines of the record and what was said."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SDCRUN", "PET_"))}
    command = [sys.executable, "-m", "sdcrun.cli", "campaign", "faults.yaml", *arguments]
    done = subprocess.run(command, cwd=folder, env=kept | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=500)  # fmt: skip
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    place = folder / "sdcrun_jobs" / "campaign-faults"
    lines = [json.loads(line) for line in (place / "cells.jsonl").read_text().splitlines()]
    return json.loads((place / "coverage.json").read_text()), lines, done


def test_cells_share_a_launch_the_rest_is_added_and_a_crash_is_a_result(tmp_path):
    launch = ("--", "--nproc-per-node", "3", str(SCRIPT), "60")
    (tmp_path / "faults.yaml").write_text(FAULTS)
    data, lines, done = campaign(tmp_path, *launch)
    assert data["outcomes"]["named"] == 3 and data["done"] == 3 and data["sdcrun"]["false_alarms"] == 0
    assert [line.get("run") for line in lines] == [None, "001", "002", "002", "002"]
    reference = lines[1]
    assert reference["restore"] and reference["why_not"] is None and len(reference["slots"]) == 3
    weight = data["rows"][-1]
    # Repaired in its own step: the cell's losses are the clean run's to the bit.
    assert weight["worst_loss_gap"] == 0.0 and weight["caught_by"] == "weights" and weight["after_steps"] == 0
    assert "3 of 3 faults" in done.stdout and (tmp_path / "sdcrun_jobs" / "campaign-faults" / "coverage.html").exists()

    # The same element and the same bits are hit whatever else is in the launch, and nothing is run twice.
    (tmp_path / "faults.yaml").write_text(FAULTS + MORE)
    data, lines, done = campaign(tmp_path, *launch, code=88)
    assert data["done"] == 6 and [line.get("run") for line in lines[5:]] == ["003", "004", "004"]
    outcomes = {row["site"]: row["outcome"] for row in data["rows"]}
    assert outcomes == {"gradient": "named", "weight": "named", "activation": "crashed", "reduced": "named",
                        "allreduce": "unseen"}  # fmt: skip
    for row, line in zip(data["rows"], lines[2:5]):
        assert row == {key: value for key, value in line.items() if key not in ("what", "traceless")}
    assert "crashed" in done.stdout


def test_a_script_whose_state_cannot_be_put_back_still_gets_its_table(tmp_path):
    (tmp_path / "faults.yaml").write_text(FAULTS)
    data, lines, done = campaign(tmp_path, "--", "--nproc-per-node", "3", str(SCRIPT), "20", "grows")
    assert [line.get("run") for line in lines] == [None, "002", "003", "003", "003"]
    assert lines[1]["restore"] is False and "was not there before" in lines[1]["why_not"]
    assert data["outcomes"]["named"] == 3 and any("could not be put back" in note for note in data["notes"])
    assert "cannot be put back" in done.stderr


def test_a_script_that_is_too_short_is_an_error_that_says_how_long_it_must_be(tmp_path):
    (tmp_path / "faults.yaml").write_text(FAULTS)
    _, _, done = campaign(tmp_path, "--", "--nproc-per-node", "2", str(SCRIPT), "5", code=2)
    assert "needs 10 steps" in done.stderr
