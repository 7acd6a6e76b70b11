"""Idioms of training scripts under an audit in every step: clean, without a trace, or declined for the right reason."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "replay"
sys.path.insert(0, str(HERE))

import idioms  # noqa: E402

EAGER = [name for name in idioms.IDIOMS if name not in idioms.COMPILED]
FULL_MATRIX = os.environ.get("SDCRUN_MATRIX", "") not in ("", "0")


def run(names, ranks=3, timeout=500):
    """JSON lines of `run_idioms.py` by idiom, one per rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(HERE / "run_idioms.py"), *names], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = {}
    for text in done.stdout.splitlines():
        if text.startswith('{"idiom"'):
            line = json.loads(text)
            lines.setdefault(line["idiom"], []).append(line)
    missing = [name for name in names if len(lines.get(name, [])) != ranks]
    assert not missing, f"{missing}\n{done.stderr[-3000:]}"
    return lines


def check(name, lines):
    """One idiom's lines are what its decoration says."""
    expected = idioms.IDIOMS[name][1]
    for line in lines:
        assert line["error"] is None, line["error"]
        assert line["same"], f"{name} left a trace on rank {line['rank']}"
        assert line["mismatches"] == 0, line["audits"]
    if expected in (idioms.WHOLE, idioms.OUTPUTS):
        assert all(line["audits"] and not line["reasons"] for line in lines), [line["reasons"] for line in lines]
        for audit in lines[0]["audits"]:
            assert audit["agreed"] == len(lines) and not audit["comparisons"], audit
            assert audit["weights_agree"] is True and not audit["declined"]
            assert (audit["scope"] == "all") == (expected == idioms.WHOLE), audit["scope"]
        assert lines[0]["audits"][0]["own_agreed"] == len(lines)
        assert not any(line["gathered"] for line in lines), "a clean audit costs one all-reduce"
    else:
        assert not any(line["audits"] for line in lines)
        assert any(expected in reason for line in lines for reason in line["reasons"])
        assert all(line["off"] is not None for line in lines)


@pytest.fixture(scope="module")
def eager():
    return run(EAGER)


@pytest.mark.parametrize("name", EAGER)
def test_eager(name, eager):
    check(name, eager[name])


@pytest.mark.skipif(not FULL_MATRIX, reason="compilers are slow: make matrix")
@pytest.mark.parametrize("name", sorted(idioms.COMPILED))
def test_compiled(name):
    check(name, run([name])[name])


@pytest.mark.skipif(not FULL_MATRIX, reason="a second world size: make matrix")
def test_on_four_ranks():
    for name, lines in run(EAGER, ranks=4).items():
        check(name, lines)
