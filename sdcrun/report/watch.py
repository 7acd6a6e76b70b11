"""`sdcrun watch`: a job that runs elsewhere, from its folder: what was found, as it comes, and one live line."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sdcrun.core import decide, words
from sdcrun.core.types import Event
from sdcrun.report import alive, build, command, store
from sdcrun.report.follow import Follower, Progress
from sdcrun.report.store import JobError
from sdcrun.report.verdict import LEVEL_STYLES, headline, next_command, unexplained

EVERY = 1.0
LINE_EVERY = 60.0
SHARE, LONGEST = 20.0, 10.0
# A supervisor that ends puts that on record first; an old job's ranks say something once a minute.
GONE_SECONDS, ELSEWHERE_SECONDS = 5.0, 180.0
STYLES = {"alarm": "red", "warning": "yellow"}
SAVED = {"verified": "is verified", "provisional": "is provisional until the next audit", "unverified": "is unverified",
         "withheld": "was withheld", "tainted": "is tainted"}  # fmt: skip


def watch(job: str | None = None, root: str | os.PathLike[str] | None = None, file: TextIO | None = None) -> int:
    """Follow a job (default: the newest) until it ends, or until nobody is left who could say that it has; returns 0
    when it is clean, 1 with an unexplained finding, 2 on an error. KeyboardInterrupt is the caller's."""
    out = file if file is not None else sys.stdout
    try:
        folder = store.find_job(job, root)
        if (elsewhere := store.kept_elsewhere(folder)) is not None:
            raise JobError(f"{folder}: {elsewhere}")
        watched = Watched(folder)
    except (JobError, OSError) as error:
        command.complain(f"error: {words.clean(error, 1000)}")
        return command.TOOL_ERROR
    console = Console(file=out, highlight=False, markup=False, emoji=False, soft_wrap=not out.isatty())
    console.print(Text(watched.title(), "bold"))
    (_on_terminal if console.is_terminal and not console.is_dumb_terminal else _plainly)(watched, console)
    decide.finish(watched.state)
    report = build.build(watched.state, watched.job)
    level, text = headline(report)
    code = "" if report["exit_code"] is None else f" ({report['status']}, exit code {report['exit_code']})"
    console.print(Text(f"{text}{code}", LEVEL_STYLES[level]))
    console.print(Text(f"next: {next_command(report)}"))
    return int(unexplained(report))


class Watched:
    """One job's folder, read as it grows. `state` is the controller's memory made from the same events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = store.read_job(folder)
        config = command.config_of(self.job, folder)
        self._follower = Follower(folder)
        self._progress = Progress(config)
        self._attempt: int | None = None
        self._heard: float | None = None
        self._gone = self._asked = False

    @property
    def state(self) -> Any:
        """What the events have said so far."""
        return self._progress.state

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.state.ended or self._gone

    def title(self) -> str:
        """One line on which job it is."""
        typed = self.job.get("command")
        what = words.clean(" ".join(map(str, typed)), 200) if isinstance(typed, list) else "command unknown"
        return f"job {words.clean(self.state.config.job_id)}: {what}"

    def news(self, now: float) -> Iterator[Text]:
        """Lines on what has happened since the last call."""
        before = self._heard
        while events := self._follower.read():
            self._heard = now if before is not None else now - self._age()
            for event in events:
                _, actions = decide.apply(self.state, event)
                self._progress.take(event, now)
                yield from self._event(event)
                yield from _said(actions)
        if not self.ended:
            yield from _said(decide.tick(self.state, now)[1])
            yield from self._silence(now)

    def _age(self) -> float:
        """Seconds since the record was last written."""
        try:
            return max(0.0, time.time() - os.stat(self.folder / store.EVENTS).st_mtime)
        except OSError:
            return 0.0

    def _silence(self, now: float) -> Iterator[Text]:
        """Lines on a job whose record has no end and does not grow: killed with everything that could have said so."""
        self._heard = now if self._heard is None else self._heard
        silent = now - self._heard
        if silent < GONE_SECONDS:
            return
        crew = alive.crew(self.folder, self.state, socket.gethostname())
        since = f"nothing has come on record for {silent:.0f} s"
        if crew.gone and not crew.work and not crew.elsewhere:
            self._gone = True
            gone = words.clean(", ".join(crew.gone), 300)
            how = "killed, or gone with its machine"
            yield Text(f"the job is over, without an end on record: sdcrun ({gone}) was {how}; {since}", "yellow")
        elif not crew.work and silent >= ELSEWHERE_SECONDS and not self._asked:
            self._asked = True
            names = words.clean(", ".join(crew.elsewhere), 300)
            where = f" ({names}) cannot be seen from here: look there" if names else " nobody can tell from here"
            yield Text(f"{since}; whether sdcrun still runs{where}", "yellow")

    def line(self, now: float) -> Text:
        """The status in one line."""
        return self._progress.line(now)

    def _event(self, event: Event) -> Iterator[Text]:
        """Lines for what no finding tells of."""
        data = event.data
        if event.kind == "hello" and event.attempt != self._attempt:
            if self._attempt is not None:
                yield Text(f"attempt {event.attempt}: the ranks were started again", "yellow")
            self._attempt = event.attempt
        elif event.kind == "worker_lost":
            rank = data.get("rank")
            who = f"node {data.get('node')}" if rank is None else f"rank {rank}"
            yield Text(f"{who} has failed: {words.clean(data.get('text') or '')}, exit {data.get('exit')}", "yellow")
        elif event.kind == "checkpoint":
            what = SAVED.get(str(data.get("state")), words.clean(data.get("state")))
            bad = data.get("state") in ("withheld", "tainted")
            yield Text(f"checkpoint {words.clean(data.get('path'), 300)} {what}", "red" if bad else "")


def _said(actions: list[Any]) -> Iterator[Text]:
    for action in actions:
        if action.kind == "say":
            yield Text(action.data["text"], STYLES.get(action.data["level"], ""))


def _on_terminal(watched: Watched, console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for now in _turns(watched, live.console.print):
            line = watched.line(now)
            line.no_wrap, line.overflow = True, "ellipsis"
            live.update(line, refresh=True)


def _plainly(watched: Watched, console: Console) -> None:
    line_at = time.monotonic() + LINE_EVERY
    for now in _turns(watched, console.print):
        if now >= line_at:
            line_at = now + LINE_EVERY
            console.print(watched.line(now))
        console.file.flush()


def _turns(watched: Watched, show: Callable[[Text], None]) -> Iterator[float]:
    """Show what is new once a second (less often where the status takes long to make) until the job ends; yields the
    time, on a steady clock."""
    while True:
        now = time.monotonic()
        for text in watched.news(now):
            show(text)
        if watched.ended:
            return
        before = time.monotonic()
        yield now
        time.sleep(min(LONGEST, max(EVERY, SHARE * (time.monotonic() - before))))
