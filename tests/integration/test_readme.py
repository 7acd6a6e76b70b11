"""README.md says what its commands print: each block is made again and compared, each command is run or, where it needs
a cluster, taken apart."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from sdcrun import args, cli, optiontable
from sdcrun.runner import plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import readme  # noqa: E402

TEXT = readme.README.read_text()
BLOCKS = [(kind, command, content) for _, kind, command, content, _ in readme.BLOCK.findall(TEXT)]
RUN = [block for block in BLOCKS if block[0] in ("output", "table")]
# Blocks for which nothing is launched.
LIGHT = ("sdcrun --help", "sdcrun --inject-fault help")
COMMANDS = readme.fenced_commands(TEXT)
LOCAL = [command for cluster, command in COMMANDS if not cluster]
CLUSTER = [command for cluster, command in COMMANDS if cluster]
# `make test` is what runs this file.
ELSEWHERE = {"make test"} | {command for _, command, _ in BLOCKS}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return readme.Scratch(tmp_path_factory.mktemp("readme"))


def weighed(block):
    light = block[0] == "table" or block[1] in LIGHT
    return pytest.param(*block, id=block[1], marks=() if light else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "command", "content"), [weighed(block) for block in RUN])
def test_block_is_what_its_command_prints(kind, command, content, scratch):
    assert content.strip(), f"empty; make readme fills it: {command}"
    assert not (changed := readme.changes(content, readme.produced(kind, command, scratch))), changed


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in LOCAL if command not in ELSEWHERE])
def test_command_works(command, scratch):
    """These come after the blocks, which leave jobs to report on."""
    code, said = scratch.run(command)
    assert code == 0, said


@pytest.mark.parametrize("command", CLUSTER)
def test_command_for_a_cluster_is_one(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for name, value in {"SLURM_NNODES": "4", "SLURM_JOB_ID": "7", "head": "node0"}.items():
        monkeypatch.setenv(name, value)
    tokens = shlex.split(command)
    if tokens[0] == "sbatch":
        assert (readme.ROOT / tokens[1]).is_file()
        return
    tokens = tokens[tokens[0] == "srun" :]
    assert tokens[0] in ("sdcrun", "torchrun") and tokens[1] not in cli.SUBCOMMANDS
    table = optiontable.read()
    line = args.split([os.path.expandvars(token) for token in tokens[1:]], table)
    assert plan.make(line, table, {}).local_nodes == 1 and line.script == "train.py"


def test_commands_in_sentences_exist():
    """`sdcrun WORD` in a sentence names a sub-command or a script; `--sdc-...` is an option."""
    for text in readme.inline_code(TEXT):
        for word in text.split():
            if word.startswith("--sdc-"):
                assert args.own_option(word.partition("=")[0]), text
        if text.startswith("sdcrun ") and (second := text.split()[1]) and not second.startswith("-"):
            assert second.endswith(".py") or second in cli.WORDS, text


def test_files_that_are_linked_exist():
    for target in readme.links(TEXT):
        if target.startswith("#"):
            titles = [line.lstrip("# ").lower() for line in TEXT.splitlines() if line.startswith("#")]
            anchors = {"".join(c for c in title if c.isalnum() or c in " -").replace(" ", "-") for title in titles}
            assert target[1:] in anchors, target
        else:
            assert (readme.ROOT / target).exists(), target


def test_comparison_sees_a_change_and_not_the_noise():
    said = "[sdcrun] job a: 3 nodes\nstep 20  loss 3.3616  609 ms/step\ntime 2026-11-30T01:06:50Z\nCPU AVX512 0xbb6d\n"
    other = "step 20 loss 2.9 7 ms/step\n[sdcrun] job a: 3\ntime 2027-01-30T01:06:50Z CPU DEFAULT 0x1\n"
    assert readme.plain(said)[1] == readme.plain(other)[1]
    assert readme.plain(said) != readme.plain(said.replace("3 nodes", "4 nodes"))
    assert readme.plain(said) != readme.plain(said.replace("step 20", "step 21"))
