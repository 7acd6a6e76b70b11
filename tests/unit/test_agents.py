"""When a launch whose agents only wait for each other is ended."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from sdcrun.runner import agents


class OfNobody:
    """Children whose agents tell `lines` and whose ranks nobody ever sees."""

    def __init__(self, lines: bytes) -> None:
        self.lines, self.sessions, self.sent = lines, set(), []

    def start(self, role, index, arguments, environ, pet, report, linger):
        os.write(report, self.lines)
        send = self.sent.append
        return SimpleNamespace(pid=1000 + index, workers=set(), has_workers=False, code=None, send=send)

    def press(self, hurry):
        return False


@pytest.mark.parametrize(("lines", "ended"), [(b"", False), (b"\n", True), (b"\n\n", True)])
def test_agents_whose_ranks_were_too_quick_to_be_seen_are_not_waited_for(monkeypatch, lines, ended):
    now, said, children = [0.0], [], OfNobody(lines)
    monkeypatch.setattr("sdcrun.runner.agents.time.monotonic", lambda: now[0])
    options = SimpleNamespace(shutdown_timeout=None, max_restarts=1)
    plan = SimpleNamespace(options=options, torchrun=(), script="s.py", script_args=(), local_nodes=3, nodes=3,
                           min_nodes=3, given=frozenset())  # fmt: skip
    watched = agents.Agents(plan, children, SimpleNamespace(say=said.append), set())
    watched.start({}, "job", "", None, None)
    watched.turn()
    now[0] += agents.IDLE_RESTART_SECONDS - 1
    watched.turn()
    assert not said
    now[0] += 1
    watched.turn()
    assert bool(said) is bool(children.sent) is ended


@pytest.mark.parametrize(("first", "code"), [("signal", 1), ("stop", 1), (None, 134)])
def test_an_agent_that_aborts_while_it_ends_after_a_signal_has_ended_with_1(first, code):
    children = OfNobody(b"")
    plan = SimpleNamespace(options=SimpleNamespace(shutdown_timeout=1, max_restarts=0), torchrun=(), script="s.py",
                           script_args=(), local_nodes=1, nodes=1, min_nodes=1, given=frozenset())  # fmt: skip
    watched = agents.Agents(plan, children, SimpleNamespace(say=print), {signal.SIGTERM})
    watched.start({}, "job", "", None, None)
    if first is not None:
        getattr(watched, first)(signal.SIGTERM if first == "signal" else "why")
    (child,) = watched.living.values()
    child.code = 134
    watched.ended(child)
    assert watched.code == code


def test_what_an_agent_tells_of_failed_ranks_stands_behind_the_empty_lines():
    row = b'[{"rank": 1, "local_rank": 0, "pid": 77, "exit": 3, "at": 5.0}]'
    children = OfNobody(b"\n\n" + row + b"\n")
    plan = SimpleNamespace(options=SimpleNamespace(shutdown_timeout=1, max_restarts=0), torchrun=(), script="s.py",
                           script_args=(), local_nodes=1, nodes=1, min_nodes=1, given=frozenset())  # fmt: skip
    watched = agents.Agents(plan, children, SimpleNamespace(say=print), set())
    watched.start({}, "job", "", None, None)
    (child,) = watched.living.values()
    rows = [{"rank": 1, "exit": 3, "text": "local rank 0, pid 77", "at": 5.0}]
    assert watched.ended(child) == rows == watched.failures
