"""Reading a job while it is written, the status line made of it, and `sdcrun watch`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from eventmaker import Job
from hypothesis import given
from hypothesis import strategies as st

from sdcrun import cli
from sdcrun.core import decide
from sdcrun.core.codec import MAX_LINE, encode_event
from sdcrun.report import alive, watch
from sdcrun.report.follow import Follower, Progress


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(watch, "EVERY", 0.01)


def started(world=4, **config):
    job = Job(world, **config)
    job.node_up()
    job.hello()
    return job


def folder_of(job, path, upto=None):
    path.mkdir(parents=True, exist_ok=True)
    values = {"job_id": "job", "config": job.config.to_json(), "command": ["sdcrun", "train.py"], "created_at": 1.0}
    (path / "job.json").write_text(json.dumps(values))
    (path / "events.jsonl").write_bytes(b"".join(map(encode_event, job.events[:upto])))
    return path


def progress_of(job):
    progress = Progress(job.config)
    for event in job.events:
        decide.fold(progress.state, event)
        progress.take(event, 100.0)
    return progress


@given(cuts=st.lists(st.integers(1, 400), max_size=60), twice=st.booleans())
def test_whatever_has_been_written_is_read_once(cuts, twice, tmp_path_factory):
    job = started(2)
    job.summaries(5)
    data = b"".join(encode_event(event) for event in job.events) * (1 + twice)
    path = tmp_path_factory.mktemp("job")
    follower, got = Follower(path), []
    assert follower.read() == []
    with open(path / "events.jsonl", "wb", buffering=0) as file:
        at = 0
        for size in [*cuts, len(data)]:
            file.write(data[at : at + size])
            at += size
            got += follower.read()
    assert got == job.events and follower.read() == []


def test_lines_that_are_no_events_are_passed_over(tmp_path):
    job = started(2)
    lines = [encode_event(event) for event in job.events]
    noise = b"nonsense\n" + b"x" * (2 * MAX_LINE) + b"\n"
    (tmp_path / "events.jsonl").write_bytes(lines[0] + noise + b"".join(lines[1:]))
    follower, got = Follower(tmp_path), []
    for _ in range(6):
        got += follower.read()
    assert got == job.events


def test_line_before_the_first_step():
    job = Job(4)
    job.node_up()
    assert progress_of(job).line(100.0).plain == "waiting for the first step · 0/4 guarded"


def test_line_says_where_the_job_stands():
    job = started()
    job.summaries(1000)
    assert progress_of(job).line(101.0).plain == (
        "step 1,000 · clean · 4/4 guarded · 0 audits, 1,000 votes · overhead 1.0 %"
    )
    job.summaries(1200)
    # Rank 0's two summaries are four events, and so four seconds, apart.
    assert "step 1,200 · clean · 4/4 guarded · 50.0 steps/s · " in progress_of(job).line(101.0).plain
    job.nonfinite(1201, {2: ["w"]})
    job.vote(1202, {"w": [3]})
    assert " · 1 skipped · " in progress_of(job).line(101.0).plain
    assert "suspect at step 1202, rank 3 · 4/4" in progress_of(job).line(101.0).plain


def test_slow_steps_are_given_as_seconds_a_step():
    job = started()
    job.summaries(1)
    job.summaries(2)
    assert "4.0 s/step" in progress_of(job).line(101.0).plain


def test_silence_is_said():
    job = started()
    job.summaries(10)
    assert "no word from the ranks for 50 s" in progress_of(job).line(150.0).plain


def test_ranks_that_are_not_guarded_are_said():
    job = Job(4)
    job.node_up()
    job.hello(skip=(3,))
    job.summaries(10)
    line = progress_of(job).line(101.0)
    assert " · 3/4 guarded · " in line.plain and line.spans[-1].style == "bold yellow"


def test_a_restart_starts_the_rate_anew():
    job = started()
    job.summaries(1000)
    job.summaries(1100)
    job.hello(attempt=1)
    job.summaries(10, attempt=1)
    assert "steps/s" not in progress_of(job).line(101.0).plain


def watched(folder, code):
    out = io.StringIO()
    assert watch.watch(str(folder), None, out) == code
    return out.getvalue().splitlines()


def test_watch_of_a_job_that_has_ended(tmp_path):
    job = started()
    job.vote(3, {"w": [2]})
    job.emit("worker_lost", "node:gpu:7", {"rank": 1, "node": 1, "exit": -9, "text": "local rank 0, pid 7"})
    job.hello(attempt=1)
    saved = {"path": "a.pt", "step": 5, "state": "withheld", "reason": "dissent", "id": "1", "rank": 0}
    job.emit("checkpoint", 0, saved)
    job.summaries(9, attempt=1)
    job.end()
    lines = watched(folder_of(job, tmp_path / "job"), 1)
    text = "\n".join(lines)
    assert lines[0] == "job job: sdcrun train.py"
    assert "SUSPECT at step 3 · check 3, weight vote" in lines
    assert "rank 1 has failed: local rank 0, pid 7, exit -9" in lines
    assert "attempt 1: the ranks were started again" in lines
    assert "checkpoint a.pt was withheld" in lines
    assert "(finished, exit code 0)" in text and lines[-1] == "next: sdcrun report job"


def test_watch_follows_until_the_end(tmp_path):
    job = started()
    job.summaries(9)
    so_far = len(job.events)
    job.end()
    folder = folder_of(job, tmp_path / "job", so_far)
    codes, out = [], io.StringIO()
    thread = threading.Thread(target=lambda: codes.append(watch.watch(str(folder), None, out)), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    with open(folder / "events.jsonl", "ab") as file:
        file.write(encode_event(job.events[-1]))
    thread.join(30)
    assert codes == [0] and "No corruption was found in 9 steps." in out.getvalue()


def test_watch_on_a_terminal_shows_a_line_and_takes_it_away(tmp_path, monkeypatch):
    job = started()
    job.summaries(9)
    folder = folder_of(job, tmp_path / "job")
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = os.openpty()
    os.set_blocking(leader, False)
    turns = []

    def sleep(seconds):
        turns.append(seconds)
        if len(turns) == 2:
            job.end()
            folder_of(job, folder)

    monkeypatch.setattr(watch.time, "sleep", sleep)
    with open(follower, "w") as file:
        assert watch.watch(str(folder), None, file) == 0
        parts = []
        with contextlib.suppress(BlockingIOError):
            # A terminal hands out one stretch at a time.
            while True:
                parts.append(os.read(leader, 1 << 16))
    os.close(leader)
    shown = b"".join(parts).decode()
    assert "step 9 · " in shown and "\x1b[2K" in shown.split("step 9 · ")[-1]
    assert shown.rstrip().endswith("next: sdcrun report job")


class Steady:
    """A clock that goes only while `watch` sleeps, and a stop for a watch that would never end."""

    def __init__(self, monkeypatch, most):
        self.now, self.most = 0.0, most
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watch.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += 10.0
        if self.now > self.most:
            raise KeyboardInterrupt


def of_this_host(job, pid):
    for event in job.events:
        if event.kind == "node_up":
            return [replace(e, source=f"node:{socket.gethostname()}:{pid}") if e is event else e for e in job.events]


def test_watch_of_a_job_that_was_killed_ends_and_says_so(tmp_path, monkeypatch):
    job = started()
    job.summaries(9)
    command = [sys.executable, "-c", "print(flush=True); input()", "sdcrun"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    # Its arguments can be read some time after it has been started.
    assert child.stdout.readline()
    job.events[:] = of_this_host(job, child.pid)
    folder = folder_of(job, tmp_path / "job")
    monkeypatch.setattr(watch, "EVERY", 1.0)
    clock = Steady(monkeypatch, 1000.0)
    with pytest.raises(KeyboardInterrupt):
        # It may be silent for as long as it likes while its supervisor lives.
        watch.watch(str(folder), None, io.StringIO())
    child.kill()
    child.wait()
    clock.most += 1000.0
    lines = watched(folder, 0)
    assert lines[-3].startswith(
        f"the job is over, without an end on record: sdcrun (pid {child.pid} on {socket.gethostname()})"
    )
    assert lines[-1] == "next: sdcrun report job"


def test_a_supervisor_in_another_container_of_this_host_is_elsewhere(tmp_path):
    job = started()
    sources = {"h": "node:h:1", "pod": "node:h:2", "other": "node:o:3", "ended": "node:h:4"}
    for source in sources.values():
        facts = {"pid_namespace": "pid:[7]"} if source == sources["pod"] else {"pid_namespace": alive.pid_namespace()}
        job.emit("node_up", source, {"host": source.split(":")[1], "nnodes": 4, "nproc": 1, **facts})
    job.emit("job_end", sources["ended"], {"exit_code": 0, "status": "finished"})
    crew = alive.crew(tmp_path, progress_of(job).state, "h")
    assert crew == alive.Crew((), ("pid 1 on h",), ("pid 7 on gpu", "pid 2 on h", "pid 3 on o"))


def test_watch_of_a_silent_job_elsewhere_says_once_where_to_look(tmp_path, monkeypatch):
    job = started()
    job.summaries(9)
    folder, out = folder_of(job, tmp_path / "job"), io.StringIO()
    (folder / f"controller-{socket.gethostname()}-x.json").touch()
    (folder / "controller-gpu-b-8.json").touch()
    Steady(monkeypatch, 1000.0)
    with pytest.raises(KeyboardInterrupt):
        watch.watch(str(folder), None, out)
    said = [line for line in out.getvalue().splitlines() if "whether sdcrun still runs" in line]
    assert len(said) == 1 and "(pid 8 on gpu-b, pid 7 on gpu) cannot be seen from here: look there" in said[0]


def test_interrupt_is_clean(tmp_path, monkeypatch, capsys):
    job = started()
    folder = folder_of(job, tmp_path / "job")

    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert cli.main(["watch", str(folder)]) == cli.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_no_job_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SDCRUN_DIR", raising=False)
    assert cli.main(["watch"]) == 2
    assert capsys.readouterr().err.startswith("[sdcrun] error: no jobs in sdcrun_jobs")
