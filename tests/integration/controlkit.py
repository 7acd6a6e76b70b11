"""Real controllers and real clients for the tests of the control plane."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from sdcrun.core.codec import Lines, decode_event, decode_line, encode_message, proof, proven, whole_lines
from sdcrun.core.types import EVENT_SCHEMA, Config, Event
from sdcrun.wire.link import Link
from sdcrun.wire.runtime import read_runtime, runtime_address

CLIENT = Path(__file__).with_name("controlclient.py")
PATIENCE = 120.0


class Job:
    """A job folder, its controller, and clients; everything started ends with `end`."""

    def __init__(self, folder: Path, program: str = "-m sdcrun.runner.controller") -> None:
        self.folder = folder / "job"
        self.folder.mkdir()
        self.runtime = str(folder / "runtime.json")
        self.config = Config(job_id="job", job_dir=str(self.folder), summary_every=0.01)
        self.environ = {**os.environ, "SDCRUN_CONFIG": json.dumps(self.config.to_json())}
        self.program = program.split()
        self.stderr = folder / "controller.err"
        self.controller: subprocess.Popen | None = None
        self.processes: list[subprocess.Popen] = []
        self.links: list[Link] = []

    def start(self, wait: bool = True) -> subprocess.Popen:
        """Start the controller (again) as the supervisor does."""
        command = [sys.executable, *self.program, "--runtime", self.runtime, "--job-dir", str(self.folder)]
        with open(self.stderr, "ab") as errors:
            self.controller = self.spawn(command, stderr=errors)
        if wait:
            wait_for(lambda: self.answers() or self.controller.poll() is not None)
        return self.controller

    def answers(self) -> bool:
        address = read_runtime(self.runtime)
        with contextlib.suppress(OSError):
            if address:
                socket.create_connection((address["host"], address["port"]), timeout=1).close()
                return True
        return False

    def kill(self) -> None:
        self.controller.kill()
        self.controller.wait()

    def spawn(self, command: list[str], **options) -> subprocess.Popen:
        process = subprocess.Popen(command, env=self.environ, **options)
        self.processes.append(process)
        return process

    def client(self, source: str, script: str, **options) -> subprocess.Popen:
        """A process of its own in which `script` runs with `link` at hand."""
        return self.spawn([sys.executable, str(CLIENT), self.runtime, source, script], **options)

    def link(self, source: str) -> Link:
        link = Link(self.config, source, runtime_address(self.runtime))
        self.links.append(link)
        return link

    def finish(self) -> None:
        """End the job as its supervisor does; the controller must exit with 0 and leave no spool."""
        assert self.link("node:test:1").finish(PATIENCE)
        assert self.controller.wait(PATIENCE) == 0
        assert not (self.folder / "spool").exists()

    def events(self) -> list[Event]:
        return [decode_event(line) for line in whole_lines((self.folder / "events.jsonl").read_bytes())]

    def by_source(self) -> dict[str, list[Event]]:
        """Events per source, after checking that each is on record once and that order is kept."""
        found: dict[str, list[Event]] = defaultdict(list)
        streams: dict[tuple, list[int]] = defaultdict(list)
        for event in self.events():
            found[event.source].append(event)
            streams[event.source, event.session, event.attempt].append(event.seq)
        for stream, seqs in streams.items():
            assert seqs == list(range(1, len(seqs) + 1)), f"{stream}: {seqs}"
        return found

    def said(self) -> str:
        return self.stderr.read_text()

    def logged(self) -> list[str]:
        return [line for path in self.folder.glob("logs/*.log") for line in path.read_text().splitlines()]

    def memory(self) -> int:
        """Resident memory of the controller in bytes."""
        pages = Path(f"/proc/{self.controller.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        for link in self.links:
            link.close(0)
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


class Peer:
    """A hand-made client, for what a real one would never do."""

    def __init__(self, job: Job) -> None:
        address = read_runtime(job.runtime)
        self.secret = address["secret"]
        self.socket = socket.create_connection((address["host"], address["port"]), timeout=PATIENCE)
        self.framing = Lines(1 << 20)
        self.waiting: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> dict | None:
        """The next message; None when the controller has closed."""
        while not self.waiting:
            try:
                data = self.socket.recv(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            self.waiting = self.framing.feed(data)
        return decode_line(self.waiting.pop(0))

    def prove(self, secret: str | None = None) -> dict | None:
        """Answer the challenge; returns what comes back."""
        challenge = self.read()
        assert challenge["msg"] == "challenge"
        nonce = "n" * 32
        answer = proof(secret or self.secret, "client", challenge["nonce"], nonce)
        self.send(encode_message("proof", nonce=nonce, proof=answer))
        reply = self.read()
        if reply is not None:
            assert proven(self.secret, "server", challenge["nonce"], nonce, reply["proof"])
        return reply

    def hello(self, source: str = "rank:0", session: str = "s", **changes) -> dict | None:
        from sdcrun import __version__

        values = {"source": source, "session": session, "version": __version__, "schema": EVENT_SCHEMA, "seen": None}
        self.send(encode_message("hello", **{**values, "blind": None, **changes}))
        return self.read()


def wait_for(condition) -> None:
    """Wait until `condition()` holds; fail after a long while."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
