"""The control plane when processes are killed and stopped at any moment and disks are full: nothing lost or doubled."""

import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from controlkit import PATIENCE, Job, Peer, wait_for

from sdcrun import cli
from sdcrun.report import command
from sdcrun.wire.runtime import read_runtime
from sdcrun.wire.spool import Spool

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from eventmaker import Job as Ranks  # noqa: E402


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.end()


def texts(events):
    return [int(event.data["text"]) for event in events]


def test_controller_killed_twenty_times_under_load(job):
    job.start()
    before = read_runtime(job.runtime)
    steady = "for n in range({0}, {0} + 1500): emit(n); n % 10 or time.sleep(0.04)\nassert link.close(120)"
    clients = [job.client(f"rank:{rank}", steady.format(rank * 10_000)) for rank in range(4)]
    chance = random.Random(os.urandom(8))
    for _ in range(20):
        time.sleep(chance.uniform(0.0, 0.6))
        job.kill()
        job.start(wait=False)
    assert [client.wait(PATIENCE) for client in clients] == [0] * 4
    job.finish()
    found = job.by_source()
    for rank in range(4):
        assert texts(found[f"rank:{rank}"]) == list(range(rank * 10_000, rank * 10_000 + 1500))
    assert not [event for event in found["controller"] if event.kind == "gap"]
    assert read_runtime(job.runtime) == before


def test_killed_client_loses_nothing_it_had_emitted(job):
    """Also not what it emitted while there was no controller at all."""
    job.start()
    job.kill()
    script = "n = 0\nwhile True: emit(n); n += 1; print(n, flush=True)"
    client = job.client("rank:1", script, stdout=subprocess.PIPE, text=True)
    for _ in range(500):
        emitted = int(client.stdout.readline())
    client.kill()
    rest = client.stdout.read().split("\n")
    emitted = max([emitted, *map(int, rest[:-1])])
    job.start()
    job.finish()
    found = texts(job.by_source()["rank:1"])
    assert found == list(range(len(found))) and len(found) in (emitted, emitted + 1)


def test_stopped_controller_stops_nobody(job):
    """All of a burst is emitted, and its process over, while the controller is stopped; later all of it arrives."""
    job.start()
    link = job.link("rank:0")
    link.emit("limit", {"text": "0", "check": None}, 0)
    wait_for(lambda: link._backlog.empty)
    job.controller.send_signal(signal.SIGSTOP)
    client = job.client("rank:1", "for n in range(5000): emit(n)\nlink.close(0.1)")
    for n in range(1, 3000):
        link.emit("limit", {"text": str(n), "check": None}, 0)
    assert client.wait(PATIENCE) == 0
    job.controller.send_signal(signal.SIGCONT)
    assert link.close(PATIENCE)
    job.finish()
    found = job.by_source()
    assert texts(found["rank:0"]) == list(range(3000))
    assert texts(found["rank:1"]) == list(range(5000))


def test_full_disk_is_one_warning_and_loses_nothing(job):
    job.start()
    link = job.link("rank:0")
    for n in range(50):
        link.emit("limit", {"text": str(n), "check": None}, 0)
    wait_for(lambda: link._backlog.empty)
    size = os.stat(job.folder / "events.jsonl").st_size
    before = resource.prlimit(job.controller.pid, resource.RLIMIT_FSIZE, (size + 30, resource.RLIM_INFINITY))
    for n in range(50, 100):
        link.emit("limit", {"text": str(n), "check": None}, 0)
    wait_for(lambda: "cannot write the record" in job.said())
    assert not link._backlog.empty and os.stat(link._spool.path).st_size > 0
    assert os.stat(job.folder / "events.jsonl").st_size == size, "a part of a batch stayed on the record"
    newcomer = job.link("rank:1")
    newcomer.emit("limit", {"text": "7", "check": None}, 0)
    wait_for(lambda: newcomer._backlog._sent)
    resource.prlimit(job.controller.pid, resource.RLIMIT_FSIZE, before)
    assert link.close(PATIENCE) and newcomer.close(PATIENCE)
    job.finish()
    assert texts(job.by_source()["rank:0"]) == list(range(100))
    assert texts(job.by_source()["rank:1"]) == [7]
    assert job.said().count("cannot write the record") == 1


