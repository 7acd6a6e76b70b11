"""A copy of the record on another host, kept by the controller that the supervisor there offers: the keeping side.

An event is acknowledged when it is on the record and, while there is a follower that keeps up, on its copy: a node that
is lost takes nothing with it that its clients no longer have.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

from sdcrun.core.codec import CodecError, encode_message
from sdcrun.runner.server import Connection
from sdcrun.wire.runtime import checked_address

CHUNK = 128 << 10
# Clients count an acknowledgement that takes eight seconds as blindness; a follower that is slower is let go.
LAG_SECONDS = 4.0
PREFIX = "copy:"


class Copies:
    """The one follower of the record at `path`; `send(connection, line)` and `close(connection, why)` are the server's.

    `successor` is the address of the follower's own controller once its copy is whole, else None.
    """

    def __init__(
        self, path: str, send: Callable[[Connection, bytes], None], close: Callable[[Connection, str], None]
    ) -> None:
        self._path, self._send, self._close = path, send, close
        self._follower: Connection | None = None
        self._address: dict[str, Any] | None = None
        self._sent = self.copied = 0
        self._behind_since: float | None = None
        self.successor: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """Bytes on the record."""
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    @property
    def following(self) -> bool:
        """Whether there is a follower."""
        return self._follower is not None

    def follow(self, connection: Connection, values: dict[str, Any], token: str) -> None:
        """A standby asks to follow; it has `size` bytes with the SHA-256 `digest`. Raises CodecError."""
        size, address = values.get("size"), checked_address(values.get("address"))
        if type(size) is not int or size < 0 or address is None:
            raise CodecError("malformed wish to follow")
        if self._follower is not None:
            self._send(connection, encode_message("standby"))
            return
        self._sent = self.copied = size if values.get("digest") == digest(self._path, size) else 0
        self._follower, self._address, self._behind_since = connection, address, None
        self._send(connection, encode_message("record", token=token, start=self._sent))

    def took(self, connection: Connection, upto: Any) -> None:
        """The follower has everything up to this offset. Raises CodecError."""
        if type(upto) is not int or connection is not self._follower or not self.copied <= upto <= self._sent:
            raise CodecError("a copy that cannot be")
        self.copied = upto
        self._behind_since = None
        if upto == self.size:
            self.successor = self._address

    def gone(self, connection: Connection) -> None:
        """A client is away."""
        if connection is self._follower:
            self._follower = self._address = self.successor = None

    def turn(self, now: float) -> None:
        """Send what is new; let a follower go that does not keep up (`now` monotonic, seconds)."""
        follower, size = self._follower, self.size
        if follower is None:
            return
        if self.copied < size:
            self._behind_since = now if self._behind_since is None else self._behind_since
            if now - self._behind_since > LAG_SECONDS:
                self._close(follower, "does not keep up with the record")
                return
        while self._sent < size and not follower.out and self._follower is follower:
            text = _read(self._path, self._sent, CHUNK)
            if not text:
                return
            self._send(follower, encode_message("lines", at=self._sent, text=text.decode("ascii", "replace")))
            self._sent += len(text)

    def over(self) -> None:
        """The job has ended well and the record is whole: the copy is not needed."""
        if self._follower is not None:
            self._send(self._follower, encode_message("over"))


def digest(path: str, size: int) -> str | None:
    """SHA-256 (hex) of the first `size` bytes of a file, None when it is shorter or missing."""
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while size > 0 and (data := file.read(min(size, 1 << 20))):
                found.update(data)
                size -= len(data)
    except OSError:
        return None
    return found.hexdigest() if size == 0 else None


def _read(path: str, offset: int, most: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), most, offset)
    except OSError:
        return b""
