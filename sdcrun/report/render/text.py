"""The report for a person: verdict first, then who, what was seen, what it means for checkpoints, and what it cannot
see.

Styled on a terminal, plain when piped. All text goes through rich as `Text`, never as markup, and names are cleaned of
control characters, so nothing that a script or a host name says can style, hide or move anything.
"""

from __future__ import annotations

import io
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sdcrun.core import words
from sdcrun.core.roster import MAX_PEERS
from sdcrun.core.types import Device
from sdcrun.report.answers import answers
from sdcrun.report.verdict import LEVEL_STYLES, caught_by, counts, failed, headline, how_sure, named, outcome, spread

PLAIN_WIDTH = 100
MAX_BLOCKS = 20
MAX_ROWS = 50
VERDICTS = {
    "confirmed": "bold red", "suspect": "red", "inconclusive": "yellow", "not-hardware": "cyan",
    "amp-overflow": "dim", "clean-after-triage": "green",
}  # fmt: skip


def render(report: dict[str, Any]) -> str:
    """The report as plain text, at most 100 columns wide."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=PLAIN_WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    _write(console, report)
    return "\n".join(line.rstrip() for line in buffer.getvalue().split("\n"))


def faults(report: dict[str, Any]) -> list[str]:
    """The table of injected faults as plain lines; none when there were none."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=PLAIN_WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    for row in _injected(report):
        console.print(row)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]


def show(report: dict[str, Any], file: TextIO) -> None:
    """Print the report to `file`: with style when it is a terminal, else as `render`."""
    if file.isatty():
        console = Console(file=file, highlight=False, emoji=False, markup=False)
        console.width = min(console.width, 120)
        _write(console, report)
    else:
        file.write(render(report))


def _write(console: Console, report: dict[str, Any]) -> None:
    code = "" if report["exit_code"] is None else f", exit code {report['exit_code']}"
    console.print(
        Text(f"sdcrun report · job {words.clean(report['job_id'] or '?')} · {report['status']}{code}", "bold")
    )
    level, text = headline(report)
    console.print()
    console.print(Text(text, LEVEL_STYLES[level]))
    console.print()
    _pairs(console, answers(report))
    console.print()
    _pairs(console, _facts(report))
    for title, section in _SECTIONS:
        rows = section(report)
        if rows:
            console.print()
            console.print(Text(title, "bold underline"))
            for row in rows:
                console.print(row)
    console.print()


def _pairs(console: Console, pairs: list[tuple[str, str]]) -> None:
    console.print(_grid([(Text(name, "dim"), Text(value)) for name, value in pairs]))


