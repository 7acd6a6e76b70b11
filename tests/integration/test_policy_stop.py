"""The policy ends a real job: the exit code says what to do, torchrun does not restart it, and nobody hangs."""

import pytest
from harness import LOOPS, launch

pytestmark = pytest.mark.slow

# arguments of the script, own options, exit code, what the reason says
STOPS = {
    "on_fault": (["nan=*.1.6"], ["--sdc-on-fault", "stop", "--sdc-audit-every", "0"], 87, "on_fault is stop"),
    "one_strike": (["flip=*.1.5"], ["--sdc-max-strikes", "1"], 87, "1 strike against"),
    "two_strikes": (["flip=*.1.5", "flip=*.1.9"], ["--sdc-max-strikes", "2"], 86, "2 strikes against"),
    "only_skips": (
        ["nan=*.1.5-99", "nan=*.2.5-99"],
        ["--sdc-max-skipped", "4", "--sdc-audit-every", "0", "--sdc-max-strikes", "99"],
        87,
        "in a row were skipped",
    ),
    "weight_fault": (["flip=*.2.5"], ["--sdc-on-weight-fault", "stop"], 87, "on_weight_fault is stop"),
}


# The decisions themselves are tested without processes; two ways to a stop are enough to see ranks and agents end.
LIGHT = ("two_strikes", "only_skips")


@pytest.mark.parametrize("name", [n if n in LIGHT else pytest.param(n, marks=pytest.mark.slow) for n in STOPS])
def test_the_job_is_stopped_and_not_restarted(tmp_path, name):
    arguments, options, code, why = STOPS[name]
    place = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "3"]
    own = ["--sdc-weights-every", "1", *options]
    done = launch(tmp_path, LOOPS / "troubled.py", "steps=1000000", *arguments, sdcrun=own, options=place)
    assert done.exit_code == code, done.tail()
    assert done.report["status"] == "stopped" and done.report["exit_code"] == code
    # Once: by the controller, which is this node's.
    said = [line.removeprefix("[sdcrun] ") for line in done.stderr.splitlines()]
    assert [why in line for line in said if line.startswith(("Stopping the job", "the job is stopped"))] == [True]
    assert not done.leftovers and not list(tmp_path.glob("steps.1.*")), "restarted"
    stops = [event for event in done.events("command") if event["data"]["what"] == "stop"]
    assert [(event["data"]["to"], event["data"]["code"]) for event in stops] == [("supervisors", code)]
    for rank in range(3):
        steps = [int(line) for line in (tmp_path / f"steps.0.{rank}").read_text().split()]
        assert steps == list(range(len(steps)))


def test_report_only(tmp_path):
    own = ["--sdc-weights-every", "1", "--sdc-on-weight-fault", "report"]
    place = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "3"]
    done = launch(tmp_path, LOOPS / "troubled.py", "flip=*.2.5", sdcrun=own, options=place)
    assert done.exit_code == 0 and done.report["status"] == "finished", done.tail()
    assert done.report["findings"] and {row["rank"] for row in done.report["findings"]} == {2}
    assert {event["data"]["action"] for event in done.events("vote")} == {"reported"}
