"""What a forward prints, logs or writes was written when it ran for the script: a replay writes nothing.

Only the thread that replays is meant; what others write meanwhile is the script's.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sdcrun.shim.replay.state import replaying_here

_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


class Muted:
    """Stands in for a stream or a file: drops what a replay writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        """As a stream's."""
        return len(data) if replaying_here() else self._stream.write(data)

    def writelines(self, lines: Any) -> None:
        """As a stream's."""
        if not replaying_here():
            self._stream.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keeps_files() -> bool:
    """This thread must not write files: it replays, and no compiler is at work in the forward, which writes its own."""
    frame = sys._getframe(1) if replaying_here() else None
    if frame is None:
        return False
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_COMPILERS):
            return False
        frame = frame.f_back
    return True


def _opening(original: Any) -> Any:
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode).isdisjoint("wax+") and keeps_files():
            if "+" in mode:
                raise OSError(f"a replay does not write into {file}")
            return original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
        return original(file, mode, *args, **kwargs)

    return opened


def _handling(original: Any) -> Any:
    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not replaying_here():
            original(logger, record)

    return handle


@contextmanager
def muted() -> Iterator[None]:
    """Inside the block, which is a replay, prints, records for loggers and files that are opened go nowhere."""
    before = [
        (sys, "stdout", sys.stdout, Muted), (sys, "stderr", sys.stderr, Muted),
        (builtins, "open", builtins.open, _opening), (io, "open", io.open, _opening),
        (logging.Logger, "handle", logging.Logger.handle, _handling),
    ]  # fmt: skip
    for holder, name, value, instead in before:
        # There is no standard output where nobody reads it.
        if value is not None:
            setattr(holder, name, instead(value))
    try:
        yield
    finally:
        for holder, name, value, _ in before:
            setattr(holder, name, value)
