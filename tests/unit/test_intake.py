"""Events into record and decisions: with a record and a state machine made for the purpose."""

import pytest

from sdcrun.core.codec import CodecError, decode_event, decode_line, encode_event
from sdcrun.core.types import Action, Config, Event
from sdcrun.runner.intake import LATE_SECONDS, RETRY_WRITE_EVERY, Intake


class Machine:
    """Does what the events say; its state is the list of those it has seen."""

    def initial(self, config):
        return []

    def apply(self, state, event):
        return [*state, (event.source, event.seq)], [Action(*action) for action in event.data.get("do", ())]

    def tick(self, state, now):
        return state, []


class File:
    def __init__(self):
        self.content, self.full = b"", False

    def append_lines(self, lines):
        if self.full:
            raise OSError(28, "No space left")
        self.content += lines

    def lines(self):
        return self.content.splitlines(True)

    def events(self):
        return [decode_event(line) for line in self.lines()]


@pytest.fixture
def file():
    return File()


def intake_of(file, said=None):
    said = [] if said is None else said
    return Intake(Config(), Machine(), lambda: (file, file.lines()), said.append, said.append)


def give(intake, seq, source="rank:0", session="s", attempt=0, kind="k", **data):
    line = encode_event(Event(kind, source, attempt, seq, 1.0, data, session))[:-1]
    return intake.take(decode_line(line), line)


def test_each_event_is_on_record_once(file):
    intake = intake_of(file)
    intake.open()
    for seq in (1, 2, 2, 1, 3):
        give(intake, seq)
    give(intake, 1, session="t")
    give(intake, 1, attempt=1)
    assert intake.write(0.0) and intake.write(0.0)
    found = [(e.session, e.attempt, e.seq) for e in file.events() if e.source == "rank:0"]
    assert found == [("s", 0, 1), ("s", 0, 2), ("s", 0, 3), ("t", 0, 1), ("s", 1, 1)]
    assert intake.acked("rank:0", "s") == {0: 3, 1: 1}


def test_restart_knows_what_was_written_and_nothing_else(file):
    intake = intake_of(file)
    intake.open()
    give(intake, 1)
    intake.write(0.0)
    give(intake, 2)
    again = intake_of(file)
    again.open()
    assert again.acked("rank:0", "s") == {0: 1}
    assert again._state[:2] == [("controller", 1), ("rank:0", 1)]
    give(again, 1)
    give(again, 2)
    again.write(0.0)
    assert [e.seq for e in file.events() if e.source == "rank:0"] == [1, 2]
    assert [e.data["restarted"] for e in file.events() if e.kind == "started"] == [False, True]


def test_failed_write_is_said_once_and_tried_again(file):
    said = []
    intake = intake_of(file, said)
    intake.open()
    assert intake.write(0.0)
    file.full = True
    give(intake, 1)
    assert not intake.write(10.0)
    file.full = False
    assert not intake.write(10.0 + RETRY_WRITE_EVERY / 2)
    file.full = True
    give(intake, 2)
    assert not intake.write(10.0 + RETRY_WRITE_EVERY)
    assert len(said) == 1 and intake.unwritten > 0 and [e.kind for e in file.events()] == ["started"]
    file.full = False
    assert intake.write(20.0) and intake.unwritten == 0
    assert [e.seq for e in file.events()] == [1, 1, 2] and len(said) == 2


def test_gap_is_noted_before_the_event_that_shows_it(file):
    intake = intake_of(file)
    intake.open()
    give(intake, 3)
    intake.write(0.0)
    assert [e.kind for e in file.events()] == ["started", "gap", "k"]
    assert file.events()[1].data == {"source": "rank:0", "after": 0, "upto": 2}


def test_commands_are_recorded_and_counted_alike_after_a_restart(file):
    intake = intake_of(file)
    intake.open()
    give(intake, 1, do=[["command", {"what": "audit", "why": "w", "code": None}], ["say", {"text": "t"}]])
    give(intake, 2, do=[["command", {"what": "vote", "why": "w", "code": None}]])
    actions = list(intake.actions())
    assert [(a.kind, a.data.get("id")) for a in actions] == [("command", 1), ("say", None), ("command", 2)]
    intake.write(0.0)
    again = intake_of(file)
    again.open()
    assert again.commands == intake.commands and len(again.commands) == 2
    assert list(again.actions()) == [], "a command was given twice"


def test_command_not_yet_on_record_is_owed_after_a_restart(file):
    intake = intake_of(file)
    intake.open()
    give(intake, 1, do=[["command", {"what": "audit", "why": "w", "code": None}]])
    give(intake, 2, source="node:h:1", do=[["stop", {"code": 86, "why": "w"}]])
    intake.write(0.0)
    again = intake_of(file)
    again.open()
    assert [a.kind for a in again.actions()] == ["command", "stop"]
    assert again.owes_stop("node:h:1")
    again.write(0.0)
    third = intake_of(file)
    third.open()
    assert list(third.actions()) == [] and third.owes_stop("node:h:1") and not third.owes_stop("node:h:2")


def test_a_supervisor_that_comes_soon_after_a_stop_is_told_to(file, monkeypatch):
    """That of a node whose ranks have only just found the controller; not one that runs the same job again later."""
    now = [100.0]
    monkeypatch.setattr("sdcrun.runner.intake.time.monotonic", lambda: now[0])
    intake = intake_of(file)
    intake.open()
    assert not intake.owes_stop("node:h:2")
    give(intake, 1, source="node:h:1", do=[["stop", {"code": 86, "why": "w"}]])
    assert [a.kind for a in intake.actions()] == ["stop"]
    now[0] += LATE_SECONDS - 1
    assert intake.owes_stop("node:h:1") and intake.owes_stop("node:h:2")
    now[0] += 2
    assert intake.owes_stop("node:h:1") and not intake.owes_stop("node:h:2")


def test_unreadable_and_doubled_lines_of_the_record_are_passed_over(file):
    line = encode_event(Event("k", "rank:0", 0, 1, 1.0, {}, "s"))
    file.content = line + b"nonsense\n" + line
    said = []
    intake = intake_of(file, said)
    intake.open()
    assert intake._state == [("rank:0", 1), ("controller", 1)] and len(said) == 1


def test_record_stays_one_ascii_line_per_event_however_it_was_spelled(file):
    intake = intake_of(file)
    intake.open()
    line = (
        '{"v":1,"kind":"k",\r "source":"é","session":"s","attempt":0,"seq":1,"time":1.0,"data":{"a":"\u2028"}}'
    ).encode()
    intake.take(decode_line(line), line)
    intake.write(0.0)
    assert file.content.isascii() and len(file.content.splitlines()) == 2
    assert file.events()[1].data == {"a": "\u2028"} and file.events()[1].source == "é"


def test_what_is_no_event_changes_nothing(file):
    intake = intake_of(file)
    intake.open()
    with pytest.raises(CodecError):
        intake.take({"v": 1, "kind": "k"}, b"{}")
    intake.write(0.0)
    assert [e.kind for e in file.events()] == ["started"]


def test_before_the_record_can_be_opened_events_are_kept(file):
    intake = intake_of(file)
    give(intake, 1)
    assert not intake.write(0.0)
    intake.open()
    assert intake.write(0.0)
    assert [e.kind for e in file.events()] == ["k", "started"]
