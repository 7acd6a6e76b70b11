"""Events and control messages as JSON lines, and the proofs by which both ends of a connection know each other.

One message is one line of JSON (ASCII, no pickle anywhere), at most `MAX_LINE` bytes with its newline. A line with the
key "v" is an event of that schema; one with "msg" is a control message, which lives only inside an authenticated
connection whose two ends have compared schema and version in "hello".

Handshake (C client, S server; nonces are random hex, proofs HMAC-SHA256 under the job's secret):

    S {"msg": "challenge", "nonce": s}
    C {"msg": "proof", "nonce": c, "proof": proof(secret, "client", s, c)}
    S {"msg": "proof", "proof": proof(secret, "server", s, c)}
    C {"msg": "hello", ...}
    S {"msg": "welcome", ...}

Nothing but the random nonce leaves the server before the client has proven itself, and the client sends no event before
the server has; the role in the proof keeps one end's answer from being reflected as the other's.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Mapping
from typing import Any

from sdcrun.core.types import EVENT_SCHEMA, Event

MAX_LINE = 1 << 20
MAX_HANDSHAKE_LINE = 1024

_MAX_DEPTH = 24
_SHRINK_LIMITS = (4096, 256, 32, 4)


class CodecError(ValueError):
    """A line that is not a well-formed message; the text says why and quotes nothing of the input."""


def plain(value: Any, limit: int | None = None, _depth: int = 0) -> Any:
    """`value` as JSON values that survive a round trip; total: anything a check may hand over becomes something.

    Non-finite floats become "nan", "inf", "-inf" (JSON has none), integers beyond 64 bits their hex text, unknown
    objects `str()` of them. With `limit`, no container or text keeps more than that many entries or characters.
    """
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is str:
        return value if limit is None else value[:limit]
    if kind is int:
        return value if -(1 << 63) <= value < (1 << 64) else hex(value)[: 1 << 12]
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if _depth >= _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        items = list(value.items())[:limit]
        return {str(plain(key)): plain(entry, limit, _depth + 1) for key, entry in items}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry, limit, _depth + 1) for entry in list(value)[:limit]]
    for base in (str, int, float):
        if isinstance(value, base):
            return plain(base(value), limit, _depth)
    try:
        return str(value)[:1000]
    except Exception:
        return f"<{kind.__name__}>"


def encode_event(event: Event) -> bytes:
    """The event as one line with its newline; never longer than `MAX_LINE`, never raises for any `data`.

    Data too large for one line keeps the first entries of each of its containers and gets the key "truncated".
    """
    data = plain(event.data)
    line = _event_line(event, data)
    for limit in _SHRINK_LIMITS:
        if len(line) <= MAX_LINE:
            return line
        data = {**plain(event.data, limit), "truncated": True}
        line = _event_line(event, data)
    return line if len(line) <= MAX_LINE else _event_line(event, {"truncated": True})


def _event_line(event: Event, data: dict[str, Any]) -> bytes:
    values = {
        "v": EVENT_SCHEMA,
        "attempt": event.attempt,
        "source": event.source,
        "session": event.session,
        "seq": event.seq,
        "kind": event.kind,
        "time": event.time,
        "data": data,
    }
    return json.dumps(values, separators=(",", ":")).encode("ascii") + b"\n"


def decode_event(line: bytes) -> Event:
    """Inverse of `encode_event`; raises CodecError for anything that it cannot have made."""
    return event_of(decode_line(line))


def event_of(values: dict[str, Any]) -> Event:
    """The event in a decoded line; raises CodecError when a field is missing, of the wrong type or out of range."""
    if values.get("v") != EVENT_SCHEMA:
        raise CodecError(f"not an event of schema {EVENT_SCHEMA}")
    kind, source, session = (_text(values, key) for key in ("kind", "source", "session"))
    if not kind or not source:
        raise CodecError("event without kind or source")
    attempt, seq = _count(values, "attempt"), _count(values, "seq")
    if seq < 1:
        raise CodecError("seq counts from 1")
    time = values.get("time")
    if type(time) not in (int, float) or not math.isfinite(time):
        raise CodecError("time is not a number")
    data = values.get("data")
    if type(data) is not dict:
        raise CodecError("data is not an object")
    return Event(kind=kind, source=source, attempt=attempt, seq=seq, time=time, data=data, session=session)


def _text(values: dict[str, Any], key: str) -> str:
    value = values.get(key)
    if type(value) is not str or len(value) > 256:
        raise CodecError(f"{key} is not a short text")
    return value


def _count(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise CodecError(f"{key} is not a count")
    return value


def encode_message(msg: str, **fields: Any) -> bytes:
    """A control message as one line. Raises CodecError when it would be longer than `MAX_LINE`."""
    line = json.dumps({"msg": msg, **{key: plain(value) for key, value in fields.items()}}, separators=(",", ":"))
    if len(line) >= MAX_LINE:
        raise CodecError(f"message {msg!r} is too long")
    return line.encode("ascii") + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """The JSON object of one line (newline optional), event or control message; raises CodecError if it is none."""
    if len(line) > MAX_LINE:
        raise CodecError("line too long")
    try:
        values = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise CodecError("not a line of JSON") from None
    if type(values) is not dict:
        raise CodecError("not a JSON object")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def message_of(values: dict[str, Any], *expected: str) -> str:
    """The name of a decoded control message; raises CodecError when it is none of `expected`."""
    msg = values.get("msg")
    if type(msg) is not str or msg not in expected:
        raise CodecError(f"expected {' or '.join(expected)}")
    return msg


def proof(secret: str, role: str, server_nonce: str, client_nonce: str) -> str:
    """HMAC-SHA256 (hex) by which `role` ("client" or "server") shows that it knows `secret` in this connection."""
    text = "\n".join(("sdcrun", role, server_nonce, client_nonce))
    return hmac.new(secret.encode("utf-8"), text.encode("utf-8"), hashlib.sha256).hexdigest()


def proven(secret: str, role: str, server_nonce: str, client_nonce: str, given: Any) -> bool:
    """Whether `given` is the proof of `role`; takes the same time for every wrong answer."""
    expected = proof(secret, role, server_nonce, client_nonce)
    return type(given) is str and hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace"))


class Lines:
    """Cuts a byte stream into lines of at most `limit` bytes; holds no more than one unfinished line."""

    __slots__ = ("limit", "_rest")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines completed by `data`, without newlines; raises CodecError once a line exceeds the limit."""
        rest = self._rest
        if not rest and data.endswith(b"\n"):
            lines = data.split(b"\n")
            lines.pop()
        else:
            start = len(rest)
            rest += data
            end = rest.rfind(b"\n", start)
            if end < 0:
                lines = []
            else:
                lines = bytes(rest[:end]).split(b"\n")
                del rest[: end + 1]
        if len(rest) >= self.limit or any(len(line) >= self.limit for line in lines):
            raise CodecError("line too long")
        return lines


def whole_lines(content: bytes) -> list[bytes]:
    """The complete lines of a file's content without their newlines; a torn last line is left out."""
    return content.split(b"\n")[:-1]
