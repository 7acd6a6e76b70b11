"""A person's decision goes on record once, and into the report."""

from __future__ import annotations

import json

import pytest
from eventmaker import Job

from sdcrun import cli
from sdcrun.core.codec import encode_event


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SDCRUN_DIR", raising=False)
    job = Job(4)
    job.node_up()
    job.hello()
    job.vote(3, {"w": [2]})
    job.end()
    path = tmp_path / "sdcrun_jobs" / "job"
    path.mkdir(parents=True)
    (path / "job.json").write_text(json.dumps({"job_id": "job", "config": job.config.to_json(), "created_at": 1.0}))
    (path / "events.jsonl").write_bytes(b"".join(map(encode_event, job.events)))
    return path


@pytest.mark.parametrize("device", ["gpu-2/GPU-0002", "GPU-0002", "rank 2"])
def test_approval_is_in_the_report_and_in_the_lines_to_paste(folder, capsys, device):
    assert cli.main(["approve", "job", device, "--by", "Ada"]) == 0
    assert "on record: gpu-2/GPU-0002 of job job, approved by Ada" in capsys.readouterr().out
    report = json.loads((folder / "report.json").read_text())
    assert [suspect["approved_by"] for suspect in report["suspects"]] == ["Ada"]
    cli.main(["report", "job", "--commands", "slurm"])
    assert "approved by Ada" in capsys.readouterr().out


def test_last_word_counts(folder, capsys):
    for name in ("Ada", "Bob"):
        assert cli.main(["approve", "job", "GPU-0002", "--by", name]) == 0
    assert json.loads((folder / "report.json").read_text())["suspects"][0]["approved_by"] == "Bob"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["job", "GPU-0003", "--by", "Ada"], "no suspect 'GPU-0003'; did you mean 'GPU-0002'?"),
        (["job", "x", "--by", "Ada"], "no suspect 'x'; suspects are gpu-2/GPU-0002"),
        (["job", "GPU-0002", "--by", " "], "--by: must be the name of a person"),
        (["nojob", "GPU-0002", "--by", "Ada"], "no job 'nojob'"),
        (["job", "GPU-0002"], "Missing option '--by'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_recorded(folder, capsys, tokens, said):
    before = (folder / "events.jsonl").read_bytes()
    assert cli.main(["approve", *tokens]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert (folder / "events.jsonl").read_bytes() == before


def test_a_clean_job_has_nothing_to_approve(folder, capsys):
    lines = [line for line in (folder / "events.jsonl").read_bytes().splitlines(True) if b'"vote"' not in line]
    (folder / "events.jsonl").write_bytes(b"".join(line for line in lines if b'"word"' not in line))
    assert cli.main(["approve", "job", "GPU-0002", "--by", "Ada"]) == 2
    assert "there is nothing to approve" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["approve job GPU-0002 --by Ada", "watch job", "report job"])
def test_a_host_that_does_not_keep_the_record_says_which_one_does(folder, capsys, command):
    command = command.split()
    record = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").rename(folder / "events.copy.jsonl")
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "here is only a copy of the record (events.copy.jsonl)" in error and error.count("\n") == 1
    (folder / "controller-gpu-1-7.json.job").write_text('{"host": "gpu-0", "port": 4711, "secret": "s"}')
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "the record of this job is kept on gpu-0; use sdcrun there" in error and error.count("\n") == 1
    assert not (folder / "approvals").exists() and not (folder / "events.jsonl").exists()
    # On a file system that both hosts share it is in this folder.
    (folder / "events.jsonl").write_bytes(record)
    assert cli.main(command) in (0, 1) and not capsys.readouterr().err
