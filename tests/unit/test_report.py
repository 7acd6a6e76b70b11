"""The report: its published schema, what it says about a job, and that hostile or broken input cannot hurt it."""

import io
import json
import shlex
import unicodedata

import pytest
from eventmaker import Job
from jsonschema import Draft202012Validator

from sdcrun.core import decide
from sdcrun.core.types import PARTS
from sdcrun.report import build, command, handoff, store
from sdcrun.report.render import json as render_json
from sdcrun.report.render import text as render_text
from sdcrun.report.verdict import headline, next_command, unexplained

SCHEMA = json.loads((store.Path(command.__file__).parent / "schema.json").read_text())
HOSTILE = "x\x1b[31m\x1b]0;t\x07\r\n\u202e[bold red]$(reboot)'\";`id`<script>&\ud800\x9b"


def report_of(job):
    return build.build(build.fold(job.config, job.events))


def sick():
    """A job in which nearly everything happened."""
    job = Job(faults=("weight:rank=2,step=3", "allreduce:step=4,bit=3"), max_strikes=9)
    job.node_up()
    job.hello(skip=(3,))
    job.inject(3, 2)
    job.vote(3, {"w": [2]})
    job.inject(4, 0, spec=1, site="allreduce")
    job.nonfinite(5, {1: ["w"]})
    job.nonfinite(6, reduced={0: ["b"]})
    job.audit(7)
    job.vote(8, {"w": [1]})
    job.vote(9, {"w": [1]})
    job.emit("limit", 0, {"text": "SyncBatchNorm is not replayed", "check": "replay"})
    job.emit("check_off", 0, {"check": "replay", "reason": "a custom Function", "step": 8})
    for step, state in ((4, "verified"), (8, "verified"), (10, "withheld")):
        job.emit(
            "checkpoint", 0, {"path": f"ck{step}.pt", "step": step, "state": state, "reason": "", "id": f"c{step}"}
        )
    job.emit("blind", "controller", {"since": 1, "until": 2, "reason": "paused"})
    job.emit("gap", "controller", {"source": "rank:1", "after": 3, "upto": 5})
    job.emit("approved", "controller", {"device": "gpu-1/GPU-0001", "by": "Ada"})
    job.summaries(20, skipped=2)
    job.end(0)
    return job


def healthy():
    job = Job()
    job.node_up()
    job.hello()
    job.summaries(100)
    job.end(0)
    return job


def moving():
    job = Job()
    job.hello()
    job.hello(attempt=1, shift=1)
    for attempt in (0, 1):
        job.vote(3, {"w": [2 - attempt]}, attempt=attempt)
    job.summaries(10, attempt=1)
    return job


