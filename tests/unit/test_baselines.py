"""The two common detectors that a campaign compares with."""

import math

from hypothesis import given
from hypothesis import strategies as st

from sdcrun.core import baselines

finite = st.floats(0.1, 1e6)


def test_scores_are_distances_in_median_absolute_deviations():
    # Median 3, deviations 2 1 0 1 7, their median 1.
    assert baselines.outlier_scores([1.0, 2.0, 3.0, 4.0, 10.0]) == [2.0, 1.0, 0.0, 1.0, 7.0]


def test_a_norm_that_is_not_finite_stands_out_and_two_ranks_never_do():
    assert baselines.outlier_scores([1.0, 2.0, 3.0, math.nan])[3] == math.inf
    assert baselines.outlier_scores([1.0, 900.0]) == [0.0, 0.0]
    assert baselines.outlier_scores([1.0, math.inf]) == [0.0, math.inf]


def test_equal_norms_have_no_outlier_and_one_other_has_no_scale():
    assert baselines.outlier_scores([2.0, 2.0, 2.0]) == [0.0, 0.0, 0.0]
    assert baselines.outlier_scores([2.0, 2.0, 2.0, 2.1])[3] == math.inf


@given(st.lists(finite, min_size=3, max_size=9), st.integers(-20, 20))
def test_scores_do_not_depend_on_the_unit(norms, power):
    # Powers of two: no other unit is free of rounding, which a tiny spread would magnify without bound.
    assert baselines.outlier_scores([n * 2.0**power for n in norms]) == baselines.outlier_scores(norms)


def test_a_falling_loss_does_not_hide_a_spike():
    falling = [10.0 - 0.5 * step + 0.01 * (-1) ** step for step in range(10)]
    assert baselines.spike_score(falling, 5.0) < 3
    # Below the mean of the past losses all the same.
    assert baselines.spike_score(falling, 5.5) > 3
    assert baselines.spike_score(falling, math.nan) == math.inf
    assert baselines.spike_score([], 5.0) == 0.0


def test_detectors_learn_from_the_warm_up_and_then_see_what_is_far_outside():
    norms = [[1.0, 1.1, 1.25], [1.0, 1.2, 1.3], [1.1, 1.2, 1.4]]
    losses = [5.0 - 0.1 * step + 0.02 * (-1) ** step for step in range(20)]
    detectors = baselines.learn(norms, losses)
    healthy = max(score for row in norms for score in baselines.outlier_scores(row))
    assert detectors.norm_limit == 1.5 * healthy and detectors.loss_limit >= 3
    assert detectors.norm_alarms(norms) == []
    alarm = detectors.norm_alarms([[1.0, 1.1, 1.25], [1.0, 1.1, 50.0]])
    assert [(a.step, a.ranks) for a in alarm] == [(1, (2,))]
    assert [a.step for a in detectors.loss_alarms([2.98, 2.92, 40.0])] == [2]
    assert detectors.loss_alarms([2.98]) == []
