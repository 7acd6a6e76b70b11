"""What an operator asks at night is answered in the first lines, in the same words in every view."""

from __future__ import annotations

import pytest
from eventmaker import Job
from test_report import healthy, hostile, report_of, sick
from test_report_page import Page, page_of

from sdcrun.core import words
from sdcrun.report import verdict
from sdcrun.report.answers import answers
from sdcrun.report.render import text as render_text


def job_with(*what, faults=(), **config):
    job = Job(faults=faults, **config)
    job.hello()
    for do in what:
        do(job)
    return job


def vote(step, rank):
    return lambda job: job.vote(step, {"w": [rank]})


def saved(step, state):
    data = {"path": f"ck{step}.pt", "step": step, "state": state, "reason": "", "id": f"c{step}"}
    return lambda job: job.emit("checkpoint", 0, data)


def undecided(job):
    job.vote(5, no_majority=("w",), action="declined", again=None)


def everywhere(job):
    job.nonfinite(5, {0: ["w"], 1: ["w"]})


def silent(job):
    job.events.clear()
    job.emit("unguarded", 0, {"reason": "no DDP"})


@pytest.mark.parametrize(
    ("job", "hardware", "drain"),
    [
        (job_with(vote(3, 2), vote(9, 2)), "Yes: rank 2 on host gpu-2, device GPU-0002 (H100, serial S2) gave",
         "gpu-2 (rank 2). Lines to paste: sdcrun report job --commands"),
        (job_with(vote(3, 2)), "Likely: rank 2 on host gpu-2", "Nothing yet. Watch gpu-2 (rank 2): a second"),
        (job_with(undecided), "Possible: devices gave different results", "Nothing."),
        (job_with(everywhere), "Unlikely: values that are not finite", "Nothing."),
        (job_with(vote(0, 2)), "Unlikely: this looks like code", "Nothing."),
        (job_with(lambda job: job.summaries(5)), "No sign of it.", "Nothing."),
        (job_with(lambda job: job.inject(3, 2), vote(3, 2), faults=("weight:rank=2,step=3",)),
         "No: what was found was put there by --inject-fault.", "Nothing."),
        (job_with(silent), "Cannot be told: nothing was guarded.", "Nothing."),
    ],
)  # fmt: skip
def test_hardware_and_drain(job, hardware, drain):
    said = dict(answers(report_of(job)))
    assert said["hardware"].startswith(hardware) and said["drain"].startswith(drain), said


def test_a_nan_that_a_second_device_reproduces_is_no_hardware():
    """Also where other steps were not looked at by a second device."""
    note = {"attempt": 0, "step": 12, "check": "nonfinite", "verdict": "not-hardware", "device": None, "rank": None,
            "rule": "reproduced-elsewhere", "strike": False, "injected": False, "text": ""}  # fmt: skip
    clean, unclear = report_of(healthy()), report_of(job_with(everywhere))
    assert dict(answers(clean | {"findings": [note]}))["hardware"].startswith("No: another device got the same")
    said = dict(answers(unclear | {"findings": [*unclear["findings"], note]}))["hardware"]
    assert said.startswith("Very unlikely: another device") and "(step 12)" in said


def test_the_node_is_named_as_its_scheduler_names_it():
    report = report_of(job_with(vote(3, 2), vote(9, 2)))
    names = report["suspects"][0]["names"]
    names.update(kubernetes_node="worker-7", pod="train-2")
    assert dict(answers(report))["drain"].startswith("worker-7 (rank 2)")
    names["slurm_node"] = "n17"
    report["suspects"][0]["approved_by"] = "Ada"
    assert dict(answers(report))["drain"].startswith("n17 (rank 2, approved by Ada)")


@pytest.mark.parametrize(
    ("saves", "said"),
    [
        ((), "None is on record."),
        ((saved(4, "verified"),), "Newest safe one: ck4.pt, of step 4."),
        ((saved(4, "verified"), saved(8, "unverified"), saved(9, "withheld")),
         "Newest safe one: ck4.pt, of step 4. Later ones: 1 unverified, 1 withheld."),
        ((saved(8, "unverified"), saved(9, "provisional")), "None is known to be safe (1 unverified, 1 provisional)."),
        ((saved(8, "verified"), vote(3, 2), vote(9, 2)), "None is known to be safe (1 tainted)."),
    ],
)  # fmt: skip
def test_checkpoint(saves, said):
    assert dict(answers(report_of(job_with(*saves))))["checkpoint"] == said


