"""The policy and its voice: stops, audits that are asked for, what people are told and when, exit codes."""

import pytest
from decidekit import findings, only, run, said, stops
from eventmaker import Job, comparison

from sdcrun.core import decide, exitcode
from sdcrun.core.smoke import problems as smoke_problems
from sdcrun.core.types import Event, Verdict


def test_max_strikes_stops_with_86():
    job = Job(max_strikes=3)
    job.hello()
    for step in (3, 6, 9, 12):
        job.vote(step, {"w": [2]})
    state, actions = run(job)
    assert [stop["code"] for stop in stops(actions)] == [86]
    assert exitcode.exit_code(state, 0) == exitcode.exit_code(state, 1) == 86
    assert "max_strikes" in said(actions)


def test_strikes_follow_the_device_when_ranks_move():
    job = Job()
    job.hello()
    job.vote(3, {"w": [2]})
    job.hello(attempt=1, shift=1)
    job.vote(4, {"w": [1]}, attempt=1)
    state, _ = run(job)
    assert state.ledger.strikes(state.device_key) == {"gpu-2/GPU-0002": [(0, 3), (1, 4)]}


def attempts_ending(*rows, **config):
    """A job whose attempts each end with a dissenting vote, `rows` of (step of it, last step)."""
    job = Job(**{"max_strikes": 99, **config})
    for attempt, (step, last) in enumerate(rows):
        job.hello(attempt, shift=attempt)
        job.vote(step, {"w": [2]}, attempt=attempt)
        job.summaries(last + 1, attempt=attempt)
    job.hello(len(rows))
    return job


def test_attempts_that_keep_ending_after_corruption_are_an_endless_loop():
    _, actions = run(attempts_ending((3, 5), (7, 9), (4, 4)))
    (stop,) = stops(actions)
    assert stop["code"] == 87 and "3 attempts in a row" in stop["why"]
    assert all(f"attempt {n} at step {step}" in stop["why"] for n, step in enumerate((3, 7, 4)))


@pytest.mark.parametrize("rows", [[(3, 5), (7, 9)], [(3, 5), (7, 40), (4, 4)], [(3, 30), (7, 9), (4, 4)]])
def test_fewer_or_other_ends_are_not(rows):
    assert not stops(run(attempts_ending(*rows))[1])


def test_on_suspect_stop_and_on_fault_stop():
    job = Job(on_suspect="stop")
    job.hello()
    job.vote(3, {"w": [2]})
    assert [stop["code"] for stop in stops(run(job)[1])] == [87]
    job = Job(on_fault="stop")
    job.hello()
    job.nonfinite(5, {1: ["w"], 2: ["w"]})
    assert [stop["code"] for stop in stops(run(job)[1])] == [87]


def test_a_job_that_only_skips_is_stopped():
    job = Job(max_skipped=5)
    job.hello()
    for step in (1, 2, 3, 4, 6, 7, 8, 9):
        job.nonfinite(step, {1: ["w"], 2: ["w"]})
    assert not stops(run(job)[1])
    job.nonfinite(5, {1: ["w"], 2: ["w"]})
    stop = stops(run(job)[1])
    assert [s["code"] for s in stop] == [87] and "max_skipped" in stop[0]["why"]


def test_an_order_to_stop_is_pending_until_it_is_on_record():
    job = Job(max_strikes=1)
    job.hello()
    job.vote(3, {"w": [2]})
    state, actions = run(job)
    assert [a.data["code"] for a in decide.pending(state)] == [87]
    job.emit("command", "controller", {"what": "stop", "why": "strikes", "code": 87})
    state, actions = run(job)
    assert decide.pending(state) == [] and exitcode.exit_code(state, 0) == 87


def test_a_read_only_fold_decides_nothing():
    job = Job(max_strikes=1)
    job.hello()
    job.vote(3, {"w": [2]})
    state = decide.initial(job.config)
    for event in job.events:
        decide.fold(state, event)
    decide.finish(state)
    assert state.stop is None and exitcode.exit_code(state, 0) == 0
    assert findings(state) == findings(run(job)[0])


