"""What a shell is offered, and the scripts with which it asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sdcrun import cli, completion, optiontable

TABLE = optiontable.read()


def offered(*words):
    return completion.candidates(list(words), cli.WORDS, TABLE)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SDCRUN_DIR", raising=False)
    return tmp_path


def test_first_word_is_a_command_an_option_or_a_file():
    assert offered("re") == ["report"]
    assert offered("") == list(cli.WORDS)
    assert offered("train") == []
    assert {"--sdc-quiet", "--inject-fault", "--nnodes", "--max-restarts"} <= set(offered("--"))


def test_options_of_a_launch_and_their_values():
    assert offered("--nnodes", "4", "--sdc-on-w") == ["--sdc-on-weight-fault"]
    assert offered("run", "--nnodes", "4", "--nproc") == ["--nproc-per-node"]
    assert offered("--sdc-on-fault", "") == ["skip", "stop"]
    assert offered("--sdc-on-weight-fault", "re") == ["repair", "report"]


def test_what_stands_behind_the_script_is_the_scripts():
    assert offered("--nnodes", "4", "train.py", "--") == []
    assert offered("--nnodes", "4", "report") == []


def test_options_of_commands_and_jobs(folder):
    (folder / "sdcrun_jobs" / "monday").mkdir(parents=True)
    (folder / "sdcrun_jobs" / "monday" / "events.jsonl").touch()
    assert {"--format", "--help", "monday"} <= set(offered("report", ""))
    assert offered("watch", "mon") == ["monday"]
    assert offered("report", "--format", "j") == ["json", "junit"]
    assert "monday" not in offered("report", "monday", "")
    assert offered("doctor", "--", "--nnod") == ["--nnodes"]


def test_every_command_has_options_to_offer():
    for word in cli.SUBCOMMANDS:
        assert "--help" in offered(word, "--h"), word


def test_an_ask_prints_candidates_and_nothing_else(capsys, monkeypatch):
    monkeypatch.setenv("_SDCRUN_COMPLETE", "1")
    assert cli.main(["--sdc-qu"]) == 0
    assert capsys.readouterr() == ("--sdc-quiet\n", "")
    assert cli.main(["--nope", "--"]) == 0
    assert capsys.readouterr() == ("", "")


def test_bash_completes(folder):
    tool = folder / "sdcrun"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m sdcrun.cli "$@"\n')
    tool.chmod(0o755)
    program = completion.SCRIPTS["bash"] + 'COMP_WORDS=(sdcrun --sdc-on-fault ""); COMP_CWORD=2; _sdcrun\n'
    program += 'printf "%s|" "${COMPREPLY[@]}"\n'
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    child = subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=environ)
    assert (child.stdout, child.stderr) == ("skip|stop|", "")


@pytest.mark.parametrize("shell", sorted(completion.SCRIPTS))
def test_scripts_are_valid(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n"], input=completion.SCRIPTS[shell], text=True, check=True)


@pytest.mark.parametrize("shell", sorted(completion.SCRIPTS))
def test_install_writes_where_the_shell_looks(shell, folder, capsys, monkeypatch):
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert cli.main(["--install-completion", shell]) == 0
    path = Path(capsys.readouterr().out.split()[0])
    assert path.is_relative_to(folder / "home") and path.read_text() == completion.SCRIPTS[shell]


def test_shell_is_taken_from_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert cli.main(["--show-completion"]) == 0
    assert capsys.readouterr().out == completion.SCRIPTS["fish"]
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert cli.main(["--show-completion"]) == 2
    assert "must be one of bash, zsh, fish, got 'tcsh'" in capsys.readouterr().err
