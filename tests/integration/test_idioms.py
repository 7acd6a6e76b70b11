"""Training loops as people write them, under plain torchrun and under sdcrun: the same bits, and faults caught."""

import json

import pytest
from harness import EXAMPLES, LOOPS, differences, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]
EVERY_STEP = ("--sdc-weights-every", "1", "--sdc-audit-every", "2")
OVERFLOWS = 2  # steps of the loops in which a GradScaler meets an overflow that the loop itself makes
# Loops for the faults. In step 3 of the GAN the generator is updated, and the critic has gradients too.
FAULTED = ("plain", "gan", "batchnorm_buffers_broadcast")


def with_faults(*texts):
    return [word for text in texts for word in ("--inject-fault", text)]


def assert_untouched(plain, guarded):
    """The script did under sdcrun exactly what it does without."""
    assert guarded.exit_code == plain.exit_code, guarded.tail()
    assert differences(plain, guarded) == []
    assert guarded.leftovers == []
    assert guarded.lines, guarded.tail()
    assert guarded.report is not None, guarded.tail()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("idioms")


@pytest.fixture(scope="module")
def plain(folder):
    return launch(folder / "plain", LOOPS / "everything.py", timeout=800)


@pytest.fixture(scope="module")
def guarded(folder):
    return launch(folder / "guarded", LOOPS / "everything.py", sdcrun=EVERY_STEP, timeout=800)


def test_loops_compute_the_same_bits_on_every_rank(plain, guarded):
    assert plain.exit_code == 0, plain.tail()
    assert len(plain.lines) == 3 * len({loop for loop, _ in plain.lines}) > 200
    assert_untouched(plain, guarded)


def test_healthy_loops_are_guarded_and_nothing_is_found(guarded):
    report = guarded.report
    assert report["guarded_ranks"] == 3 and report["unguarded"] == []
    assert [finding["text"] for finding in report["findings"] if finding["verdict"] != "amp-overflow"] == []
    assert len({finding["step"] for finding in report["findings"]}) == OVERFLOWS
    assert report["suspects"] == [] and report["steps"]["skipped"] == 0
    for check in ("nonfinite", "replay", "weights"):
        assert report["checks"][check]["off_reason"] is None
        assert report["checks"][check]["run"] > 100


