"""What a run with --inject-fault proves: delays, who can be named at all, and what is a failure of the run."""

import pytest
from eventmaker import Job, comparison

from sdcrun.core import exitcode
from sdcrun.core.audit import NARROWED
from sdcrun.core.smoke import fault_rows, problems
from sdcrun.report import build
from sdcrun.report.render import junit, text


def judged(job):
    state = build.fold(job.config, job.events)
    return fault_rows(state), problems(state), exitcode.exit_code(state, 0)


def started(world, *faults, **config):
    job = Job(world=world, faults=faults, **config)
    job.node_up()
    job.hello()
    return job


def test_the_delay_counts_from_the_first_firing_that_changed_something():
    job = started(3, "weight:rank=1,step=2,repeat=always", weights_every=4)
    job.inject(2, rank=1, before=0.0, after=0.0)
    for step in (3, 4, 5):
        job.inject(step, rank=1)
    job.vote(5, {"w": [1]})
    rows, wrong, code = judged(job)
    assert rows[0].after_steps == 2 and rows[0].named_right and not wrong and code == 0


def test_a_shared_wrong_sum_of_which_somebody_is_accused_is_a_failure():
    job = started(3, "allreduce:step=2,bit=3")
    for rank in range(3):
        job.inject(2, rank=rank, site="allreduce")
    job.vote(2, {"w": [1]})
    rows, wrong, code = judged(job)
    assert rows[0].named_right is False and "accused" in rows[0].problem and wrong and code == 88


def test_two_of_three_domains_wrong_in_one_step_can_be_seen_but_not_named():
    job = started(3, "gradient:rank=1,step=2,bit=3", "gradient:rank=2,step=2,bit=3", audit_every=1)
    for spec, rank in enumerate((1, 2)):
        job.inject(2, rank=rank, spec=spec, site="gradient")
    silent = judged(job)
    assert silent[2] == 88 and all("not caught" in row.problem for row in silent[0])
    ring = [comparison(owner, (owner + 1) % 3, "ring", owner == 2, other=f"x{owner}") for owner in range(3)]
    job.audit(2, comparisons=ring, skipped=True)
    rows, wrong, code = judged(job)
    assert code == 0 and not wrong and {row.named_right for row in rows} == {None}
    assert all("no two of the others" in row.by_design_unseen for row in rows)


@pytest.mark.parametrize(("step", "audited", "code"), [(4, (0, 5), 0), (5, (0, 5), 88)])
def test_on_two_nodes_nobody_is_named_but_what_an_audit_could_see_must_be_seen(step, audited, code):
    job = started(2, f"gradient:rank=1,step={step},bit=3", audit_every=5, weights_every=0)
    job.inject(step, rank=1, site="gradient")
    for at in audited:
        job.audit(at)
    rows, _, got = judged(job)
    assert got == code and rows[0].caught_by is None
    assert ("no audit" if code == 0 else "two failure domains") in rows[0].by_design_unseen


def convicted(job, step, rank):
    """An audit whose finding names `rank`."""
    found = [comparison(rank, (rank + 1) % 3, "ring", False), comparison(rank, (rank + 2) % 3, "arbiter", False)]
    job.audit(step, comparisons=found, skipped=True)


def test_of_two_wrong_computations_in_a_row_an_audit_saw_its_own():
    job = started(3, "gradient:rank=1,step=2,bit=3", "activation:rank=1,step=3,bit=3", audit_every=1, weights_every=1)
    job.inject(2, rank=1, spec=0, site="gradient")
    job.inject(3, rank=1, spec=1, site="activation")
    job.audit(2)
    convicted(job, 3, 1)
    rows, _, code = judged(job)
    assert [(row.caught_by, row.named_right) for row in rows] == [(None, None), ("replay", True)]
    assert "not caught" in rows[0].problem and code == 88


def test_a_wrong_loss_that_no_audit_covered_is_excused_by_what_the_run_said():
    job = started(3, "loss:rank=1,step=2,bit=3", "gradient:rank=1,step=3,bit=3", audit_every=1)
    job.inject(2, rank=1, spec=0, site="loss")
    job.inject(3, rank=1, spec=1, site="gradient")
    job.audit(2, scope="from the outputs back")
    job.audit(3, scope="from the outputs back")
    silent = judged(job)[0]
    assert all("not caught" in row.problem for row in silent)
    job.emit("limit", 0, {"text": f"{NARROWED}from the outputs back", "check": "replay"})
    rows, _, code = judged(job)
    assert "less than all: from the outputs back" in rows[0].by_design_unseen and rows[0].problem is None
    assert "not caught" in rows[1].problem and code == 88


def test_a_stop_excuses_only_what_was_still_to_come():
    job = started(3, "weight:rank=1,step=2", "weight:rank=2,step=9", "weight:rank=2,step=1,tensor=nosuch")
    job.inject(2, rank=1)
    job.vote(2, {"w": [1]})
    job.emit("command", "controller", {"what": "stop", "why": "max_strikes", "code": 86, "to": "supervisors"})
    rows, wrong, code = judged(job)
    assert [row.problem is None for row in rows] == [True, True, False]
    assert "stopped the job" in rows[1].by_design_unseen
    assert code == 88 and len(wrong) == 1


SAVED = {"path": "ema.pt", "step": 4, "state": "unverified", "reason": "w matches no vote", "id": "1", "rank": 0}


@pytest.mark.parametrize(
    ("saved", "why"),
    [
        ([SAVED, {**SAVED, "path": "b.pt", "id": "2", "step": 9}],
         "checkpoint ema.pt is unverified: w matches no vote"),
        ([{**SAVED, "state": "provisional", "reason": "as voted"}], "checkpoint ema.pt is provisional"),
        ([{**SAVED, "step": None}, {**SAVED, "path": "b.pt", "step": None}],
         "checkpoint ema.pt is unverified: w matches no vote"),
        ([{**SAVED, "step": 2}], "no checkpoint that this rank saved from then on is on record"),
        ([], "no checkpoint that this rank saved from then on is on record"),
    ],
)
def test_a_fault_in_a_checkpoint_that_was_not_caught_tells_what_became_of_the_checkpoint(saved, why):
    job = started(3, "checkpoint:rank=0,step=4,bit=30")
    job.inject(4, rank=0, site="checkpoint")
    for data in saved:
        job.emit("checkpoint", 0, data)
    rows, wrong, code = judged(job)
    assert rows[0].problem == f"it fired and was not caught ({why})" and code == 88 and len(wrong) == 1


def test_the_table_at_the_end_and_junit_have_a_row_for_each_fault():
    job = started(3, "weight:rank=1,step=2", "allreduce:step=3,bit=2", "gradient:rank=7,step=2")
    job.inject(2, rank=1)
    job.vote(2, {"w": [1]})
    for rank in range(3):
        job.inject(3, rank=rank, spec=1, site="allreduce")
    job.emit("limit", 0, {"text": "x never fired: there is no rank 7 among 3", "check": None, "unfired": 2})
    report = build.build(build.fold(job.config, job.events))
    lines = text.faults(report)
    assert len([line for line in lines if ":" in line and "×" in line]) == 3
    assert "weight vote" in lines[1] and "right" in lines[1] and "unseen by design" in " ".join(lines)
    assert "there is no rank 7" in " ".join(" ".join(lines).split())
    assert text.faults({**report, "injected": []}) == []
    xml = junit.render(report)
    assert 'tests="3" failures="1" skipped="1"' in xml
