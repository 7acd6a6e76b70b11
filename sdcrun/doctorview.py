"""What `sdcrun doctor` prints: one line per question, the worst of them in words at the end."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sdcrun.runner import doctor, inventory

STYLES = {doctor.GOOD: "green", doctor.NOTE: "dim", doctor.LESS: "bold yellow", doctor.BAD: "bold red"}
MACHINE = ("This machine can be guarded.", "This machine can be guarded, but not fully: see the lines marked LESS.",
           "Nothing can be guarded here: see the lines marked FAIL.")  # fmt: skip
SCRIPT = ("This script is guarded.", "This script is guarded, but not fully: see the lines marked LESS.",
          "This script is not guarded: see the lines marked FAIL.")  # fmt: skip


def show(directory: str | None, script: list[str], seconds: float) -> int:
    """Examine this machine, and `script` (with torchrun options before and arguments behind it) where one is given, for
    at most `seconds`. Returns 0: all can be guarded, 1: not all, 2: nothing."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())

    def line(answer: doctor.Answer) -> None:
        if not console.is_terminal:
            print(f"  {answer.level:5} {answer.about:12} {answer.text}", flush=True)
            return
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column(width=4)
        row.add_column(width=11)
        row.add_column(overflow="fold")
        row.add_row(Text(answer.level, STYLES[answer.level]), Text(answer.about), Text(answer.text))
        console.print(Padding(row, (0, 0, 0, 2)))

    console.print(Text(f"sdcrun doctor · host {inventory.host_name()}", "bold"))
    worst = doctor.examine(doctor.directory_of(directory), os.environ, line)
    console.print(Text(MACHINE[worst], ("green", "yellow", "red")[worst]))
    if not script or worst == 2:
        return worst
    console.print(Text(f"\ntrying {' '.join(script)} for up to {seconds:.0f} s", "bold"))
    outcome = doctor.try_script(script, seconds, os.environ, line)
    console.print(Text(SCRIPT[outcome], ("green", "yellow", "red")[outcome]))
    return max(worst, outcome)