def test_stdout_has_nothing_of_ours(plain, guarded):
    assert sorted(guarded.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert "[sdcrun]" not in guarded.stdout


def test_groups_made_and_destroyed(folder):
    plain = launch(folder / "teardown-plain", LOOPS / "teardown.py")
    guarded = launch(folder / "teardown", LOOPS / "teardown.py", sdcrun=EVERY_STEP)
    assert_untouched(plain, guarded)
    assert guarded.findings == [] and guarded.report["guarded_ranks"] == 3
    assert guarded.report["steps"]["committed"] == 24


def test_the_scripts_own_sitecustomize_still_runs(folder):
    own = {"PYTHONPATH": str(LOOPS / "own_site")}
    plain = launch(folder / "site-plain", LOOPS / "own_sitecustomize.py", env=own)
    guarded = launch(folder / "site", LOOPS / "own_sitecustomize.py", env=own, sdcrun=EVERY_STEP)
    assert_untouched(plain, guarded)
    assert guarded.lines["own_sitecustomize", 0]["losses"][0] == (1.0).hex()
    assert guarded.report["guarded_ranks"] == 3 and guarded.report["steps"]["committed"] == 6


def test_what_cannot_be_guarded_runs_on_and_is_said(folder):
    plain = launch(folder / "partly-plain", LOOPS / "partly.py")
    guarded = launch(folder / "partly", LOOPS / "partly.py", sdcrun=EVERY_STEP)
    assert_untouched(plain, guarded)
    assert guarded.findings == []
    said = json.dumps([guarded.report["limits"], guarded.report["unguarded"]])
    for words in ("duck-typed", "backward", "ZeroRedundancyOptimizer", "localSGD"):
        assert words in said


def test_without_ddp_every_rank_is_reported_unguarded(folder):
    plain = launch(folder / "without-plain", LOOPS / "without_ddp.py")
    guarded = launch(folder / "without", LOOPS / "without_ddp.py", sdcrun=EVERY_STEP)
    assert_untouched(plain, guarded)
    assert guarded.findings == [] and guarded.report["guarded_ranks"] == 0
    assert sorted(entry["rank"] for entry in guarded.report["unguarded"]) == [0, 1, 2]
    assert all("DistributedDataParallel" in entry["reason"] for entry in guarded.report["unguarded"])
    assert "UNGUARDED" in guarded.stderr


def assert_caught(outcome, loop, check, rank):
    """The fault in the step it fired, the right rank named and nobody else, all ranks to the end in lockstep."""
    assert outcome.exit_code == 0, outcome.tail()
    assert outcome.leftovers == []
    assert {(f["step"], f["rank"], f["check"]) for f in outcome.findings} == {(3, rank, check)}
    assert [suspect["rank"] for suspect in outcome.report["suspects"]] == [rank]
    (injected,) = outcome.report["injected"]
    assert injected["fired"] and injected["caught_by"] == check and injected["named_right"]
    lines = [outcome.lines[loop, r] for r in range(3)]
    assert len({len(line["losses"]) for line in lines}) == 1
    assert len({line["grads"] for line in lines}) == 1, "ranks have different gradients"


@pytest.mark.parametrize("loop", FAULTED)
def test_a_gradient_that_is_not_a_number_is_caught_in_its_step(folder, plain, loop):
    faults = with_faults("gradient:rank=1,step=3,kind=nan")
    outcome = launch(folder / f"nan-{loop}", LOOPS / "everything.py", loop, sdcrun=[*EVERY_STEP[:2], *faults])
    assert_caught(outcome, loop, "nonfinite", 1)
    assert outcome.report["steps"]["skipped"] == 1
    assert outcome.report["steps"]["committed"] == outcome.report["steps"]["seen"] - 1
    wanted = plain.lines[loop, 0]["losses"]
    got = outcome.lines[loop, 0]["losses"]
    assert "nan" not in got and got[:4] == wanted[:4] and got != wanted
    if loop != "batchnorm_buffers_broadcast":
        assert len({outcome.lines[loop, rank]["weights"] for rank in range(3)}) == 1


def test_a_step_that_is_skipped_before_its_closure_was_called_still_returns_a_loss(folder, plain):
    """SAM: the gate stands behind the script's own backward, and the closure would see weights nobody perturbed."""
    loop, faults = "sam_with_a_closure", with_faults("gradient:rank=1,step=3,kind=nan")
    outcome = launch(folder / "nan-closure", LOOPS / "everything.py", loop, sdcrun=[*EVERY_STEP[:2], *faults])
    assert_caught(outcome, loop, "nonfinite", 1)
    assert outcome.report["steps"]["skipped"] == 1
    wanted, got = plain.lines[loop, 0]["losses"], outcome.lines[loop, 0]["losses"]
    assert "nan" not in got and len(got) == len(wanted) and got[:3] == wanted[:3]


@pytest.mark.parametrize("loop", FAULTED)
def test_a_flipped_weight_bit_is_caught_at_the_next_vote_and_repaired(folder, plain, loop):
    faults = with_faults("weight:rank=2,step=3,kind=bitflip,bit=20")
    outcome = launch(folder / f"flip-{loop}", LOOPS / "everything.py", loop, sdcrun=[*EVERY_STEP[:2], *faults])
    assert_caught(outcome, loop, "weights", 2)
    for rank in range(3):
        assert outcome.lines[loop, rank] == plain.lines[loop, rank]
    (suspect,) = outcome.report["suspects"]
    (word,) = suspect["evidence"]
    assert word["bits"] == [20] and word["words"] == 1 and word["peers_agreeing"] == [0, 1]


@pytest.mark.parametrize("ending", ["sys_exit", "killed"])
def test_a_script_that_fails_ends_as_under_torchrun(folder, ending):
    plain = launch(folder / f"{ending}-plain", LOOPS / "exits.py", ending)
    guarded = launch(folder / ending, LOOPS / "exits.py", ending, sdcrun=EVERY_STEP)
    assert plain.exit_code != 0
    assert_failed_alike(plain, guarded)


def assert_failed_alike(plain, guarded):
    assert guarded.exit_code == plain.exit_code, guarded.tail()
    assert guarded.leftovers == [] and guarded.lines == plain.lines
    assert guarded.report["status"] == "failed" if plain.exit_code else "finished"
    assert guarded.report["suspects"] == []


def test_the_gpt_example_learns_saves_and_resumes_under_guard(folder):
    snapshot = folder / "gpt.pt"
    steps = ("--batch", "4", "--steps")
    straight = launch(folder / "gpt-plain", EXAMPLES / "train_gpt.py", *steps, "60")
    half = launch(
        folder / "gpt-half", EXAMPLES / "train_gpt.py", *steps, "60", "--snapshot", str(snapshot), "--save-every", "30",
        sdcrun=EVERY_STEP,
    )  # fmt: skip
    assert straight.exit_code == half.exit_code == 0, half.tail()
    assert snapshot.exists() and half.findings == []

    def losses(outcome):
        return [line.split("ms/step")[0].rsplit(None, 1)[0] for line in outcome.stdout.splitlines() if "loss" in line]

    assert losses(half) == losses(straight)
    entropy = float(straight.stdout.split("unigram entropy ")[1].split()[0])
    held_out = float(straight.stdout.split("held out: ")[1].split()[0])
    assert held_out < entropy - 0.3
