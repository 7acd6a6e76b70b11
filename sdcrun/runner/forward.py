"""What dead ranks of this node left in their spool files, delivered to a controller that cannot read them itself."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from sdcrun import __version__
from sdcrun.core.codec import MAX_LINE, CodecError, decode_event, encode_message, message_of, whole_lines
from sdcrun.core.types import EVENT_SCHEMA, Event
from sdcrun.report.store import EVENTS
from sdcrun.wire.opening import connect, prove, wait_messages
from sdcrun.wire.spool import spool_folder

_BATCH = 256


def spools(job_dir: str, address: dict[str, Any], own: str, timeout: float) -> None:
    """Send every spool file but `own` (a path) to the controller at `address` and delete it when all of it is on
    record; within `timeout` seconds. A controller on the same file system reads them itself."""
    folder, until = spool_folder(job_dir), time.monotonic() + timeout
    if os.path.exists(os.path.join(job_dir, EVENTS)) or not os.path.isdir(folder):
        return
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if path == own or not name.endswith(".jsonl") or time.monotonic() >= until:
            continue
        # What cannot be delivered stays where it is, for a person.
        with contextlib.suppress(OSError, CodecError):
            rows = _events_of(path)
            if not rows or _deliver(rows, address, max(1.0, until - time.monotonic())):
                os.unlink(path)


def tidy(job_dir: str) -> None:
    """Remove the folder of spool files if it is empty."""
    with contextlib.suppress(OSError):
        os.rmdir(spool_folder(job_dir))


def _events_of(path: str) -> list[tuple[Event, bytes]]:
    """The events of one client and their lines; raises OSError."""
    rows = []
    with open(path, "rb") as file:
        for line in whole_lines(file.read()):
            with contextlib.suppress(CodecError):
                rows.append((decode_event(line), line + b"\n"))
    return [row for row in rows if (row[0].source, row[0].session) == (rows[0][0].source, rows[0][0].session)]


def _deliver(rows: list[tuple[Event, bytes]], address: dict[str, Any], timeout: float) -> bool:
    """Send in the name of the client that is dead; True when all is acknowledged."""
    first = rows[0][0]
    with connect(address, timeout) as connection:
        lines = prove(connection, address["secret"])
        connection.sendall(
            encode_message(
                "hello", source=first.source, session=first.session, version=__version__, schema=EVENT_SCHEMA,
                seen=None, blind=None,
            )
        )  # fmt: skip
        lines.limit = MAX_LINE
        welcome, *more = wait_messages(connection, lines)
        if message_of(welcome, "welcome", "refused") == "refused":
            return False
        acked = {int(attempt): int(seq) for attempt, seq in welcome["acked"].items()}
        owed = [row for row in rows if row[0].seq > acked.get(row[0].attempt, 0)]
        for start in range(0, len(owed), _BATCH):
            batch = owed[start : start + _BATCH]
            connection.sendall(b"".join(line for _, line in batch))
            while any(event.seq > acked.get(event.attempt, 0) for event, _ in batch):
                for message in more or wait_messages(connection, lines):
                    if message.get("msg") == "ack":
                        acked[int(message["attempt"])] = int(message["seq"])
                more = []
        connection.sendall(encode_message("goodbye"))
    return True
