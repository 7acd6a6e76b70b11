"""One launch of a campaign: an ordinary `sdcrun` as a child, its output in a file, its record read as it grows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcrun.core.codec import CodecError, decode_event
from sdcrun.core.types import Config, Event
from sdcrun.report import store
from sdcrun.runner import start

TICK = 0.3
PATIENCE = 60.0
TAIL = 2000


@dataclass(frozen=True)
class Ended:
    """How a launch ended: its exit code, None where it was ended for standing still; where its output is."""

    code: int | None
    log: Path
    job_dir: Path

    def events(self) -> list[Event]:
        """Everything on record; nothing where there is no record."""
        try:
            return list(store.read_events(self.job_dir))
        except store.JobError:
            return []

    def tail(self) -> str:
        """The last lines that the script and sdcrun wrote."""
        try:
            return self.log.read_text(errors="replace")[-TAIL:]
        except OSError:
            return ""


def settings(faults: Sequence[str], rules: Mapping[str, int], plan: Path) -> dict[str, Any]:
    """The configuration file of a launch. A campaign is stopped by no policy: strikes and skips are its business."""
    names = ("seed", "audit_every", "weights_every", "optimizer_every")
    values = {name: rules[name] for name in names if name in rules}
    return values | {"inject_fault": list(faults), "campaign": str(plan), "summary_every": 30.0}


def config(faults: Sequence[str], rules: Mapping[str, int]) -> Config:
    """The same as core's Config, for judging."""
    values = settings(faults, rules, Path())
    return Config(**{k: v for k, v in values.items() if k != "inject_fault"}, faults=tuple(faults))


def run(
    folder: Path, number: int, values: dict[str, Any], command: Sequence[str], stall: float,
    progress: Callable[[int], None],
) -> Ended:  # fmt: skip
    """Launches `command` (torchrun's options, script, arguments) under sdcrun with the settings `values` and waits.

    `progress` is told how many slots the first rank has finished. A launch without any news for `stall` seconds is
    ended. KeyboardInterrupt ends the launch first.
    """
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    name = f"{number:03d}"
    given = runs / f"{name}.yaml"
    store.replace_file(given, json.dumps(values, indent=1))
    own = ["--sdc-config", str(given), "--sdc-dir", str(runs), "--sdc-job", name]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SDCRUN_") or k == "SDCRUN_DEBUG"}
    ended = Ended(None, runs / f"{name}.log", runs / name)
    parent = os.getpid()
    with open(ended.log, "wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "sdcrun.cli", "run", *own, *command], env=environ, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: start.die_with_parent(parent),
        )  # fmt: skip
    try:
        code = _watch(child, ended.job_dir, stall, progress)
    except BaseException:
        _stop(child)
        raise
    return Ended(code, ended.log, ended.job_dir)


def _watch(child: subprocess.Popen, job_dir: Path, stall: float, progress: Callable[[int], None]) -> int | None:
    reader, slots, news = _Tail(job_dir / store.EVENTS), 0, time.monotonic()
    while True:
        try:
            code = child.wait(TICK)
        except subprocess.TimeoutExpired:
            code = None
        for event in reader.read():
            if event.kind == "segment":
                slots = max(slots, int(event.data.get("slot", -1)) + 1)
            news = time.monotonic()
        progress(slots)
        if code is not None:
            return code
        if time.monotonic() - news > stall:
            _stop(child)
            return None


class _Tail:
    """The events of a record that is being written, each once."""

    def __init__(self, path: Path) -> None:
        self.path, self.place, self.rest = path, 0, b""

    def read(self) -> list[Event]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.place)
                data = file.read()
        except OSError:
            return []
        self.place += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        found = []
        for line in lines:
            try:
                found.append(decode_event(line + b"\n"))
            except CodecError:
                continue
        return found


def _stop(child: subprocess.Popen) -> None:
    """Has sdcrun end its ranks; in the last resort the whole session is killed."""
    for number, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(child.pid, number) if number == signal.SIGKILL else child.send_signal(number)
            child.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            child.wait(patience)
            return
