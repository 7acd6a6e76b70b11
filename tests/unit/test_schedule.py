"""When checks are due, which micro-batch is audited, and what a budget buys."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sdcrun.core.schedule import (
    LONGEST,
    audit_due,
    audited_position,
    delay_table,
    expected_steps_to_detection,
    expected_steps_to_vote,
    intervals_for,
    next_intervals,
    overhead_percent,
    vote_due,
)

seconds = st.floats(1e-4, 10.0)


@pytest.mark.parametrize("due", [audit_due, vote_due])
def test_first_step_and_every_nth_are_due(due) -> None:
    assert [step for step in range(12) if due(step, 5)] == [0, 5, 10]
    assert all(due(step, 1) for step in range(5))
    assert not any(due(step, 0) for step in range(5))


@given(st.integers(1, 200), st.integers(1, 16), st.integers(0, 50))
def test_audits_in_a_row_cover_all_places_of_the_window(every: int, window: int, start: int) -> None:
    steps = [every * (start + k) for k in range(window)]
    assert {audited_position(step, every, window) for step in steps} == set(range(window))


@given(st.integers(0, 10**6), st.integers(0, 100), st.integers(0, 20))
def test_position_is_always_inside_the_window(step: int, every: int, window: int) -> None:
    assert 0 <= audited_position(step, every, window) < max(window, 1)


@given(st.floats(0.01, 50), seconds, seconds, seconds, st.floats(0, 1e-3))
def test_budget_is_kept(budget: float, step: float, audit: float, vote: float, plain: float) -> None:
    intervals = intervals_for(budget, step, audit, vote, plain)
    assert all(1 <= every <= LONGEST for every in intervals)
    if LONGEST not in intervals:
        assert overhead_percent(*intervals, step, audit, vote, plain) <= budget * (1 + 1e-6)


@given(st.floats(2.0, 30), st.floats(0.01, 1.0), st.floats(0.001, 1.0))
def test_no_other_intervals_detect_sooner_for_the_same_money(budget: float, audit: float, vote: float) -> None:
    got = sum(intervals_for(budget, 1.0, audit, vote))
    best = math.inf
    for a in range(1, 400):
        room = budget / 100 - audit / a
        if room > 0:
            best = min(best, a + max(1, math.ceil(vote / room - 1e-9)))
    assume(math.isfinite(best))
    # Rounding may cost a step or two against the best pair of whole numbers.
    assert got <= best + 2 + 0.02 * best


def test_budget_of_the_reference_cadence() -> None:
    # A step of 1 s, an audit that doubles it, a vote of 5 ms: one per cent buys about an audit in a hundred steps.
    audit_every, weights_every = intervals_for(1.0, 1.0, 1.0, 0.005)
    assert 100 < audit_every < 115 and weights_every < 10


def test_budget_that_cannot_be_kept_is_visible() -> None:
    assert intervals_for(1.0, 1.0, 1.0, 0.1, plain_extra_seconds=0.02) == (LONGEST, LONGEST)
    assert overhead_percent(LONGEST, LONGEST, 1.0, 1.0, 0.1, 0.02) > 1.0
    with pytest.raises(ValueError):
        intervals_for(0.0, 1.0, 1.0, 0.1)
    with pytest.raises(ValueError):
        intervals_for(math.nan, 1.0, 1.0, 0.1)


def test_costs_that_are_not_there() -> None:
    assert intervals_for(1.0, 1.0, 0.0, 0.0) == (1, 1)
    assert intervals_for(1.0, 1.0, 1.0, 0.0) == (100, 1)
    assert overhead_percent(0, 0, 1.0, 1.0, 1.0) == 0.0
    assert overhead_percent(1, 0, 0.0, 1.0, 0.0) == math.inf


@given(st.floats(0.1, 20), seconds, seconds, seconds, st.lists(st.floats(0.96, 1.04), min_size=1, max_size=12))
def test_noise_does_not_move_the_intervals_to_and_fro(budget, step, audit, vote, noise) -> None:
    current = intervals_for(budget, step, audit, vote)
    assume(LONGEST not in current)
    seen = [current]
    for factor in noise:
        seen.append(next_intervals(seen[-1], budget, step * factor, audit, vote))
        if LONGEST not in seen[-1]:
            assert overhead_percent(*seen[-1], step * factor, audit, vote) <= budget * (1 + 1e-6)
    # They only ever get longer, each time the step is found shorter than ever before: nothing goes back.
    assert [sum(pair) for pair in seen] == sorted(sum(pair) for pair in seen)


def test_intervals_follow_a_step_that_became_slower_or_faster() -> None:
    current = intervals_for(2.0, 1.0, 1.0, 0.01)
    assert next_intervals(current, 2.0, 1.02, 1.0, 0.01) == current
    assert next_intervals(current, 2.0, 2.0, 1.0, 0.01)[0] < current[0]
    assert next_intervals(current, 2.0, 0.5, 1.0, 0.01)[0] > current[0]


@pytest.mark.parametrize(("p", "every", "window"), [(1.0, 10, 4), (0.2, 5, 1), (0.3, 3, 4)])
def test_delay_formula_against_a_simulation(p: float, every: int, window: int) -> None:
    draw = random.Random(5)
    hit = 1 - (1 - p) ** (1 / window)
    total, runs = 0, 20_000
    for _ in range(runs):
        step = draw.randrange(every)
        onset = step
        while not (step % every == 0 and any(draw.random() < hit for _ in range(2))):
            step += 1
        total += step - onset + 1
    assert total / runs == pytest.approx(expected_steps_to_detection(p, every, window), rel=0.03)


def test_delay_table_of_the_report() -> None:
    rows = delay_table(100)
    assert [row["p"] for row in rows] == [1.0, 1e-2, 1e-4]
    assert rows[0]["steps"] == 50.5 and rows[0]["corrupted"] == 49.5
    assert rows[1]["steps"] == pytest.approx(4976, abs=1)
    assert delay_table(0) == [{"p": p, "steps": None, "corrupted": None} for p in (1.0, 1e-2, 1e-4)]
    assert expected_steps_to_vote(10) == 5.5 and expected_steps_to_vote(0) == math.inf
    assert expected_steps_to_detection(0.0, 10) == math.inf
