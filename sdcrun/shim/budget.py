"""--sdc-budget: the job's own costs, measured in its first steps and now and then, become the two intervals.

All ranks must take the same intervals at the same step: they meet at steps known to all and reduce their measurements
with MAX, so that the dearest rank counts.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from sdcrun.core import ballot, schedule, words

PHASE_BUDGET = 10
FIRST_REVIEWS = (12, 40, 100)
REVIEW_EVERY = 250
EARLY = (8, 5)
MICRO = 1_000_000


class Budget:
    """Measures one group's steps and sets `group.audit_every` and `group.weights_every`."""

    def __init__(self, group) -> None:
        self.group, self.percent = group, group.config.budget
        self.plain: deque[float] = deque(maxlen=101)
        self.last_end: float | None = None
        self.busy = False
        # A few checks before the first review, whose costs are those of any later one: step 0 also imports, calibrates.
        group.audit_every, group.weights_every = EARLY
        self.first: dict[str, tuple[int, float]] = {}

    def gate_passed(self, step: int, checked: bool) -> None:
        """After the gate of `step`; `checked`: it had an audit or a vote. A collective of the group at review steps.
        Raises BallotFailed."""
        now = time.perf_counter()
        # A vote comes after the gate, so it lengthens the interval that ends at the next one.
        if self.last_end is not None and not checked and not self.busy:
            self.plain.append(now - self.last_end)
        self.last_end, self.busy = now, checked
        if step == 1:
            self.first = {name: (check["run"], check["seconds"]) for name, check in self.group.checks.items()}
        if step in FIRST_REVIEWS or (step and step % REVIEW_EVERY == 0):
            self._review(step)
            self.last_end = time.perf_counter()

    def _review(self, step: int) -> None:
        group, place = self.group, ballot.tag(step, 0, PHASE_BUDGET)
        per = {name: self._since_first(name) for name in group.checks}
        plain = per["nonfinite"] + (group.parts.get("capture", 0.0) + group.parts.get("hook", 0.0)) / (step + 1)
        measured = [statistics.median(self.plain) if self.plain else 0.0, per["replay"], per["weights"], plain]
        maxima = group.all_reduce_max([*(round(MICRO * seconds) for seconds in measured), 0, 0, place, -place])
        if maxima[ballot.TAG] != -maxima[ballot.NEGATED_TAG] or not maxima[0]:
            return
        costs = [value / MICRO for value in maxima[:4]]
        current = (group.audit_every, group.weights_every)
        first = step == FIRST_REVIEWS[0]
        if first:
            chosen = schedule.intervals_for(self.percent, *costs)
        else:
            chosen = schedule.next_intervals(current, self.percent, *costs)
        if chosen != current or first:
            group.audit_every, group.weights_every = chosen
            if group.rank == 0:
                group.runtime.limit(describe(self.percent, step, chosen, costs))

    def _since_first(self, name: str) -> float:
        """Seconds per check, those of the first steps left out."""
        run, seconds = self.first.get(name, (0, 0.0))
        check = self.group.checks[name]
        return (check["seconds"] - seconds) / max(check["run"] - run, 1)


def describe(percent: float, step: int, chosen: tuple[int, int], costs: list[float]) -> str:
    """One sentence for the report: the intervals, what they were made from, and what they buy."""
    spent = schedule.overhead_percent(*chosen, *costs)
    delays = ", ".join(
        f"{row['steps']:,.0f} steps at p = {row['p']:g}" for row in schedule.delay_table(chosen[0]) if row["steps"]
    )
    text = (
        f"From step {step} on the budget of {percent:g} % means an audit every {words.count(chosen[0], 'step')} and a "
        f"weight vote every {words.count(chosen[1], 'step')} (a step takes {1e3 * costs[0]:.1f} ms, an audit "
        f"{1e3 * costs[1]:.1f} ms more, a vote {1e3 * costs[2]:.1f} ms, the rest {1e3 * costs[3]:.2f} ms in every "
        f"step): {spent:.2f} %. A fault of rate p per step is caught after {delays} on average."
    )
    if spent > percent:
        text += f" This is over the budget: what every step costs alone is {100 * costs[3] / costs[0]:.2f} %."
    return text
