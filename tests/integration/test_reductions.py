"""What is read in DDP's reductions: several in one window, whose first brings one rank's NaN to all of them; buckets of
complex parameters."""

import pytest
from harness import LOOPS, differences, launch

EVERY_STEP = ("--sdc-audit-every", "1", "--sdc-weights-every", "1")


@pytest.mark.parametrize(
    ("file", "loop", "fault"),
    [
        ("ddp_options", "accumulate_with_sync", "gradient:rank=0,step=1,kind=inf"),
        pytest.param("surroundings", "complex_parameters", "gradient:rank=0,step=1,kind=inf", marks=pytest.mark.slow),
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


def test_complex_gradients_that_are_views_of_buckets_keep_their_bits(tmp_path):
    """Three ranks: a third is not exact, so that it matters how a gradient is divided."""
    plain = launch(tmp_path / "plain", LOOPS / "surroundings.py", "complex_in_bucket_views")
    guarded = launch(tmp_path / "guarded", LOOPS / "surroundings.py", "complex_in_bucket_views", sdcrun=EVERY_STEP)
    assert guarded.exit_code == 0 and differences(plain, guarded) == [] and guarded.findings == [], guarded.tail()