def _grid(rows: list[tuple[Text, ...]], last_wraps: bool = True) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for place in range(len(rows[0])):
        grid.add_column(no_wrap=last_wraps and place < len(rows[0]) - 1, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    where = f"{words.count(report['world_size'], 'rank')} on {words.count(report['nnodes'], 'node')}"
    ends = (("stopped", report["stopped_because"]), ("failed", failed(report)))
    facts = [(name, text) for name, text in ends if text]
    facts += [
        ("job", f"{where}, {report['guarded_ranks']} guarded, {words.count(report['attempts'], 'attempt')}"),
        ("steps", counts(report)),
        ("checks", _checks(report)),
        ("overhead", _overhead(report)),
        ("time", f"{report['started_at'] or '?'} to {report['ended_at'] or 'now'}"),
    ]
    tested = report.get("selftest")
    if tested:
        broken = "; ".join(f"FAILED on rank {row['rank']}: {row['check']}" for row in tested["failed"][:4])
        facts.append(("self-test", broken or f"passed on {words.count(tested['ranks'], 'rank')}: "
                                            f"{', '.join(tested['checks'])}"))  # fmt: skip
    if report["command"]:
        facts.append(("command", words.clean(" ".join(report["command"]), 400)))
    known = [f"{name} {words.clean(value, 60)}" for name, value in report["versions"].items() if value]
    if known:
        facts.append(("versions", ", ".join(known)))
    return facts


def _checks(report: dict[str, Any]) -> str:
    said = []
    for check, row in report["checks"].items():
        off = f" (off: {words.clean(row['off_reason'], 100)})" if row["off_reason"] else ""
        said.append(f"{words.CHECK_NAMES[check]} {row['run']:,}×, fired {row['fired']:,}{off}")
    return "; ".join(said)


def _overhead(report: dict[str, Any]) -> str:
    over = report["overhead"]
    if over["percent_of_step_time"] is None:
        return "not measured"
    parts = ", ".join(f"{words.CHECK_NAMES[check]} {percent:.2f}" for check, percent in over["by_check"].items())
    return f"{over['percent_of_step_time']:.2f} % of step time ({parts})"


def _unguarded(report: dict[str, Any]) -> list[Any]:
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in report["unguarded"]:
        reasons.setdefault((row["reason"], str(row["host"] or "unknown host")), []).append(row["rank"])
    lines = [
        Text(f"{words.ranks(set(ranks))} on {words.clean(host)}: {words.clean(reason, 400)}", "yellow")
        for (reason, host), ranks in list(reasons.items())[:MAX_ROWS]
    ]
    return lines + _more(len(reasons), "reason")


def _suspects(report: dict[str, Any]) -> list[Any]:
    rows: list[Any] = []
    for suspect in report["suspects"][:MAX_ROWS]:
        mark = " · injected" if suspect["injected"] else ""
        rows.append(Text(f"{suspect['verdict'].upper()} rank {suspect['rank']}{mark}", VERDICTS[suspect["verdict"]]))
        pairs = [
            ("who", f"{words.device(Device(**suspect['device']))}; local rank {_or(suspect['local_rank'])}, "
                    f"node {_or(suspect['node'])}"),
            ("sure", how_sure(suspect)),
            ("ruled out", "; ".join(suspect["ruled_out"]) or "nothing"),
            *[("evidence", text) for text in _evidence(suspect)],
            ("now", suspect["recommended_action"]),
        ]  # fmt: skip
        if suspect["approved_by"]:
            pairs.append(("approved", f"by {words.clean(suspect['approved_by'])}"))
        rows.append(Padding(_grid([(Text(name, "dim"), Text(value)) for name, value in pairs]), (0, 0, 0, 2)))
    return rows + _more(len(report["suspects"]), "suspect")


def _or(value: Any) -> str:
    return "?" if value is None else str(value)


def _evidence(suspect: dict[str, Any]) -> list[str]:
    """The first few pieces of evidence, a line each."""
    lines = []
    for row in suspect["evidence"][:3]:
        phase = "" if row["phase"] == row["check"] else f", {words.clean(row['phase'], 40)}"
        text = f"step {row['step']}, {words.CHECK_NAMES[row['check']]}{phase}"
        if row["tensor"] is not None:
            text += f", {words.clean(row['tensor'], 80)}"
        if row.get("index") is not None:
            text += f"[{row['index']}]"
        if row["expected"] is not None or row["observed"] is not None:
            expected, observed = (_value(row, side) for side in ("expected", "observed"))
            text += f": expected {expected}, observed {observed}"
        if row.get("bits"):
            text += f", bit{'s' if len(row['bits']) > 1 else ''} {', '.join(map(str, row['bits']))} flipped"
        if row["peers_agreeing"]:
            others = " and others" if len(row["peers_agreeing"]) == MAX_PEERS else ""
            text += f"; agreeing: {words.ranks(row['peers_agreeing'])}{others}"
        lines.append(text)
    return lines


def _value(row: dict[str, Any], side: str) -> str:
    value = row.get(f"{side}_value")
    raw = words.clean(_or(row[side]), 40)
    return raw if value is None else f"{words.number(value)} ({raw})"


def _findings(report: dict[str, Any]) -> list[Any]:
    """Blocks of the findings, once each even where they accuse several devices, the gravest first when there are many.
    """
    seen, found = set(), []
    for row in report["findings"]:
        key = (row["attempt"], row["step"], row["check"], row["rule"], row["text"].split("\n", 2)[1])
        if key not in seen:
            seen.add(key)
            found.append(row)
    chosen = set(range(len(found)))
    if len(found) > MAX_BLOCKS:
        order = list(VERDICTS)
        grave = sorted(chosen, key=lambda i: (found[i]["injected"], order.index(found[i]["verdict"]), i))
        chosen = set(grave[:MAX_BLOCKS])
    rows: list[Any] = []
    for row in (found[i] for i in sorted(chosen)):
        head, *lines = row["text"].split("\n")
        rows.append(Text(head, VERDICTS[row["verdict"]]))
        pairs = [line.strip().split(None, 1) for line in lines]
        rows.append(
            Padding(_grid([(Text(p[0], "dim"), Text(p[1] if len(p) > 1 else "")) for p in pairs]), (0, 0, 0, 2))
        )
    if len(found) > MAX_BLOCKS:
        rows.append(Text(f"and {len(found) - MAX_BLOCKS} more; all are in report.json", "dim"))
    return rows


def _injected(report: dict[str, Any]) -> list[Any]:
    if not report["injected"]:
        return []
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for place, title in enumerate(("fault", "fired", "caught by", "after", "named", "")):
        table.add_column(title, no_wrap=place > 0, overflow="fold")
    notes = []
    for row in report["injected"][:MAX_ROWS]:
        spec, after = words.clean(row["spec"], 120), row["after_steps"]
        result, level = outcome(row)
        style = LEVEL_STYLES[level]
        table.add_row(
            Text(spec), Text(f"{row['fired']:,}×"), Text(caught_by(row)),
            Text("-" if after is None else words.count(after, "step")), Text(named(row)), Text(result, style),
        )  # fmt: skip
        why = row["problem"] or row["by_design_unseen"]
        notes += [Text(f"{result}: {words.clean(why, 300)} ({spec})", style)] if why else []
    return [table, *notes, *_more(len(report["injected"]), "fault")]


def _checkpoints(report: dict[str, Any]) -> list[Any]:
    saved = report["checkpoints"]
    if not saved:
        return []
    rows = []
    for row in saved[-MAX_ROWS:]:
        style = {"verified": "green", "provisional": "yellow", "unverified": "yellow"}.get(row["state"], "red")
        step = "-" if row["step"] is None else f"step {row['step']}"
        rows.append((Text(words.clean(row["state"]), style), Text(step), Text(words.clean(row["path"], 200)),
                     Text(words.clean(row["reason"], 200), "dim")))  # fmt: skip
    safe = report["blast_radius"]["newest_safe_checkpoint"]
    last = Text(f"newest safe checkpoint: {words.clean(safe, 200) if safe else 'none'}", "bold")
    return [_grid(rows), *_more(len(saved), "older checkpoint"), last]


def _radius(report: dict[str, Any]) -> list[Any]:
    said = spread(report)
    return [Text(said)] if said else []


def _limits(report: dict[str, Any]) -> list[Any]:
    return [_grid([(Text("·"), Text(words.clean(text, 600)))]) for text in report["limits"]]


def _more(total: int, noun: str) -> list[Any]:
    return [Text(f"and {words.count(total - MAX_ROWS, noun)} more", "dim")] if total > MAX_ROWS else []


_SECTIONS = (
    ("UNGUARDED", _unguarded),
    ("Suspects", _suspects),
    ("Injected faults", _injected),
    ("Findings", _findings),
    ("Checkpoints", _checkpoints),
    ("Blast radius", _radius),
    ("What this run could not see", _limits),
)
