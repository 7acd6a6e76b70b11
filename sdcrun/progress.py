"""What a campaign shows while it runs, on stderr: a bar on a terminal, a line now and then where it is piped."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

PLAIN_SECONDS = 20.0


class Bar:
    """`total`: cells of the campaign. Use as a context."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.bar = None
        self._task = None
        self._said = ("", 0.0)
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("[sdcrun]", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False), console=self.console, transient=True,
            )  # fmt: skip

    def __enter__(self) -> Bar:
        if self.bar is not None:
            self.bar.start()
            self._task = self.bar.add_task("starting", total=self.total)
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        for line in text.splitlines():
            self.console.print(Text(f"[sdcrun] {line}"))

    def done(self, cells: int, under_way: str) -> None:
        """So many cells are done; `under_way` says what is going on now."""
        if self.bar is not None:
            self.bar.update(self._task, completed=cells, description=under_way)
            return
        text, at = self._said
        now = time.monotonic()
        if under_way != text and now - at >= PLAIN_SECONDS:
            self._said = under_way, now
            self.say(f"{cells} of {self.total} cells; {under_way}")
