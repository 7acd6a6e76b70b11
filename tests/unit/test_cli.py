"""The first token decides; what is wrong is said in one line; a launch imports neither torch nor typer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_report import healthy

from sdcrun import __version__, cli
from sdcrun.core.codec import encode_event


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SDCRUN_DIR", "SDCRUN_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_help_fits_one_screen(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # 80 x 24, with a row left for the prompt; text in the last column would wrap on some terminals.
    assert len(lines) <= 23 and max(map(len, lines)) < 80
    text = "\n".join(lines)
    from sdcrun.args import OWN_OPTIONS

    for option in OWN_OPTIONS:
        assert option.name in text
    for word in (*cli.WORDS, "torchrun --help", "86", "87", "88"):
        assert word in text
    assert text.count("sdcrun --nnodes") == 2


def test_help_is_a_word_too_where_no_script_is_called_so(folder, capsys, monkeypatch):
    assert cli.main(["help"]) == 0 and "usage: sdcrun" in capsys.readouterr().out
    (folder / "help").write_text("")
    monkeypatch.setattr(cli, "launch", lambda tokens, typed: 7)
    assert cli.main(["help"]) == 7


def test_a_wrong_choice_is_told_what_there_is(tmp_path, capsys):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/events.jsonl").write_bytes(b"".join(map(encode_event, healthy().events)))
    for tokens, said in (
        (["report", "job", "--format", "htlm"], "--format: must be json, text, html, junit or prometheus, got 'htlm'"),
        (["report", "job", "--format", "htlm"], "(did you mean html?)"),
        (["report", "job", "--commands", "slrum"], "must be slurm, kubernetes, hyperpod or gcloud, got 'slrum'"),
        (["checkpoints", "job", "--format", "xml"], "--format: must be text or json, got 'xml'"),
        (["report", "jbo"], "did you mean job?"),
        (["report", "xyz"], "sdcrun jobs lists them"),
    ):
        assert cli.main([*tokens, "--sdc-dir", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sdcrun {__version__}\n"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([], "no script given"),
        (["--nodes", "4", "a.py"], "unknown option --nodes (did you mean --nnodes?)"),
        (["--max-restarts", "x", "a.py"], "torchrun: argument --max-restarts/--max_restarts: invalid int value: 'x'"),
        (["nosuch.py"], "no such script: nosuch.py"),
        (["run", "nosuch.py"], "no such script: nosuch.py"),
        (["reprot"], "no such script or sub-command: reprot (did you mean sdcrun report?)"),
        (["--sdc-off", "--inject-fault", "weight", "a.py"], "--sdc-off contradicts --inject-fault"),
        (["--inject-fault", "weight:rnk=1", "a.py"], "no key 'rnk'"),
        (["--sdc-controller", "h:1", "a.py"], "--sdc-controller needs that controller's secret"),
        (["report", "--no-such"], "No such option: --no-such (sdcrun report --help)"),
        (["approve", "job"], "Missing argument 'device' (sdcrun approve --help)"),
        (["report", "nosuchjob"], "no job 'nosuchjob' in sdcrun_jobs; there are none"),
        (["jobs"], "no jobs in sdcrun_jobs"),
    ],
)
def test_one_line_and_exit_2(folder, capsys, tokens, said):
    (folder / "a.py").write_text("")
    assert cli.main(tokens) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("[sdcrun] error: ")
    assert said in captured.err
    assert not (folder / "sdcrun_jobs").exists()


@pytest.mark.parametrize("tokens", [["nosuch.py"], ["--sdc-quiet", "nosuch.py"], ["jobs"]])
def test_a_mistyped_variable_is_one_warning(capsys, monkeypatch, tokens):
    monkeypatch.setenv("SDCRUN_AUDIT_EVRY", "5")
    monkeypatch.setenv("SDCRUN_RUN", "an outer job")
    assert cli.main(tokens) == 2
    assert capsys.readouterr().err.splitlines()[:-1] == [
        "[sdcrun] warning: SDCRUN_AUDIT_EVRY is ignored: there is no such variable (did you mean SDCRUN_AUDIT_EVERY?)"
    ]


def test_a_terminal_without_our_signs_and_a_folder_that_is_not_there(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/events.jsonl").write_bytes(b"".join(map(encode_event, healthy().events)))
    command = [sys.executable, "-m", "sdcrun.cli", "report", str(tmp_path / "job")]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.startswith("sdcrun report ? job job ? finished"), shown.stderr
    shown = subprocess.run([*command, "-o", "nosuch/report.txt"], env=environ, capture_output=True, text=True)
    assert shown.returncode == 2
    assert shown.stderr == "[sdcrun] error: -o nosuch/report.txt: cannot be written: No such file or directory\n"


def test_faults_can_be_listed(capsys):
    assert cli.main(["--inject-fault", "help"]) == 0
    assert "bitflip" in capsys.readouterr().out


def test_file_with_a_subcommands_name_is_hinted_at(folder, capsys):
    (folder / "jobs").write_text("")
    assert cli.main(["jobs"]) == 2
    assert "sdcrun run jobs" in capsys.readouterr().err


def test_run_reaches_such_a_file(folder, monkeypatch):
    from sdcrun.runner import supervise

    (folder / "report").write_text("")
    seen = []
    monkeypatch.setattr(supervise, "run", lambda plan, settings, command, environ: seen.append((plan, command)) or 5)
    assert cli.main(["run", "--nnodes", "1", "report", "-x"]) == 5
    plan, command = seen[0]
    assert (plan.script, plan.script_args, command[0]) == ("report", ("-x",), "sdcrun")
    assert command[1:] == ["run", "--nnodes", "1", "report", "-x"]


def test_launch_imports_neither_torch_nor_typer(folder):
    (folder / "a.py").write_text("")
    program = """
import sys
from sdcrun import cli
from sdcrun.runner.agents import Agents
def start(self, *rest):
    heavy = {"torch", "typer", "rich", "yaml", "psutil", "pydantic", "jinja2"} & set(sys.modules)
    print("heavy:", *sorted(heavy), flush=True)
    import os
    os._exit(0)
Agents.start = start
cli.main(["--nnodes", "3", "a.py"])
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.stdout == "heavy:\n", child.stderr
