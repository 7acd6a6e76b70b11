"""Whether this script can be computed twice with equal bits, measured rather than assumed.

At the first audit every owner computes its own micro-batch again. Where most get other bits, deterministic kernels are
tried inside a replay (an exception there is ours); if they give equal bits twice on all ranks, audit steps run under
them from then on. Otherwise the audit narrows itself to the tensors that are stable, or gives up and names what is not.
"""

from __future__ import annotations

from dataclasses import replace

from sdcrun.core.audit import Audit
from sdcrun.shim.checks.opinion import differing_names, is_value
from sdcrun.shim.replay.program import FALLBACK
from sdcrun.shim.replay.run import Result, replay


class Calibration:
    """`done`: an audit was clean, so owners need not compute twice any more. `strict`: audit steps run with
    deterministic kernels. `excluded`: names that are not compared. `hopeless`: why no audit is possible, or None."""

    def __init__(self) -> None:
        self.done = False
        self.strict = False
        self.excluded: frozenset[str] = frozenset()
        self.hopeless: str | None = None
        self.cause = ""
        self._tried = False

    def passed(self) -> None:
        """An audit was clean."""
        self.done = True

    def scope(self, kind: str | None) -> str:
        """What is compared, in words."""
        parts = []
        if kind == FALLBACK:
            parts.append("from the module's outputs back: the script's own loss could not be recorded")
        if self.excluded:
            parts.append(f"without {len(self.excluded)} tensors that are not deterministic ({self.cause})")
        return "; ".join(parts) or "all"

    def revise(self, rounds, audit: Audit) -> None:
        """Most owners got other bits from their own micro-batch: a collective of the group, the same on all ranks."""
        self.done = False
        kinds, strict_works = self._look_closer(rounds)
        said = rounds.gather({"kind": kinds, "strict": strict_works, "names": self._names(rounds)})
        if not self._tried and all(one["strict"] is not False for one in said):
            self._tried = self.strict = True
            return
        self._tried = True
        self.strict = False
        self.cause = next((one["kind"] for one in said if one["kind"]), "unknown")
        everything = {name for one in said for name in one["names"]}
        self.excluded = self.excluded | rounds.unstable
        left = everything - self.excluded
        if not any(not is_value(name) for name in left) and not any(is_value(name) for name in left):
            self.hopeless = f"the same micro-batch gives other bits on the same device: {self.cause}"

    @staticmethod
    def _names(rounds) -> list[str]:
        return [] if isinstance(rounds.mine, str) else list(rounds.mine.expected)

    def _look_closer(self, rounds) -> tuple[str, bool | None]:
        """(what is not deterministic here, whether deterministic kernels cure it; None: no opinion)."""
        if isinstance(rounds.mine, str):
            return "", None
        first, second = _twice(rounds, strict=False)
        if isinstance(first, str) or isinstance(second, str):
            return first if isinstance(first, str) else str(second), False
        kind = _first_difference(first, second, rounds)
        if not kind:
            names = differing_names(rounds.mine.expected, first.table, self.excluded)
            if not names:
                return "", None
            return "the model keeps state between calls, or depends on something outside", False
        if self._tried:
            return kind, False
        one, two = _twice(rounds, strict=True)
        if isinstance(one, str) or isinstance(two, str):
            return f"{kind}; with deterministic kernels: {one if isinstance(one, str) else two}", False
        return kind, one.table == two.table


def _twice(rounds, strict: bool) -> list[Result | str]:
    results: list[Result | str] = []
    program = replace(rounds.mine.program, strict=strict)
    for _ in range(2):
        try:
            results.append(replay(program, rounds.guards, rounds.local, trace=True))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}"[:160])
    return results


def _first_difference(first: Result, second: Result, rounds) -> str:
    """What differs first between two computations of one micro-batch on one device; "" if nothing does."""
    for (what, one), (_, two) in zip(first.trace, second.trace):
        if one != two:
            return f"{what} is not deterministic"
    for name in second.details:
        if first.table.get(name) != second.table.get(name):
            return f"the gradient of {rounds.name(name)} is not deterministic"
    if first.table != second.table:
        return "the loss is not deterministic"
    return ""