@pytest.mark.parametrize("job", [healthy(), sick(), hostile(), Job()], ids=["healthy", "sick", "hostile", "empty"])
def test_text_and_page_say_the_same_first(job):
    report = report_of(job)
    text = " ".join(render_text.render(report).split())
    page = " ".join(" ".join(Page(page_of(job)).texts).split())
    for question, answer in answers(report):
        said = " ".join(f"{question} {answer}".split())
        assert said in page
        # A name without a space is cut where a line ends.
        assert said in text or job.config.job_id != "job"


def test_findings_and_suspects_read_the_same_in_text_and_page():
    job = sick()
    report = report_of(job)
    text = " ".join(render_text.render(report).split())
    page = " ".join(" ".join(Page(page_of(job)).texts).split())
    wanted = [line.strip() for row in report["findings"] for line in row["text"].splitlines()[1:]]
    wanted += [f"sure {verdict.how_sure(suspect)}" for suspect in report["suspects"]]
    for line in wanted:
        name, _, said = line.partition(" ")
        assert f"{name} {' '.join(said.split())}" in text and f"{name} {' '.join(said.split())}" in page, line


def test_why_a_job_was_stopped_is_said():
    job = job_with(vote(3, 2), vote(9, 2), vote(12, 2))
    job.emit("command", "controller", {"what": "stop", "to": "supervisors", "code": 86, "why": "3 strikes"})
    job.end(86)
    assert report_of(job)["stopped_because"] == "3 strikes"
    assert "stopped 3 strikes" in " ".join(render_text.render(report_of(job)).split())
    assert "3 strikes" in page_of(job) and report_of(healthy())["stopped_because"] is None


@pytest.mark.parametrize("length", [10, 60, 300])
def test_the_table_of_faults_loses_no_column(length):
    """Whatever the length of what was typed, and whatever became of it."""
    row = {"spec": "weight:" + "x" * length, "fired": 9, "step": 8, "rank": 1, "caught_by": "nonfinite",
           "after_steps": 2, "named_right": True, "by_design_unseen": None, "problem": None}  # fmt: skip
    rows = [row, {**row, "problem": "it went wrong"}, {**row, "named_right": None, "by_design_unseen": "two only"}]
    lines = render_text.faults({"injected": rows})
    assert max(map(len, lines)) <= 100
    for result in ("right  ok", "right  FAILED", "-      seen, not named"):
        assert any(line.endswith(f"9×     {words.CHECK_NAMES['nonfinite']}  2 steps  {result}") for line in lines)


def test_a_checkpoint_fault_that_was_caught_accuses_nobody_and_is_well():
    row = {"spec": "checkpoint:step=9", "fired": 1, "step": 9, "rank": 0, "caught_by": "checkpoint", "after_steps": 0,
           "named_right": None, "by_design_unseen": None, "problem": None}  # fmt: skip
    report = report_of(healthy()) | {"injected": [row]}
    assert verdict.headline(report) == (verdict.GOOD, "The injected fault was caught, and nobody was accused of it.")
    assert verdict.named(row) == "nobody"


def test_a_fault_that_is_not_caught_yet_has_not_failed_while_the_job_runs():
    job = job_with(lambda job: job.inject(3, 2), faults=("weight:rank=2,step=3",))
    assert verdict.headline(report_of(job))[0] == verdict.WATCH
    job.end(0)
    assert verdict.headline(report_of(job))[0] == verdict.BAD


def test_how_far_errors_may_have_spread():
    job = job_with(vote(3, 2))
    assert verdict.spread(report_of(job)).startswith("Any step may hold errors of a suspect")
    job = job_with(lambda job: job.audit(7), vote(9, 2), lambda job: job.audit(12), audit_every=1)
    said = verdict.spread(report_of(job))
    assert said.startswith("Steps from 8 on") and said.endswith("that of step 7.")
    for view in (render_text.render(report_of(job)), " ".join(Page(page_of(job)).texts)):
        assert said in " ".join(view.split())
    assert verdict.spread(report_of(healthy())) is None


def test_who_failed_first_is_said():
    job = job_with(lambda job: job.summaries(5))
    for rank, code, at in ((1, 1, 20.0), (2, -9, 10.0), (None, "x", None)):
        row = {"rank": rank, "node": 0, "exit": code, "text": f"local rank {rank}, pid 7", "at": at}
        job.emit("worker_lost", "node:gpu:7", row)
    job.end(1)
    report = report_of(job)
    said = "first rank 2 (local rank 2, pid 7): killed by SIGKILL (often the kernel's out-of-memory killer); 2 more"
    assert verdict.failed(report).startswith(said)
    for view in (render_text.render(report), " ".join(Page(page_of(job)).texts)):
        assert f"failed {said}" in " ".join(view.split())
    assert verdict.failed(report_of(healthy())) is None
