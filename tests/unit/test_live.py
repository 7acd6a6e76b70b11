"""The status of a job where it was started: a line a minute without a terminal, nothing when it is not ours to show."""

from __future__ import annotations

import pytest
from eventmaker import Job

from sdcrun.core.codec import encode_event
from sdcrun.runner import live, statusline


class Voice:
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    def warn(self, text):
        self.said.append(f"warning: {text}")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    for name in ("EVERY", "LINE_EVERY", "SHARE"):
        monkeypatch.setattr(live, name, 0.0)


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Returns a function that runs the live status over a job's folder and gives back what was said."""

    def run(ours=True, terminal=False, events=None, **config):
        job = Job(4, job_dir=str(tmp_path), **config)
        job.node_up()
        job.hello()
        job.summaries(50)
        (tmp_path / "events.jsonl").write_bytes(b"".join(map(encode_event, job.events)) if events is None else events)
        monkeypatch.setattr(statusline, "possible", lambda *_: terminal)
        voice = Voice()
        status = live.Live(job.config, voice, lambda: ours, {})
        status.begin()
        status.turn()
        status.end()
        status.turn()
        return voice.said

    return run


def test_without_a_terminal_a_line_now_and_then(shown):
    assert shown() == ["step 50 · clean · 4/4 guarded · 0 audits, 50 votes · overhead 1.0 %"]


def test_quiet_says_nothing(shown):
    assert shown(quiet=True) == []


def test_of_several_supervisors_one_speaks(shown):
    assert shown(ours=False) == []


def test_a_job_without_a_folder_has_no_status(tmp_path):
    voice = Voice()
    status = live.Live(Job(4).config, voice, lambda: True, {})
    status.begin(), status.turn(), status.end()
    assert voice.said == []


def test_on_a_terminal_it_is_drawn_and_taken_away(shown, monkeypatch):
    calls = []

    class Line:
        def __init__(self, descriptor):
            assert descriptor == 2

        def open(self):
            calls.append("open")

        def draw(self, text):
            calls.append(text.plain)

        def close(self):
            calls.append("close")

    monkeypatch.setattr(statusline, "StatusLine", Line)
    assert shown(terminal=True) == []
    line = "[sdcrun] step 50 · clean · 4/4 guarded · 0 audits, 50 votes · overhead 1.0 %"
    assert calls == ["open", line, "close"]


def test_trouble_ends_the_status_and_nothing_else(shown, monkeypatch):
    from sdcrun.report import follow

    monkeypatch.setattr(follow.Progress, "line", lambda *_: 1 / 0)
    assert shown() == ["warning: no live status any more (ZeroDivisionError: division by zero)"]
