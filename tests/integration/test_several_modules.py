"""Two modules that take turns: every update is audited whole, and a fault in any of them is caught in its step."""

import pytest
from harness import LOOPS, launch

pytestmark = pytest.mark.slow

EVERY_STEP = ("--sdc-audit-every", "1", "--sdc-weights-every", "1")
LOOPS_OF = {"tutorial": 8, "wasserstein": 12, "generator_first": 8}


@pytest.mark.parametrize("loop", LOOPS_OF)
def test_all_gradients_of_both_modules_are_audited_and_nothing_moves(loop, tmp_path):
    plain = launch(tmp_path / "plain", LOOPS / "gans.py", loop)
    guarded = launch(tmp_path / "guarded", LOOPS / "gans.py", loop, sdcrun=EVERY_STEP)
    assert plain.exit_code == guarded.exit_code == 0, guarded.tail()
    assert sorted(guarded.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert guarded.findings == []
    assert guarded.report["checks"]["replay"]["run"] == guarded.report["steps"]["seen"] == LOOPS_OF[loop]
    assert {event["data"]["scope"] for event in guarded.events("audit")} == {"all"}


@pytest.mark.parametrize("loop", LOOPS_OF)
def test_a_fault_is_caught_whichever_module_is_updated(loop, tmp_path):
    faults = [f"gradient:rank={step % 3},step={step},kind=bitflip,bit=27" for step in range(1, 7)]
    faults += ["activation:rank=2,step=7,kind=scale,by=1.5"]
    options = [word for text in faults for word in ("--inject-fault", text)]
    outcome = launch(tmp_path, LOOPS / "gans.py", loop, sdcrun=[*EVERY_STEP, "--sdc-max-strikes", "20", *options])
    assert outcome.exit_code == 0, outcome.tail()
    assert len(set(outcome.stdout.split()[2::3])) == 1, "the replicas differ"
    assert sorted((f["step"], f["rank"], f["check"]) for f in outcome.findings) == [
        (step, 2 if step == 7 else step % 3, "replay") for step in range(1, 8)
    ]
    gradients = [event["data"] for event in outcome.events("inject") if event["data"]["site"] == "gradient"]
    turns = {data["step"]: data["tensor"].startswith("module1.") for data in gradients if data["phase"] == "step"}
    assert turns == {step: _turn(loop, step) == "judge" for step in range(1, 7)}


def _turn(loop, step):
    """Whose update step `step` is."""
    if loop == "wasserstein":
        return "maker" if step % 3 == 2 else "judge"
    return "judge" if (step % 2 == 0) == (loop == "tutorial") else "maker"
