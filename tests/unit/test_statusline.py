"""The status line stays on its row and leaves alone whatever else is written to the terminal."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from screen import Screen

from sdcrun.runner import speak, statusline

ROWS, COLUMNS = 8, 60


class Recorded(statusline.StatusLine):
    """A status line whose output goes to a screen; the terminal's size is the screen's."""

    def __init__(self, screen):
        super().__init__(-1)
        self.screen = screen

    def _foreground(self):
        return True

    def _write(self, text):
        self.screen.feed(text)


@pytest.fixture(autouse=True)
def size(monkeypatch):
    current = [os.terminal_size((COLUMNS, ROWS))]
    monkeypatch.setattr(statusline.os, "get_terminal_size", lambda descriptor: current[0])
    return current


pieces = st.one_of(
    st.text("abc xyz", min_size=1, max_size=COLUMNS + 5), st.sampled_from(["\r\n", "\r", "\r\nlast line", "draw"])
)


@given(start=st.lists(pieces, max_size=12), rest=st.lists(pieces, max_size=40))
def test_output_is_as_on_a_terminal_with_one_row_less(start, rest):
    screen, alone = Screen(ROWS, COLUMNS), Screen(ROWS - 1, COLUMNS)
    for piece in start:
        screen.feed("" if piece == "draw" else piece)
        alone.feed("" if piece == "draw" else piece)
    line = Recorded(screen)
    line._reserve()
    # What was there before may have moved up by a row; from here on everything must be the same.
    alone.cells, (alone.row, alone.column) = [row[:] for row in screen.cells[:-1]], (screen.row, screen.column)
    for number, piece in enumerate(rest):
        if piece == "draw":
            line.draw(Text(f"status {number}", "red"))
            assert screen.lines()[-1] == f"status {number}"
        else:
            screen.feed(piece)
            alone.feed(piece)
    assert screen.lines()[:-1] == alone.lines()
    assert (screen.row, screen.column) == (alone.row, alone.column)
    line.close()
    assert screen.lines()[:-1] == alone.lines() and screen.lines()[-1] == ""
    assert (screen.top, screen.bottom) == (0, ROWS - 1)


@pytest.mark.parametrize("above", [0, 3, ROWS - 1, ROWS + 3])
def test_taking_the_row_loses_no_line(above):
    screen = Screen(ROWS, COLUMNS)
    screen.feed("".join(f"line {number}\r\n" for number in range(above)) + "half")
    before = [text for text in screen.lines() if text]
    line = Recorded(screen)
    line._reserve()
    kept = [text for text in screen.lines() if text]
    assert kept == before[-(ROWS - 1) :] and screen.lines()[-1] == ""
    screen.feed(" and half\r\nnext")
    assert screen.lines()[screen.row - 1] == "half and half"


def test_long_text_is_cut_to_the_width():
    screen = Screen(ROWS, COLUMNS)
    line = Recorded(screen)
    line._reserve()
    line.draw(Text("x" * 500))
    assert screen.lines()[-1] == "x" * (COLUMNS - 2) + "…" and screen.lines()[:-1] == [""] * (ROWS - 1)


def test_a_larger_window_gets_a_new_row_and_loses_the_old_one(size):
    screen = Screen(ROWS, COLUMNS)
    line = Recorded(screen)
    line._reserve()
    screen.feed("output\r\npart")
    line.draw(Text("old"))
    larger = Screen(ROWS + 4, COLUMNS)
    larger.cells[:ROWS], larger.row, larger.column, larger.bottom = screen.cells, screen.row, screen.column, ROWS - 2
    line.screen, size[0] = larger, os.terminal_size((COLUMNS, ROWS + 4))
    line.draw(Text("new"))
    assert larger.lines() == ["output", "part", *[""] * (ROWS + 1), "new"]
    larger.feed("ial")
    assert larger.lines()[1] == "partial"


def test_a_window_too_small_gets_no_status(size):
    screen = Screen(ROWS, COLUMNS)
    line = Recorded(screen)
    line._reserve()
    size[0] = os.terminal_size((COLUMNS, 3))
    line.draw(Text("status"))
    assert "status" not in screen.lines() and (screen.top, screen.bottom) == (0, ROWS - 1)


@pytest.mark.parametrize("typed", ["", "x", "x" * (COLUMNS - 1), "x" * COLUMNS, "x" * (COLUMNS + 1), "line\r\n"])
def test_a_line_of_ours_starts_on_an_empty_line_and_damages_nothing(typed, monkeypatch):
    monkeypatch.setattr(statusline, "possible", lambda *_: True)
    screen, alone = Screen(ROWS, COLUMNS), Screen(ROWS, COLUMNS)
    screen.feed(typed), alone.feed(typed)
    screen.feed(speak.fresh_line(2).decode() + "[sdcrun] word\r\n")
    before = [line for line in alone.lines() if line]
    assert screen.lines()[: len(before) + 2] == [*before, "[sdcrun] word", ""]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "CI": "1"}, False), ({"TERM": "dumb"}, False), ({}, False)],
)
def test_only_on_a_terminal_with_a_person_before_it(environ, expected):
    assert statusline.possible(2, environ) is expected


def test_not_on_a_pipe(monkeypatch):
    monkeypatch.undo()
    read, write = os.pipe()
    assert not statusline.possible(write, {"TERM": "xterm"})
    os.close(read), os.close(write)
