"""Budget mode: measurements become intervals that keep the budget, the same on all ranks."""

import types

import pytest

from sdcrun.core import schedule
from sdcrun.core.types import Config
from sdcrun.shim import budget as module
from sdcrun.shim.budget import FIRST_REVIEWS, Budget


class Said:
    def __init__(self):
        self.texts = []

    def limit(self, text):
        self.texts.append(text)


def group_of(percent, costs, others=(0, 0, 0, 0)):
    """A stand-in for the one group whose all-reduce also sees `others` (microseconds of another rank)."""
    group = types.SimpleNamespace(config=Config(budget=percent), rank=0, runtime=Said(), parts={}, reduced=0)
    group.checks = {name: {"run": 0, "seconds": 0.0} for name in ("nonfinite", "replay", "weights")}
    group.costs = costs

    def all_reduce_max(words):
        group.reduced += 1
        return [max(pair) for pair in zip(words, [*others, 0, 0, words[6], words[7]])]

    group.all_reduce_max = all_reduce_max
    return group


def drive(group, monkeypatch, steps, seconds):
    """`steps` gates, `seconds` apart by the clock."""
    clock = iter(range(10**6))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock) * seconds)
    budget = Budget(group)
    for step in range(steps):
        budget.gate_passed(step, checked=step == 0)
        for name, each in zip(("nonfinite", "replay", "weights"), (group.costs[3], group.costs[1], group.costs[2])):
            # The first one is dearer by far and must not count.
            group.checks[name]["run"] += 1
            group.checks[name]["seconds"] += each if step else 100 * each
    return budget


@pytest.mark.parametrize("percent", [0.5, 1.0, 5.0])
def test_intervals_keep_the_budget(percent, monkeypatch):
    costs = (0.1, 0.12, 0.004, 0.0001)
    group = group_of(percent, costs)
    drive(group, monkeypatch, FIRST_REVIEWS[0] + 1, 0.1)
    assert (group.audit_every, group.weights_every) == schedule.intervals_for(percent, *costs)
    assert schedule.overhead_percent(group.audit_every, group.weights_every, *costs) <= percent
    (text,) = group.runtime.texts
    assert f"every {group.audit_every} steps" in text and "over the budget" not in text


def test_the_dearest_rank_counts(monkeypatch):
    cheap, dear = group_of(1.0, (0.1, 0.1, 0.01, 0.0)), group_of(1.0, (0.1, 0.1, 0.01, 0.0), (0, 500_000, 0, 0))
    drive(cheap, monkeypatch, FIRST_REVIEWS[0] + 1, 0.1)
    drive(dear, monkeypatch, FIRST_REVIEWS[0] + 1, 0.1)
    assert dear.audit_every > cheap.audit_every


def test_a_budget_that_cannot_be_kept_is_said(monkeypatch):
    group = group_of(0.1, (0.1, 0.1, 0.01, 0.01))
    drive(group, monkeypatch, FIRST_REVIEWS[0] + 1, 0.1)
    assert group.audit_every == schedule.LONGEST
    assert "over the budget" in group.runtime.texts[0]


def test_ranks_meet_at_steps_known_to_all(monkeypatch):
    group = group_of(1.0, (0.1, 0.1, 0.01, 0.0))
    drive(group, monkeypatch, 501, 0.1)
    assert group.reduced == len(FIRST_REVIEWS) + 2
