"""What people use today to notice corruption, for comparison: a gradient-norm outlier over ranks, and a loss spike.

Both get the best of conditions: every rank's local norm of every step, the loss averaged over all ranks, thresholds
learnt on the same job. The threshold rule (1.5 times the highest healthy score of a warm-up) is AWS's for the outlier
detector of its reference implementation of silent-corruption checks on SageMaker HyperPod; a loss spike is three
standard deviations at least. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression, median, pstdev

MARGIN = 1.5
LEAST_SPIKE = 3.0


def outlier_scores(norms: Sequence[float]) -> list[float]:
    """Distance of each rank's gradient norm from the median of the ranks, in median absolute deviations.

    A norm that is not finite scores infinity. With fewer than three finite norms nobody stands out: zeros.
    """
    finite = [norm for norm in norms if math.isfinite(norm)]
    if len(finite) < 3:
        return [0.0 if math.isfinite(norm) else math.inf for norm in norms]
    middle = median(finite)
    spread = median(abs(norm - middle) for norm in finite)
    return [_ratio(abs(norm - middle), spread) if math.isfinite(norm) else math.inf for norm in norms]


def spike_score(history: Sequence[float], loss: float) -> float:
    """How many standard deviations `loss` lies above the straight line through the losses before it (training losses
    fall, so their mean would hide a spike); infinity when it is not finite."""
    if not math.isfinite(loss):
        return math.inf
    past = [(at, value) for at, value in enumerate(history) if math.isfinite(value)]
    if len(past) < 4:
        return 0.0
    slope, start = linear_regression(*zip(*past))
    spread = pstdev([value - (start + slope * at) for at, value in past])
    return _ratio(loss - (start + slope * len(history)), spread)


def _ratio(distance: float, spread: float) -> float:
    if distance <= 0:
        return 0.0
    return distance / spread if spread > 0 else math.inf


def threshold(scores: Sequence[float]) -> float:
    """1.5 times the highest finite healthy score."""
    return MARGIN * max((score for score in scores if math.isfinite(score)), default=0.0)


@dataclass(frozen=True)
class Alarm:
    """One alarm: the step counted from the segment's beginning, the ranks (places in the list of norms), the score."""

    step: int
    ranks: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Detectors:
    """Both detectors after a warm-up. `history` are the last losses of it, `norm_limit` in MADs, `loss_limit` in
    standard deviations."""

    norm_limit: float
    loss_limit: float
    history: tuple[float, ...]

    def norm_alarms(self, norms: Sequence[Sequence[float]]) -> list[Alarm]:
        """Alarms over a segment; `norms` has a list over ranks for each step."""
        found = []
        for step, row in enumerate(norms):
            scores = outlier_scores(row)
            high = tuple(rank for rank, score in enumerate(scores) if score > self.norm_limit)
            if high:
                found.append(Alarm(step, high, max(scores)))
        return found

    def loss_alarms(self, losses: Sequence[float]) -> list[Alarm]:
        """Alarms over a segment that follows the warm-up directly; they accuse nobody."""
        past, found = list(self.history), []
        for step, loss in enumerate(losses):
            score = spike_score(past[-len(self.history) :] if self.history else [], loss)
            if score > self.loss_limit:
                found.append(Alarm(step, (), score))
            past.append(loss)
        return found


def learn(norms: Sequence[Sequence[float]], losses: Sequence[float]) -> Detectors:
    """The detectors of a healthy warm-up. The losses' window is half of it: the other half gives healthy scores."""
    window = max(4, len(losses) // 2)
    healthy = [spike_score(losses[i - window : i], losses[i]) for i in range(window, len(losses))]
    return Detectors(
        threshold([score for row in norms for score in outlier_scores(row)]),
        max(LEAST_SPIKE, threshold(healthy)),
        tuple(losses[-window:]),
    )
