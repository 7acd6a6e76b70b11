"""torchrun restarts the ranks: nothing in flight survives, strikes stay with the device, and it is never endless."""

import pytest
from harness import LOOPS, launch

from sdcrun.runner.localnodes import HeldPort

pytestmark = pytest.mark.slow

EVERY = ("--sdc-weights-every", "1", "--sdc-audit-every", "4")


def run(folder, *arguments, restarts, options=()):
    """Static rendezvous: its store is the same in every attempt, with all that earlier ones left in it."""
    held = HeldPort()
    place = ["--nproc-per-node", "3", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    place += ["--master-port", str(held.number), "--max-restarts", str(restarts)]
    try:
        done = launch(folder, LOOPS / "troubled.py", *arguments, sdcrun=[*EVERY, *options], options=place)
    finally:
        held.close()
    assert not done.leftovers, done.tail()
    return done


def test_every_attempt_starts_clean_and_strikes_stay_with_the_device(tmp_path):
    done = run(tmp_path, "flip=0.1.4", "flip=1.1.6", "crash=0.2.9", "crash=1.0.11", restarts=3)
    assert done.exit_code == 0, done.tail()
    report = done.report
    assert (report["status"], report["attempts"], report["guarded_ranks"]) == ("finished", 3, 3)
    for kind in ("hello", "guarded"):
        said = sorted((event["attempt"], event["source"]) for event in done.events(kind))
        assert said == [(attempt, f"rank:{rank}") for attempt in range(3) for rank in range(3)]
    assert [(row["attempt"], row["rank"], row["verdict"]) for row in report["findings"]] == [
        (0, 1, "suspect"),
        (1, 1, "confirmed"),
    ]
    (suspect,) = report["suspects"]
    assert (suspect["strikes"], suspect["device"]["uuid"]) == (2, "cpu-n0-l1")
    last = {event["source"]: event["data"] for event in done.events("summary") if event["attempt"] == 2}
    assert {source: row["steps"] for source, row in last.items()} == {
        f"rank:{rank}": {"seen": 16, "committed": 16, "skipped": 0} for rank in range(3)
    }
    assert all(row["checks"]["replay"]["run"] >= 3 and row["checks"]["weights"]["run"] >= 15 for row in last.values())
    assert not done.events("check_off") and not done.events("gap")
    lost = done.events("worker_lost")
    assert not lost, "torchrun tells of lost ranks only when it gives up"


def test_attempts_that_keep_ending_after_corruption_stop_with_87(tmp_path):
    done = run(tmp_path, "flip=*.1.4", "crash=*.2.7", restarts=9, options=("--sdc-max-strikes", "99"))
    assert done.exit_code == 87, done.tail()
    assert done.report["status"] == "stopped" and done.report["attempts"] == 4
    assert "3 attempts in a row ended right after corruption was seen (attempt 0 at step 5" in done.stderr
    assert "Stopping the job with exit code 87" in done.stderr
