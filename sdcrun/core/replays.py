"""The audits of a job in order, each judged in the light of those before it. The rules are `core.attribute`'s. Pure."""

from __future__ import annotations

import json
from bisect import insort
from dataclasses import dataclass, field

from sdcrun.core import attribute
from sdcrun.core.attribute import CLEAN, NOT_REPLAYABLE, Audit, History
from sdcrun.core.ledger import CaseKey
from sdcrun.core.roster import group_of
from sdcrun.core.triage import triage
from sdcrun.core.types import Event, Finding
from sdcrun.core.votes import standing


@dataclass
class AuditCase:
    """One audit. `said` maps the text of each version of it to the ranks that sent it; the standing one is `audit`."""

    audit: Audit
    kind: str
    clean: frozenset[int] | None
    said: dict[str, set[str]] = field(default_factory=dict)


class ReplayBook:
    """Audits by case; `order` has the steps of each (attempt, group)."""

    def __init__(self) -> None:
        self.audits: dict[CaseKey, AuditCase] = {}
        self.order: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._judged: dict[CaseKey, list[Finding]] = {}

    def add(self, event: Event) -> CaseKey:
        """Take an `audit` event in; raises KeyError, TypeError or ValueError on malformed data.

        All senders should say the same; where one does not, the account of most stands.
        """
        audit = Audit.from_json(event.data)
        group = group_of(audit.group)
        key = CaseKey(event.attempt, audit.step, "replay", group)
        case = self.audits.get(key)
        said = case.said if case else {}
        said.setdefault(json.dumps(audit.to_json(), sort_keys=True), set()).add(event.source)
        audit = Audit.from_json(json.loads(standing(said)))
        kind = attribute.outcome(audit)
        cleared = frozenset(audit.clean_ranks())
        if case is None:
            insort(self.order.setdefault((event.attempt, group), []), audit.step)
        # Nearly all audits clear everybody; None stands for that and saves a set of all ranks for each.
        self.audits[key] = AuditCase(audit, kind, None if len(cleared) == len(group) else cleared, said)
        return key

    def affected(self, key: CaseKey) -> list[CaseKey]:
        """The case and the later ones of its group that were not clean: what came before is part of their judgement."""
        steps = self.order[key.attempt, key.group]
        later = [CaseKey(key.attempt, step, "replay", key.group) for step in steps if step > key.step]
        return [key] + [other for other in later if self.audits[other].kind != CLEAN]

    def judge(self, key: CaseKey, accused: frozenset[int], voting: bool) -> list[Finding]:
        """Findings of an audit. `accused`: ranks whose device an earlier finding accused; `voting`: weight votes are
        on."""
        case = self.audits[key]
        if case.kind == CLEAN:
            self._judged.pop(key, None)
            return []
        history = self._history(key, accused, voting)
        found = attribute.judge(case.audit, history, key.attempt)
        self._judged[key] = found
        return found

    def triage(self, key: CaseKey, accused: frozenset[int], amp: bool) -> list[Finding]:
        """What the audit of a step says about its non-finite gradients, by owner; empty without one that can tell."""
        if key not in self.audits:
            return []
        found = triage(self.audits[key].audit, self._history(key, accused, True), key.attempt, amp)
        return [found[owner] for owner in sorted(found)]

    def _history(self, key: CaseKey, accused: frozenset[int], voting: bool) -> History:
        steps = self.order[key.attempt, key.group]
        before = [CaseKey(key.attempt, step, "replay", key.group) for step in steps if step < key.step]
        kinds = [self.audits[other].kind for other in before]
        wandering = [
            rank
            for other in before
            for finding in self._judged.get(other, ())
            if finding.persistence != "persistent" and not finding.injected
            for rank in finding.ranks
        ]
        return History(
            clean_audits=kinds.count(CLEAN),
            accused=accused,
            transients=tuple(wandering),
            replayable=NOT_REPLAYABLE not in kinds,
            voting=voting,
        )

    def remember(self, key: CaseKey, findings: list[Finding]) -> None:
        """Keep the findings of an audit with their `injected` marks for the judgement of later ones."""
        if findings:
            self._judged[key] = findings

    def skipped(self, key: CaseKey) -> bool:
        """Whether the ranks skipped this step for what the audit found."""
        return self.audits[key].audit.skipped

    def done(self, key: CaseKey) -> str:
        """What the run did about an audit's findings."""
        if self.skipped(key):
            return f"All ranks skipped step {key.step}: gradients zeroed, weights, optimizer and buffers untouched."
        return "The step was not skipped."

    def last_clean(self, attempt: int, before: int | None = None) -> dict[int, int]:
        """Rank -> the last step of `attempt` (before step `before`) in which an audit cleared it; ranks never cleared
        are missing."""
        found: dict[int, int] = {}
        for (number, group), steps in self.order.items():
            if number != attempt:
                continue
            wanted = set(group)
            for step in reversed(steps):
                if not wanted:
                    break
                if before is None or step < before:
                    case = self.audits[CaseKey(attempt, step, "replay", group)]
                    cleared = wanted if case.clean is None else wanted & case.clean
                    for rank in cleared:
                        found[rank] = max(step, found.get(rank, -1))
                    wanted = wanted - cleared
        return found
