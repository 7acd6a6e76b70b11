"""Descriptors, threads and memory of controller and client stay what they were, however long a job runs."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from controlkit import PATIENCE, Job, wait_for

from sdcrun.wire import link as wire
from sdcrun.wire.link import Link
from sdcrun.wire.runtime import read_runtime

# As many as asked for: FLAT_BREAKS=1000 FLAT_EVENTS=100000.
BREAKS = int(os.environ.get("FLAT_BREAKS", "300"))
EVENTS = int(os.environ.get("FLAT_EVENTS", "20000"))


class Wire:
    """A relay to the controller that can be broken: every connection through it at once."""

    def __init__(self, target: dict) -> None:
        self.target, self.made, self.pairs = target, 0, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> dict:
        return {**self.target, "port": self.listener.getsockname()[1]}

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection((self.target["host"], self.target["port"]))
            except OSError:
                return
            self.made += 1
            self.pairs = [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(one, other), daemon=True).start()

    @staticmethod
    def _relay(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
        except OSError:
            pass
        for end in (one, other):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        one.close()

    def cut(self) -> None:
        """Break what stands."""
        for end in self.pairs:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def resident(pid) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    job.start()
    yield job
    job.end()


def test_flat_over_events_and_broken_links(job, monkeypatch):
    monkeypatch.setattr(wire, "_PAUSE_MOST", 0.005)
    monkeypatch.setattr(wire, "_PAUSE_FIRST", 0.001)
    relay = Wire(read_runtime(job.runtime))
    link = Link(job.config, "rank:0", lambda: relay.address)
    job.links.append(link)
    own, other = os.getpid(), job.controller.pid
    sent = 0

    def emit(count: int) -> None:
        nonlocal sent
        for _ in range(count):
            link.emit("limit", {"text": str(sent), "check": None}, 0)
            sent += 1

    def settle() -> None:
        wait_for(lambda: link._backlog.empty)

    def measure() -> list[tuple[int, int]]:
        wait_for(lambda: threading.active_count() <= resting)
        return [(open_files(pid), threads(pid)) for pid in (own, other)]

    emit(2000)
    settle()
    resting = threading.active_count()
    before, memory = measure(), [resident(pid) for pid in (own, other)]
    for _ in range(BREAKS):
        emit(EVENTS // BREAKS)
        made = relay.made
        relay.cut()
        wait_for(lambda made=made: relay.made > made)
    settle()
    assert relay.made > BREAKS
    assert measure() == before
    grown = [resident(pid) - was for pid, was in zip((own, other), memory, strict=True)]
    assert all(growth < 16 << 20 for growth in grown), grown
    assert not link._spool.size
    assert link.close(PATIENCE)
    relay.listener.close()
    job.finish()
    assert [int(event.data["text"]) for event in job.by_source()["rank:0"]] == list(range(sent))


def test_flat_over_clients_that_come_and_go(job):
    """Short-lived processes, as after many restarts of the ranks."""

    def visit(number: int) -> None:
        link = Link(job.config, f"rank:{number % 4}", lambda: read_runtime(job.runtime))
        link.emit("limit", {"text": str(number), "check": None}, 0)
        assert link.close(PATIENCE)

    for number in range(50):
        visit(number)
    pid = job.controller.pid
    wait_for(lambda: open_files(pid) < 20)
    before, memory = (open_files(pid), threads(pid)), resident(pid)
    for number in range(50, 400):
        visit(number)
    wait_for(lambda: (open_files(pid), threads(pid)) == before)
    assert resident(pid) - memory < 8 << 20
    job.finish()
    assert sum(len(events) for source, events in job.by_source().items() if source.startswith("rank:")) == 400
