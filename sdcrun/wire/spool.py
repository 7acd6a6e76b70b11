"""A client's spool: the file in the job folder that keeps its unacknowledged events should the process be killed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

_COMPACT_ABOVE = 8 << 20


def spool_name(source: str, session: str) -> str:
    """File name of a client's spool; `source` may hold characters that a file name should not."""
    return f"{re.sub(r'[^A-Za-z0-9.:_-]', '_', source)}.{session}.jsonl"


def spool_folder(job_dir: str) -> str:
    """Where the spool files of a job lie."""
    return os.path.join(job_dir, "spool")


class Spool:
    """Append-only file of event lines. No method raises OSError: `error` holds the last failure, None if all is well.

    After a failure the file may lack lines, so nothing is appended until `rewrite` has put the whole backlog back. With
    an empty path there is no file and nothing is kept.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.error: OSError | None = None
        self.size = 0
        self._fd = -1

    def append(self, line: bytes) -> None:
        """Add one line with one write. A partial write (disk full) is cut off again."""
        if self.error is not None or not self.path:
            return
        try:
            if self._fd < 0:
                self._open()
            written = os.write(self._fd, line)
            if written != len(line):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError("disk full")
            self.size += written
        except OSError as error:
            self.error = error

    def _open(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size

    def clear(self) -> None:
        """Empty the file: everything in it is acknowledged. Also ends a failure, there is nothing left to miss."""
        self.error = None
        if self._fd < 0 or self.size == 0:
            return
        try:
            os.ftruncate(self._fd, 0)
            self.size = 0
        except OSError as error:
            self.error = error

    @property
    def bloated(self) -> bool:
        """Whether the file is large enough for a rewrite to be worth it, when most of it is acknowledged."""
        return self.size > _COMPACT_ABOVE

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace the file by `lines`, atomically; ends a failure when it succeeds."""
        temporary = self.path + ".new"
        content = b"".join(lines)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                if os.write(fd, content) != len(content):
                    raise OSError("disk full")
                os.replace(temporary, self.path)
            except OSError:
                os.close(fd)
                os.unlink(temporary)
                raise
        except OSError as error:
            self.error = error
            return
        self.forget()
        self._fd, self.size, self.error = fd, len(content), None

    def remove(self) -> None:
        """Close and delete the file."""
        self.forget()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self.size = 0

    def forget(self) -> None:
        """Close the descriptor and leave the file alone (a forked child's part)."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
