"""The client in a rank or supervisor: commands, questions, forks, signals, exits."""

import _thread
import os
import signal
from pathlib import Path

import pytest
from controlkit import PATIENCE, Job, Peer, wait_for

from sdcrun.wire.link import Link

MACHINE = str(Path(__file__).with_name("controlmachine.py"))


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path, MACHINE)
    job.start()
    yield job
    job.end()


def do(link, *actions, **data):
    link.emit("do", {"do": list(actions), **data}, 0)


AUDIT = ("command", {"what": "audit", "why": "because", "code": None})
STOP = ("stop", {"code": 86, "why": "enough"})


def taken(link):
    """The first commands that arrive."""
    found = set()
    wait_for(lambda: found.update(link.requests()) or found)
    return found


def test_command_reaches_all_ranks_once(job):
    ranks = [job.link(f"rank:{rank}") for rank in range(3)]
    node = job.link("node:h:2")
    for link in [*ranks, node]:
        link.emit("limit", {"text": "here", "check": None}, 0)
        wait_for(lambda link=link: link._backlog.empty)
    do(ranks[0], AUDIT)
    assert [taken(link) for link in ranks] == [{"audit"}] * 3
    assert [link.requests() for link in [*ranks, node]] == [frozenset()] * 4
    commands = [event for event in job.events() if event.kind == "command"]
    assert [event.data for event in commands] == [AUDIT[1]]


def test_command_given_while_a_rank_was_cut_off_reaches_it_later(job):
    near, far = Peer(job), Peer(job)
    for peer, source in ((near, "rank:0"), (far, "rank:1")):
        peer.prove()
        assert peer.hello(source, source)["command"] == 0
    far.socket.close()
    link = job.link("rank:2")
    do(link, AUDIT)
    assert near.read() == {"msg": "command", "id": 1, **AUDIT[1]}
    job.kill()
    job.start()
    back, fresh = Peer(job), Peer(job)
    back.prove()
    assert back.hello("rank:1", "rank:1", seen=0)["command"] == 1
    assert back.read()["what"] == "audit"
    fresh.prove()
    assert fresh.hello("rank:1", "another process")["command"] == 1
    fresh.send(b'{"msg":"ping"}\n')
    assert fresh.read() == {"msg": "pong"}


def test_stop_reaches_supervisors_also_those_cut_off(job):
    node, rank = job.link("node:h:2"), job.link("rank:0")
    heard = []
    node.on("stop", heard.append)
    node.emit("node_up", {}, 0)
    wait_for(lambda: node._backlog.empty)
    do(rank, STOP)
    wait_for(lambda: node.stop)
    assert node.stop == STOP[1] and heard == [STOP[1]] and rank.stop is None
    job.kill()
    job.start()
    known, later = Peer(job), Peer(job)
    known.prove()
    known.hello("node:h:2", node.session)
    assert known.read() == {"msg": "stop", **STOP[1]}
    later.prove()
    later.hello("node:h:77", "x")
    later.send(b'{"msg":"ping"}\n')
    assert later.read() == {"msg": "pong"}, "a supervisor that runs the same job again was stopped"
    assert len([event for event in job.events() if event.kind == "command"]) == 1


def test_decision_whose_controller_died_before_recording_it(job):
    """The event is on record, the stop that follows from it is not."""
    job.kill()
    head = '{"v":1,"attempt":0,"session":"x","time":1.0,"seq":1,'
    (job.folder / "events.jsonl").write_text(
        head + '"source":"node:h:2","kind":"node_up","data":{}}\n'
        + head + '"source":"rank:0","kind":"do","data":{"do":[["stop",{"code":87,"why":"w"}]]}}\n'
    )
    job.start()
    peer = Peer(job)
    peer.prove()
    peer.hello("node:h:2", "x")
    assert peer.read() == {"msg": "stop", "code": 87, "why": "w"}
    assert [event.data["what"] for event in job.events() if event.kind == "command"] == ["stop"]


def test_event_that_trips_the_decisions_is_on_record_all_the_same(job):
    link = job.link("rank:0")
    do(link, trip=True)
    do(link, ("say", {"text": "still\nhere", "level": "info"}))
    assert link.close(PATIENCE)
    job.finish()
    assert [event.kind for event in job.by_source()["rank:0"]] == ["do", "do"]
    assert job.said() == "[sdcrun] still?here\n"
    assert len([line for line in job.logged() if "not understood" in line]) == 1


