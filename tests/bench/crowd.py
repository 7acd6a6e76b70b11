"""Many simulated ranks in one process: they speak the clients' protocol to a real controller, over loopback.

    python crowd.py RUNTIME COUNT

Orders come as JSON lines on stdin, answers go as JSON lines to stdout. Every rank connects, proves itself, says hello,
keeps what is not acknowledged, and after a broken connection comes back and sends that again, as a real client does.

    {"do": "events", "ranks": [first, end), "kind": k, "data": {...}}   each emits one; "rank" in data: its number
    {"do": "status"}                                                    {connected, owed, broken, emitted}
    {"do": "end"}
"""

from __future__ import annotations

import json
import os
import random
import resource
import secrets
import selectors
import socket
import sys
import time
from collections import deque

from sdcrun import __version__
from sdcrun.core.codec import MAX_LINE, Lines, decode_line, encode_event, encode_message, proof
from sdcrun.core.types import EVENT_SCHEMA, Event
from sdcrun.wire.runtime import read_runtime

CONNECTS_A_TURN = 400
HANDSHAKE_SECONDS = 10.0


class Rank:
    """One simulated rank. `state`: away, opening, proven, here."""

    def __init__(self, number: int) -> None:
        self.number, self.source, self.session = number, f"rank:{number}", secrets.token_hex(8)
        self.state, self.socket, self.seq = "away", None, 0
        self.owed: deque[tuple[int, bytes]] = deque()
        self.out = bytearray()
        self.pause, self.since = 0.05, 0.0

    def emit(self, kind: str, data: dict) -> None:
        """Adds an event; sent at once when the rank is here."""
        self.seq += 1
        line = encode_event(Event(kind, self.source, 0, self.seq, time.time(), data, self.session))
        self.owed.append((self.seq, line))
        if self.state == "here":
            self.out += line


class Crowd:
    """All ranks and one loop for them."""

    def __init__(self, runtime: str, count: int) -> None:
        self.runtime = runtime
        self.ranks = [Rank(number) for number in range(count)]
        self.selector = selectors.DefaultSelector()
        self.due = [(0.0, rank) for rank in self.ranks]
        self.opening: set[Rank] = set()
        self.broken = 0
        self.chance = random.Random(1)

    def turn(self) -> None:
        """Connect who is due, then read and write what can be."""
        now, started, later = time.monotonic(), 0, []
        for at, rank in self.due:
            if at > now or started >= CONNECTS_A_TURN:
                later.append((at, rank))
            else:
                started += 1
                self.connect(rank)
        self.due = later
        for rank in [rank for rank in self.opening if now - rank.since > HANDSHAKE_SECONDS]:
            self.lose(rank)
        for key, mask in self.selector.select(0.01):
            if key.data is None:
                self.order(sys.stdin.readline())
                continue
            rank = key.data
            try:
                if mask & selectors.EVENT_READ:
                    self.read(rank)
                if rank.socket is not None and rank.out:
                    del rank.out[: rank.socket.send(rank.out)]
            except BlockingIOError:
                pass
            except OSError:
                self.lose(rank)
            self.watch(rank)

    def connect(self, rank: Rank) -> None:
        address = read_runtime(self.runtime)
        if address is None:
            return self.lose(rank)
        self.secret = address["secret"]
        rank.socket = socket.socket()
        rank.socket.setblocking(False)
        rank.socket.connect_ex((address["host"], address["port"]))
        rank.state, rank.lines, rank.since = "opening", Lines(MAX_LINE), time.monotonic()
        self.opening.add(rank)
        rank.out.clear()
        self.selector.register(rank.socket, selectors.EVENT_READ, rank)

    def read(self, rank: Rank) -> None:
        data = rank.socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        for line in rank.lines.feed(data):
            message = decode_line(line)
            msg = message["msg"]
            if msg == "challenge":
                nonce = secrets.token_hex(16)
                answer = proof(self.secret, "client", message["nonce"], nonce)
                rank.out += encode_message("proof", nonce=nonce, proof=answer)
            elif msg == "proof":
                rank.out += encode_message(
                    "hello", source=rank.source, session=rank.session, version=__version__, schema=EVENT_SCHEMA,
                    seen=None, blind=None,
                )  # fmt: skip
            elif msg == "welcome":
                self.opening.discard(rank)
                self.acknowledge(rank, int(message["acked"].get("0", 0)))
                rank.state, rank.pause = "here", max(0.05, min(float(message["summary_every"]) / 100, 3.0))
                rank.out += b"".join(line for _, line in rank.owed)
            elif msg == "ack":
                self.acknowledge(rank, message["seq"])

    @staticmethod
    def acknowledge(rank: Rank, seq: int) -> None:
        while rank.owed and rank.owed[0][0] <= seq:
            rank.owed.popleft()

    def watch(self, rank: Rank) -> None:
        if rank.socket is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.out else 0)
            if self.selector.get_key(rank.socket).events != wanted:
                self.selector.modify(rank.socket, wanted, rank)

    def lose(self, rank: Rank) -> None:
        """The connection broke: again after the pause of a real client."""
        if rank.socket is not None:
            self.selector.unregister(rank.socket)
            rank.socket.close()
        self.opening.discard(rank)
        self.broken += rank.state == "here"
        rank.socket, rank.state = None, "away"
        self.due.append((time.monotonic() + rank.pause * self.chance.uniform(0.5, 1.0), rank))
        rank.pause = min(rank.pause * 2, 3.0)

    def order(self, line: str) -> None:
        values = json.loads(line) if line else {"do": "end"}
        if values["do"] == "end":
            raise SystemExit(0)
        if values["do"] == "events":
            for rank in self.ranks[slice(*values["ranks"])]:
                data = {key: rank.number if value == "rank" else value for key, value in values["data"].items()}
                rank.emit(values["kind"], data)
                self.watch(rank)
        answer = {
            "connected": sum(rank.state == "here" for rank in self.ranks),
            "owed": sum(len(rank.owed) for rank in self.ranks),
            "emitted": sum(rank.seq for rank in self.ranks),
            "broken": self.broken,
        }
        os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Serve orders until told to end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd(sys.argv[1], int(sys.argv[2]))
    crowd.selector.register(sys.stdin, selectors.EVENT_READ, None)
    while True:
        crowd.turn()


if __name__ == "__main__":
    main()
