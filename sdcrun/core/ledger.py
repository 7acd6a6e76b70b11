"""All findings of a job and the strikes they make. Pure; fed case by case, so that one finding more costs the same
always."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from sdcrun.core.roster import Group
from sdcrun.core.types import CHECKS, Finding, Verdict

STRIKES_CONFIRM = 2
ACCUSING = (Verdict.SUSPECT, Verdict.CONFIRMED)


@dataclass(frozen=True, order=True)
class CaseKey:
    """What findings are filed under: one step of one group in one attempt, by check (and table of a vote)."""

    attempt: int
    step: int
    check: str
    group: Group
    table: str = ""

    @property
    def of_vote(self) -> bool:
        """Whether the case is a weight vote; findings about checkpoints are filed under check 3 as well."""
        return self.check == "weights" and not self.table.startswith("checkpoint ")


@dataclass(frozen=True)
class Entry:
    """A finding and what the run did about it."""

    finding: Finding
    done: str


class Ledger:
    """Findings by case, strikes by (attempt, rank). A device's strikes are those of every rank it ever was.

    Two findings of one step count as one strike: independent findings are findings of different steps.
    """

    def __init__(self) -> None:
        self.entries: dict[CaseKey, list[Entry]] = {}
        self.steps: dict[int, dict[int, set[CaseKey]]] = {}
        self._strikes: dict[tuple[int, int], Counter[int]] = {}

    def put(self, key: CaseKey, entries: list[Entry]) -> bool:
        """File the entries of one case in place of those it had; returns whether a verdict, rule or rank is another
        now."""
        old = self.entries.get(key, [])
        for entry in old:
            self._count(entry.finding, -1)
        for entry in entries:
            self._count(entry.finding, 1)
        if entries:
            self.entries[key] = entries
            self.steps.setdefault(key.attempt, {}).setdefault(key.step, set()).add(key)
        elif old:
            del self.entries[key]
        return [signature(e.finding) for e in old] != [signature(e.finding) for e in entries]

    def _count(self, finding: Finding, by: int) -> None:
        if not finding.strike:
            return
        for rank in finding.ranks:
            steps = self._strikes.setdefault((finding.attempt, rank), Counter())
            steps[finding.step] += by
            if not steps[finding.step]:
                del steps[finding.step]

    def strikes(self, device: Callable[[int, int], str]) -> dict[str, list[tuple[int, int]]]:
        """Device key to its strikes as sorted (attempt, step). `device(attempt, rank)` gives the key."""
        found: dict[str, set[tuple[int, int]]] = {}
        for (attempt, rank), steps in self._strikes.items():
            if steps:
                found.setdefault(device(attempt, rank), set()).update((attempt, step) for step in steps)
        return {key: sorted(strikes) for key, strikes in found.items()}

    def between(self, attempt: int, first: int, last: int) -> list[CaseKey]:
        """Cases of an attempt with first <= step <= last, in order."""
        steps = self.steps.get(attempt, {})
        within = range(first, last + 1) if last - first < len(steps) else (s for s in steps if first <= s <= last)
        return sorted(key for step in within for key in steps.get(step, ()) if key in self.entries)

    def ordered(self) -> list[Entry]:
        """All entries in the order of attempt, step and check."""
        keys = sorted(self.entries, key=lambda k: (k.attempt, k.step, CHECKS.index(k.check), k.group, k.table))
        return [entry for key in keys for entry in self.entries[key]]


def signature(finding: Finding) -> tuple:
    """What makes a finding another one for a person; its evidence and wording may still grow."""
    return finding.verdict, finding.rule, finding.ranks, finding.strike


def confirmed_at(strikes: list[tuple[int, int]]) -> tuple[int, int] | None:
    """(attempt, step) of the strike that confirms a device, None while there are too few."""
    return strikes[STRIKES_CONFIRM - 1] if len(strikes) >= STRIKES_CONFIRM else None


def as_of(finding: Finding, confirmed: tuple[int, int] | None) -> Finding:
    """`finding` as it reads against one device: confirmed when the strike that confirms it is this one or an earlier.
    """
    if finding.strike and confirmed is not None and (finding.attempt, finding.step) >= confirmed:
        return replace(finding, verdict=Verdict.CONFIRMED)
    return finding
