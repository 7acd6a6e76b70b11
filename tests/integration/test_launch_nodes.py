"""Several sdcrun that make up one job, as on a cluster: one keeps the record, all say how it ended."""

from __future__ import annotations

import json

import pytest
from launchkit import Launch

from sdcrun.runner.localnodes import HeldPort

CHOOSE = """
# As a guarded rank does: the first node's controller is everybody's.
from sdcrun.wire.runtime import read_runtime, write_runtime
own = os.environ["SDCRUN_RUNTIME"]
if RANK == 0:
    while not (address := read_runtime(own)):
        time.sleep(0.02)
    write_runtime("chosen", **address)
while not (address := read_runtime("chosen")):
    time.sleep(0.02)
write_runtime(own + ".job", **address)
"""


@pytest.fixture
def two_nodes(tmp_path):
    held = HeldPort()
    started = []

    def start(script):
        for _ in range(2):
            endpoint = f"127.0.0.1:{held.number}"
            options = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
            started.append(Launch(tmp_path, script, *options, "--sdc-max-skipped", "2"))
        return started

    yield start
    held.close()
    for one in started:
        one.kill()


def test_one_record_of_two_supervisors(two_nodes):
    nodes = two_nodes(CHOOSE)
    assert [node.end() for node in nodes] == [0, 0]
    on_record = [json.loads(line) for line in (nodes[0].job / "events.jsonl").read_text().splitlines()]
    for kind in ("node_up", "node_down", "job_end"):
        sources = [event["source"] for event in on_record if event["kind"] == kind]
        assert len(sources) == len(set(sources)) == 2, kind
    assert [event["data"]["restarted"] for event in on_record if event["kind"] == "started"] == [False]
    assert sum("another node keeps the record" in line for node in nodes for line in node.says()) == 1
    assert sum("sdcrun report job" in line for node in nodes for line in node.says()) == 1
    assert json.loads((nodes[0].job / "report.json").read_text())["status"] == "finished"


def test_supervisors_whose_ranks_never_chose_a_controller(two_nodes):
    nodes = two_nodes("pass")
    assert [node.end() for node in nodes] == [0, 0]
    assert json.loads((nodes[0].job / "report.json").read_text())["guarded_ranks"] == 0


def test_stop_reaches_every_supervisor(two_nodes):
    script = """
        from sdcrun.core.types import Config
        from sdcrun.wire.link import Link
        from sdcrun.wire.runtime import runtime_address
        import json
        config = Config.from_json(json.loads(os.environ["SDCRUN_CONFIG"]))
        link = Link(config, f"rank:{RANK}", runtime_address(own + ".job"))
        link.emit("limit", {"text": "a word to open the record", "check": None})
        while not os.path.exists(config.job_dir + "/events.jsonl"):
            time.sleep(0.05)
        bad = {"tensor": "w", "elements": 1, "nan": 1, "inf": 0, "numel": 4}
        for step in range(3):
            link.emit("nonfinite", {"step": step, "group": [0, 1], "amp": False, "skipped": True, "local": [bad],
                                    "reduced": [bad]})
        wait_for_end()
        """
    nodes = two_nodes(CHOOSE + "\n".join(line.removeprefix("        ") for line in script.splitlines()))
    assert [node.end() for node in nodes] == [87, 87]
    # Each says it once: one node's controller with the exit code, the other node in words of its own.
    stops = ("Stopping the job", "the job is stopped")
    said = [line.partition(": ")[0] for node in nodes for line in node.says() if line.startswith(stops)]
    assert sorted(said) == ["Stopping the job with exit code 87 (a person must look)", "the job is stopped"]
