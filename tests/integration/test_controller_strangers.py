"""Whoever cannot prove the secret learns nothing, changes nothing and delays nobody."""

import contextlib
import itertools
import json
import random
import socket
import time
from collections import deque

import pytest
from controlkit import PATIENCE, Job, Peer, wait_for

from sdcrun.core.codec import MAX_LINE, encode_message
from sdcrun.runner import server
from sdcrun.wire.link import Link
from sdcrun.wire.runtime import read_runtime

NOISE = 10_000


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    job.start()
    yield job
    job.end()


EVENT = b'{"v":1,"attempt":0,"source":"rank:0","session":"x","seq":1,"kind":"bye","time":1.0,"data":{}}\n'
HELLO = encode_message("hello", source="rank:0", session="x", version="0", schema=1, seen=None, blind=None)


def test_wrong_secret_learns_and_changes_nothing(job):
    peer = Peer(job)
    assert peer.prove("wrong" * 10) is None
    for data in (HELLO + EVENT, EVENT, encode_message("finish", grace=0), encode_message("proof", nonce="n" * 32)):
        peer = Peer(job)
        peer.send(data)
        assert peer.read()["msg"] == "challenge" and peer.read() is None
    assert job.controller.poll() is None
    assert not (job.folder / "events.jsonl").exists()
    wait_for(lambda: len([line for line in job.logged() if "closed: " in line]) >= 5)
    assert len([line for line in job.logged() if "wrong secret" in line]) == 2


def test_challenges_do_not_repeat_and_answers_cannot_be_replayed(job):
    """What one connection was answered is worthless in another, also as the answer of the other side."""
    first, second = Peer(job), Peer(job)
    challenge = first.read()["nonce"]
    assert second.read()["nonce"] != challenge
    right = Peer(job)
    reply = right.prove()
    second.send(encode_message("proof", nonce="n" * 32, proof=reply["proof"]))
    assert second.read() is None


