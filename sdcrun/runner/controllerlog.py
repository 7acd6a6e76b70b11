"""What the controller says: to people on stderr, and line by line into a bounded log in the job folder."""

from __future__ import annotations

import contextlib
import os
import time

from sdcrun.runner.speak import fresh_line

MAX_LOG = 4 << 20
MAX_TEXT = 300
NOTES_A_MINUTE = 5


class ControllerLog:
    """`say` is for people and goes to stderr. `log` is about one connection or line and goes to the file at `path`,
    made at the first such line, up to `MAX_LOG` bytes; only where that cannot be written it goes to stderr,
    `NOTES_A_MINUTE` times a minute. Whoever floods the port must not flood the user's terminal or disk."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._size = 0
        self._minute = float("-inf")
        self._notes = 0

    def say(self, text: str) -> None:
        """One line on stderr."""
        with contextlib.suppress(OSError):
            os.write(2, fresh_line(2) + b"[sdcrun] " + _one_line(text, 4096) + b"\n")

    def log(self, text: str) -> None:
        """One line in the log."""
        line = time.strftime("%Y-%m-%dT%H:%M:%S ").encode() + _one_line(text, MAX_TEXT) + b"\n"
        try:
            self._open()
            if self._size + len(line) <= MAX_LOG:
                self._size += os.write(self._fd, line)
        except OSError:
            self._note(text)

    def _note(self, text: str) -> None:
        now = time.monotonic()
        if now - self._minute >= 60.0:
            self._minute, self._notes = now, 0
        self._notes += 1
        if self._notes <= NOTES_A_MINUTE:
            self.say(f"controller: {text[:MAX_TEXT]}")

    def _open(self) -> None:
        if self._fd < 0:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._fd).st_size


def _one_line(text: str, most: int) -> bytes:
    """Nothing a stranger sends may move the cursor or start a new line."""
    return "".join(char if char.isprintable() else "?" for char in text[:most]).encode("utf-8", "replace")
