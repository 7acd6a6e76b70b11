"""One status line on the last row of a terminal that others write to at the same time.

The ranks write to the terminal directly, so a line drawn where the cursor is would end up in the middle of theirs. The
last row is taken out of the region that scrolls instead (as package managers do for their progress): whatever the
script prints, partial lines and progress bars included, goes on above it. Each change is one write, in which the
cursor is saved and put back.

Whoever takes a row must give it back, and a process that is killed cannot. So a small shell waits for its end: it reads
from a pipe which row is taken, and when the pipe ends with one taken, it gives that row back.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

SAVE, RESTORE, WHOLE = "\x1b7", "\x1b8", "\x1b[r"
LEAST_ROWS, LEAST_COLUMNS = 6, 40
# Give the last row told back, unless an empty line said that none is taken.
HEIR = r'while read -r told; do row=$told; done; [ -z "$row" ] || printf "\0337\033[r\033[$row;1H\033[2K\0338"'


def possible(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Whether `descriptor` is a real terminal with a person before it. CI systems give jobs a terminal, too, and would
    keep each redrawing for ever."""
    if environ.get("CI") or environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    try:
        columns, rows = os.get_terminal_size(descriptor)
    except OSError:
        return False
    return rows >= LEAST_ROWS and columns >= LEAST_COLUMNS


class StatusLine:
    """The status line of the terminal at `descriptor`. Writing errors are nobody's business: the terminal is gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size: os.terminal_size | None = None
        self._before: Any = None
        self._heir: subprocess.Popen | None = None

    def open(self) -> None:
        """Take the last row. Ctrl-Z gives it back until sdcrun is continued."""
        self._heir = _heir(self._descriptor)
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTSTP, self._pause)
        self._reserve()

    def _foreground(self) -> bool:
        """A job in the background leaves the terminal to whoever is before it now."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            return False

    def _reserve(self) -> None:
        try:
            size = os.get_terminal_size(self._descriptor)
        except OSError:
            return
        if size.lines < LEAST_ROWS or size.columns < LEAST_COLUMNS or not self._foreground():
            self._release()
            return
        self._size = size
        self._tell(str(size.lines))
        # Down one line (scrolling where need be) and up again, so that the cursor is above the row that is taken; what
        # stands below it is an older status line in the wrong place.
        self._write(
            f"{SAVE}{WHOLE}{RESTORE}\x1bD\x1b[A{SAVE}\x1b[B\r\x1b[J{RESTORE}{SAVE}\x1b[1;{size.lines - 1}r{RESTORE}"
        )

    def draw(self, text: Any) -> None:
        """Show `text` (rich text, cut to the width of the terminal)."""
        try:
            size = os.get_terminal_size(self._descriptor)
        except OSError:
            return
        if size != self._size or not self._foreground():
            self._reserve()
        if self._size is not None:
            lines, shown = self._size.lines, _ansi(text, self._size.columns - 1)
            self._write(f"{SAVE}\x1b[1;{lines - 1}r\x1b[{lines};1H\x1b[2K{shown}\x1b[0m{RESTORE}")

    def close(self) -> None:
        """Give the row back, empty."""
        self._release()
        if self._before is not None:
            signal.signal(signal.SIGTSTP, self._before)
            self._before = None
        if self._heir is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._heir.stdin.close()
                self._heir.wait(1.0)
            self._heir = None

    def _release(self) -> None:
        if self._size is not None:
            if self._foreground():
                self._write(f"{SAVE}{WHOLE}\x1b[{self._size.lines};1H\x1b[2K{RESTORE}")
            self._size = None
            self._tell("")

    def _tell(self, row: str) -> None:
        """The heir: which row is taken."""
        if self._heir is not None:
            with contextlib.suppress(OSError):
                os.write(self._heir.stdin.fileno(), f"{row}\n".encode())

    def _pause(self, number: int, frame: Any) -> None:
        self._release()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here again once continued; the next `draw` takes the row again.
        signal.signal(signal.SIGTSTP, self._pause)

    def _write(self, text: str) -> None:
        try:
            os.write(self._descriptor, text.encode("utf-8", "replace"))
        except OSError:
            pass


def _heir(descriptor: int) -> subprocess.Popen | None:
    """The shell that gives the row back should this process be killed; in a session of its own, where no Ctrl-C reaches
    it and no terminal stops it from writing. None where there is no shell."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", HEIR], stdin=subprocess.PIPE, stdout=descriptor, stderr=subprocess.DEVNULL,
            bufsize=0, start_new_session=True,
        )  # fmt: skip
    except OSError:
        return None


def _ansi(text: Any, width: int) -> str:
    """`text` on one line of at most `width` columns, with the escape sequences of its styles."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, width=width, force_terminal=True, color_system="standard", highlight=False)
    console.print(text, end="", no_wrap=True, overflow="ellipsis", crop=True)
    return buffer.getvalue()