def test_an_audit_is_wished_for_when_a_nan_is_unclear_but_not_every_step():
    job = Job(audit_every=100)
    job.hello()
    for step in range(30, 36):
        job.nonfinite(step, {1: ["w"]})
    _, actions = run(job, finish=False)
    state, actions = run(job, finish=False)
    state, more = decide.tick(state, 1.0)
    state, late = decide.tick(state, 7.0)
    assert [a.data["what"] for a in actions + more + late if a.kind == "command"] == ["audit"]


def test_triage_clears_a_device_whose_nan_another_one_reproduces():
    job = Job(audit_every=1)
    job.hello()
    job.nonfinite(5, {2: ["w"]})
    job.audit(5, cause="triage", agreed=3, skipped=True, comparisons=[
        comparison(2, 3, "ring", True, nonfinite_owner=True, nonfinite_replayer=True)])  # fmt: skip
    state, actions = run(job)
    finding = only(state)
    assert (finding.verdict, finding.ranks, finding.strike) == (Verdict.NOT_HARDWARE, (), False)
    assert any(row["tensor"] == "w" for row in finding.evidence)
    assert "SUSPECT" not in said(actions)


def test_triage_accuses_a_device_whose_nan_is_finite_elsewhere():
    job = Job(audit_every=1)
    job.hello()
    job.audit(5, cause="triage", agreed=3, skipped=True, comparisons=[
        comparison(2, 3, "ring", False, nonfinite_owner=True, nonfinite_replayer=False)])  # fmt: skip
    job.nonfinite(5, {2: ["w"]})
    state, _ = run(job)
    accusing = [f for f in findings(state) if f.ranks]
    assert [(f.check, f.verdict, f.ranks, f.strike) for f in accusing] == [
        ("nonfinite", Verdict.SUSPECT, (2,), True)]  # fmt: skip
    assert len(state.ledger.strikes(state.device_key)["gpu-2/GPU-0002"]) == 1


def test_a_replay_mismatch_convicts_the_odd_one_out_and_a_second_confirms():
    job = Job(audit_every=1)
    job.hello()
    wrong = [comparison(2, 3, "ring", False), comparison(2, 0, "arbiter", False, other="bb")]
    job.audit(5, comparisons=wrong, agreed=3, skipped=True)
    job.audit(6, comparisons=wrong, agreed=3, skipped=True)
    state, actions = run(job)
    assert [f.ranks for f in findings(state)] == [(2,), (2,)]
    assert len(state.ledger.strikes(state.device_key)["gpu-2/GPU-0002"]) == 2
    assert "CONFIRMED at step 6" in said(actions)


def test_missing_ranks_are_named_once():
    job = Job()
    job.hello(skip=(1, 3))
    state, _ = run(job, finish=False)
    texts = [said(decide.tick(state, now)[1]) for now in (0.0, 29.0, 31.0, 60.0)]
    assert [bool(text) for text in texts] == [False, False, True, False]
    assert "UNGUARDED: ranks 1 and 3: never said hello" in texts[2]


def test_a_vote_is_told_after_a_second_even_when_the_evidence_never_comes():
    job = Job()
    job.hello()
    job.vote(3, {"w": [2]}, word=False)
    state, actions = run(job, finish=False)
    assert not said(actions)
    _, first = decide.tick(state, 10.0)
    _, second = decide.tick(state, 11.5)
    assert not said(first) and "SUSPECT at step 3" in said(second)


def test_a_nan_waits_for_its_audit_before_people_are_told():
    """What a second device makes of the micro-batch turns the finding around; a crowded machine takes its time."""
    job = Job(audit_every=100)
    job.hello()
    job.nonfinite(3, {2: ["w"]})
    state, actions = run(job, finish=False)
    told = [said(decide.tick(state, now)[1]) for now in (10.0, 14.5, 15.5)]
    assert not said(actions) and not told[0] and not told[1] and "one-rank-local" in told[2]


def test_repeated_findings_shrink_to_one_line():
    job = Job(on_suspect="report", max_strikes=100)
    job.hello()
    for step in range(1, 9):
        job.vote(step, {"w": [2]})
    _, actions = run(job)
    assert said(actions).count("  what  ") == 4  # one as suspect, three as confirmed


