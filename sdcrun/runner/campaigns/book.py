"""The results of a campaign on disk: `cells.jsonl`, one JSON object a line, appended as cells are done.

Lines: {"what": "campaign", command, rules} once, at the beginning · {"what": "reference", run, slots: [...], warmup,
restore, ...} for each clean run, of which the last one counts · {"what": "cell", ...} as `sdcrun.core.coverage` makes
them. A line that was cut off by a kill is left out, and the next one begins a line of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from sdcrun.errors import UsageError

FILE = "cells.jsonl"


class Book:
    """The open record of one campaign in `folder`; held by one process at a time. Raises UsageError where the folder
    belongs to another campaign or is in use."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = open(folder / FILE, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(f"{folder} is in use by another sdcrun campaign") from None
        self.reference: dict[str, Any] | None = None
        self.cells: dict[str, dict[str, Any]] = {}
        lines = self._read()
        if not lines:
            self.append("campaign", head)
        for line in lines:
            self._take(line, head)

    def _read(self) -> list[dict[str, Any]]:
        self._file.seek(0)
        lines = []
        for raw in self._file.read().splitlines():
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict):
                lines.append(line)
        self._file.seek(0, os.SEEK_END)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")
        return lines

    def _take(self, line: dict[str, Any], head: dict[str, Any]) -> None:
        if line.get("what") == "campaign":
            other = sorted(key for key in head if line.get(key) != head[key])
            if other:
                raise UsageError(
                    f"{self.folder} holds a campaign with another {' and '.join(other)}: give this one a name of its "
                    "own with --sdc-job, or start over with --fresh"
                )
        elif line.get("what") == "reference":
            self.reference = line
        elif line.get("what") == "cell":
            self.cells[line["key"]] = line

    def append(self, what: str, values: dict[str, Any]) -> None:
        """Adds one line, on disk when this returns."""
        line = {"what": what, **values}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if what == "reference":
            self.reference = line
        elif what == "cell":
            self.cells[line["key"]] = line

    def close(self) -> None:
        """Lets go of the folder."""
        self._file.close()


def set_aside(folder: Path) -> None:
    """Moves the folder of an earlier campaign to a free name beside it."""
    if folder.exists():
        number = 1
        while (other := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(other)
