"""Conducts a campaign: a clean launch first, then launches full of cells until each cell has a result.

Cells of one launch do not disturb each other: the ranks put the state back after each and prove it. A script whose
state cannot be put back is run without that; then a launch counts up to the first cell that leaves a trace.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sdcrun.core import baselines, coverage, decide
from sdcrun.core.coverage import Segment
from sdcrun.core.matrix import Cell, Matrix
from sdcrun.core.types import Config, Event
from sdcrun.report import store
from sdcrun.runner.campaigns import launch
from sdcrun.runner.campaigns.book import Book

TRIES = 2


class CampaignError(RuntimeError):
    """The campaign cannot go on; the text says why and what may help."""


class Show(Protocol):
    """Whoever watches."""

    def say(self, text: str) -> None: ...

    def done(self, cells: int, under_way: str) -> None: ...


class Conductor:
    """One campaign on `command` (torchrun's options, the script, its arguments), with its record in `book`."""

    def __init__(self, matrix: Matrix, command: Sequence[str], book: Book, show: Show) -> None:
        self.matrix, self.command, self.book, self.show = matrix, list(command), book, show
        self.rules = matrix.rules()

    @property
    def pending(self) -> list[Cell]:
        """Cells without a result, in the order of the matrix."""
        return [cell for cell in self.matrix.cells if cell.key not in self.book.cells]

    def run(self) -> None:
        """Until no cell is pending. Raises CampaignError, or KeyboardInterrupt with all that is done on record."""
        if self.pending and self.book.reference is None:
            self._refer(restore=True)
        idle = 0
        while self.pending:
            before = len(self.pending)
            self._cells(self.pending[: self._capacity()])
            idle = 0 if len(self.pending) < before else idle + 1
            if idle >= TRIES:
                raise CampaignError(f"{TRIES} launches in a row brought no cell to its end")

    def _capacity(self) -> int:
        return min(len(self.book.reference["slots"]), self.matrix.cells_per_launch)

    # -- the clean launch ---------------------------------------------------------------------------------------------

    def _refer(self, restore: bool, why_not: str | None = None) -> None:
        """A launch without faults, with the same restores: what every cell is compared with, step by step. `why_not`:
        why the state cannot be put back, where an earlier one has shown that."""
        slots = min(len(self.pending), self.matrix.cells_per_launch)
        self.show.say(f"clean launch: {self.matrix.warmup} steps of warm-up, {slots} x {self.matrix.horizon} steps")
        ended = self._launch((), slots, restore, "clean run")
        events = ended.events()
        found = coverage.segments(events)
        whole = _consecutive(found)
        if not whole:
            raise CampaignError(self._why_nothing(ended, events, found))
        why = next((found[slot].restored for slot in whole if found[slot].restored is not None), None)
        if restore and why is not None:
            self.show.say(f"the state cannot be put back ({why}): a launch counts up to the first cell with a trace")
            self._refer(restore=False, why_not=why)
            return
        if len(whole) < slots:
            self.show.say(f"the script ends after {self.matrix.first(len(whole))} steps or soon after: "
                          f"{len(whole)} cells fit into one launch")  # fmt: skip
        state = decide.initial(launch.config((), self.rules))
        for event in events:
            decide.fold(state, event)
        decide.finish(state)
        attempt = state.roster.last
        off = dict(attempt.checks_off) if attempt else {}
        self.book.append("reference", {
            "run": ended.job_dir.name, "restore": restore, "why_not": why_not,
            "world_size": attempt.world_size if attempt else 0,
            "nodes": len({place.node for place in attempt.places.values()}) if attempt else 0,
            "off": off, "limits": list(attempt.limits) if attempt else [],
            "findings": len(state.ledger.ordered()), "steps": attempt.last_step + 1 if attempt else 0,
            "warmup": found[-1].to_json(), "slots": [found[slot].to_json() for slot in whole],
        })  # fmt: skip

    def _why_nothing(self, ended: launch.Ended, events: list[Event], found: dict[int, Segment]) -> str:
        reasons = [str(event.data.get("reason")) for event in events if event.kind == "unguarded"]
        if ended.code is None:
            why = f"nothing happened in it for {self.matrix.stall_seconds} s"
        elif ended.code != 0:
            why = f"it failed with exit code {ended.code}"
        elif reasons:
            why = f"nothing was guarded: {reasons[0]}"
        elif not any(event.kind == "guarded" for event in events):
            why = "nothing was guarded: no rank made a DistributedDataParallel module"
        else:
            need = self.matrix.first(1)
            at = "in its first cell" if found else "within the warm-up"
            why = f"the script ended {at}: a cell needs {need} steps (warmup {self.matrix.warmup} + horizon)"
        return f"the clean launch gave no result: {why}\n{ended.tail()}"

    # -- launches with faults -----------------------------------------------------------------------------------------

    def _cells(self, batch: list[Cell]) -> None:
        matrix, restore = self.matrix, self.book.reference["restore"]
        faults = [cell.spec(matrix.first(slot), matrix.horizon) for slot, cell in enumerate(batch)]
        draws = [zlib.crc32(cell.key.encode()) for cell in batch]
        try:
            ended = self._launch(faults, len(batch), restore, "cells", draws)
        except KeyboardInterrupt:
            job = self.book.folder / "runs" / f"{self._number - 1:03d}"
            self._take(batch, launch.Ended(0, job.with_suffix(".log"), job), faults, restore)
            raise
        self._take(batch, ended, faults, restore)

    def _take(self, batch: list[Cell], ended: launch.Ended, faults: list[str], restore: bool) -> None:
        """Judges the cells that came to their end and puts them on record."""
        events = ended.events()
        found, config = coverage.segments(events), launch.config(faults, self.rules)
        detectors, clean = self._clean()
        done = 0
        for slot in _consecutive(found)[: len(batch)]:
            unproven = found[slot - 1].restored if restore and slot else None
            if unproven is not None:
                self.show.say(f"the state could not be put back after a cell ({unproven}): a new launch")
                break
            result = self._judged(batch[slot], slot, config, events)
            self.book.append("cell", coverage.compare(result, found[slot], clean[slot], detectors)
                             | {"run": ended.job_dir.name})  # fmt: skip
            done = slot + 1
            if not restore and not result["traceless"]:
                break
        else:
            self._under_way(batch, done, ended, events)

    def _judged(self, cell: Cell, slot: int, config: Config, events: list[Event]) -> dict[str, Any]:
        return coverage.judge(cell, slot, self.matrix.first(slot), self.matrix.last(slot), config, events)

    def _under_way(self, batch: list[Cell], slot: int, ended: launch.Ended, events: list[Event]) -> None:
        """The cell in which a launch came to an end too early is the end's cause if its fault had fired."""
        if slot == len(batch) or ended.code in (0, 88):
            return
        fired = any(e.kind == "inject" and e.data.get("spec") == slot for e in events)
        why = f"no step for {self.matrix.stall_seconds} s" if ended.code is None else f"exit code {ended.code}"
        if fired:
            cell = batch[slot]
            result = coverage.crashed(cell, self.matrix.first(slot), self.matrix.last(slot), why)
            self.book.append("cell", result | {"run": ended.job_dir.name})
        elif not slot:
            self.show.say(f"launch {ended.job_dir.name} failed before its first fault ({why}):\n{ended.tail()}")

    def _clean(self) -> tuple[baselines.Detectors, list[Segment]]:
        warmup = Segment.from_json(self.book.reference["warmup"])
        slots = [Segment.from_json(values) for values in self.book.reference["slots"]]
        return baselines.learn(warmup.norms, warmup.losses), slots

    # -- any launch ---------------------------------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        runs = self.book.folder / "runs"
        return 1 + max((int(path.stem) for path in runs.glob("*.yaml") if path.stem.isdigit()), default=0)

    def _launch(
        self, faults: Sequence[str], slots: int, restore: bool, what: str, draws: Sequence[int] = ()
    ) -> launch.Ended:
        number = self._number
        runs: Path = self.book.folder / "runs"
        runs.mkdir(exist_ok=True)
        plan = (runs / f"{number:03d}.plan.json").absolute()
        values = {"warmup": self.matrix.warmup, "horizon": self.matrix.horizon, "slots": slots, "draws": list(draws),
                  "restore": restore}  # fmt: skip
        store.replace_file(plan, json.dumps(values))
        base = len(self.matrix.cells) - len(self.pending)

        def progress(finished: int) -> None:
            ahead = finished if faults else 0
            self.show.done(base + ahead, f"{what}, launch {number}, {finished} of {slots}")

        given = launch.settings(faults, self.rules, plan)
        return launch.run(self.book.folder, number, given, self.command, self.matrix.stall_seconds, progress)


def _consecutive(found: dict[int, Segment]) -> list[int]:
    """Slots 0, 1, 2 ... as far as there is a segment for each, once the warm-up is there."""
    slots: list[int] = []
    while -1 in found and len(slots) in found:
        slots.append(len(slots))
    return slots
