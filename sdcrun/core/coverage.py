"""What became of the cells of a campaign: each is judged by its own steps' events alone, as if it had been a run of its
own, so that no cell's findings speak for or against another. Pure.

Results are JSON objects, kept one a line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdcrun.core import decide
from sdcrun.core.baselines import Alarm, Detectors
from sdcrun.core.matrix import Cell
from sdcrun.core.roster import rank_of
from sdcrun.core.smoke import BLAMELESS, FaultRow, fault_rows
from sdcrun.core.state import State
from sdcrun.core.types import Config, Event

# What became of a cell. Two of them are failures of a check.
NAMED, CAUGHT, UNSEEN, MASKED, UNCHANGED, UNFIRED, WRONG, MISSED, CRASHED = OUTCOMES = (
    "named", "caught", "unseen", "masked", "unchanged", "unfired", "wrong", "missed", "crashed",
)  # fmt: skip
MEANING = {
    NAMED: "caught, and exactly the right devices named",
    CAUGHT: "caught; who it was could not be told, or nobody was to be named",
    UNSEEN: "no check of this run can see it, by design",
    MASKED: "it left no trace: every bit of the state after it is the clean run's",
    UNCHANGED: "it fired and changed no value",
    UNFIRED: "it never fired",
    WRONG: "caught, but the device was not named, or another one",
    MISSED: "it fired and was not caught",
    CRASHED: "the script ended in this cell",
}
HIT = (NAMED, CAUGHT, WRONG, MISSED, UNSEEN, CRASHED)
FAILED = (WRONG, MISSED)
BY_STEP = ("nonfinite", "audit", "vote", "word", "inject", "checkpoint")
ALWAYS = ("hello", "guarded", "unguarded", "check_off", "node_up")


@dataclass(frozen=True)
class Segment:
    """What all ranks saw in one slot: `losses` averaged over ranks, `norms` of the local gradients per step and rank,
    `restored`: None where all ranks proved that the state could be put back after it, else why not; `states`: a digest
    per rank of the state at its end, where it is known."""

    losses: tuple[float, ...]
    norms: tuple[tuple[float, ...], ...]
    restored: str | None = None
    states: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values; numbers that are not finite as text."""
        return {
            "losses": [_put(value) for value in self.losses],
            "norms": [[_put(value) for value in row] for row in self.norms],
            "restored": self.restored,
            "states": None if self.states is None else list(self.states),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Segment:
        """Inverse of `to_json`."""
        return cls(
            tuple(float(value) for value in values["losses"]),
            tuple(tuple(float(value) for value in row) for row in values["norms"]),
            values.get("restored"),
            None if values.get("states") is None else tuple(values["states"]),
        )


def _put(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def segments(events: Iterable[Event]) -> dict[int, Segment]:
    """Slot -> what the ranks saw, for every slot of which each rank of the group has told. Slot -1 is the warm-up.

    Of several groups the first one to be named counts: cells are timed by its steps.
    """
    told: dict[int, dict[int, dict[str, Any]]] = {}
    members: list[int] = []
    for event in events:
        if event.kind == "segment" and event.attempt == 0:
            group = [int(rank) for rank in event.data["group"]]
            members = members or group
            if group == members:
                told.setdefault(int(event.data["slot"]), {})[int(event.data["rank"])] = event.data
    return {
        slot: _together([rows[rank] for rank in members])
        for slot, rows in sorted(told.items())
        if set(rows) == set(members)
    }


def _together(rows: Sequence[dict[str, Any]]) -> Segment:
    steps = min(len(row["losses"]) for row in rows)
    losses = [[float(row["losses"][step]) for row in rows] for step in range(steps)]
    norms = [tuple(float(row["norms"][step]) for row in rows) for step in range(steps)]
    why = next((str(row["restored"]) for row in rows if row["restored"] is not None), None)
    states = tuple(row.get("state") for row in rows)
    known = None if None in states else states
    return Segment(tuple(sum(row) / len(row) for row in losses), tuple(norms), why, known)


def judge(cell: Cell, slot: int, first: int, last: int, config: Config, events: Iterable[Event]) -> dict[str, Any]:
    """What became of `cell`, which had the steps first ... last and the place `slot` in --inject-fault order."""
    text = cell.spec(first, last - first + 1)
    state = decide.initial(replace(config, faults=(text,)))
    hits = []
    for event in events:
        if event.attempt != 0 or not _belongs(event, slot, first, last):
            continue
        if event.kind == "inject":
            event = replace(event, data={**event.data, "spec": 0})
            if event.data.get("phase") == "step":
                hits.append({**event.data, "rank": rank_of(event.source)})
        elif event.kind == "limit":
            event = replace(event, data={**event.data, "unfired": 0})
        decide.fold(state, event)
    decide.finish(state)
    row = fault_rows(state)[0]
    outcome = _outcome(cell, row)
    accused = sorted({rank for entry in state.ledger.ordered() for rank in entry.finding.ranks})
    return {
        "key": cell.key, "site": cell.site, "values": dict(cell.values), "persistence": cell.persistence,
        "spec": text, "outcome": outcome, "fired": row.fired, "caught_by": row.caught_by,
        "after_steps": row.after_steps, "named_right": row.named_right, "accused": accused,
        "reason": row.problem or row.by_design_unseen, "hits": hits[:4],
        "traceless": _traceless(state, outcome, row),
    }  # fmt: skip


def _belongs(event: Event, slot: int, first: int, last: int) -> bool:
    if event.kind in ALWAYS:
        return event.kind != "check_off" or event.data.get("step") is None or event.data["step"] <= last
    if event.kind == "limit":
        return event.data.get("unfired") == slot
    if event.kind not in BY_STEP or not isinstance(event.data.get("step"), int):
        return False
    return first <= event.data["step"] <= last and (event.kind != "inject" or event.data.get("spec") == slot)


def _outcome(cell: Cell, row: FaultRow) -> str:
    if not row.fired:
        return UNFIRED
    if row.caught_by is None:
        if row.by_design_unseen:
            return UNSEEN
        return UNCHANGED if "changed no value" in (row.problem or "") else MISSED
    if row.problem:
        return WRONG
    return NAMED if row.named_right and cell.site not in BLAMELESS else CAUGHT


def _traceless(state: State, outcome: str, row: FaultRow) -> bool:
    """Whether training after the cell is as if the fault had not been: nothing was changed, or it was caught in its own
    step and the step was skipped or the replicas repaired. Asked only where the state cannot be put back."""
    if outcome in (UNFIRED, UNCHANGED):
        return True
    votes = [case for history in state.votes.values() for case in history.cases.values()]
    return row.caught_by is not None and row.after_steps == 0 and all(case.again == "clean" for case in votes)


def crashed(cell: Cell, first: int, last: int, why: str) -> dict[str, Any]:
    """The result of a cell in which the script, or the launch, came to an end."""
    return {
        "key": cell.key, "site": cell.site, "values": dict(cell.values), "persistence": cell.persistence,
        "spec": cell.spec(first, last - first + 1), "outcome": CRASHED, "fired": 1, "caught_by": None,
        "after_steps": None, "named_right": None, "accused": [], "reason": why, "hits": [], "traceless": False,
    }  # fmt: skip


def compare(result: dict[str, Any], found: Segment, clean: Segment, detectors: Detectors) -> dict[str, Any]:
    """`result` with the loss beside the clean run's and with what the two common detectors made of the cell.

    An alarm that the clean run raises in the same step (and for the same rank) says nothing about the fault.
    """
    ranks = {int(hit["rank"]) for hit in result["hits"] if isinstance(hit.get("rank"), int)}
    both = found.losses and clean.losses
    end, healthy = (found.losses[-1], clean.losses[-1]) if both else (math.nan, math.nan)
    norm = _beyond(detectors.norm_alarms(found.norms), detectors.norm_alarms(clean.norms))
    spike = _beyond(detectors.loss_alarms(found.losses), detectors.loss_alarms(clean.losses))
    right = {rank for alarm in norm for rank in alarm.ranks}
    if result["outcome"] in (MISSED, UNSEEN) and found.states is not None and found.states == clean.states:
        result = result | {"outcome": MASKED, "reason": MEANING[MASKED]}
    return result | {
        "loss": _put(end), "clean_loss": _put(healthy),
        "worst_loss_gap": _put(max((abs(a - b) for a, b in zip(found.losses, clean.losses)), default=math.nan)),
        "norm_alarm": bool(norm), "norm_named": bool(norm) and right == ranks,
        "loss_alarm": bool(spike),
    }  # fmt: skip


def _beyond(alarms: list[Alarm], healthy: list[Alarm]) -> list[Alarm]:
    known = {(alarm.step, alarm.ranks) for alarm in healthy}
    return [alarm for alarm in alarms if (alarm.step, alarm.ranks) not in known]


def false_alarms(clean: Iterable[Segment], detectors: Detectors) -> dict[str, int]:
    """Alarms of both detectors over the clean run's slots, in steps: {steps, norm, loss}."""
    total = {"steps": 0, "norm": 0, "loss": 0}
    for segment in clean:
        total["steps"] += len(segment.losses)
        total["norm"] += len(detectors.norm_alarms(segment.norms))
        total["loss"] += len(detectors.loss_alarms(segment.losses))
    return total
