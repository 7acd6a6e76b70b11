"""What sdcrun says: on stderr only, each line whole and marked, never in the way of the script's own output."""

from __future__ import annotations

import os

from sdcrun.runner import statusline


def fresh_line(descriptor: int) -> bytes:
    """What moves the cursor of a terminal to an empty line: nothing where it is at the start of one, else down, so
    that a partial line of the script (a progress bar) stays. Where the cursor is cannot be asked for; a line of blanks
    ends on the same row only when it began at its start. Empty where `descriptor` is no terminal with a person."""
    if not statusline.possible(descriptor, os.environ):
        return b""
    return b" " * os.get_terminal_size(descriptor).columns + b"\r\x1b[K"


class Voice:
    """Lines on stderr. With `quiet` only warnings are said. A closed stderr is no error."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._warned: set[str] = set()

    def say(self, text: str) -> None:
        """A line for whoever watches."""
        if not self.quiet:
            self._write(text)

    def warn(self, text: str) -> None:
        """A line that must be seen; the same one is said once."""
        if text not in self._warned:
            self._warned.add(text)
            self._write(f"warning: {text}")

    def error(self, text: str) -> None:
        """The one line of a command that ends here."""
        self._write(f"error: {text}")

    def _write(self, text: str) -> None:
        try:
            lines = "".join(f"[sdcrun] {line}\n" for line in text.splitlines())
            os.write(2, fresh_line(2) + lines.encode("utf-8", "replace"))
        except OSError:
            pass
