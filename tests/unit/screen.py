"""A terminal small enough to check: what a stream of output leaves on the screen of an xterm of that size."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\x1b(?:\[([?\d;]*)([A-Za-z])|([78DM]))")


class Screen:
    """`rows` x `columns` cells. Understands what the status line uses, carriage return, newline and plain text;
    anything else is an error."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.cells = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.top, self.bottom = 0, rows - 1
        self.saved = (0, 0)

    def lines(self) -> list[str]:
        """The rows as text."""
        return ["".join(row).rstrip() for row in self.cells]

    def feed(self, text: str) -> None:
        """Take output in."""
        at = 0
        while at < len(text):
            match = _ESCAPE.match(text, at)
            if match:
                self._escape(match[1] or "", match[2] or match[3])
                at = match.end()
            else:
                self._character(text[at])
                at += 1

    def _character(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        elif character.isprintable():
            if self.column == self.columns:
                self.column = 0
                self._down()
            self.cells[self.row][self.column] = character
            self.column += 1
        else:
            raise AssertionError(repr(character))

    def _down(self) -> None:
        if self.row == self.bottom:
            del self.cells[self.top]
            self.cells.insert(self.bottom, [" "] * self.columns)
        elif self.row < self.rows - 1:
            self.row += 1

    def _escape(self, parameters: str, kind: str) -> None:
        numbers = [int(number) for number in parameters.split(";") if number.isdigit()]
        first = numbers[0] if numbers else 0
        if kind == "7":
            self.saved = self.row, self.column
        elif kind == "8":
            self.row, self.column = self.saved
        elif kind == "D":
            self._down()
        elif kind == "A":
            self.row = max(0 if self.row < self.top else self.top, self.row - (first or 1))
        elif kind == "B":
            self.row = min(self.rows - 1 if self.row > self.bottom else self.bottom, self.row + (first or 1))
        elif kind == "r":
            self.top, self.bottom = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, self.rows - 1)
            self.row = self.column = 0
        elif kind == "H":
            self.row, self.column = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, 0)
        elif kind == "K" and first in (0, 2):
            start = 0 if first == 2 else self.column
            self.cells[self.row][start:] = [" "] * (self.columns - start)
        elif kind == "J" and first == 0:
            self.cells[self.row][self.column :] = [" "] * (self.columns - self.column)
            self.cells[self.row + 1 :] = [[" "] * self.columns for _ in range(self.rows - self.row - 1)]
        elif kind != "m":
            raise AssertionError(f"{parameters}{kind}")