def strict(schema):
    """The schema with no key allowed that it does not list."""
    if isinstance(schema, dict):
        out = {key: strict(value) for key, value in schema.items()}
        if "properties" in out and isinstance(out["properties"], dict) and out.get("type") == "object":
            out.setdefault("additionalProperties", False)
        return out
    return [strict(item) for item in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("job", [sick(), healthy(), moving(), Job()], ids=["sick", "healthy", "moving", "empty"])
def test_reports_are_valid_by_the_published_schema_and_hold_nothing_else(job):
    Draft202012Validator.check_schema(SCHEMA)
    report = json.loads(render_json.render(report_of(job)))
    Draft202012Validator(strict(SCHEMA)).validate(report)


def test_a_schema_error_would_be_seen():
    report = report_of(healthy())
    del report["blast_radius"]["newest_safe_checkpoint"]
    assert list(Draft202012Validator(SCHEMA).iter_errors(report))


def test_a_healthy_job():
    report = report_of(healthy())
    assert report["status"] == "finished" and report["exit_code"] == 0 and report["attempts"] == 1
    assert report["guarded_ranks"] == report["world_size"] == 4 and report["unguarded"] == []
    assert report["steps"] == {"seen": 100, "committed": 100, "skipped": 0}
    overhead = report["overhead"]
    assert overhead["percent_of_step_time"] == 1.0
    assert overhead["by_check"] == {"nonfinite": 0.5, "replay": 0.0, "weights": 0.5}
    assert overhead["by_part"] == dict.fromkeys(PARTS, 0.0) | {"ballot": 0.1}
    assert report["findings"] == report["suspects"] == report["injected"] == []
    assert report["checks"]["replay"]["off_reason"] and report["checks"]["weights"]["off_reason"] is None
    assert not unexplained(report) and headline(report)[0] == "good"


def test_one_damaged_file_that_all_ranks_load_is_one_checkpoint():
    job = Job()
    job.hello()
    for rank in range(3):
        job.emit("loaded", rank, {"path": "/c/5.pt", "step": 0, "id": "x", "differing": [], "count": 1})
    report = report_of(job)
    assert len(report["findings"]) == 3 and headline(report)[1].startswith("1 checkpoint loaded damaged")


def test_a_rank_that_first_trained_something_unguarded_is_guarded_once_its_module_is():
    job = Job()
    job.emit("unguarded", 3, {"reason": "no DDP", "so_far": True})
    assert [row["reason"] for row in report_of(job)["unguarded"]] == ["no DDP"]
    job.emit("guarded", 3, {"group": [0, 1, 2, 3], "modules": []})
    assert report_of(job)["unguarded"] == [] and report_of(job)["guarded_ranks"] == 1
    job.emit("unguarded", 3, {"reason": "no DDP", "so_far": True})
    assert report_of(job)["unguarded"] == []
    job.emit("unguarded", 3, {"reason": "a duck-typed optimizer"})
    assert [row["reason"] for row in report_of(job)["unguarded"]] == ["a duck-typed optimizer"]


def test_a_rank_that_could_not_be_guarded_stays_so_whatever_it_trained_before():
    job = Job()
    job.emit("unguarded", 3, {"reason": "no DDP", "so_far": True})
    job.emit("unguarded", 3, {"reason": "the ranks could not connect"})
    job.emit("guarded", 3, {"group": [0, 1, 2, 3], "modules": []})
    assert [row["reason"] for row in report_of(job)["unguarded"]] == ["the ranks could not connect"]


def test_a_sick_job():
    report = report_of(sick())
    assert [(s["rank"], s["verdict"], s["strikes"]) for s in report["suspects"]] == [
        (1, "confirmed", 2), (2, "suspect", 1), (0, "suspect", 1)]  # fmt: skip
    one = report["suspects"][0]
    assert one["device"] == {"host": "gpu-1", "uuid": "GPU-0001", "pci": None, "model": "H100", "serial": "S1"}
    assert one["approved_by"] == "Ada" and not one["injected"] and report["suspects"][1]["injected"]
    assert any(row.get("bits") == [30] for row in one["evidence"])
    assert report["unguarded"] == [{"rank": 3, "host": "gpu", "reason": report["unguarded"][0]["reason"]}]
    assert [(row["caught_by"], row["named_right"], bool(row["by_design_unseen"])) for row in report["injected"]] == [
        ("weights", True, False), (None, None, True)]  # fmt: skip
    assert [(c["path"], c["state"]) for c in report["checkpoints"]] == [
        ("ck4.pt", "verified"), ("ck8.pt", "tainted"), ("ck10.pt", "withheld")]  # fmt: skip
    assert report["blast_radius"] == {
        "first_unverified_step": 0, "newest_safe_checkpoint": "ck4.pt",
        "last_clean_audit": {f"gpu-{n}/GPU-000{n}": 7 for n in range(3)} | {"unknown host/attempt-0-rank-3": 7},
    }  # fmt: skip
    limits = "\n".join(report["limits"])
    for part in (
        "rank 3: never said hello",
        "SyncBatchNorm",
        "a custom Function",
        "blind",
        "gap",
        "inside an all-reduce",
    ):
        assert part in limits, part
    level, text = headline(report)
    assert level == "bad" and "gpu-1" in text and "UNGUARDED" in text and unexplained(report)


def test_strikes_follow_the_device_over_attempts():
    report = report_of(moving())
    assert [(s["device"]["uuid"], s["rank"], s["verdict"]) for s in report["suspects"]] == [
        ("GPU-0002", 1, "confirmed")
    ]
    assert [f["verdict"] for f in report["findings"]] == ["suspect", "confirmed"]
    assert report["attempts"] == 2


def test_only_injected_faults_are_clean_and_missed_ones_are_not():
    job = Job(faults=("weight:rank=2,step=3",))
    job.hello()
    job.inject(3, 2)
    job.vote(3, {"w": [2]})
    assert not unexplained(report_of(job))
    job = Job(faults=("weight:rank=2,step=3",))
    job.hello()
    job.inject(3, 2)
    assert unexplained(report_of(job))


def test_the_text_says_what_an_operator_asks_for():
    text = render_text.render(report_of(sick()))
    flat = " ".join(text.split())
    for part in ("Confirmed: rank 1 (gpu-1, GPU-0001)", "serial S1", "newest safe checkpoint: ck4.pt", "UNGUARDED",
                 "bit 30 flipped", "approved by Ada", "--commands slurm", "unseen by design", "tainted"):  # fmt: skip
        assert part in flat, part
    assert max(map(len, text.split("\n"))) <= 100
    assert "\x1b" not in text


def hostile():
    job = Job(job_id=HOSTILE, faults=(HOSTILE,))
    job.node_up(command=["sdcrun", HOSTILE])
    job.hello(host=HOSTILE + "{}")
    job.vote(3, {HOSTILE: [2]})
    job.vote(4, {HOSTILE: [2]})
    job.vote(5, no_majority=(HOSTILE,), action="declined", again=None)
    job.nonfinite(5, {1: [HOSTILE]})
    job.emit("limit", 0, {"text": HOSTILE, "check": None})
    job.emit("unguarded", 3, {"reason": HOSTILE})
    job.emit("check_off", 0, {"check": "replay", "reason": HOSTILE, "step": 1})
    job.emit("checkpoint", 0, {"path": HOSTILE, "step": 1, "state": "withheld", "reason": HOSTILE, "id": HOSTILE})
    job.emit("approved", "controller", {"device": HOSTILE, "by": HOSTILE})
    return job


def unsafe(text):
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"]


def test_hostile_names_cannot_reach_the_terminal(capsys):
    report = report_of(hostile())
    assert unsafe(render_text.render(report)) == []
    assert "<script>" in render_text.render(report)  # shown as it is: nothing is taken for markup
    assert "[bold red]" in render_text.render(report)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    render_text.show(report, terminal)
    assert "\x1b]0" not in terminal.getvalue() and "\x07" not in terminal.getvalue()
    state, actions = decide.initial(hostile().config), []
    for event in hostile().events:
        state, more = decide.apply(state, event)
        actions += more
    said = [a.data["text"] for a in [*actions, *decide.finish(state)] if a.kind == "say"]
    assert said and all(unsafe(line) == [] and "\n" not in line for line in said)
    assert all(unsafe(f["text"]) == [] for f in report["findings"])


@pytest.mark.parametrize("platform", sorted(handoff.PLATFORMS))
def test_hand_over_lines_hold_nothing_that_a_host_name_could_smuggle_in(platform):
    text = handoff.render(report_of(hostile()), platform)
    assert all(line.startswith("#") or not line for line in text.split("\n")) and "look it up by hand" in text
    job = Job(job_id="j$(id)")
    job.hello()
    job.vote(3, {"w": [2]})
    job.vote(4, {"w": [2]})
    text = handoff.render(report_of(job), platform)
    commands = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert commands and "gpu-2" in text and "$(id)" not in text
    assert not [line for line in commands if unsafe(line)]


def test_a_command_to_type_is_harmless_to_paste():
    report = report_of(hostile())
    assert shlex.split(next_command(report))[:2] == ["sdcrun", "report"] and len(shlex.split(next_command(report))) == 5
    assert next_command(report_of(healthy())) == "sdcrun report job"


def test_platforms_name_the_node_and_the_reason():
    job = Job(job_id="j1")
    job.hello(host="gpu-{}.cluster.local")
    job.vote(3, {"w": [2]})
    report = report_of(job)
    slurm = handoff.render(report, "slurm")
    assert "scontrol update NodeName=gpu-2 State=DRAIN" in slurm and "--exclude=gpu-2" in slurm
    assert "Reason='[node_problem] sdc: weights gpu=GPU-0002 job=j1 [sdcrun]'" in slurm
    assert "SILENT_DATA_CORRUPTION" in handoff.render(report, "gcloud")
    assert "destroys" in handoff.render(report, "hyperpod") and "Action:Replace" in handoff.render(report, "hyperpod")
    assert "kubectl cordon" in handoff.render(report, "kubernetes")
    report["suspects"][0]["names"] = {"slurm_node": "n17", "kubernetes_node": "worker-3", "pod": "train-2"}
    assert "NodeName=n17 " in handoff.render(report, "slurm")
    assert "NODE=worker-3\n" in handoff.render(report, "kubernetes")
    report["suspects"][0]["names"]["slurm_node"] = "n17;id"
    assert "id" not in [line for line in handoff.render(report, "slurm").split("\n") if not line.startswith("#")]


def test_sixteen_thousand_ranks_and_ten_thousand_events():
    job = Job(world=16384, job_id="big")
    job.hello()
    for step in range(1, 2000):
        job.vote(step, {"w": [step % 7 + 1]})
    job.summaries(3000)
    report = report_of(job)
    assert report["guarded_ranks"] == 16384 and len(report["findings"]) == 1999
    assert len(render_text.render(report)) < 100_000


def test_steps_after_the_last_sum_are_counted():
    job = Job()
    job.hello()
    job.summaries(3)
    for step in (5, 6):
        job.nonfinite(step, {0: ["w"], 1: ["w"]})
    job.emit("summary", 1, {"steps": {"seen": 2**50}, "checks": {}, "train_seconds": 1.0})
    assert report_of(job)["steps"] == {"seen": 7, "committed": 3, "skipped": 2}
