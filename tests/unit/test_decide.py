"""Rules of checks 1 and 3, and strikes: what the controller makes of what the ranks say."""

import pytest
from decidekit import findings, only, run, said, stops
from eventmaker import Job

from sdcrun.core import decide, exitcode
from sdcrun.core.types import Event, Verdict


def test_one_rank_with_local_nan_is_suspect_without_a_strike():
    job = Job()
    job.hello()
    job.nonfinite(5, {2: ["w"]})
    state, actions = run(job)
    finding = only(state)
    assert (finding.verdict, finding.ranks, finding.strike) == (Verdict.SUSPECT, (2,), False)
    assert not state.ledger.strikes(state.device_key)
    text = said(actions)
    for part in ("step 5", "rank 2", "gpu-2", "GPU-0002", "serial S2", "one-rank-local", "skipped", "learning rate"):
        assert part in text, part


def test_several_ranks_with_local_nan_accuse_nobody():
    job = Job()
    job.hello()
    job.nonfinite(5, {1: ["w"], 2: ["w", "b"]})
    finding = only(run(job)[0])
    assert (finding.verdict, finding.ranks) == (Verdict.INCONCLUSIVE, ())
    assert "more likely than hardware" in finding.text


def test_overflow_under_a_grad_scaler_is_no_finding_that_counts():
    job = Job(on_fault="stop", on_suspect="stop", max_skipped=2)
    job.hello()
    for step in range(5):
        job.nonfinite(step, {2: ["w"]}, amp=True)
    state, actions = run(job)
    assert {f.verdict for f in findings(state)} == {Verdict.AMP_OVERFLOW}
    assert not stops(actions) and exitcode.exit_code(state, 0) == 0


def test_reduced_nan_on_one_rank_is_a_strike():
    job = Job()
    job.hello()
    job.nonfinite(5, reduced={3: ["w"]})
    finding = only(run(job)[0])
    assert (finding.verdict, finding.rule, finding.ranks, finding.strike) == (
        Verdict.SUSPECT, "one-rank-reduced", (3,), True)  # fmt: skip


def test_reduced_nan_everywhere_blames_the_all_reduce():
    job = Job()
    job.hello()
    job.nonfinite(5, reduced=dict.fromkeys(range(4), ["w"]))
    finding = only(run(job)[0])
    assert (finding.verdict, finding.rule, finding.ranks) == (Verdict.INCONCLUSIVE, "inside-all-reduce", ())


def test_a_sum_that_overflowed_is_clean_after_triage():
    job = Job()
    job.hello()
    job.nonfinite(5, reduced={})
    assert only(run(job)[0]).verdict is Verdict.CLEAN_AFTER_TRIAGE


def test_nobody_is_singled_out_while_ranks_are_silent_and_a_late_view_corrects_it():
    job = Job()
    job.hello()
    job.nonfinite(5, {2: ["w"]}, silent=(3,))
    state, actions = run(job, finish=False)
    assert not findings(state) and not said(actions)
    state, actions = decide.tick(state, 100.0)
    assert not findings(state)
    state, actions = decide.tick(state, 111.0)
    assert only(state).rule == "ranks-missing"
    late = Job()
    late.nonfinite(5, {2: ["w"]}, silent=(0, 1, 2))
    state, actions = decide.apply(state, late.events[0])
    assert only(state).rule == "one-rank-local"


def test_a_rank_that_went_on_without_answering_is_not_waited_for():
    job = Job()
    job.hello()
    job.nonfinite(5, {2: ["w"]}, silent=(3,))
    job.nonfinite(6, {2: ["w"]})
    state, _ = run(job, finish=False)
    assert [f.rule for f in findings(state)] == ["ranks-missing", "one-rank-local"]


def test_weight_minority_is_suspect_and_a_second_one_confirms():
    job = Job()
    job.hello()
    job.vote(3, {"w": [2]})
    state, actions = run(job)
    finding = only(state)
    assert (finding.verdict, finding.ranks, finding.strike) == (Verdict.SUSPECT, (2,), True)
    for part in ("bit 30 flipped", "element 5", "3 agreeing ranks", "Repaired"):
        assert part in said(actions), part
    job.vote(9, {"b": [2]})
    state, actions = run(job)
    assert "CONFIRMED at step 9" in said(actions)
    assert state.ledger.strikes(state.device_key) == {"gpu-2/GPU-0002": [(0, 3), (0, 9)]}
    assert not stops(actions)


