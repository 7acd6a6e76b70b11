"""One job on three hosts with addresses of their own and no common file system: found, cut off, lost."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import hostkit
import pytest

import sdcrun
from sdcrun.core.codec import decode_event, whole_lines

LOOP = str(Path(__file__).parent / "loops" / "paced.py")
pytestmark = pytest.mark.skipif(hostkit.why_not() is not None, reason=hostkit.why_not() or "")


@pytest.fixture
def lab(tmp_path):
    lab = hostkit.Lab(tmp_path, 3)
    yield lab
    lab.end()


def static(lab, index):
    return ["--nnodes", "3", "--node-rank", str(index), "--master-addr", lab.nodes[0].address, "--master-port", "29500"]


def c10d(lab, index, nnodes="3", host=0):
    """The store is served by node `host`; rank 0 goes to the lowest address, which is node 0."""
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{lab.nodes[host].address}:29400", "--rdzv-id", "job")
    return ["--nnodes", nnodes, *endpoint, "--rdzv-conf", f"is_host={int(index == host)},last_call_timeout=3"]


def launch(lab, place, steps, *options, **environ):
    """sdcrun on every host with the usual torchrun line of its own; returns the processes."""
    return [
        node.sdcrun("--sdc-job", "job", "--sdc-audit-every", "10", *options, *place(index), LOOP, str(steps), "0.1",
                    **environ)
        for index, node in enumerate(lab.nodes)
    ]  # fmt: skip


def ends(lab, processes):
    """Exit codes, waited for."""
    return [lab.wait(lambda p=p: p.poll() is not None, "still running") and p.returncode for p in processes]


def on_record(node):
    """The events on a node's record, in which every client's numbers have no hole and no double."""
    events = [decode_event(line) for line in whole_lines((node.job / "events.jsonl").read_bytes())]
    streams = defaultdict(list)
    for event in events:
        streams[event.source, event.session, event.attempt].append(event.seq)
    for stream, seqs in streams.items():
        assert seqs == list(range(1, len(seqs) + 1)), f"{stream}: {seqs}"
    assert not [event for event in events if event.kind == "gap"]
    return events


def keeper(lab):
    """The only node with a record, and its report."""
    kept = [node for node in lab.nodes if (node.job / "events.jsonl").exists()]
    assert len(kept) == 1, [node.name for node in kept]
    return kept[0], json.loads((kept[0].job / "report.json").read_text())


def steps_of(node, rank, restart=0):
    path = node.folder / f"steps.{restart}.{rank}"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def no_secret(lab):
    """Nothing in any job folder holds a secret, or is left of the files that did."""
    for node in lab.nodes:
        assert not list(node.job.glob("controller-*.json*")), node.name
        assert not list(node.job.rglob("*copy*")), node.name


def test_c10d_three_hosts_one_record(lab):
    assert ends(lab, launch(lab, lambda index: c10d(lab, index), 25)) == [0, 0, 0]
    node, report = keeper(lab)
    assert node is lab.nodes[0], "rank 0's node keeps the record"
    assert (report["status"], report["exit_code"], report["world_size"], report["nnodes"]) == ("finished", 0, 3, 3)
    assert report["guarded_ranks"] == 3 and report["unguarded"] == [] and report["steps"]["committed"] == 25
    events = on_record(node)
    hosts = {event.data["device"]["host"] for event in events if event.kind == "hello"}
    assert hosts == {"node0", "node1", "node2"}
    assert sum(event.kind == "node_up" for event in events) == sum(event.kind == "job_end" for event in events) == 3
    for other in lab.nodes[1:]:
        assert "another node keeps the record" in "".join(other.says())
        assert not (other.job / "spool").exists()
    no_secret(lab)


@pytest.mark.slow
def test_static_with_the_control_plane_cut_off_then_the_cable(lab):
    """Training does not notice that a node cannot reach the controller; what it says in the meantime arrives late."""
    processes = launch(lab, lambda index: static(lab, index), 0)
    runtime = lab.wait(lambda: list(lab.nodes[0].job.glob("controller-*.json")), "no controller")[0]
    lab.wait(lambda: len(steps_of(lab.nodes[2], 2)) > 5, "no steps")
    port = json.loads(runtime.read_text())["port"]
    assert runtime.stat().st_mode & 0o777 == 0o600
    began = time.time()
    lab.nodes[2].block(port)
    before = len(steps_of(lab.nodes[2], 2))
    # Long enough for the rank to notice; that it trains on meanwhile is waited for.
    time.sleep(12)
    lab.wait(lambda: len(steps_of(lab.nodes[2], 2)) > before + 20, "no steps while the controller is out of reach")
    lab.nodes[2].unblock(port)
    ended = time.time()
    lab.nodes[1].cut()
    time.sleep(2)
    lab.nodes[1].mend()
    (lab.nodes[0].folder / "enough").touch()
    assert ends(lab, processes) == [0, 0, 0]
    node, report = keeper(lab)
    assert node is lab.nodes[0] and report["status"] == "finished" and report["guarded_ranks"] == 3
    assert report["steps"]["committed"] == len(steps_of(lab.nodes[0], 0)) and report["findings"] == []
    blind = [event.data for event in on_record(node) if event.kind == "blind"]
    assert any(began - 2 < row["since"] < ended and {"rank:2"} & set(row["sources"]) for row in blind), blind
    assert any("blind" in text for text in report["limits"])
    no_secret(lab)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_is_lost_and_the_others_go_on(lab, lost):
    """Also when it is the one that kept the record: the copy on another host becomes the record."""
    options = ("--max-restarts", "3")
    place = lambda index: c10d(lab, index, "2:3", host=2)  # noqa: E731
    processes = launch(lab, place, 150, *options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    nodes = lab.nodes
    lab.wait(lambda: len(steps_of(nodes[0], 0)) > 15, "no steps")
    # The followers look for the controller once a second; training for a while gives them the time.
    lab.wait(lambda: any(list(node.job.glob("*.copy.jsonl")) for node in nodes[1:]), "no copy")
    lab.wait(lambda: len(steps_of(nodes[0], 0)) > 45, "no steps")
    nodes[lost].lose()
    left = [node for node in nodes if node is not nodes[lost]]
    assert ends(lab, [processes[nodes.index(node)] for node in left]) == [0, 0]
    kept = [node for node in left if (node.job / "events.jsonl").exists()]
    assert len(kept) == 1 and (lost == 0 or kept == [nodes[0]])
    report = json.loads((kept[0].job / "report.json").read_text())
    events = on_record(kept[0])
    hellos = {(event.attempt, event.data["device"]["host"]) for event in events if event.kind == "hello"}
    first = {(0, node.name) for node in nodes}
    last = max(attempt for attempt, _ in hellos)
    assert hellos >= first and {(last, node.name) for node in left} <= hellos and last > 0
    assert report["status"] == "finished" and report["attempts"] >= 2 and report["world_size"] == 2
    seen = max(e.data["steps"]["seen"] for e in events if e.kind == "summary" and e.attempt == 0)
    assert seen > 15, "what was said before the loss is on the record"
    if lost == 0:
        assert any("took over" in text for text in report["limits"])
        assert any("took over" in line for line in kept[0].says())


@pytest.mark.slow
def test_the_node_with_the_record_is_lost_and_the_job_with_it(lab):
    """No restart: whoever holds the copy ends the record."""
    processes = launch(lab, lambda index: c10d(lab, index, host=2), 0)
    nodes = lab.nodes
    lab.wait(lambda: any(list(node.job.glob("*.copy.jsonl")) for node in nodes[1:]), "no copy")
    lab.wait(lambda: len(steps_of(nodes[0], 0)) > 45, "no steps")
    asked = nodes[1].sdcrun("approve", "job", "rank 1", "--by", "Ada")
    lab.wait(lambda: asked.poll() is not None, "no answer")
    assert asked.returncode == 2 and f"is kept on {nodes[0].address}; use sdcrun there" in "".join(nodes[1].says())
    nodes[0].lose()
    codes = ends(lab, processes[1:])
    assert all(code == 1 for code in codes), codes
    kept = [node for node in nodes[1:] if (node.job / "events.jsonl").exists()]
    assert len(kept) == 1
    report = json.loads((kept[0].job / "report.json").read_text())
    assert report["status"] == "failed" and report["guarded_ranks"] == 3
    on_record(kept[0])
    assert {e.source.split(":")[1] for e in on_record(kept[0]) if e.kind == "job_end"} == {"node1", "node2"}


@pytest.mark.slow
def test_a_node_with_another_version_is_refused(lab):
    """It trains all the same, and its rank shows as unguarded in the record; both sides say why."""
    lab.nodes[2].replace(Path(sdcrun.__file__), '__version__ = "0.0.1"\n')
    processes = launch(lab, lambda index: static(lab, index), 20, PYTHONDONTWRITEBYTECODE="1")
    assert ends(lab, processes) == [0, 0, 0]
    _, report = keeper(lab)
    assert report["status"] == "finished"
    assert "install the same version on every node" in "".join(lab.nodes[0].says())
    assert "install the same version on every node" in "".join(lab.nodes[2].says())
