"""What `sdcrun report` and `sdcrun jobs` do, and the views that a run leaves in its job folder."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sdcrun.core import words
from sdcrun.core.types import Config
from sdcrun.report import alive, build, handoff, metrics, sidecars, store
from sdcrun.report.store import JobError, Reading
from sdcrun.report.verdict import LEVEL_STYLES, headline, next_command, unexplained

VIEWS = {
    "json": "report.json",
    "text": "report.txt",
    "html": "report.html",
    "junit": "junit.xml",
    "prometheus": metrics.NAME,
}
TOOL_ERROR = 2
JOB_TITLES = ("JOB", "STARTED", "STATUS", "RANKS", "STEPS", "VERDICT")
WIDE = 120


def load(job_dir: str | os.PathLike[str], reading: Reading | None = None) -> tuple[dict[str, Any], Any]:
    """(report, state) of a job folder. Raises JobError with one clear line when there is nothing to report on."""
    reading = reading if reading is not None else Reading()
    job = store.read_job(job_dir)
    state = build.fold(config_of(job, job_dir), store.read_events(job_dir, reading))
    if not reading.events:
        cut = " but a line that is cut off" if reading.torn else ""
        raise JobError(f"{job_dir}: no events{cut} in {store.EVENTS}; the job never started, or the folder is broken")
    notes = []
    if reading.unreadable:
        notes.append(f"{words.count(reading.unreadable, 'line')} of the record could not be read.")
    if reading.torn:
        notes.append("The last line of the record is cut off: whoever wrote it was killed. It is left out.")
    if reading.recovered:
        notes.append(
            f"{words.count(reading.recovered, 'event')} came from spool files: no controller had taken them in."
        )
    crew = alive.crew(job_dir, state, socket.gethostname())
    if not state.ends and crew.gone and not crew.work and not crew.elsewhere:
        notes.append(f"sdcrun ({words.clean(', '.join(crew.gone), 300)}) is gone: killed, or with its machine.")
    return build.build(state, job, notes), state


def config_of(job: dict[str, Any], job_dir: str | os.PathLike[str]) -> Config:
    """The job's settings; those that cannot be read are the defaults."""
    given = job.get("config") if isinstance(job.get("config"), dict) else {}
    known = {key: value for key, value in given.items() if key in Config.__dataclass_fields__}
    try:
        config = Config.from_json(known)
    except (TypeError, ValueError):
        config = Config()
    if config.job_id:
        return config
    name = str(job.get("job_id") or Path(job_dir).resolve().name)
    return Config.from_json({**config.to_json(), "job_id": name})


def report(job: str | None = None, format: str = "text", output: str | None = None,
           root: str | os.PathLike[str] | None = None, commands: str | None = None) -> int:  # fmt: skip
    """Print or write one view of a job. Returns 0 when it is clean, 1 with any unexplained finding, 2 on an error."""
    try:
        folder, reading = store.find_job(job, root), Reading()
        data, state = load(folder, reading)
        if reading.torn or reading.unreadable:
            broken = "its last line is cut off" if reading.torn else f"{reading.unreadable} lines cannot be read"
            complain(f"note: {folder / store.EVENTS} is damaged ({broken}); the rest is reported")
        if commands is not None:
            text = _commands(data, commands)
        elif format == "text" and output is None:
            _module("text").show(data, sys.stdout)
            return int(unexplained(data))
        else:
            text = _renderer(format)(data, state)
        _put(text, output)
    except JobError as error:
        complain(f"error: {words.clean(error, 1000)}")
        return TOOL_ERROR
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        complain(f"error: {words.clean(error.filename or '', 300)}: {error.strerror or error}")
        return TOOL_ERROR
    return int(unexplained(data))


def _module(name: str) -> Any:
    return importlib.import_module(f"sdcrun.report.render.{name}")


def _renderer(format: str) -> Callable[[dict[str, Any], Any], str]:
    """The function (report, state) -> text of a format; raises JobError for an unknown one."""
    if format not in VIEWS:
        raise JobError(f"--format: {words.choice(format, VIEWS)}")
    module = _module(format)
    return module.render if format == "html" else lambda data, state: module.render(data)


def _commands(data: dict[str, Any], platform: str) -> str:
    if platform not in handoff.PLATFORMS:
        raise JobError(f"--commands: {words.choice(platform, handoff.PLATFORMS)}")
    return handoff.render(data, platform)


def _put(text: str, output: str | None) -> None:
    if output is None or output == "-":
        sys.stdout.write(text)
        return
    try:
        store.replace_file(output, text)
    except OSError as error:
        raise JobError(f"-o {output}: cannot be written: {error.strerror or error}") from None


def complain(text: str) -> None:
    """One line on stderr."""
    print(f"[sdcrun] {text}", file=sys.stderr)


def jobs(root: str | os.PathLike[str] | None = None) -> int:
    """List the jobs, the newest first. Returns 0, or 2 when there are none."""
    folders = store.list_jobs(root)
    if not folders:
        complain(f"error: no jobs in {words.clean(store.jobs_root(root), 300)}")
        return TOOL_ERROR
    out = sys.stdout
    console = Console(file=out) if out.isatty() else Console(file=out, width=160, color_system=None)
    rows = [_job_row(folder) for folder in folders]
    if console.width >= WIDE:
        _print_table(console, JOB_TITLES, rows)
        return 0
    # Too narrow for a verdict beside the rest: it gets a line of its own.
    *titles, _ = JOB_TITLES
    widths = [max(map(len, column)) for column in zip(map(Text, titles), *(row[:-1] for row in rows))]
    for row in ([Text(title, "bold") for title in titles], *rows):
        line = Text()
        for cell, width in zip(row, widths):
            line.append(cell).append(" " * (width - len(cell) + 2))
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
        for verdict in row[len(titles) :]:
            console.print(Padding(verdict, (0, 0, 0, 2)))
    return 0


def _print_table(console: Console, titles: tuple[str, ...], rows: list[list[Text]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, no_wrap=title != titles[-1], overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _job_row(folder: Path) -> list[Text]:
    try:
        data, _ = load(folder)
    except (JobError, OSError) as error:
        return [Text(words.clean(folder.name)), *[Text("-")] * 4, Text(words.clean(error, 200), "yellow")]
    level, text = headline(data)
    code = "" if data["exit_code"] is None else f" ({data['exit_code']})"
    return [
        Text(words.clean(folder.name)),
        Text(str(data["started_at"] or "?")),
        Text(data["status"] + code),
        Text(f"{data['guarded_ranks']}/{data['world_size']}"),
        Text(f"{data['steps']['seen']:,}"),
        Text(text, LEVEL_STYLES[level]),
    ]


def write_views(job_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Write every view of a job into its folder; returns the report. Raises JobError or OSError."""
    data, state = load(job_dir)
    for format, name in VIEWS.items():
        store.replace_file(Path(job_dir) / name, _renderer(format)(data, state))
    sidecars.refresh(state)
    return data


def closing(config: Config, code: int) -> list[str]:
    """Write the views of a job that has ended with `code`; returns the last lines for its user."""
    try:
        data = write_views(config.job_dir)
    except (JobError, OSError) as error:
        return [f"no report could be written: {words.clean(error, 300)}"]
    _, text = headline(data)
    lines = [*_module("text").faults(data), f"{text} (exit code {code})"]
    path = words.clean(os.path.join(config.job_dir, VIEWS["text"]), 300)
    return [*lines, f"report: {path}   next: {next_command(data)}"]
