"""Windows that reduce several times: what the first reduction brings to all ranks accuses the rank it is from alone."""

import pytest
from harness import LOOPS, launch

EVERY_STEP = ("--sdc-audit-every", "1", "--sdc-weights-every", "1")


@pytest.mark.parametrize(
    ("file", "loop", "fault"),
    [
        ("ddp_options", "accumulate_with_sync", "gradient:rank=0,step=1,kind=inf"),
        pytest.param("optimizers", "gan_two_critic_steps", "gradient:rank=0,step=1,kind=inf", marks=pytest.mark.slow),
        pytest.param("optimizers", "step_without_backward", "gradient:rank=1,step=3,kind=nan", marks=pytest.mark.slow),
        pytest.param("perturbed", "sam", "gradient:rank=2,step=1,kind=inf", marks=pytest.mark.slow),
        pytest.param("perturbed", "adversarial", "gradient:rank=1,step=3,kind=nan", marks=pytest.mark.slow),
    ],
)
def test_the_rank_it_came_from_is_named(file, loop, fault, tmp_path):
    outcome = launch(tmp_path, LOOPS / f"{file}.py", loop, sdcrun=[*EVERY_STEP, "--inject-fault", fault])
    assert outcome.exit_code == 0 and outcome.leftovers == [], outcome.tail()
    rank, step = int(fault.split("rank=")[1][0]), int(fault.split("step=")[1][0])
    assert {(f["rank"], f["step"]) for f in outcome.findings} == {(rank, step)}, outcome.tail()
    (event,) = outcome.events("nonfinite")[:1]
    assert event["data"]["skipped"]
    named = [e["source"] for e in outcome.events("nonfinite") if e["data"]["local"]]
    assert named == [f"rank:{rank}"]
    assert len({line["weights"] for (name, _), line in outcome.lines.items() if name == loop}) == 1
