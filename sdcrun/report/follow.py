"""A job while it runs, from its folder: new events as they are written, and where the job stands in one line."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

from rich.text import Text

from sdcrun.core import decide, words
from sdcrun.core.codec import MAX_LINE, CodecError, decode_event
from sdcrun.core.types import Config, Event
from sdcrun.report import build
from sdcrun.report.store import EVENTS, Seen

CHUNK = 1 << 20
RATE_SECONDS = 30.0
SILENT_SECONDS = 20.0
QUIET = ("amp-overflow", "clean-after-triage")
STYLES = {"confirmed": "bold red", "suspect": "bold red", "inconclusive": "bold yellow", "not-hardware": "cyan"}


class Follower:
    """Events of a job folder, each once, as its record grows."""

    def __init__(self, job_dir: str | os.PathLike[str]) -> None:
        self._path = Path(job_dir) / EVENTS
        self._offset = 0
        self._seen = Seen()

    def read(self, limit: int = CHUNK) -> list[Event]:
        """What is new since the last call, of at most about `limit` bytes; [] when there is nothing, or no record yet.

        A last line without its newline is left for the next call: its writer may still be at it.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(max(limit, MAX_LINE + 1))
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) > MAX_LINE:
            # No event is that long. What is left of the line will not decode and is passed over.
            whole = len(data)
        self._offset += whole
        events = []
        for line in data[:whole].splitlines(keepends=True):
            try:
                event = decode_event(line)
            except CodecError:
                continue
            if self._seen.add(event):
                events.append(event)
        return events


class Progress:
    """Where a job stands. `state` is the controller's memory made from the same events."""

    def __init__(self, config: Config) -> None:
        self.state = decide.initial(config)
        self._leader: tuple[int, str] | None = None
        self._marks: deque[tuple[float, int]] = deque()
        self._heard: float | None = None

    def take(self, event: Event, now: float) -> None:
        """Note one event for `line`; `now` in seconds on a steady clock. Folding it into `state` is the caller's."""
        if event.kind != "summary":
            return
        self._heard = now
        # One rank's own clock: clocks of different nodes may be minutes apart.
        source = event.attempt, event.source
        if self._leader is None or event.attempt > self._leader[0]:
            self._leader = source
            self._marks.clear()
        steps = event.data.get("steps")
        seen = steps.get("seen") if isinstance(steps, dict) else None
        if source == self._leader and isinstance(seen, int):
            self._marks.append((event.time, seen))
            while len(self._marks) > 2 and self._marks[-1][0] - self._marks[1][0] >= RATE_SECONDS:
                self._marks.popleft()

    @property
    def rate(self) -> float | None:
        """Steps per second of late; None before it can be known."""
        if len(self._marks) < 2:
            return None
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start and last >= first else None

    def line(self, now: float) -> Text:
        """One line: step, last verdict, ranks guarded, steps a second, checks done, overhead; what matters least comes
        last, where a narrow terminal cuts it off."""
        report = build.build(self.state)
        guarded = f"{report['guarded_ranks']}/{report['world_size'] or '?'} guarded"
        if not report["steps"]["seen"]:
            return Text(f"waiting for the first step · {guarded}")
        silent = now - self._heard if self._heard is not None else 0.0
        rate, over = self.rate, report["overhead"]["percent_of_step_time"]
        speed = [] if rate is None else [f"{rate:.1f} steps/s" if rate >= 1 or not rate else f"{1 / rate:.1f} s/step"]
        speed = [f"no word from the ranks for {silent:.0f} s"] if silent > SILENT_SECONDS else speed
        skipped = report["steps"]["skipped"]
        text = Text(f"step {report['steps']['seen']:,} · ")
        text.append(*_last_verdict(report))
        text.append(" · ")
        whole = report["guarded_ranks"] == report["world_size"]
        text.append(guarded, "" if whole else "bold yellow")
        parts = [
            *speed,
            f"{words.count(report['checks']['replay']['run'], 'audit')}, "
            f"{words.count(report['checks']['weights']['run'], 'vote')}",
            *([f"{skipped:,} skipped"] if skipped else []),
            *([f"overhead {over:.1f} %"] if over is not None else []),
        ]
        return text.append("".join(f" · {part}" for part in parts))


def _last_verdict(report: dict[str, Any]) -> tuple[str, str]:
    """(words, style) for the newest finding that is more than a note."""
    found = [row for row in report["findings"] if row["verdict"] not in QUIET]
    if not found:
        return "clean", "green"
    last = found[-1]
    who = "" if last["rank"] is None else f", rank {last['rank']}"
    mark = ", injected" if last["injected"] else ""
    return f"{last['verdict']} at step {last['step']}{who}{mark}", STYLES.get(last["verdict"], "")
