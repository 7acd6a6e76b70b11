"""The results of a campaign -> its coverage table, as data. Pure: JSON values in, JSON values out.

What no check caught stands beside what was caught: every miss has its row, with the reason where it is one by design.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

from sdcrun.core import baselines, coverage, words
from sdcrun.core.coverage import (
    CAUGHT,
    CRASHED,
    FAILED,
    HIT,
    MASKED,
    MISSED,
    NAMED,
    OUTCOMES,
    UNFIRED,
    UNSEEN,
    WRONG,
    Segment,
)
from sdcrun.core.matrix import Matrix

SCHEMA = 1
LEAST_BITS = 4
DETECTED = (NAMED, CAUGHT, WRONG)


def build(name: str, matrix: Matrix, command: list[str], reference: dict[str, Any] | None,
          cells: dict[str, dict[str, Any]]) -> dict[str, Any]:  # fmt: skip
    """The table. `reference` and `cells` (by key) are lines of the campaign's record; cells that are not of the matrix
    are left out."""
    rows = [_row(cells[cell.key]) for cell in matrix.cells if cell.key in cells]
    reference = reference or {}
    alarms = _false_alarms(reference)
    return {
        "schema_version": SCHEMA,
        "campaign": name,
        "command": command,
        "rules": matrix.rules(),
        "world_size": reference.get("world_size", 0),
        "nodes": reference.get("nodes", 0),
        "cells": len(matrix.cells),
        "done": len(rows),
        "outcomes": {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES},
        "sdcrun": _totals(rows) | {
            "false_alarms": reference.get("findings", 0), "healthy_steps": reference.get("steps", 0)
        },
        "gradient_norm": _baseline(rows, "norm_alarm") | {
            "named": sum(bool(row.get("norm_named")) for row in rows), "false_alarms": alarms["norm"],
            "healthy_steps": alarms["steps"], "threshold": alarms["norm_limit"],
        },
        "loss_spike": _baseline(rows, "loss_alarm") | {
            "named": 0, "false_alarms": alarms["loss"], "healthy_steps": alarms["steps"],
            "threshold": alarms["loss_limit"],
        },
        "groups": _groups(rows),
        "bits": _bits(rows),
        "misses": [row for row in rows if row["outcome"] in (*FAILED, UNSEEN, CRASHED)],
        "nothing": [row for row in rows if row["outcome"] not in HIT],
        "rows": rows,
        "notes": _notes(reference, rows),
    }  # fmt: skip


def _row(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cell.items() if key not in ("what", "traceless")}


def _totals(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {
        "fired": sum(row["outcome"] in HIT for row in rows),
        "caught": sum(row["outcome"] in DETECTED for row in rows),
        "named": sum(row["outcome"] == NAMED for row in rows),
        "missed": sum(row["outcome"] == MISSED for row in rows),
        "wrong": sum(row["outcome"] == WRONG for row in rows),
        "unseen": sum(row["outcome"] == UNSEEN for row in rows),
        "masked": sum(row["outcome"] == MASKED for row in rows),
    }


def _baseline(rows: Iterable[dict[str, Any]], alarm: str) -> dict[str, int]:
    fired = [row for row in rows if row["outcome"] in HIT]
    return {"fired": len(fired), "caught": sum(bool(row.get(alarm)) for row in fired)}


def _false_alarms(reference: dict[str, Any]) -> dict[str, Any]:
    if "warmup" not in reference:
        return {"steps": 0, "norm": 0, "loss": 0, "norm_limit": None, "loss_limit": None}
    warmup = Segment.from_json(reference["warmup"])
    detectors = baselines.learn(warmup.norms, warmup.losses)
    found = coverage.false_alarms([Segment.from_json(slot) for slot in reference["slots"]], detectors)
    return {**found, "norm_limit": detectors.norm_limit, "loss_limit": detectors.loss_limit}


def _groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each site, kind and persistence, in the order of the matrix."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        kind = row["values"].get("kind", "bitflip")
        found.setdefault((row["site"], kind, row["persistence"]), []).append(row)
    return [_group(*key, members) for key, members in found.items()]


def _group(site: str, kind: str, persistence: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    delays = [row["after_steps"] for row in rows if row["after_steps"] is not None]
    return {
        "site": site, "kind": kind, "persistence": persistence, "cells": len(rows), **_totals(rows),
        "by": dict(Counter(row["caught_by"] for row in rows if row["caught_by"]).most_common()),
        "steps": None if not delays else median(delays), "worst_steps": max(delays, default=None),
        "norm": _baseline(rows, "norm_alarm")["caught"], "loss": _baseline(rows, "loss_alarm")["caught"],
        "worst_loss_gap": max((_number(row.get("worst_loss_gap")) for row in rows), default=0.0),
    }  # fmt: skip


def _number(value: Any) -> float:
    """A number from the record; what is not finite counts as infinite, what is not there as nothing."""
    if value is None:
        return 0.0
    number = float(value)
    return number if number == number else float("inf")


def _bits(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outcomes bit by bit, for cells that differ in their bit alone, where there are enough of them for a picture."""
    found: dict[tuple, dict[int, dict[str, Any]]] = {}
    for row in rows:
        bit = row["values"].get("bit")
        if bit is not None and bit.isdigit():
            rest = tuple((key, value) for key, value in row["values"].items() if key != "bit")
            found.setdefault((row["site"], rest, row["persistence"]), {})[int(bit)] = row
    return [
        {
            "site": site, "values": dict(rest), "persistence": persistence,
            "outcomes": {str(bit): members[bit]["outcome"] for bit in sorted(members)},
            "norm": {str(bit): bool(members[bit].get("norm_alarm")) for bit in sorted(members)},
            "loss": {str(bit): bool(members[bit].get("loss_alarm")) for bit in sorted(members)},
        }
        for (site, rest, persistence), members in found.items() if len(members) >= LEAST_BITS
    ]  # fmt: skip


