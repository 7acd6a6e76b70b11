"""What a forward prints, logs or writes was written when it ran for the script: a replay writes nothing.

Only the thread that replays is meant; what others write meanwhile is the script's.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sdcrun.shim.replay.state import replaying_here

_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OF_FILES = ("write", "remove", "unlink", "rmdir", "rename", "replace", "link", "symlink", "truncate", "system")
# Modules that have bound `open` to a name of their own.
_OPENERS = (("builtins", "open"), ("io", "open"), ("bz2", "_builtin_open"), ("tarfile", "bltn_open"))
_REFUSED = (("sqlite3", "connect"), ("subprocess", "run"), ("subprocess", "call"), ("subprocess", "check_output"))
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


class Muted:
    """Stands in for a stream, a file or a writer of rows: drops what a replay writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        """As a stream's."""
        return len(data) if replaying_here() else self._stream.write(data)

    def writelines(self, lines: Any) -> None:
        """As a stream's."""
        if not replaying_here():
            self._stream.writelines(lines)

    def writerow(self, row: Any) -> int:
        """As that of a writer of the module csv."""
        return 0 if replaying_here() else self._stream.writerow(row)

    def writerows(self, rows: Any) -> None:
        """As that of a writer of the module csv."""
        if not replaying_here():
            self._stream.writerows(rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_WRITERS = (io.IOBase, type(csv.writer(io.StringIO())), codecs.StreamWriter, codecs.StreamReaderWriter)


def stand_in(value: Any) -> Any:
    """What a replay may write into in the place of `value`, also of a tuple or a partial function with files in it;
    None where nothing has to stand in."""
    if isinstance(value, (*_WRITERS, tempfile._TemporaryFileWrapper)):
        return Muted(value)
    if type(value) is tuple and value:
        items = [stand_in(item) for item in value]
        return tuple(old if new is None else new for old, new in zip(value, items)) if any(items) else None
    if type(value) is functools.partial:
        args, keywords = stand_in(value.args), {name: stand_in(item) for name, item in value.keywords.items()}
        if args or any(keywords.values()):
            keywords = {name: value.keywords[name] if new is None else new for name, new in keywords.items()}
            return functools.partial(value.func, *(args or value.args), **keywords)
    return None


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


@functools.cache
def _opening(original: Any) -> Any:
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode).isdisjoint("wax+") and keeps_files():
            if "+" in mode and "w" not in mode:
                raise OSError(f"a replay does not write into {file}")
            file = os.memfd_create("replay") if hasattr(os, "memfd_create") else os.devnull
            return original(file, mode.replace("x", "w"), *args, **kwargs)
        return original(file, mode, *args, **kwargs)

    return opened


@functools.cache
def _refusing(original: Any) -> Any:
    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if keeps_files():
            raise OSError(f"a replay does not call {getattr(original, '__qualname__', original)}")
        return original(*args, **kwargs)

    return refuse


@functools.cache
def _opening_below(original: Any) -> Any:
    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & _TO_WRITE and keeps_files():
            raise OSError(f"a replay does not write into {path}")
        return original(path, flags, *args, **kwargs)

    return opened


@functools.cache
def _making(original: Any) -> Any:
    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if keeps_files() and not os.path.isdir(path):
            raise OSError(f"a replay does not make {path}")
        original(path, *args, **kwargs)

    return mkdir


@functools.cache
def _handling(original: Any) -> Any:
    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not replaying_here():
            original(logger, record)

    return handle


@contextmanager
def muted() -> Iterator[None]:
    """Inside the block, which is a replay, prints, records for loggers and files that are opened go nowhere; whatever
    else changes the file system or starts a process raises OSError."""
    before = [
        *((sys, name, getattr(sys, name), Muted) for name in ("stdout", "stderr", "__stdout__", "__stderr__")),
        (logging.Logger, "handle", logging.Logger.handle, _handling), (os, "mkdir", os.mkdir, _making),
        (os, "open", os.open, _opening_below),
        *((os, name, getattr(os, name), _refusing) for name in _OF_FILES if hasattr(os, name)),
        *((module, name, getattr(module, name), _opening)
          for path, name in _OPENERS if (module := sys.modules.get(path)) is not None and hasattr(module, name)),
        *((module, name, getattr(module, name), _refusing)
          for path, name in _REFUSED if (module := sys.modules.get(path)) is not None),
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
