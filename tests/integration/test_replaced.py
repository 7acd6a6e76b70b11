"""Weights and buffers that the script replaces by other tensors are looked at where they are."""

import pytest
from harness import LOOPS, differences, launch

EVERY_STEP = ("--sdc-audit-every", "1", "--sdc-weights-every", "1")
SCRIPT = LOOPS / "replaced.py"


@pytest.mark.slow
def test_a_healthy_run_is_what_it_would_have_been(tmp_path):
    plain = launch(tmp_path / "plain", SCRIPT)
    guarded = launch(tmp_path / "guarded", SCRIPT, sdcrun=EVERY_STEP)
    assert guarded.exit_code == 0 and differences(plain, guarded) == [], guarded.tail()
    assert guarded.findings == [] and guarded.report["unguarded"] == []


def test_a_flip_in_weights_that_lie_elsewhere_by_now_is_seen_and_repaired(tmp_path):
    faults = ["weight:rank=2,step=2,bit=20,tensor=fc1.weight", "weight:rank=0,step=3,bit=20,tensor=fc2.weight"]
    options = [word for text in faults for word in ("--inject-fault", text)]
    outcome = launch(tmp_path, SCRIPT, "weights_replaced", sdcrun=[*EVERY_STEP, *options])
    assert outcome.exit_code == 0, outcome.tail()
    assert {(f["step"], f["rank"], f["check"]) for f in outcome.findings} == {(2, 2, "weights"), (3, 0, "weights")}
    assert len({line["weights"] for line in outcome.lines.values()}) == 1
    whole = launch(tmp_path / "whole", SCRIPT, "weights_replaced")
    assert outcome.lines["weights_replaced", 0]["weights"] == whole.lines["weights_replaced", 0]["weights"]


def test_a_skipped_step_takes_back_what_the_forward_put_into_buffers(tmp_path):
    fault = "gradient:rank=1,step=3,kind=nan"
    outcome = launch(tmp_path, SCRIPT, "buffers_replaced", sdcrun=[*EVERY_STEP, "--inject-fault", fault])
    assert outcome.exit_code == 0, outcome.tail()
    whole = launch(tmp_path / "whole", SCRIPT, "buffers_replaced")
    for rank in range(3):
        losses, right = (run.lines["buffers_replaced", rank]["losses"] for run in (outcome, whole))
        assert losses[:9] == right[:9] and losses[9] == right[9]
        # Of step 3 only the loss was; centre and memory are those of step 2 again when the gate has skipped it.
        assert losses[10:12] == losses[7:9]
