"""`metrics.prom` of a job that runs, kept fresh for whoever scrapes the job folder (the node exporter's textfile
collector)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdcrun.report import store

NAME = "metrics.prom"
EVERY = 15.0
SHARE = 20.0


class Metrics:
    """The file in `job_dir`, written by the job's controller alone. `log(text)` takes a line when it cannot be.

    It costs the controller one part in `SHARE` of its time at most: in a huge job it is written less often.
    """

    def __init__(self, job_dir: str | os.PathLike[str], log: Callable[[str], None]) -> None:
        self._path, self._log = Path(job_dir) / NAME, log
        self._due = float("-inf")
        self._failing = False

    def turn(self, state: Any, now: float) -> None:
        """Write what `state` (core.state.State) says, if it is time to (`now` monotonic). Never raises."""
        if now < self._due:
            return
        began = time.monotonic()
        try:
            from sdcrun.report import build
            from sdcrun.report.render import prometheus

            store.replace_file(self._path, prometheus.render(build.build(state)))
        except Exception as error:
            if not self._failing:
                self._log(f"{self._path}: {type(error).__name__}: {error}; trying again")
            self._failing = True
        else:
            self._failing = False
        self._due = now + max(EVERY, SHARE * (time.monotonic() - began))
