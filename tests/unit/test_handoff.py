"""The lines that are printed for a person, run by a real shell in which every tool only notes how it was called."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from eventmaker import Job

from sdcrun.report import build, handoff

TOOLS = ("scontrol", "sbatch", "kubectl", "gcloud")
NOTE = """#!/bin/sh
printf '%s\\0' "${0##*/}" "$@" >> "$NOTES"
printf 'END\\0' >> "$NOTES"
"""
EVIL = (
    "$(touch owned)", "`touch owned`", "a;touch owned", "a\ntouch owned", "a'; touch owned; '", "a\"; touch owned; \"",
    "--all", "ALL", "all.example", "a b", "a,b", "n[1-9]", "../a", "a&touch owned", "a|touch owned",
)  # fmt: skip


def sick(host="gpu-{}", uuid=None, **config):
    job = Job(**config)
    job.hello(host=host)
    for event in job.events:
        if uuid is not None and event.kind == "hello":
            event.data["device"]["uuid"] = uuid + str(event.data["rank"])
    job.vote(3, {"w$(touch owned)": [2]})
    job.vote(5, {"w`touch owned`": [2]})
    return build.build(build.fold(job.config, job.events))


@pytest.fixture
def calls(tmp_path):
    """Runs a text in bash; returns the calls of the tools. Nothing else may come of it."""
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    tools, notes = tmp_path / "tools", tmp_path / "notes"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).write_text(NOTE)
        (tools / name).chmod(0o755)

    def run(text):
        empty = tmp_path / "empty"
        empty.mkdir(exist_ok=True)
        notes.write_bytes(b"")
        environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "NOTES": str(notes)}
        done = subprocess.run(["bash", "-eu"], input=text, text=True, cwd=empty, env=environ, capture_output=True)
        assert (done.returncode, done.stderr, os.listdir(empty)) == (0, "", []), text
        return [call.split("\0") for call in notes.read_text().split("\0END\0")[:-1]]

    return run


def test_what_the_tools_are_told(calls):
    report = sick(job_id="j1")
    reason = "sdc: weights gpu=GPU-0002 job=j1"
    assert calls(handoff.render(report, "slurm")) == [
        ["scontrol", "update", "NodeName=gpu-2", "State=DRAIN", f"Reason=[node_problem] {reason} [sdcrun]"]
    ]
    cordon, taint, annotate = calls(handoff.render(report, "kubernetes"))[-3:]
    assert cordon == ["kubectl", "cordon", "gpu-2"]
    assert taint[:4] == ["kubectl", "taint", "nodes", "gpu-2"] and taint[4].endswith("=suspect:NoSchedule")
    assert annotate[-2].endswith(f"-reason={reason}")
    assert ["scontrol", "update", "node=gpu-2", "state=fail", "reason=Action:Replace"] in calls(
        handoff.render(report, "hyperpod")
    )
    (gcloud,) = calls(handoff.render(report, "gcloud"))
    assert f"--fault-reasons=behavior=SILENT_DATA_CORRUPTION,description={reason}" in gcloud
    assert "," not in reason and "=" in reason


@pytest.mark.parametrize("platform", sorted(handoff.PLATFORMS))
def test_hostile_names_run_nothing_and_name_no_other_node(platform, calls):
    hosts = [sick(host=evil if evil.lower().startswith("all") else evil + "{}") for evil in EVIL]
    assert calls("".join(handoff.render(report, platform) for report in hosts)) == []
    devices = [sick(uuid=evil, job_id=evil) for evil in EVIL]
    said = calls("".join(handoff.render(report, platform) for report in devices))
    assert len(said) >= len(EVIL) and all("gpu-2" in " ".join(words) for words in said), said
    for evil, report in zip(EVIL, devices, strict=True):
        report["suspects"][0]["names"] = dict.fromkeys(("slurm_node", "kubernetes_node", "pod"), evil)
    assert calls("".join(handoff.render(report, platform) for report in devices)) == []
