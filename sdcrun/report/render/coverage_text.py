"""The coverage table of a campaign as plain text of at most 100 columns, and on a terminal with colour."""

from __future__ import annotations

import io
import math
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sdcrun.core import words
from sdcrun.core.coverage import CAUGHT, CRASHED, MASKED, MEANING, MISSED, NAMED, UNCHANGED, UNFIRED, UNSEEN, WRONG
from sdcrun.report.coverage import headline
from sdcrun.report.verdict import LEVEL_STYLES

WIDTH = 100
MAX_ROWS = 200
SIGNS = {
    NAMED: "#", CAUGHT: "+", UNSEEN: "-", MASKED: "o", UNCHANGED: "=", UNFIRED: "?", WRONG: "W", MISSED: "M",
    CRASHED: "C",
}  # fmt: skip
STYLES = {
    NAMED: "green", CAUGHT: "green", UNSEEN: "yellow", MASKED: "dim", UNCHANGED: "dim", UNFIRED: "dim",
    WRONG: "bold red", MISSED: "bold red", CRASHED: "bold magenta",
}  # fmt: skip
HIT, QUIET = "x", "."


def render(data: dict[str, Any]) -> str:
    """The table as plain text."""
    buffer = io.StringIO()
    _write(Console(file=buffer, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False), data)
    return "\n".join(line.rstrip() for line in buffer.getvalue().split("\n"))


def show(data: dict[str, Any], file: TextIO) -> None:
    """Print the table to `file`: with colour when it is a terminal, else as `render`."""
    if file.isatty():
        console = Console(file=file, highlight=False, emoji=False, markup=False)
        console.width = min(console.width, 140)
        _write(console, data)
    else:
        file.write(render(data))


def _write(console: Console, data: dict[str, Any]) -> None:
    level, text = headline(data)
    where = f"{words.count(data['world_size'], 'rank')} on {words.count(data['nodes'], 'node')}"
    console.print(Text(f"sdcrun campaign · {words.clean(data['campaign'])} · {where} · "
                       f"{data['done']} of {words.count(data['cells'], 'cell')}", "bold"))  # fmt: skip
    console.print()
    console.print(Text(text, LEVEL_STYLES[level]))
    console.print()
    rules = data["rules"]
    console.print(Text(
        f"Each cell: {words.count(rules['horizon'], 'step')} from the same state (that after {rules['warmup']} steps); "
        f"an audit every {words.count(rules['audit_every'], 'step')}, a weight vote every "
        f"{words.count(rules['weights_every'], 'step')}.", "dim",
    ))  # fmt: skip
    _section(console, "Caught by", _comparison(data))
    _section(console, "By site and kind", _groups(data))
    console.print(Text(
        "steps: from the firing to the finding (median, and the worst). norm, spike: caught by the gradient-norm "
        "outlier, by the loss spike. gap: largest distance of the loss from the clean run in the cell; a skipped step "
        "leaves it one update behind, a repair leaves nothing.",
        "dim",
    ))  # fmt: skip
    if data["bits"]:
        _section(console, "Bit by bit", None)
        _bits(console, data["bits"])
    if data["misses"]:
        _section(console, "Not caught, or not named", _misses(data["misses"]))
    if data["nothing"]:
        _section(console, "Nothing to catch", _misses(data["nothing"]))
    if data["notes"]:
        _section(console, "Limits", None)
        for note in data["notes"]:
            console.print(Text(f"· {words.clean(note, 400)}"))


def _section(console: Console, title: str, table: Table | None) -> None:
    console.print()
    console.print(Text(title, "bold underline"))
    if table is not None:
        console.print(table)