def test_what_goes_on_and_on_is_said_ever_more_rarely():
    job = Job(on_suspect="report", max_strikes=10_000)
    job.hello()
    for step in range(1, 251):
        job.vote(step, {"w": [2]})
    state, actions = run(job)
    lines = [line for line in said(actions).splitlines() if "(rule: weight-minority)" in line and " at step " in line]
    # Of the confirmed ones, the fourth to the tenth one by one, then each tenth up to 100, then 200.
    assert len(lines) == 7 + 9 + 1 and lines[-1].endswith("200 times so far, from now on said now and then")
    assert len(state.ledger.ordered()) == 250


def test_replicas_that_stay_apart_are_one_finding():
    """Until they are equal again."""
    job = Job(on_weight_fault="report")
    job.hello()
    for step in range(3, 9):
        job.vote(step, no_majority=("w",), action="reported", again=None)
    job.vote(20, {"w": [1]})
    job.vote(21, no_majority=("w",), action="reported", again=None)
    state, _ = run(job)
    found = [(entry.finding.step, entry.finding.rule) for entry in state.ledger.ordered()]
    assert found == [(3, "no-majority"), (20, "weight-minority"), (21, "no-majority")]


KINDS = (
    "hello guarded unguarded limit check_off summary nonfinite audit vote word inject checkpoint bye worker_lost"
    " job_end command approved node_up blind gap never_heard_of"
).split()
BROKEN = [
    {},
    {"step": "x"},
    {"step": -1, "group": [0, 0], "rank": None},
    {"step": 1, "group": 7},
    {"step": 2**62, "group": ["a"], "steps": [], "checks": 3, "device": "x", "rank": 1},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", BROKEN)
def test_malformed_data_is_counted_and_never_raises(kind, data):
    state = decide.initial(Job().config)
    state, _ = decide.apply(state, Event(kind, "rank:0", 0, 1, 0.0, data))
    decide.finish(state)
    assert not findings(state)


def test_exit_codes_without_faults():
    state = decide.initial(Job().config)
    assert [exitcode.exit_code(state, code) for code in (0, 1, -9)] == [0, 1, -9]


def smoke(fault, build, code=0, **config):
    job = Job(faults=(fault,), **config)
    job.hello()
    build(job)
    state, _ = run(job)
    return exitcode.exit_code(state, code), state


def test_smoke_runs():
    caught = lambda job: (job.inject(3, 2), job.vote(3, {"w": [2]}))  # noqa: E731
    assert smoke("weight:rank=2,step=3", caught)[0] == 0
    assert smoke("weight:rank=2,step=3", caught, code=1)[0] == 1
    assert smoke("weight:rank=2,step=3", lambda job: job.inject(3, 2))[0] == 88
    assert smoke("weight:rank=2,step=999", lambda job: None)[0] == 88
    assert smoke("weight:rank=2,step=3", lambda job: (caught(job), job.vote(7, {"w": [1]})))[0] == 88
    assert smoke("weight:rank=2,step=3", lambda job: job.inject(3, 2, after=1.0))[0] == 88
    assert smoke("allreduce:step=3,bit=3", lambda job: [job.inject(3, r, site="allreduce") for r in range(4)])[0] == 0
    stopped = lambda job: [(job.inject(s, 2), job.vote(s, {"w": [2]})) for s in (3, 4, 5)]  # noqa: E731
    assert smoke("weight:rank=2,step=3,repeat=always", stopped, code=1)[0] == 0


def test_a_fault_caught_without_naming_the_device_fails_where_three_replicas_could_name_it():
    job = Job(faults=("gradient:rank=2,step=3,kind=nan",))
    job.hello()
    job.inject(3, 2, site="gradient", after="nan")
    job.nonfinite(3, {1: ["w"], 2: ["w"]})
    state, _ = run(job)
    assert exitcode.exit_code(state, 0) == 88


def test_a_fault_that_never_fired_says_why():
    job = Job(faults=("weight:rank=2,step=3",))
    job.hello()
    job.emit("limit", 2, {"text": "weight:x never fired: there is no tensor x", "check": None, "unfired": 0})
    state, _ = run(job)
    assert exitcode.exit_code(state, 0) == 88
    assert smoke_problems(state) == ["weight:rank=2,step=3: it never fired: there is no tensor x"]
