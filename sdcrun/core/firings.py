"""Injected faults: what fired, and which findings a firing explains. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sdcrun.core.faultspec import COMPUTED
from sdcrun.core.types import Config, Event, Finding

ANY_TIME = 1 << 40


@dataclass(frozen=True)
class Firing:
    """One fault put into one tensor of one rank. `position` is that of its text in --inject-fault order."""

    attempt: int
    step: int
    rank: int
    position: int
    site: str
    tensor: str
    phase: str
    effective: bool
    loud: bool


def firing_of(event: Event, rank: int) -> Firing:
    """The firing in an `inject` event; raises KeyError, TypeError or ValueError on malformed data."""
    data = event.data
    after = _flat(data.get("after"))
    return Firing(
        event.attempt,
        int(data["step"]),
        rank,
        int(data["spec"]),
        str(data["site"]),
        str(data.get("tensor")),
        str(data.get("phase") or "step"),
        data.get("before") != data.get("after") or data.get("before") is None,
        any(str(value) in ("nan", "inf", "-inf") for value in after),
    )


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def reach(config: Config, check: str) -> int:
    """Steps after a firing in which a finding of `check` may still be its doing: until the next look of that kind."""
    if config.budget is not None:
        return ANY_TIME
    return max(1, config.weights_every, config.optimizer_every if check == "weights" else 0)


class Firings:
    """All firings of one job, by attempt and step."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.all: list[Firing] = []
        self._by_step: dict[int, dict[int, list[Firing]]] = {}

    def add(self, firing: Firing) -> None:
        """Remember one."""
        self.all.append(firing)
        self._by_step.setdefault(firing.attempt, {}).setdefault(firing.step, []).append(firing)

    def before(self, attempt: int, step: int, check: str) -> list[Firing]:
        """Firings of `attempt` at most `reach` steps before `step`."""
        steps = self._by_step.get(attempt)
        if not steps:
            return []
        back = reach(self.config, check)
        if back < len(steps):
            return [f for s in range(max(0, step - back), step + 1) for f in steps.get(s, ())]
        return [f for s in sorted(steps) if step - back <= s <= step for f in steps[s]]

    def explain(self, finding: Finding) -> list[Firing]:
        """Firings that explain `finding`: those on the ranks it accuses, all of them; any, where it accuses nobody.

        Empty when a rank is accused on which nothing fired: then the finding has another cause, or the wrong rank.
        """
        near = self.before(finding.attempt, finding.step, finding.check)
        if not finding.ranks:
            return near
        named = [f for f in near if f.rank in finding.ranks]
        # A wrong computation shows in the audit of its own step: one before is not what this audit saw.
        if finding.check == "replay" and any(f.step == finding.step and f.site in COMPUTED for f in named):
            named = [f for f in named if f.step == finding.step or f.site not in COMPUTED]
        return named if {f.rank for f in named} == set(finding.ranks) else []
