"""`sdcrun report` and `sdcrun jobs`: exit codes, formats, broken folders, terminals of any width."""

import io
import json
import re

import pytest
from eventmaker import Job
from jsonschema import Draft202012Validator
from test_report import SCHEMA, healthy, sick

from sdcrun.core.codec import encode_event
from sdcrun.core.types import Config
from sdcrun.report import command, store


def folder_of(job, tmp_path, name="j1"):
    folder = tmp_path / name
    store.write_job(folder, {"job_id": name, "config": {**job.config.to_json(), "job_id": name}, "created_at": 1.0})
    log = store.EventLog(folder)
    for event in job.events:
        log.append(event)
    log.close()
    return folder


def test_command_exit_codes_and_formats(tmp_path, capsys):
    folder_of(healthy(), tmp_path, "good")
    folder_of(sick(), tmp_path, "sick")
    assert command.report("good", root=tmp_path) == 0
    assert "No corruption was found in 100 steps" in capsys.readouterr().out
    assert command.report(str(tmp_path / "sick"), format="json") == 1
    assert json.loads(capsys.readouterr().out)["job_id"] == "sick"
    assert command.report("sick", format="text", output=str(tmp_path / "out.txt"), root=tmp_path) == 1
    assert (tmp_path / "out.txt").read_text().startswith("sdcrun report")
    assert command.report("sick", commands="slurm", root=tmp_path) == 1
    assert "scontrol" in capsys.readouterr().out


def complaint(capsys):
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "Traceback" not in shown.err, shown.err
    return shown.err


@pytest.mark.parametrize("arguments", [
    {"job": "nosuch"}, {"job": "empty"}, {"job": "blank"}, {"job": "torn"}, {"job": "garbage"}, {"job": "other"},
    {"job": "good", "format": "pdf"}, {"job": "good", "commands": "nomad"},
    {"job": "good", "format": "json", "output": "/nosuch/x.json"},
], ids=str)  # fmt: skip
def test_tool_errors_are_one_clear_line(arguments, tmp_path, capsys):
    folder_of(healthy(), tmp_path, "good")
    folder_of(Job(), tmp_path, "empty")
    for name, content in (("blank", b""), ("torn", b'{"v": 1, "atte'), ("garbage", b"\x00\xff\n[1]\n{}\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_bytes(content)
    (tmp_path / "other").mkdir()
    assert command.report(**arguments, root=tmp_path) == 2
    assert "error: " in complaint(capsys)


def test_no_jobs_at_all(tmp_path, capsys):
    assert command.report(root=tmp_path / "none") == 2
    complaint(capsys)
    assert command.jobs(tmp_path / "none") == 2
    complaint(capsys)


@pytest.mark.parametrize("keep", [0.999, 0.7, 0.4, 0.15])
def test_a_record_cut_off_anywhere_is_reported_as_far_as_it_goes(keep, tmp_path, capsys):
    folder = folder_of(sick(), tmp_path)
    content = (folder / "events.jsonl").read_bytes()
    cut = int(len(content) * keep)
    cut += content[cut - 1 : cut] == b"\n"
    (folder / "events.jsonl").write_bytes(content[:cut])
    assert command.report("j1", root=tmp_path, format="json") in (0, 1)
    shown = capsys.readouterr()
    assert "damaged" in shown.err and shown.err.count("\n") == 1
    report = json.loads(shown.out)
    assert any("cut off" in text for text in report["limits"])
    Draft202012Validator(SCHEMA).validate(report)


def test_a_broken_job_json_is_no_obstacle(tmp_path, capsys):
    folder = folder_of(healthy(), tmp_path)
    for content in (b"", b"[]", b'{"config": 3}', b'{"config": {"audit_every": 7, "nosuch": 1}}'):
        (folder / "job.json").write_bytes(content)
        assert command.report("j1", root=tmp_path, format="json") == 0
        assert json.loads(capsys.readouterr().out)["job_id"] in ("j1", "job")


def test_views_and_closing_lines(tmp_path):
    folder = folder_of(sick(), tmp_path)
    lines = command.closing(Config(job_dir=str(folder), job_id="j1"), 0)
    assert "gpu-1" in lines[-2] and "report.txt" in lines[-1] and "--commands" in lines[-1]
    assert json.loads((folder / "report.json").read_text())["schema_version"] == 1
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []
    lines = command.closing(Config(job_dir=str(tmp_path / "gone"), job_id="j1"), 0)
    assert len(lines) == 1 and "no report" in lines[0]


def test_jobs_lists_the_newest_first_and_survives_broken_ones(tmp_path, capsys):
    folder_of(healthy(), tmp_path, "old")
    sickly = folder_of(sick(), tmp_path, "new")
    values = store.read_job(sickly)
    store.write_job(sickly, {**values, "created_at": 2.0})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "job.json").write_text("{")
    assert command.jobs(tmp_path) == 0
    out = capsys.readouterr().out
    assert out.index("new") < out.index("old") and "broken" in out


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_jobs_are_listed_whole_on_a_terminal_of_any_width(tmp_path, monkeypatch, columns):
    for name, job in (("one", healthy()), ("another-one", sick())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_bytes(b"".join(map(encode_event, job.events)))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(command.sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    assert command.jobs(tmp_path) == 0
    lines = re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert "No corruption was found in 100 steps." in text and "Take it out of service." in text
    assert any(line.startswith("another-one  ") for line in lines)
