"""What `sdcrun checkpoints` prints, and what `sdcrun verify` needs to know from the record."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sdcrun.core import checkpoints, words
from sdcrun.core.state import State
from sdcrun.report import sidecars, store
from sdcrun.report.command import TOOL_ERROR, load
from sdcrun.report.store import JobError

STYLES = {"verified": "green", "provisional": "yellow", "unverified": "yellow", "withheld": "red", "tainted": "red"}


def show(job: str | None = None, root: str | os.PathLike[str] | None = None, format: str = "text") -> int:
    """List the checkpoints of a job in the state they are in now, and name the newest safe one. Returns 0, or 2 when
    there is nothing to read."""
    try:
        folder = store.find_job(job, root)
        _, state = load(folder)
        if format not in ("text", "json"):
            raise JobError(f"--format: {words.choice(format, ('text', 'json'))}")
    except (JobError, OSError) as error:
        print(f"[sdcrun] error: {words.clean(error, 1000)}", file=sys.stderr)
        return TOOL_ERROR
    sidecars.refresh(state)
    rows = checkpoints.rows(state, state.ledger.strikes(state.device_key))
    safe = checkpoints.newest_safe(rows)
    if format == "json":
        print(json.dumps({"checkpoints": rows, "newest_safe": safe}, indent=2))
        return 0
    if not rows:
        print("No checkpoint is on record.")
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("STATE", "STEP", "FILE", "WHY"):
        table.add_column(title, no_wrap=title in ("STATE", "STEP"), overflow="fold")
    for row in rows:
        step = "-" if row["step"] is None else str(row["step"])
        gone = "" if os.path.lexists(row["path"]) or not os.path.isabs(row["path"]) else " (gone)"
        table.add_row(
            Text(row["state"], STYLES.get(row["state"], "")), Text(step),
            Text(words.clean(row["path"], 300) + gone), Text(words.clean(row["reason"], 400), "dim"),
        )  # fmt: skip
    out = sys.stdout
    console = Console(file=out) if out.isatty() else Console(file=out, width=200, color_system=None)
    console.print(table)
    console.print(Text(f"newest safe checkpoint: {words.clean(safe, 300) if safe else 'none'}", "bold"))
    return 0


def refresh_files(paths: list[str]) -> None:
    """Brings the sidecars of some files up to the records of their jobs, as far as these can be read."""
    states: dict[str, State | None] = {}
    for path in paths:
        values = sidecars.read(path.rstrip('/') + sidecars.SIDECAR)
        folder = values.get("job_dir") if values is not None else None
        if not isinstance(folder, str) or not folder:
            continue
        if folder not in states:
            states[folder] = None
            with contextlib.suppress(JobError, OSError):
                states[folder] = load(folder)[1]
        state = states[folder]
        entry = state.checkpoints.get(os.path.abspath(path)) if state is not None else None
        if state is not None and entry is not None:
            confirmed = checkpoints.confirmed_devices(state, state.ledger.strikes(state.device_key))
            where, reason = checkpoints.now(state, entry, confirmed)
            sidecars.write(path, entry, where, reason, checkpoints.audited_devices(state, entry["attempt"]))
