"""Things happen to the control plane of a real training: it does not lose a step, nor the record an event."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from launchkit import PATIENCE, PYTHON, Launch

from sdcrun.report import store

pytestmark = pytest.mark.slow

LOOP = Path(__file__).parent / "loops" / "paced.py"


@pytest.fixture
def train(tmp_path):
    started = []

    def start(*options, steps=0):
        script = f"import runpy\nsys.argv = ['', '{steps}', '0.05']\nrunpy.run_path({str(LOOP)!r}, run_name='__main__')"
        own = ("--nproc-per-node", "3", "--sdc-audit-every", "10", "--sdc-weights-every", "5", *options)
        started.append(Launch(tmp_path, script, *own))
        return started[0]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def controller(run):
    """The controller's process, once it is there."""
    return run.until(run.controllers, "no controller")[0]


def steps(run, rank=0):
    path = run.folder / f"steps.0.{rank}"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def trained(run, more, rank=0):
    """Wait until so many more steps are made: training does not wait for what has just been done to the controller."""
    before = len(steps(run, rank))
    run.until(lambda: len(steps(run, rank)) >= before + more, "training stands still")


def fill(folder):
    """Leave no room at all."""
    with open(folder / "ballast", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"\0" * 4096)


def whole(run, job):
    """The end of a training that goes on for as long as it takes: all ranks made the same steps, every client's events
    are on record once, in order; returns (events, report)."""
    (run.folder / "enough").touch()
    assert run.end() == 0, run.err.read_text()[-3000:]
    made = len(steps(run, 0))
    assert made and [len(steps(run, rank)) for rank in range(3)] == [made] * 3
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    streams = defaultdict(list)
    for event in events:
        streams[event["source"], event["session"], event["attempt"]].append(event["seq"])
    for stream, seqs in streams.items():
        assert seqs == list(range(1, len(seqs) + 1)), stream
    assert not [event for event in events if event["kind"] in ("gap", "check_off")]
    report = json.loads((job / "report.json").read_text())
    assert (report["status"], report["guarded_ranks"], report["findings"]) == ("finished", 3, [])
    assert report["steps"] == {"seen": made, "committed": made, "skipped": 0}
    assert not (job / "spool").exists()
    return events, report


def test_controller_stopped_and_killed(train):
    """Also: its secret is in no file that others may read, in no log, in no command line."""
    run = train()
    run.until(lambda: len(steps(run)) > 3, "no steps")
    process = controller(run)
    path = next(run.job.glob("controller-*.json"))
    secret = json.loads(path.read_text())["secret"]
    held = [file for file in run.job.rglob("*") if file.is_file() and secret in file.read_text(errors="replace")]
    assert path in held and all(file.stat().st_mode & 0o077 == 0 for file in held), held
    assert all(file.name.startswith(path.name) for file in held), held
    assert not [pid for pid in psutil.pids() if secret.encode() in _bytes(Path(f"/proc/{pid}/cmdline"))]
    stopped = time.time()
    process.send_signal(signal.SIGSTOP)
    trained(run, 50)
    while time.time() < stopped + 10:
        time.sleep(0.2)
    process.send_signal(signal.SIGCONT)
    trained(run, 10)
    process.kill()
    trained(run, 10)
    run.until(lambda: controller(run).pid != process.pid, "no other controller")
    again = controller(run)
    again.kill()
    events, report = whole(run, run.job)
    blind = [event["data"] for event in events if event["kind"] == "blind"]
    assert any(stopped - 8 < row["since"] < stopped + 8 for row in blind), blind
    assert any("blind" in text for text in report["limits"])
    starts = [event["data"]["restarted"] for event in events if event["kind"] == "started"]
    assert len(starts) >= 2 and starts == [False] + [True] * (len(starts) - 1)
    everything = [run.out, run.err, *(file for file in run.job.rglob("*") if file.is_file())]
    assert not [file for file in everything if secret in file.read_text(errors="replace")]


