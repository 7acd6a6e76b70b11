"""What a running job shows on the terminal of the one who started it: one live line, or without a terminal one line a
minute. Findings are said by the controller, as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sdcrun.core.types import Config
from sdcrun.runner import statusline
from sdcrun.runner.speak import Voice

EVERY = 1.0
LINE_EVERY = 60.0
SHARE, LONGEST = 20.0, 10.0


class Live:
    """The status of one job. `ours` says whether the record is kept here: of several supervisors one shows it.

    `turn` costs about one part in `SHARE` of the supervisor's time at most, unless it takes most of a second.
    """

    def __init__(self, config: Config, voice: Voice, ours: Callable[[], bool], environ: Mapping[str, str]) -> None:
        self._config, self._voice, self._ours, self._environ = config, voice, ours, environ
        self._line: statusline.StatusLine | None = None
        self._follower = self._progress = None
        self._next: float | None = time.monotonic() + EVERY
        self._next_line = time.monotonic() + LINE_EVERY

    def begin(self) -> None:
        """After the banner, before the ranks can print."""
        if not self._config.quiet and self._config.job_dir and statusline.possible(2, self._environ):
            self._line = statusline.StatusLine(2)
            self._line.open()

    def turn(self) -> None:
        """Called often from the main loop. Whatever fails here ends the status, never the job."""
        now = time.monotonic()
        if self._next is None or now < self._next or self._config.quiet or not self._config.job_dir:
            return
        try:
            self._turn(now)
        except Exception as error:
            self.end()
            self._voice.warn(f"no live status any more ({type(error).__name__}: {error})")
        else:
            took = time.monotonic() - now
            self._next = now + min(LONGEST, max(EVERY, SHARE * took))

    def _turn(self, now: float) -> None:
        if not self._ours():
            return
        if self._follower is None:
            # Imported here: by now the ranks are on their way.
            from sdcrun.report.follow import Follower, Progress

            self._follower, self._progress = Follower(self._config.job_dir), Progress(self._config)
        from sdcrun.core import decide

        for event in self._follower.read():
            decide.fold(self._progress.state, event)
            self._progress.take(event, now)
        if self._line is not None:
            self._line.draw(self._marked(self._progress.line(now)))
        elif now >= self._next_line:
            self._next_line = now + LINE_EVERY
            self._voice.say(self._progress.line(now).plain)

    @staticmethod
    def _marked(line: Any) -> Any:
        from rich.text import Text

        return Text.assemble(("[sdcrun]", "bold"), " ", line)

    def end(self) -> None:
        """Give the terminal back; nothing is shown from now on."""
        self._next = None
        if self._line is not None:
            self._line.close()
            self._line = None
