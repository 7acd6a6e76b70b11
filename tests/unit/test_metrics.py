"""`metrics.prom` while a job runs: now and then, whole, and never a reason for the controller to stumble."""

from __future__ import annotations

import pytest
from eventmaker import Job

from sdcrun.core import decide
from sdcrun.report import build, metrics
from sdcrun.report.metrics import EVERY, Metrics
from sdcrun.report.render import prometheus


@pytest.fixture
def running():
    job = Job()
    job.hello()
    job.summaries(40)
    state = decide.initial(job.config)
    for event in job.events:
        decide.fold(state, event)
    return state


def test_written_at_once_and_then_when_it_is_due(tmp_path, running):
    path, said = tmp_path / "metrics.prom", []
    kept = Metrics(tmp_path, said.append)
    kept.turn(running, 100.0)
    assert path.read_text() == prometheus.render(build.build(running))
    assert 'sdcrun_job_status{job_id="job",status="running"} 1' in path.read_text()
    path.unlink()
    kept.turn(running, 100.0 + EVERY - 0.1)
    assert not path.exists()
    kept.turn(running, 100.0 + EVERY)
    assert path.exists() and said == []
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.prom"], "nothing half-written is left"


def test_what_takes_long_is_done_less_often(tmp_path, running, monkeypatch):
    clock = iter((0.0, 3.0, 3.0, 6.0))
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    kept = Metrics(tmp_path, print)
    kept.turn(running, 0.0)
    (tmp_path / "metrics.prom").unlink()
    kept.turn(running, 59.0)
    assert not (tmp_path / "metrics.prom").exists()
    kept.turn(running, 61.0)
    assert (tmp_path / "metrics.prom").exists()


def test_trouble_is_said_once_and_tried_again(tmp_path, running):
    said = []
    kept = Metrics(tmp_path / "job", said.append)
    kept.turn(running, 0.0)
    kept.turn(running, EVERY)
    kept.turn(object(), 2 * EVERY)
    assert len(said) == 1 and "metrics.prom: FileNotFoundError" in said[0]
    (tmp_path / "job").mkdir()
    kept.turn(running, 3 * EVERY)
    assert (tmp_path / "job/metrics.prom").exists()
    kept.turn(object(), 4 * EVERY)
    assert len(said) == 2