def _notes(reference: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What limits the table, in words."""
    notes = []
    if reference.get("restore") is False:
        notes.append(
            f"The state could not be put back after a cell ({reference.get('why_not')}): a launch counted up to the "
            "first cell that left a trace, and losses beside the clean run are no more than a hint."
        )
    size = reference.get("world_size", 0)
    if size == 2:
        notes.append("Two ranks: a difference is seen, but nobody can say which of the two is wrong.")
    elif size == 1:
        notes.append("One rank: there is nothing to compare it with; only values that are not finite are seen.")
    notes += [f"Check {check} was off: {why}." for check, why in (reference.get("off") or {}).items()]
    notes += list(reference.get("limits") or [])[:10]
    if any(row["outcome"] == CRASHED for row in rows):
        notes.append("In some cells the script itself ended: whoever starts it again does not learn why.")
    return [words.clean(note, 400) for note in notes]


def headline(data: dict[str, Any]) -> tuple[str, str]:
    """(level, text) of the table: "good", "watch" or "bad", and what a reader must know first."""
    own = data["sdcrun"]
    if not data["done"]:
        return "watch", "No cell has a result yet."
    text = (
        f"{own['caught']} of {words.count(own['fired'], 'fault')} that fired were caught, in {own['named']} of them "
        f"exactly the right device was named. {own['missed']} missed, {own['wrong']} without the right name, "
        f"{own['unseen']} that no check can see by design."
    )
    if own["masked"]:
        text += f" {own['masked']} more left no trace: every bit after them is the clean run's."
    if data["outcomes"][UNFIRED]:
        text += f" {data['outcomes'][UNFIRED]} never fired."
    text += (
        f" A gradient-norm outlier would have caught {data['gradient_norm']['caught']}, a loss spike "
        f"{data['loss_spike']['caught']}."
    )
    if data["done"] < data["cells"]:
        text += f" {data['cells'] - data['done']} of {data['cells']} cells have no result yet."
    failed = own["missed"] or own["wrong"] or data["outcomes"][CRASHED] or not own["fired"]
    level = "bad" if failed else "watch" if own["unseen"] or data["done"] < data["cells"] else "good"
    return level, text