def test_client_sends_nothing_to_a_false_controller(job, tmp_path):
    """It only proves itself; no event goes to who cannot prove the secret in turn."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = {"host": "127.0.0.1", "port": impostor.getsockname()[1], "secret": "s" * 32}
        link = Link(job.config, "rank:0", lambda: address)
        link.emit("limit", {"text": "precious", "check": None}, 0)
        for answer in (
            encode_message("proof", proof="0" * 64),
            encode_message("welcome", acked={}, summary_every=1, command=0),
            b"x" * 100_000,
            b"",
        ):
            connection, _ = impostor.accept()
            connection.settimeout(PATIENCE)
            with connection, connection.makefile("rb") as received:
                connection.sendall(encode_message("challenge", nonce="c" * 32))
                assert json.loads(received.readline())["msg"] == "proof"
                try:
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    assert received.read() == b""
                except OSError as error:
                    assert not isinstance(error, TimeoutError)
        address.update(read_runtime(job.runtime))
        assert link.close(PATIENCE)
    assert [event.data["text"] for event in job.events() if event.source == "rank:0"] == ["precious"]


BROKEN = [
    b"\n",
    b"null\n",
    b'{"msg": "dance"}\n',
    b'{"msg": ["ping"]}\n',
    b'{"v": 1}\n',
    b'{"v": 2}\n',
    b'{"a": NaN}\n',
    b"\xff\xfe\n",
    b"[" * 5000 + b"\n",
    EVENT.replace(b"rank:0", b"rank:1"),
    EVENT.replace(b'"seq":1', b'"seq":-1'),
    encode_message("finish", grace="soon"),
    encode_message("finish", grace=-1),
    encode_message("blind", since="x", until=1),
    encode_message("ask", id=3, kind="x", timeout=1),
    b'{"msg": "ask", "id": "a", "kind": "b", "timeout": NaN}\n',
]


def test_broken_line_of_a_proven_client_closes_its_connection_alone(job):
    good = Peer(job)
    good.prove()
    assert good.hello("rank:1", "x")["msg"] == "welcome"
    for n, line in enumerate(BROKEN):
        bad = Peer(job)
        bad.prove()
        assert bad.hello("rank:0", "x")["msg"] == "welcome"
        bad.send(line)
        assert bad.read() is None, line
        assert len([text for text in job.logged() if "connection of rank:0 closed" in text]) == n + 1
    good.send(encode_message("ping"))
    assert good.read()["msg"] == "pong"
    assert {event.source for event in job.events()} == {"controller"}


def test_line_without_end_of_a_proven_client(job):
    peer = Peer(job)
    peer.prove()
    peer.hello()
    try:
        for _ in range(20):
            peer.send(b"x" * (MAX_LINE // 10))
    except ConnectionError:
        pass
    assert peer.read() is None
    assert any("line too long" in text for text in job.logged())


def test_another_version_is_refused_with_a_clear_line(job):
    for n, changes in enumerate([{"version": "9.9"}, {"schema": 2}, {"version": None}]):
        peer = Peer(job)
        peer.prove()
        reply = peer.hello(**changes)
        assert reply["msg"] == "refused" and "install the same version" in reply["why"]
        assert peer.read() is None
        assert job.said().count("refused 'rank:0'") == n + 1
    assert not (job.folder / "events.jsonl").exists()


def test_malformed_hello(job):
    for changes in ({"source": ""}, {"source": 3}, {"session": "s" * 300}, {"blind": 1}, {"blind": {"since": 1}}):
        peer = Peer(job)
        peer.prove()
        assert peer.hello(**changes) is None, changes


def test_noise_on_the_port_neither_crashes_nor_delays_nor_grows(job):
    """Connections of every bad kind, some of them left half open or fed byte by byte, while a real client works."""
    chance = random.Random(5)
    address = read_runtime(job.runtime)
    link = job.link("rank:0")
    link.emit("limit", {"text": "-1", "check": None}, 0)
    wait_for(lambda: link._backlog.empty)
    memory = job.memory()
    kinds = [
        lambda: chance.randbytes(chance.randint(1, 3000)),
        lambda: b"x" * 200_000,
        lambda: EVENT * 50,
        lambda: HELLO,
        lambda: b"",
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: encode_message("proof", nonce="n" * 32, proof="0" * 64),
        lambda: b'{"msg":',
    ]
    held = deque()
    for n in range(NOISE):
        connection = socket.create_connection((address["host"], address["port"]), timeout=PATIENCE)
        try:
            connection.sendall(chance.choice(kinds)())
        except ConnectionError:
            pass
        if n % 3:
            held.append(connection)
        else:
            connection.close()
        if len(held) > 3000:
            held.popleft().close()
        for slow in itertools.islice(held, 20):
            with contextlib.suppress(OSError):
                slow.send(b"x")
        if n % 40 == 0:
            link.emit("limit", {"text": str(n), "check": None}, 0)
            wait_for(lambda: link._backlog.empty)
    assert job.controller.poll() is None
    assert job.memory() - memory < 16 << 20
    assert link.close(PATIENCE)
    for connection in held:
        connection.close()
    job.finish()
    assert [event.data["text"] for event in job.by_source()["rank:0"]] == ["-1", *map(str, range(0, NOISE, 40))]
    assert len(job.logged()) >= 100
    assert job.said() == ""


def test_crowd_of_silent_strangers_does_not_keep_a_client_out(job):
    """More half-open connections than the controller keeps: it makes room."""
    address = read_runtime(job.runtime)
    crowd = []
    try:
        for _ in range(server.MAX_STRANGERS + 200):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex((address["host"], address["port"]))
            crowd.append(sock)
        link = job.link("rank:0")
        link.emit("limit", {"text": "1", "check": None}, 0)
        assert link.close(PATIENCE)
    finally:
        for sock in crowd:
            sock.close()
    assert job.events()[-1].source == "rank:0"


def test_slow_stranger_is_closed_in_the_end(monkeypatch):
    """One byte at a time does not buy more time."""
    monkeypatch.setattr(server, "STRANGER_TIME", 0.2)
    logged = []
    here = server.Server(server.listen("127.0.0.1", 0), "s" * 32, None, logged.append)
    with socket.create_connection(here.address) as stranger:
        until = time.monotonic() + PATIENCE
        while not logged and time.monotonic() < until:
            here.turn(0.01)
            stranger.sendall(b"{")
            time.sleep(0.01)
    here.shut(0)
    assert len(logged) == 1 and "did not prove itself in time" in logged[0]
