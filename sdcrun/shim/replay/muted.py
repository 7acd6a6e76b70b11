"""What a forward prints was printed when it ran for the script; a replay on this thread prints nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Muted:
    """Stands in for a stream: drops what one thread writes, lets everybody else's through."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: str) -> int:
        """As a stream's."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def muted() -> Iterator[None]:
    """Inside the block this thread's prints go nowhere."""
    before = sys.stdout, sys.stderr
    thread = threading.get_ident()
    sys.stdout, sys.stderr = (stream and _Muted(stream, thread) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
