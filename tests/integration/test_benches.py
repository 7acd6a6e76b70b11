"""The benches say what they are to say; how fast anything is, is no matter of a test."""

import importlib
import math
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parent.parent / "bench"
pytestmark = pytest.mark.slow


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    names = [path.stem for path in BENCHES.glob("*.py")]
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("script", ["gpt small", "resnet"])
def test_steps(bench, script, tmp_path):
    steps = bench("bench_steps")
    found = steps.figure(script, 2, 1, tmp_path)
    assert found["script"] == script and found["ranks"] == 2 and found["step_ms"] > 0
    for ratio in ("plain_step", "audit_step"):
        assert 0 < found[ratio]["low"] <= found[ratio]["median"] <= found[ratio]["high"] < math.inf
    # An audit computes forward and backward once more: a figure near that of a plain step means that none was held.
    assert found["audit_step"]["median"] > 1.3 * found["plain_step"]["median"]
    parts = found["overhead"]["by_part"]
    assert all(parts[part] > 0 for part in ("ballot", "capture", "hook", "replay", "ship", "compare", "vote"))
    table = bench("run").table([{"bench": "steps", "figures": [found]}])
    assert f"| {script} | 2 | " in table and len(table.splitlines()) == 3


def test_a_step_counts_as_what_was_done_in_it(bench):
    steps = bench("bench_steps")
    audits = {step for step in range(1, 41) if "audit" in steps.kinds(step)}
    votes = {step for step in range(1, 41) if "vote" in steps.kinds(step)}
    assert audits == {10, 20, 30, 40} and votes == {1, 6, 11, 16, 21, 26, 31, 36}
    rows = [{"cpu": [9.0 if step in audits | votes else float(step % 4) for step in range(1, 41)]}] * 3
    assert steps.usual(rows, set()) == 1.0 and steps.usual(rows, {"audit"}) == 9.0


def test_twins(bench, tmp_path):
    twins = bench("bench_twins")
    found = twins.figure("gpt small", "small", 2, 60, tmp_path, ranks=2)
    assert found["step_ms"] > 0 and found["steps"] == 60
    for kind in ("plain_step", "audit_step", "vote_step"):
        assert 0 < found[kind]["low"] <= found[kind]["median"] <= found[kind]["high"] < math.inf
    assert found["audit_step"]["median"] > 1.3 * found["plain_step"]["median"]
    table = bench("run").table([{"bench": "twins", "figures": [found]}])
    assert "| gpt small | 2 | " in table and len(table.splitlines()) == 3


def test_a_guarded_step_is_divided_by_the_plain_ones_around_it(bench):
    twins = bench("bench_twins")
    assert [step for step in range(40) if "audit" in twins.kinds(step)] == [0, 10, 20, 30]
    assert [step for step in range(40) if "vote" in twins.kinds(step)] == [0, 7, 14, 21, 28, 35]
    times = {"guarded": [6.0 if step % 10 == 0 else 3.0 for step in range(40)], "plain": [1.0, 3.0] * 20}
    assert twins.ratios(times, {"audit"}) == [3.0] * 3 and twins.ratios(times, set()) == [1.5] * 25


def test_growth(bench, tmp_path):
    growth = bench("bench_growth")
    script = ["--steps", str(growth.STEPS), "--log-every", "1000"]
    found = growth.figure("sequences of 32", 3, [BENCHES / "sized.py", "32", "--batch", "2", *script], tmp_path)
    assert found["replay_ms"] > 0 and all(found[key] > 0 for key in ("every_step", "ship", "compare", "vote"))
    assert "| sequences of 32 | 3 |" in bench("run").table([{"bench": "growth", "figures": [found]}])


def test_fingerprints(bench, monkeypatch):
    fingerprints = bench("bench_fingerprint")
    monkeypatch.setattr(fingerprints, "gpt", lambda layers, width, words: [(width, width)] * layers + [(words,)])
    found = fingerprints.run()
    assert all(0 < row["ms"] and row["quartiles"][0] <= row["ratio"] * 1.5 for row in found["figures"])
    assert bench("run").table([found]).count("\n| ") == len(found["figures"])


def test_controller(bench, monkeypatch):
    controller = bench("bench_controller")
    monkeypatch.setattr(controller, "RANKS", 40)
    found = controller.run()
    assert found["ranks"] == 40 and found["lost"] == 0 and found["verdict_s"]["worst"] < controller.PATIENCE