def _table(*titles: str, wraps: int = -1, gap: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    for place, title in enumerate(titles):
        table.add_column(title, no_wrap=place != wraps % len(titles), overflow="fold")
    return table


def _comparison(data: dict[str, Any]) -> Table:
    table = _table("", "faults caught", "device named", "false alarms in healthy steps", "threshold")
    own = data["sdcrun"]
    rows = (
        ("sdcrun", own, "bits differ"),
        ("gradient-norm outlier", data["gradient_norm"], _limit(data["gradient_norm"]["threshold"], "MADs")),
        ("loss spike", data["loss_spike"], _limit(data["loss_spike"]["threshold"], "std")),
    )
    for name, row, limit in rows:
        named = "cannot" if row is data["loss_spike"] else str(row["named"])
        alarms = f"{row['false_alarms']} in {row['healthy_steps']:,}"
        table.add_row(name, f"{row['caught']} of {own['fired']}", named, alarms, limit)
    return table


def _limit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g} {unit}"


def _groups(data: dict[str, Any]) -> Table:
    table = _table("site", "kind", "when", "fired", "caught", "named", "missed", "unseen", "masked", "steps", "norm",
                   "spike", "gap", gap=1)  # fmt: skip
    for row in data["groups"]:
        bad = row["missed"] + row["wrong"]
        steps = "-" if row["steps"] is None else _steps(row["steps"], row["worst_steps"])
        table.add_row(
            row["site"], row["kind"], row["persistence"], str(row["fired"]), Text(str(row["caught"])),
            str(row["named"]), Text(str(bad), "bold red" if bad else "dim"),
            Text(str(row["unseen"]), "yellow" if row["unseen"] else "dim"), str(row["masked"]), steps, str(row["norm"]),
            str(row["loss"]), distance(row["worst_loss_gap"]),
        )  # fmt: skip
    return table


def _steps(middle: float, worst: int) -> str:
    return f"{middle:g}" if middle == worst else f"{middle:g}-{worst}"


def distance(value: Any) -> str:
    """A difference of losses, short."""
    number = float(value)
    return "NaN" if not math.isfinite(number) else "0" if number == 0 else f"{number:.0e}"


def _bits(console: Console, groups: list[dict[str, Any]]) -> None:
    """A line of signs for each detector, the highest bit at the left."""
    signs = ", ".join(f"{sign} {MEANING[outcome]}" for outcome, sign in SIGNS.items())
    console.print(Text(f"{signs}; {HIT} alarm, {QUIET} none", "dim"))
    for group in groups:
        bits = sorted(group["outcomes"], key=int, reverse=True)
        title = f"{group['site']} {' '.join(f'{k}={v}' for k, v in group['values'].items())} {group['persistence']}"
        console.print()
        whole = int(bits[0]) - int(bits[-1]) == len(bits) - 1
        named = f"{bits[0]} to {bits[-1]}" if whole else " ".join(bits)
        console.print(Text(f"{words.clean(title, 60)}   bits {named}"))
        own = Text("  sdcrun       ")
        for bit in bits:
            own.append(SIGNS[group["outcomes"][bit]], STYLES[group["outcomes"][bit]])
        console.print(own)
        for name, key in (("norm outlier", "norm"), ("loss spike", "loss")):
            console.print(Text(f"  {name:<13}" + "".join(HIT if group[key][bit] else QUIET for bit in bits)))


def _misses(rows: list[dict[str, Any]]) -> Table:
    """One row for all cells that differ in their bit alone and share a reason."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        bit = row["values"].get("bit", "")
        name = row["key"].replace(f"bit={bit}", "bit={}") if bit.isdigit() else row["key"]
        why = row["reason"] or MEANING[row["outcome"]]
        alike.setdefault((name, row["outcome"], why), []).append(int(bit) if bit.isdigit() else -1)
    table = _table("fault", "result", "why", wraps=2)
    for (name, outcome, why), bits in list(alike.items())[:MAX_ROWS]:
        named = words.clean(name.replace("{}", _runs(sorted(bits))), 60)
        table.add_row(named, Text(outcome, STYLES[outcome]), words.clean(why, 200))
    if len(alike) > MAX_ROWS:
        table.add_row(f"and {len(alike) - MAX_ROWS} more", "", "all are in coverage.json")
    return table


def _runs(numbers: list[int]) -> str:
    """ "0-3 7 9-31" for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
