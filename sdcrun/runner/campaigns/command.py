"""`sdcrun campaign`: checks the launch before anything starts, conducts, writes the views."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdcrun import args, campaignfile, optiontable
from sdcrun.errors import UsageError
from sdcrun.report import coverage, store
from sdcrun.report.render import coverage_html, coverage_text
from sdcrun.runner import plan
from sdcrun.runner.campaigns.book import Book, set_aside
from sdcrun.runner.campaigns.conduct import Conductor, Show

FAILED = 88
STOPPED = 130
VIEWS = {"coverage.json": lambda data: json.dumps(data, indent=1) + "\n", "coverage.txt": coverage_text.render,
         "coverage.html": coverage_html.render}  # fmt: skip


def check(tokens: Sequence[str]) -> None:
    """Raises UsageError for a launch that would not start, or that has options which the campaign itself sets."""
    table = optiontable.read()
    line = args.split(tokens, table)
    if line.own:
        raise UsageError("after -- come torchrun's options and the script; settings of sdcrun are in the file")
    made = plan.make(line, table, os.environ)
    if getattr(made.options, "max_restarts", 0):
        raise UsageError("--max-restarts: a campaign starts its launches itself, leave it out")
    if made.max_nodes > 1 and made.local_nodes == 1:
        raise UsageError("a campaign runs on one machine: leave the rendezvous out, and sdcrun starts all nodes here")


def name_of(path: str) -> str:
    """A folder's name for the campaign of a file."""
    return "campaign-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).strip("-.") or "faults")


def run(path: str, tokens: Sequence[str], folder: Path, fresh: bool, show: Show) -> int:
    """Conducts the campaign of the file `path` on the launch `tokens` in `folder`; returns the exit code of sdcrun:
    0, or 88 when a fault was missed, wrongly named or ended the script. Raises UsageError and CampaignError."""
    matrix = campaignfile.read(path)
    check(tokens)
    if fresh:
        set_aside(folder)
    book = Book(folder, {"command": list(tokens), "rules": matrix.rules()})
    conductor = Conductor(matrix, tokens, book, show)
    left = len(conductor.pending)
    show.say(f"{len(matrix.cells)} cells, {len(matrix.cells) - left} of them on record; folder {folder}")
    if left:
        show.say("files that the script writes are written as ever: give it an output folder of its own")
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        conductor.run()
    except KeyboardInterrupt:
        show.say("interrupted: what is done is on record, the same command goes on from there")
        return STOPPED
    finally:
        signal.signal(signal.SIGTERM, before)
        data = coverage.build(folder.name, matrix, list(tokens), book.reference, book.cells)
        write(folder, data)
        book.close()
    return FAILED if coverage.headline(data)[0] == "bad" else 0


def write(folder: Path, data: dict[str, Any]) -> None:
    """Writes every view of the table into the campaign's folder. Raises OSError."""
    for name, render in VIEWS.items():
        store.replace_file(folder / name, render(data))


def load(folder: Path) -> dict[str, Any]:
    """The table as it was last written."""
    return json.loads((folder / "coverage.json").read_text())


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