def test_controller_killed_while_the_disk_was_full(job):
    """What was only in its memory comes again from the clients."""
    job.start()
    link = job.link("rank:0")
    for n in range(50):
        link.emit("limit", {"text": str(n), "check": None}, 0)
    wait_for(lambda: link._backlog.empty)
    size = os.stat(job.folder / "events.jsonl").st_size
    resource.prlimit(job.controller.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    for n in range(50, 70):
        link.emit("limit", {"text": str(n), "check": None}, 0)
    wait_for(lambda: "cannot write the record" in job.said())
    back = Peer(job)
    back.prove()
    assert back.hello("rank:0", link.session)["acked"].get("0", 0) <= 50, "acknowledged what is not on record"
    job.kill()
    job.start()
    assert link.close(PATIENCE)
    job.finish()
    assert texts(job.by_source()["rank:0"]) == list(range(70))


def test_unwritable_job_folder_is_one_warning(job):
    """A file where the folder should be: root may write anywhere else."""
    job.folder.rmdir()
    job.folder.write_text("")
    job.start()
    client = job.client("rank:0", "for n in range(500): emit(n)\nlink.close(0.5)", stderr=subprocess.PIPE, text=True)
    _, errors = client.communicate(timeout=PATIENCE)
    assert client.returncode == 0
    assert errors.count("\n") == 1 and "events are kept in memory" in errors
    link = job.link("rank:1")
    link.emit("limit", {"text": "1", "check": None}, 0)
    wait_for(lambda: "cannot open the record" in job.said())
    job.folder.unlink()
    assert link.close(PATIENCE)
    job.finish()
    assert texts(job.by_source()["rank:1"]) == [1]
    assert job.said().count("cannot open the record") == 1


def test_torn_last_line_is_cut_off(job):
    job.start()
    link = job.link("rank:0")
    link.emit("limit", {"text": "1", "check": None}, 0)
    wait_for(lambda: link._backlog.empty)
    job.kill()
    with open(job.folder / "events.jsonl", "ab") as file:
        file.write(b'{"v":1,"attempt":0,"source":"rank:0","sess')
    job.start()
    link.emit("limit", {"text": "2", "check": None}, 0)
    assert link.close(PATIENCE)
    job.finish()
    found = job.by_source()
    assert texts(found["rank:0"]) == [1, 2]
    assert [event.data["restarted"] for event in found["controller"] if event.kind == "started"] == [False, True]


def test_lost_spool_is_a_gap_on_record(job):
    job.start()
    peer = Peer(job)
    assert peer.prove() and peer.hello("rank:3")["msg"] == "welcome"
    line = b'{"v":1,"attempt":2,"source":"rank:3","session":"s","seq":%d,"kind":"bye","time":1.0,"data":{}}\n'
    for seq in (1, 4, 4, 2):
        peer.send(line % seq)
    wait_for(lambda: [event.seq for event in job.events() if event.source == "rank:3"] == [1, 4])
    gaps = [event for event in job.events() if event.kind == "gap"]
    assert [(gap.attempt, gap.data) for gap in gaps] == [(2, {"source": "rank:3", "after": 1, "upto": 3})]


def test_spool_of_a_dead_rank_with_a_torn_line(job):
    """A spool that overlaps the record and ends in the middle of a line."""
    job.start()
    client = job.client("rank:0", "for n in range(100): emit(n)\ntime.sleep(60)")
    wait_for(lambda: (job.folder / "events.jsonl").exists() and len(job.by_source()["rank:0"]) == 100)
    client.kill()
    whole = [line for line in (job.folder / "events.jsonl").read_bytes().splitlines(True) if b'"rank:0"' in line]
    (spool,) = (job.folder / "spool").iterdir()
    more = whole[-1].replace(b'"seq":100', b'"seq":101').replace(b'"text":"99"', b'"text":"100"')
    spool.write_bytes(b"".join(whole[50:]) + b"nonsense\n" + more + whole[0][:40])
    job.finish()
    assert texts(job.by_source()["rank:0"]) == list(range(101))


def test_finish_waits_for_those_who_still_speak(job):
    job.start()
    client = job.client("rank:0", "emit(0)\ntime.sleep(1)\nfor n in range(1, 200): emit(n)\nassert link.close(120)")
    wait_for(lambda: (job.folder / "events.jsonl").exists())
    job.finish()
    assert client.wait(PATIENCE) == 0
    assert texts(job.by_source()["rank:0"]) == list(range(200))


def test_finish_waits_for_supervisors_that_have_said_nothing(job):
    """Two nodes and a job that is over at once: the second one may come when the first has already ended."""
    job.start()
    facts = {"host": "h", "node": None, "nnodes": 2, "nproc": 1, "local_nodes": 1, "command": [], "versions": {}}
    first, second = job.link("node:a:1"), job.link("node:b:1")
    first.emit("node_up", facts)
    wait_for(lambda: first._backlog.empty)
    ended = []
    thread = threading.Thread(target=lambda: ended.append(first.finish(PATIENCE)))
    thread.start()
    # A controller that did not wait would have ended by now.
    thread.join(0.5)
    assert not ended
    second.emit("node_up", facts)
    second.emit("node_down", {"exit": 0})
    assert second.close(PATIENCE)
    thread.join(PATIENCE)
    assert ended == [True] and job.controller.wait(PATIENCE) == 0
    assert [event.kind for event in job.by_source()["node:b:1"]] == ["node_up", "node_down"]


def test_terminated_controller_writes_first(job):
    """SIGTERM, which is also what it gets when its supervisor dies; Ctrl-C is not meant for it."""
    supervisor = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'sdcrun.runner.controller', *sys.argv[1:]])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", supervisor, "--runtime", job.runtime, "--job-dir", str(job.folder)]
    parent = job.spawn(command, stdout=subprocess.PIPE, text=True)
    controller = int(parent.stdout.readline())
    wait_for(job.answers)
    link = job.link("rank:0")
    link.emit("limit", {"text": "0", "check": None}, 0)
    wait_for(lambda: link._backlog.empty)
    dead = Spool(str(job.folder / "spool" / "rank:9.s.jsonl"))
    dead.append(b'{"v":1,"attempt":0,"source":"rank:9","session":"s","seq":1,"kind":"bye","time":1.0,"data":{}}\n')
    os.kill(controller, signal.SIGINT)
    link.emit("limit", {"text": "1", "check": None}, 0)
    wait_for(lambda: link._backlog.empty)
    parent.kill()
    link.emit("limit", {"text": "2", "check": None}, 0)
    assert link.close(PATIENCE)
    wait_for(lambda: not os.path.exists(f"/proc/{controller}"))
    assert texts(job.by_source()["rank:0"]) == [0, 1, 2]
    assert len(job.by_source()["rank:9"]) == 1


