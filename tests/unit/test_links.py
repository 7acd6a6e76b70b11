"""The ranks' own connections: where they listen, and that neither a fork nor a signal stands in their way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from sdcrun.shim import links as links_module
from sdcrun.shim.exchange import Exchange, ExchangeFailed
from sdcrun.shim.links import Links, own_address
from sdcrun.shim.transport import BallotFailed, Tree


def no_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return False
    except OSError:
        return True


@pytest.mark.parametrize("name, value, address", [
    ("GLOO_SOCKET_IFNAME", "lo", "127.0.0.1"), ("GLOO_SOCKET_IFNAME", "lo,eth9", "127.0.0.1"),
    ("MASTER_ADDR", "127.0.0.1", "127.0.0.1"), ("MASTER_ADDR", "localhost", "127.0.0.1"),
    pytest.param("MASTER_ADDR", "::1", "::1", marks=pytest.mark.skipif(no_ipv6(), reason="no IPv6 here")),
])  # fmt: skip
def test_the_address_is_that_of_the_interface_to_the_others(monkeypatch, name, value, address):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv(name, value)
    assert own_address() == address
    assert Links(0).door[0] == address


def test_an_interface_that_is_not_there_leaves_the_way_to_the_master(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"


@pytest.mark.parametrize("nodes, address", [("1", "127.0.1.1"), ("2", "198.51.100.7")])
def test_a_name_that_means_this_host_alone_is_not_told_to_other_nodes(monkeypatch, nodes, address):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    monkeypatch.setattr(links_module, "_source_towards", {"node-1": "127.0.1.1", "192.0.2.1": "198.51.100.7"}.get)
    assert own_address() == address


@pytest.fixture
def pair(monkeypatch):
    """The trees of two ranks, both in this process."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    links = [Links(0), Links(1)]
    for one in links:
        one.doors = [other.door for other in links]
    trees = [None, None]

    def make(rank):
        trees[rank] = Tree(links[rank], 2, 20.0, 20.0)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield links, trees
    for one in links:
        one.let_go()


def both(trees, *words):
    """What the ballots of two ranks with these words give: lists or errors."""
    got = [None, None]

    def vote(rank):
        try:
            got[rank] = trees[rank].max(words[rank])
        except BallotFailed as error:
            got[rank] = error

    threads = [threading.Thread(target=vote, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_a_forked_child_keeps_no_connection_open(pair):
    links, trees = pair
    assert both(trees, [1] * 8, [2] * 8) == [[2] * 8] * 2
    child = os.fork()
    if child == 0:
        # As in a data loader's worker.
        for one in links:
            one.let_go()
        time.sleep(60)
        os._exit(0)
    try:
        assert both(trees, [1] * 8, [2] * 8) == [[2] * 8] * 2, "what the child closes is its own"
        # The end of a process closes without a word more.
        links[1].let_go()
        started = time.monotonic()
        with pytest.raises(BallotFailed, match="left"):
            trees[0].max([0] * 8)
        assert time.monotonic() - started < 10
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_one_ballot_that_failed_is_the_last(pair):
    _, trees = pair
    trees[1].close()
    for tree in trees * 2:
        with pytest.raises(BallotFailed):
            tree.max([0] * 8)


def test_strangers_who_keep_knocking_extend_no_wait(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    links = Links(0)
    # Whoever is let in, there is always another one at the door.
    monkeypatch.setattr(links, "let_in", lambda: time.sleep(0.01))
    with socket.create_connection(links.door[:2]):
        with pytest.raises(TimeoutError):
            links.answer(1, 7, time.monotonic() + 0.5)
        with pytest.raises(ExchangeFailed, match=r"from ranks \[1\]"):
            Exchange(links, 2, 0.5).swap({}, [1], 1)


DEAF = """
import signal, socket, threading
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from sdcrun.shim.exchange import Exchange, ExchangeFailed
from sdcrun.shim.links import Links
links = [Links(0), Links(1)]
for one in links:
    one.doors = [other.door for other in links]
ours, theirs = (Exchange(one, 2, 20.0) for one in links)
ours.swap({1: b"x"}, [], 1)
theirs.swap({}, [0], 1)
theirs.close("gone")
try:
    for tag in range(2, 50):
        ours.swap({1: bytes(1 << 16)}, [], tag)
except ExchangeFailed:
    print("said")
"""


def test_a_script_that_lets_sigpipe_end_it_is_not_ended_by_a_peer_that_has_gone():
    done = subprocess.run(
        [sys.executable, "-c", DEAF], env=os.environ | {"MASTER_ADDR": "127.0.0.1"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "said\n"), done.stderr
