"""A copy of the record on another host: the side of a controller that the ranks have not chosen.

While the job's controller is another node's, this one keeps a copy of its record. Should that node be lost, clients
come here, and the copy becomes the record.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from sdcrun import __version__
from sdcrun.core.codec import MAX_LINE, CodecError, encode_message, message_of
from sdcrun.core.types import EVENT_SCHEMA
from sdcrun.report.store import COPY
from sdcrun.runner.copies import PREFIX, digest
from sdcrun.wire.opening import connect, prove, receive, wait_messages
from sdcrun.wire.runtime import read_runtime

LOOK_EVERY = 1.0
ASK_AGAIN = 30.0
QUIET_SECONDS = 10.0


class Follower:
    """Follows the controller that `runtime`.job names, from a thread of its own, until `take_over` or `end`.

    `record` is where this controller's own record is. On a file system that both hosts share there is nothing to copy.
    `log(text)` takes one line.
    """

    def __init__(self, runtime: str, record: str, log: Callable[[str], None]) -> None:
        self._runtime, self._record, self._log = runtime, record, log
        self._copy = os.path.join(os.path.dirname(record), COPY)
        self._source = f"{PREFIX}{socket.gethostname()}:{os.getpid()}"
        self._session = secrets.token_hex(8)
        self._over = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="sdcrun-follower", daemon=True)

    def start(self) -> None:
        """Begin to look for the job's controller."""
        self._thread.start()

    def take_over(self) -> bool:
        """Stop following; the copy, if there is one, becomes the record of this controller. Raises OSError."""
        self._stop()
        if not os.path.exists(self._copy) or not os.path.getsize(self._copy):
            return False
        if os.path.exists(self._record):
            # What a run of the same name left on this host earlier is not the record that was copied.
            os.rename(self._record, f"{self._record}.{secrets.token_hex(4)}")
        os.rename(self._copy, self._record)
        return True

    def end(self) -> None:
        """This node ends while the job's controller is there: it keeps the record, the copy is not needed."""
        following = self._socket is not None
        self._stop()
        if following:
            self._remove()

    def _stop(self) -> None:
        self._over.set()
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._copy)

    # All that follows runs in the thread.

    def _run(self) -> None:
        pause = LOOK_EVERY
        while not self._over.wait(pause):
            chosen, own = read_runtime(self._runtime + ".job"), read_runtime(self._runtime)
            pause = LOOK_EVERY
            if not chosen or not own or chosen["secret"] == own["secret"]:
                continue
            try:
                pause = self._follow(chosen, own)
            except (OSError, CodecError):
                continue
            except Exception as error:
                self._log(f"the copy of the record: {type(error).__name__}: {error}")
                pause = ASK_AGAIN

    def _follow(self, chosen: dict[str, Any], own: dict[str, Any]) -> float:
        """Returns after how many seconds to try again."""
        with connect(chosen, QUIET_SECONDS) as connection:
            lines = prove(connection, chosen["secret"])
            connection.sendall(
                encode_message(
                    "hello", source=self._source, session=self._session, version=__version__, schema=EVENT_SCHEMA,
                    seen=None, blind=None,
                )
            )  # fmt: skip
            lines.limit = MAX_LINE
            messages = wait_messages(connection, lines)
            if message_of(messages.pop(0), "welcome", "refused") == "refused":
                return ASK_AGAIN
            size = os.path.getsize(self._copy) if os.path.exists(self._copy) else 0
            connection.sendall(
                encode_message("follow", size=size, digest=digest(self._copy, size), address=own)
            )
            self._socket = connection
            try:
                return self._take(connection, lines, messages)
            finally:
                self._socket = None

    def _take(self, connection: socket.socket, lines: Any, messages: list[dict[str, Any]]) -> float:
        fd, asked = -1, False
        try:
            while not self._over.is_set():
                for message in messages:
                    msg = message_of(message, "record", "standby", "lines", "over", "pong")
                    if msg == "record":
                        if self._shared(str(message["token"])):
                            return 10 * ASK_AGAIN
                        fd = os.open(self._copy, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                        os.ftruncate(fd, int(message["start"]))
                    elif msg == "lines":
                        self._append(fd, int(message["at"]), str(message["text"]).encode("ascii"))
                        upto = os.fstat(fd).st_size
                        connection.sendall(encode_message("copied", upto=upto))
                    elif msg == "over":
                        self._remove()
                        self._over.set()
                    elif msg == "standby":
                        return ASK_AGAIN
                try:
                    messages, asked = receive(connection, lines), False
                except TimeoutError:
                    if asked:
                        return LOOK_EVERY
                    messages, asked = [], True
                    connection.sendall(encode_message("ping"))
            return LOOK_EVERY
        finally:
            if fd >= 0:
                os.close(fd)

    @staticmethod
    def _append(fd: int, at: int, data: bytes) -> None:
        if os.fstat(fd).st_size != at:
            raise CodecError("lines of another place")
        if os.write(fd, data) != len(data):
            os.ftruncate(fd, at)
            raise OSError("disk full")

    def _shared(self, token: str) -> bool:
        """Whether the record that has `token` on it lies here: one file system for both."""
        try:
            with open(self._record, "rb") as file:
                return any(token.encode() in line for line in file)
        except OSError:
            return False
