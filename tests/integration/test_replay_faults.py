"""One thing wrong at a time under an audit in every step: the right device, the right persistence, nobody else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdcrun.core import attribute
from sdcrun.core.audit import Audit
from sdcrun.core.triage import triage

pytestmark = pytest.mark.slow

RUNNER = Path(__file__).parent / "replay" / "run_faults.py"
FULL_MATRIX = os.environ.get("SDCRUN_MATRIX", "") not in ("", "0")


def run(*cases, ranks=3):
    """JSON line of each case."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(RUNNER), *cases], capture_output=True, text=True, timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith('{"case"')]
    found = {line["case"]: line for line in lines}
    assert not cases or set(cases) == set(found), done.stderr[-3000:]
    return found


def findings(line):
    """What the audits of a case amount to: replay findings and triage's, by step."""
    audits = [Audit.from_json(event) for event in line["events"]]
    judged = [finding for audit in audits for finding in attribute.judge(audit)]
    return judged, [finding for audit in audits for finding in triage(audit).values()]


@pytest.fixture(scope="module")
def three():
    return run()


ACCUSED = {
    "activation-persistent": (1, "persistent", 2),
    "activation-transient": (0, "transient", 2),
    "activation-by-variable": (1, "persistent", 2),
    "backward-by-get-rank": (1, "persistent", 2),
    "activation-by-get-rank": (0, "persistent", 2),
    "backward-persistent": (2, "persistent", 2),
    "backward-transient": (1, "transient", 2),
    "weight-persistent": (0, "persistent", 2),
    "first-audit": (2, "persistent", 1),
    "loss": (1, "transient", 2),
}


@pytest.mark.parametrize("case", ACCUSED)
def test_flip_is_found_and_its_device_named(case, three):
    rank, persistence, step = ACCUSED[case]
    line = three[case]
    judged, triaged = findings(line)
    assert [(f.ranks, f.persistence, f.step, f.strike) for f in judged] == [((rank,), persistence, step, True)]
    assert not triaged
    assert line["lockstep"]
    assert sum(line["mismatches"]) == 1


def test_evidence_names_tensors_in_forward_order_and_their_size(three):
    judged, _ = findings(three["activation-persistent"])
    rows = [row for row in judged[0].evidence if row["tensor"]]
    assert rows[0]["tensor"] == "first.weight"
    assert rows[0]["order"] == 0
    assert any(row["relative"] and 0 < row["relative"] < 1 for row in rows)
    judged, _ = findings(three["loss"])
    assert {row["tensor"] for row in judged[0].evidence if row["tensor"]} == {"loss"}


def test_clean_run_leaves_no_trace_and_no_finding(three):
    line = three["clean"]
    assert line["trace_free"] and line["lockstep"]
    assert findings(line) == ([], [])
    assert [event["agreed"] for event in line["events"]] == [3, 3, 3]


@pytest.mark.parametrize("case", ["data-nan-audited", "data-nan-between"])
def test_nonfinite_data_is_not_hardware(case, three):
    judged, triaged = findings(three[case])
    assert not judged
    assert [(f.verdict.value, f.ranks) for f in triaged] == [("not-hardware", ())]


@pytest.mark.parametrize("case, rank", [("device-nan-audited", 2), ("device-nan-between", 1)])
def test_nonfinite_value_of_one_device_accuses_it(case, rank, three):
    _, triaged = findings(three[case])
    assert [(f.verdict.value, f.ranks) for f in triaged] == [("suspect", (rank,))]
    assert three[case]["lockstep"]


def test_differing_weights_are_left_to_the_vote(three):
    line = three["own-weights"]
    assert findings(line) == ([], [])
    assert line["mismatches"] == [False, False, False]
    assert line["votes"] == [False, True, True]


def test_script_that_is_never_the_same_turns_audits_off(three):
    for case, reason in (("clock", "what head is given"), ("state", "keeps state between calls")):
        line = three[case]
        assert findings(line) == ([], [])
        assert reason in line["off"]
        assert not any(line["mismatches"])


def test_deterministic_kernels_are_tried_before_giving_up(three):
    line = three["kernel"]
    assert line["off"] is None
    assert [event["agreed"] for event in line["events"]] == [0, 3, 3]
    assert line["events"][1]["scope"] == "all"


def test_audit_narrows_itself_to_what_is_stable(three):
    line = three["noise"]
    assert line["off"] is None
    assert [event["agreed"] for event in line["events"]] == [0, 3, 3]
    assert "first" in line["events"][1]["scope"]
    assert findings(line) == ([], [])


def test_forward_that_depends_on_the_rank_skips_nothing(three):
    line = three["by-rank"]
    assert not any(line["mismatches"])
    assert "depends on the rank" in line["off"]
    judged, _ = findings(line)
    assert all(f.ranks == () and not f.strike for f in judged)


def test_late_rank_ends_the_audits_and_not_the_job(three):
    line = three["late"]
    assert line["off"] is not None
    assert line["lockstep"]
    assert not any(line["mismatches"])


def test_two_ranks_report_without_accusing():
    lines = run("clean", "activation-persistent", "activation-transient", ranks=2)
    assert findings(lines["clean"]) == ([], [])
    for case, persistence in (("activation-persistent", "persistent"), ("activation-transient", "transient")):
        judged, _ = findings(lines[case])
        assert [(f.rule, f.ranks, f.persistence) for f in judged] == [("two-domains", (), persistence)]


@pytest.mark.skipif(not FULL_MATRIX, reason="a second world size: make matrix")
def test_four_ranks():
    lines = run(*ACCUSED, ranks=4)
    for case, (rank, persistence, step) in ACCUSED.items():
        judged, _ = findings(lines[case])
        assert [(f.ranks, f.persistence, f.step) for f in judged] == [((rank,), persistence, step)]
