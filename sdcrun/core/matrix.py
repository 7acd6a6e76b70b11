"""The matrix of a campaign: which faults, in which steps of a launch, and under which key each is on record. Pure.

A launch runs `warmup` steps, then one cell after another, `horizon` steps each. A cell's fault is an ordinary
--inject-fault text whose steps lie within its slot, so the injector and the judgement are those of every other run.
"""

from __future__ import annotations

import difflib
import itertools
import re
from dataclasses import dataclass, fields
from typing import Any

from sdcrun.core import faultspec

MAX_CELLS = 100_000
PLACES = ("rank", "node", "tensor", "index", "count", "kind", "bit", "by", "to", "where", "when")
ONLY_WITH = {"bit": ("bitflip", "stuck"), "by": ("scale",), "to": ("stuck",)}
ENTRY_KEYS = ("site", *PLACES, "persistence")
ONCE, ALWAYS = "once", "always"
ALL_BITS = range(32)


class MatrixError(ValueError):
    """A campaign file that makes no campaign. The text names the key and what may stand there."""


@dataclass(frozen=True)
class Cell:
    """One fault of the matrix without its steps: `values` are the keys of the fault grammar in one order."""

    site: str
    values: tuple[tuple[str, str], ...]
    persistence: str = ONCE

    @property
    def key(self) -> str:
        """What the cell is called on record; equal cells of two campaigns have equal keys."""
        return f"{self.site}:{','.join(f'{k}={v}' for k, v in self.values)} {self.persistence}"

    def get(self, name: str) -> str | None:
        """The text given for a key of the grammar, None where it was left to its default."""
        return dict(self.values).get(name)

    def spec(self, first: int, horizon: int) -> str:
        """The fault as --inject-fault takes it, active within the steps first ... first + horizon - 1."""
        last = first + horizon - 1
        if self.persistence == ONCE:
            times = [f"step={first}"]
        else:
            times = [f"step={first}-{last}"] + ([] if self.persistence == ALWAYS else [self.persistence])
        return f"{self.site}:{','.join([f'{k}={v}' for k, v in self.values] + times)}"


@dataclass(frozen=True)
class Matrix:
    """A campaign file. Steps are window numbers of the guarded loop; intervals as in a job's settings.

    `cells_per_launch`: at most so many cells share one launch; `stall_seconds`: a launch in which no cell ends for so
    long is ended.
    """

    cells: tuple[Cell, ...]
    warmup: int = 20
    horizon: int = 4
    seed: int = 0
    audit_every: int = 1
    weights_every: int = 1
    optimizer_every: int = 1
    cells_per_launch: int = 100
    stall_seconds: int = 600

    def first(self, slot: int) -> int:
        """The first step of a slot of a launch."""
        return self.warmup + slot * self.horizon

    def last(self, slot: int) -> int:
        """The last step of a slot."""
        return self.first(slot + 1) - 1

    def rules(self) -> dict[str, int]:
        """What two campaigns must share for their cells to be comparable."""
        loose = ("cells", "cells_per_launch", "stall_seconds")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in loose}


_NUMBERS = {"warmup": 4, "horizon": 1, "seed": 0, "audit_every": 0, "weights_every": 0, "optimizer_every": 0,
            "cells_per_launch": 1, "stall_seconds": 10}  # fmt: skip
TOP_KEYS = (*_NUMBERS, "faults")


def read(content: Any) -> Matrix:
    """The matrix in a file's content (mappings, lists and scalars). Raises MatrixError."""
    if not isinstance(content, dict):
        raise MatrixError("must hold 'key: value' lines with a list under 'faults'")
    _known(content, TOP_KEYS, "")
    numbers = {}
    for key, least in _NUMBERS.items():
        if key in content:
            value = content[key]
            if type(value) is not int or value < least:
                raise MatrixError(f"{key}: must be a whole number from {least} on, got {value!r}")
            numbers[key] = value
    entries = content.get("faults")
    if not isinstance(entries, list) or not entries:
        raise MatrixError("faults: must be a list with at least one entry, as in '- {site: gradient, bit: [12, 30]}'")
    cells: dict[str, Cell] = {}
    for number, entry in enumerate(entries, 1):
        for cell in _expand(entry, f"faults, entry {number}"):
            cells.setdefault(cell.key, cell)
            if len(cells) > MAX_CELLS:
                raise MatrixError(f"faults, entry {number}: more than {MAX_CELLS:,} cells")
    return Matrix(tuple(cells.values()), **numbers)


def _expand(entry: Any, where: str) -> list[Cell]:
    """All combinations of one entry's lists, in the order in which its keys are written."""
    if not isinstance(entry, dict) or "site" not in entry:
        raise MatrixError(f"{where}: must be a mapping with a site")
    _known(entry, ENTRY_KEYS, f"{where}: ")
    axes = {key: _axis(key, value, where) for key, value in entry.items()}
    cells = {}
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination))
        kind = chosen.get("kind", "bitflip")
        kept = {k: v for k, v in chosen.items() if kind in ONLY_WITH.get(k, (kind,))}
        values = tuple((key, kept[key]) for key in PLACES if key in kept)
        cell = Cell(chosen["site"], values, chosen.get("persistence", ONCE))
        try:
            faultspec.parse(cell.spec(1, 1))
        except faultspec.FaultSpecError as error:
            raise MatrixError(f"{where}: {error}") from None
        cells.setdefault(cell.key, cell)
    return list(cells.values())


def _axis(key: str, value: Any, where: str) -> list[str]:
    """The texts that one key takes."""
    found: list[str] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, bool) or not isinstance(item, (str, int, float)):
            raise MatrixError(f"{where}: {key}: must be a value or a list of values, got {item!r}")
        text = str(item).strip()
        if key == "bit" and text == "all":
            found += [str(bit) for bit in ALL_BITS]
        elif key in ("bit", "rank") and (bounds := re.fullmatch(r"(\d+)-(\d+)", text)):
            low, high = int(bounds[1]), int(bounds[2])
            if low > high or high - low > 4096:
                raise MatrixError(f"{where}: {key}: {text}: a range goes from the lower to the higher number")
            found += [str(number) for number in range(low, high + 1)]
        elif key == "persistence" and text not in (ONCE, ALWAYS) and not re.fullmatch(r"(p|every)=[0-9.eE+-]+", text):
            raise MatrixError(f"{where}: persistence: {text!r} is not once, always, p=CHANCE or every=STEPS")
        else:
            found.append(text)
    if not found:
        raise MatrixError(f"{where}: {key}: an empty list")
    return list(dict.fromkeys(found))


def _known(content: dict[Any, Any], keys: tuple[str, ...], where: str) -> None:
    for key in content:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else f"; known are {', '.join(keys)}"
            raise MatrixError(f"{where}unknown key {str(key)!r}{hint}")