def test_no_record_before_a_real_client(job):
    """Several nodes may offer a controller on a shared file system; only one is used."""
    job.start()
    stranger, known = Peer(job), Peer(job)
    assert stranger.read()["msg"] == "challenge"
    known.prove()
    assert not (job.folder / "events.jsonl").exists()
    known.hello()
    assert (job.folder / "events.jsonl").exists()


def test_runtime_file_is_the_users_alone(job):
    job.start()
    assert stat.S_IMODE(os.stat(job.runtime).st_mode) == 0o600
    secret = json.loads(open(job.runtime).read())["secret"]
    command = open(f"/proc/{job.controller.pid}/cmdline").read()
    link = job.link("rank:0")
    link.emit("limit", {"text": "0", "check": None}, 0)
    assert link.close(PATIENCE)
    job.finish()
    everything = job.said() + command + "".join(p.read_text() for p in job.folder.rglob("*") if p.is_file())
    assert secret not in everything
    os.chmod(job.runtime, 0o644)
    assert read_runtime(job.runtime) is None, "a secret that others could read is none"
    job.start()
    wait_for(lambda: read_runtime(job.runtime) is not None)
    assert read_runtime(job.runtime)["secret"] != secret


def suspect_of(job, rank):
    """Have the ranks of `job` accuse one of them."""
    told = Ranks(4)
    told.hello()
    told.vote(3, {"w": [rank]})
    links = {}
    for event in told.events:
        if event.source not in links:
            links[event.source] = job.link(event.source)
        links[event.source].emit(event.kind, event.data, event.attempt)
    wait_for(lambda: all(link._backlog.empty for link in links.values()))
    return links


def test_an_approval_of_a_running_job_is_put_on_record_by_its_controller(job):
    """Once, whatever happens to the controller, and nobody else writes the record."""
    job.start()
    links = suspect_of(job, 2)
    assert cli.main(["approve", str(job.folder), "rank 2", "--by", "Ada"]) == 0
    wait_for(lambda: any(event.kind == "approved" for event in job.events()))
    job.kill()
    before = job.events()
    assert cli.main(["approve", str(job.folder), "rank 2", "--by", "Bob"]) == 0
    assert job.events() == before
    report, _ = command.load(job.folder)
    assert [suspect["approved_by"] for suspect in report["suspects"]] == ["Bob"]
    assert not [text for text in report["limits"] if "spool" in text]
    job.start()
    for link in links.values():
        assert link.close(PATIENCE)
    job.finish()
    assert [event.data["by"] for event in job.events() if event.kind == "approved"] == ["Ada", "Bob"]


def test_metrics_are_there_while_the_job_runs(job):
    job.start()
    suspect_of(job, 1)
    path = job.folder / "metrics.prom"
    wait_for(path.exists)
    # What it wrote first may be of the first events alone; a controller that comes back writes at once.
    job.kill()
    path.unlink()
    job.start()
    job.link("rank:0").emit("limit", {"text": "0", "check": None}, 0)
    wait_for(path.exists)
    text = path.read_text()
    assert 'sdcrun_job_status{job_id="job",status="running"} 1' in text
    assert 'device="GPU-0001",verdict="suspect"' in text and text.endswith("\n")