def test_controller_killed_twenty_times(train):
    """Soon after its start or later: however often it is killed, it is there again."""
    run = train()
    run.until(lambda: len(steps(run)) > 3, "no steps")
    killed = set()
    while len(killed) < 20:
        process = run.until(lambda: [p for p in run.controllers() if p.pid not in killed], "no other controller")[0]
        time.sleep(random.uniform(0.0, 2.0))
        process.kill()
        killed.add(process.pid)
    events, report = whole(run, run.job)
    assert not any("does not stay up" in line for line in run.says())
    assert sum(event["kind"] == "bye" for event in events) == 3
    starts = [event["data"]["restarted"] for event in events if event["kind"] == "started"]
    assert 2 <= len(starts) <= 21 and starts == [False] + [True] * (len(starts) - 1)


def _bytes(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_full_disk_in_the_middle(train, small_disk):
    run = train("--sdc-dir", str(small_disk))
    job = small_disk / "job"
    run.until(lambda: len(steps(run)) > 3, "no steps")
    fill(small_disk)
    run.until(lambda: any("cannot write the record" in line for line in run.says()), "no warning")
    trained(run, 40)
    os.unlink(small_disk / "ballast")
    trained(run, 10)
    whole(run, job)
    assert sum("cannot write the record" in line for line in run.says()) == 1


@pytest.mark.slow
def test_disk_that_stays_full(train, small_disk):
    run = train("--sdc-dir", str(small_disk), steps=60)
    run.until(lambda: len(steps(run)) > 3, "no steps")
    fill(small_disk)
    assert run.process.wait(PATIENCE) == 0
    assert [len(steps(run, rank)) for rank in range(3)] == [60] * 3
    assert any("cannot write the record" in line for line in run.says())


def test_read_only_job_folder(train, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    run = train("--sdc-dir", str(small_disk), steps=30)
    assert run.process.wait(PATIENCE) == 0
    assert [len(steps(run, rank)) for rank in range(3)] == [30] * 3
    warnings = [line for line in run.says() if "warning" in line]
    assert len(warnings) == 1 and "no record of this run" in warnings[0] and "Read-only file system" in warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["sdcrun", "controller", "agent", "rank"])
def test_kill_at_any_moment(train, victim):
    """Nothing is left running, no half file, no event twice or missing; what is on record makes a report."""
    run = train(steps=100)
    time.sleep(random.uniform(0.5, 12.0))
    found = {
        "sdcrun": lambda: [run.process.pid],
        "controller": lambda: [controller(run).pid],
        "agent": run.agents,
        "rank": lambda: [p.pid for p in run.processes() if p.environ().get("RANK") == "1" and p.ppid() in run.agents()],
    }[victim]
    pid = run.until(lambda: run.process.poll() is not None or found(), "nobody to kill")
    if pid is not True:
        os.kill(pid[0], signal.SIGKILL)
    code = run.process.wait(PATIENCE)
    run.until(lambda: not run.processes(), f"left behind after {victim}")
    assert code in {"sdcrun": (0, -9), "controller": (0,), "agent": (0, 137), "rank": (0, 1)}[victim]
    assert not [path for path in run.job.iterdir() if path.name.startswith(".")], "a half file"
    if not (run.job / "events.jsonl").exists():
        return
    streams = defaultdict(list)
    for event in store.read_events(run.job):
        streams[event.source, event.session, event.attempt].append(event.seq)
    for stream, seqs in streams.items():
        assert sorted(seqs) == list(range(1, len(seqs) + 1)), stream
    report = subprocess.run(
        [PYTHON, "-m", "sdcrun.cli", "report", str(run.job), "--format", "json"], capture_output=True, text=True
    )
    assert report.returncode in (0, 1), report.stderr
    assert json.loads(report.stdout)["status"] in ("running", "finished", "failed")
