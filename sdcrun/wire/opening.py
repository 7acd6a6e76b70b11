"""Opening a connection to the controller: both ends prove that they know the job's secret."""

from __future__ import annotations

import secrets
import socket
import time
from typing import Any

from sdcrun.core.codec import (
    MAX_HANDSHAKE_LINE,
    CodecError,
    Lines,
    decode_line,
    encode_message,
    message_of,
    proof,
    proven,
)

# A controller that was killed is started again by its supervisor.
_BACK_AFTER = 8.0
# Two more tries of the system's. A host that is lost never answers, and meanwhile another controller may count.
_CONNECT_TIME = 4.0


def answers(address: dict[str, Any]) -> bool:
    """Whether somebody listens at {host, port}. A refusal is waited out for a few seconds; a host that says nothing at
    all is lost. A process that is stopped listens: its system answers for it."""
    until = time.monotonic() + _BACK_AFTER
    while True:
        try:
            socket.create_connection((address["host"], address["port"]), timeout=3.0).close()
            return True
        except ConnectionRefusedError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.2)
        except OSError:
            return False


def connect(address: dict[str, Any], timeout: float) -> socket.socket:
    """A TCP connection to {host, port} whose operations take at most `timeout` seconds each. Raises OSError."""
    connection = socket.create_connection((address["host"], address["port"]), timeout=min(timeout, _CONNECT_TIME))
    connection.settimeout(timeout)
    try:
        _keep_alive(connection)
    except OSError:
        connection.close()
        raise
    return connection


def prove(connection: socket.socket, secret: str) -> Lines:
    """The handshake; returns the framing state. Raises CodecError when the peer is not the controller, or OSError."""
    lines = Lines(MAX_HANDSHAKE_LINE)
    challenge = next_message(connection, lines)
    message_of(challenge, "challenge")
    theirs, ours = str(challenge.get("nonce")), secrets.token_hex(16)
    proven_by = encode_message("proof", nonce=ours, proof=proof(secret, "client", theirs, ours))
    connection.sendall(proven_by, socket.MSG_NOSIGNAL)
    answer = next_message(connection, lines)
    message_of(answer, "proof")
    if not proven(secret, "server", theirs, ours, answer.get("proof")):
        raise CodecError("this is not the job's controller")
    return lines


def next_message(connection: socket.socket, lines: Lines) -> dict[str, Any]:
    """Waits for exactly one message, which nothing may follow before it is answered."""
    messages = wait_messages(connection, lines)
    if len(messages) != 1:
        raise CodecError("more than one message where one was due")
    return messages[0]


def wait_messages(connection: socket.socket, lines: Lines) -> list[dict[str, Any]]:
    """Reads until there is at least one message. Raises OSError (also for a time-out) or CodecError."""
    messages: list[dict[str, Any]] = []
    while not messages:
        messages = receive(connection, lines)
    return messages


def receive(connection: socket.socket, lines: Lines) -> list[dict[str, Any]]:
    """The messages completed by one read. Raises OSError (also at the end of the stream) or CodecError."""
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionResetError("the controller closed the connection")
    return [decode_line(line) for line in lines.feed(data)]


def _keep_alive(connection: socket.socket) -> None:
    """Notice a peer that vanished without a word within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