def test_question_to_all_ranks(job):
    ranks = [job.link(f"rank:{rank}") for rank in range(4)]
    for number, link in enumerate(ranks):
        link.on("table", lambda data, number=number: [data["step"], number // 2])
        link.emit("limit", {"text": "here", "check": None}, 0)
        wait_for(lambda link=link: link._backlog.empty)
    ranks[3].on("table", lambda data: 1 / 0)
    assert ranks[0].ask("table", {"step": 5}, PATIENCE) == {
        "rank:0": [5, 0],
        "rank:1": [5, 0],
        "rank:2": [5, 1],
        "rank:3": None,
    }
    job.controller.send_signal(signal.SIGSTOP)
    assert ranks[0].ask("table", {"step": 6}, 0.2) == {}
    job.controller.send_signal(signal.SIGCONT)


def test_question_does_not_wait_for_a_rank_that_is_silent(job):
    mute = Peer(job)
    mute.prove()
    mute.hello("rank:1", "x")
    link = job.link("rank:0")
    link.on("table", lambda data: data)
    assert link.ask("table", {"a": 1}, 0.5) in ({"rank:0": {"a": 1}}, {})
    assert mute.read()["kind"] == "table"


def test_only_the_newest_summary_matters(job):
    job.controller.send_signal(signal.SIGSTOP)
    link = job.link("rank:0")
    for n in range(1000):
        link.emit("summary", {"n": n}, 0)
    link.emit("limit", {"text": "0", "check": None}, 0)
    job.controller.send_signal(signal.SIGCONT)
    assert link.close(PATIENCE)
    job.finish()
    found = job.by_source()["rank:0"]
    numbers = [event.data["n"] for event in found if event.kind == "summary"]
    assert numbers[-1] == 999 and len(numbers) <= 2
    assert len([event for event in found if event.kind == "limit"]) == 1


def test_child_of_a_fork_is_silent_and_lets_go(job):
    """A data loader's worker must not speak for the rank, nor keep its connection open after its death."""
    script = (
        "emit(0)\n"
        "while not link._backlog.empty: time.sleep(0.01)\n"
        "if os.fork() == 0:\n"
        "    emit(1); link.requests(); assert link.close(5); assert link.ask('x', {}, 5) == {}\n"
        "    print('done', flush=True); time.sleep(60)\n"
        "emit(2)\n"
        "while not link._backlog.empty: time.sleep(0.01)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    client = job.client("rank:0", script, stdout=-1, text=True, start_new_session=True)
    try:
        assert {client.stdout.readline().strip() for _ in range(2)} == {"done", str(client.pid)}
        connections = f"/proc/{job.controller.pid}/fd"
        before = len(os.listdir(connections))
        client.kill()
        wait_for(lambda: len(os.listdir(connections)) < before)
        os.killpg(client.pid, 0)
    finally:
        os.killpg(client.pid, signal.SIGKILL)
    job.finish()
    assert [event.data["text"] for event in job.by_source()["rank:0"]] == ["0", "2"]


def test_events_from_signal_handlers_threads_and_exit(job):
    script = (
        "import atexit, signal, threading\n"
        "signal.signal(signal.SIGALRM, lambda *_: emit('signal'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)\n"
        "threads = [threading.Thread(target=lambda: [emit(f'thread {n}') for n in range(300)]) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "for n in range(2000): emit(f'main {n}')\n"
        "for thread in threads: thread.join()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "atexit.register(lambda: (emit('exit'), link.close(120), emit('late')))\n"
    )
    assert job.client("rank:0", script).wait(PATIENCE) == 0
    job.finish()
    found = [event.data["text"] for event in job.by_source()["rank:0"]]
    assert [text for text in found if text.startswith("main")] == [f"main {n}" for n in range(2000)]
    assert len([text for text in found if text.startswith("thread")]) == 900
    assert "signal" in found
    assert [text for text in found if text in ("exit", "late")] == ["exit", "late"]


def test_interrupt_in_the_middle_of_emit_loses_and_doubles_nothing(job):
    """Ctrl-C may come between any two instructions."""
    script = (
        "import random, signal\n"
        # Once for each time that it is armed, and so never outside the try.
        "def raising(*_):\n"
        "    global armed\n"
        "    if armed:\n"
        "        armed = False\n"
        "        raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGALRM, raising)\n"
        # However long it takes on this host, about every second one is interrupted.
        "n, whole, most = 0, [], 0.00006\n"
        "while n < 1500:\n"
        "    n += 1\n"
        "    try:\n"
        "        armed = True\n"
        "        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.000005, most)); emit(n); whole.append(n)\n"
        "        armed = False\n"
        "        most = max(most / 1.1, 0.00001)\n"
        "    except KeyboardInterrupt: most *= 1.1\n"
        "emit(0)\n"
        "assert link.close(120)\n"
        "print(*whole)\n"
    )
    client = job.client("rank:0", script, stdout=-1, text=True)
    whole = set(map(int, client.communicate(timeout=PATIENCE)[0].split()))
    assert client.returncode == 0
    job.finish()
    found = [int(event.data["text"]) for event in job.by_source()["rank:0"]]
    assert found[-1] == 0 and found[:-1] == sorted(set(found[:-1])), "doubled or out of order"
    assert whole <= set(found), "lost"
    assert 0 < len(whole) < 1500, "nothing or everything was interrupted"


def test_emit_never_raises(job):
    link = job.link("rank:0")
    loop = []
    loop.append(loop)
    for data in ({"a": object()}, {"a": loop}, None, 3, {("t",): {1, 2}}):
        link.emit("limit", data, 0)
    link.emit("limit", {}, None)
    link.emit("limit", {"last": True}, 0)
    assert link.close(PATIENCE)
    job.finish()
    assert [bool(event.data.get("last")) for event in job.by_source()["rank:0"]] == [False] * 5 + [True]


def test_without_a_controller_nothing_waits(tmp_path):
    job = Job(tmp_path)
    before = _thread._count()
    for address in (lambda: None, lambda: 1 / 0, lambda: {"host": "127.0.0.1", "port": 9, "secret": "s" * 32}):
        link = Link(job.config, "rank:0", address)
        link.emit("limit", {"text": "x", "check": None}, 0)
        assert not link.close(0.2)
        assert link.ask("x", {}, 0.05) == {}
    assert len(list((job.folder / "spool").iterdir())) == 3
    wait_for(lambda: _thread._count() == before)


def test_link_that_never_spoke_ends_at_once(job):
    link = job.link("rank:0")
    assert link.close(PATIENCE)
    assert not (job.folder / "spool").exists()