def test_a_difference_that_persists_is_one_finding_and_one_strike():
    job = Job(on_weight_fault="report")
    job.hello()
    for step in range(3, 20):
        job.vote(step, {"w": [2]}, action="reported", again=None)
    state, _ = run(job)
    assert only(state).step == 3
    assert state.ledger.strikes(state.device_key) == {"gpu-2/GPU-0002": [(0, 3)]}


def test_two_tables_of_one_step_are_one_strike():
    job = Job()
    job.hello()
    job.vote(3, {"w": [2]})
    job.vote(3, {"0.exp_avg.w": [2]}, table="optimizer")
    state, _ = run(job)
    assert len(findings(state)) == 2
    assert state.ledger.strikes(state.device_key) == {"gpu-2/GPU-0002": [(0, 3)]}


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_minority_in_the_first_step_is_probable_software(attempt):
    job = Job()
    job.hello(attempt)
    job.vote(0, {"w": [2]}, attempt=attempt)
    finding = only(run(job)[0])
    assert (finding.verdict, finding.rule, finding.ranks) == (Verdict.INCONCLUSIVE, "minority-at-start", ())
    assert "probable software" in finding.text and ("restart" in finding.text) == bool(attempt)


def test_a_minority_that_moves_is_probable_software():
    job = Job()
    job.hello()
    for step in range(1, 9):
        job.vote(step, {"w": [1 + step % 3]})
    state, _ = run(job)
    assert {(f.verdict, f.rule, f.ranks) for f in findings(state)} == {(Verdict.INCONCLUSIVE, "minority-moves", ())}
    assert not state.ledger.strikes(state.device_key)


def test_a_second_bad_device_does_not_clear_a_confirmed_one():
    job = Job()
    job.hello()
    job.vote(3, {"w": [2]})
    job.vote(5, {"w": [2]})
    job.vote(7, {"b": [1]})
    state, _ = run(job)
    assert set(state.ledger.strikes(state.device_key)) == {"gpu-1/GPU-0001", "gpu-2/GPU-0002"}


def test_injected_faults_on_two_ranks_are_not_a_minority_that_moves():
    job = Job(faults=("weight:rank=1,step=3", "weight:rank=2,step=6"))
    job.hello()
    job.inject(3, 1, spec=0)
    job.vote(3, {"w": [1]})
    job.inject(6, 2, spec=1)
    job.vote(6, {"w": [2]})
    state, _ = run(job)
    assert [(f.verdict, f.ranks, f.injected) for f in findings(state)] == [
        (Verdict.SUSPECT, (1,), True), (Verdict.SUSPECT, (2,), True)]  # fmt: skip
    assert exitcode.exit_code(state, 0) == 0


def test_no_majority_stops_with_87_unless_it_is_to_be_reported():
    for policy, wanted in (("repair", [87]), ("stop", [87]), ("report", [])):
        job = Job(world=2, on_weight_fault=policy)
        job.hello()
        job.vote(3, no_majority=("w",), action="declined", again=None)
        job.word(3, "w", 1)
        state, actions = run(job)
        assert only(state).verdict is Verdict.INCONCLUSIVE
        assert "Against rank 0: Rank 1: one 32-bit word differs: element 5 of w, bit 30" in only(state).text
        assert [stop["code"] for stop in stops(actions)] == wanted
        assert exitcode.exit_code(state, 1) == (wanted or [1])[0]


def test_most_senders_decide_what_a_vote_was():
    job = Job()
    job.hello()
    job.vote(3, {"w": [2, 3]}, word=False)
    honest = [e for e in job.events if e.kind == "vote"]
    lie = Event("vote", "rank:2", 0, 99, 0.0, {**honest[0].data, "minority": {"w": [0]}}, "s1")
    job.events = [e for e in job.events if e.source != "rank:2" or e.kind != "vote"] + [lie]
    assert only(run(job)[0]).ranks == (2, 3)
