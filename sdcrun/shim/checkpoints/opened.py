"""Files that a script opens itself and saves into, or into which it writes what it has saved into memory.

`open` alone knows the path, and it empties the file before anything is saved. Two kinds of binary files opened for
writing are therefore written beside their place and put there when they are closed: one that has a sidecar, so that
the old checkpoint stays until the new one is whole and may stay; and, once a bad save has gone into memory, any, so
that the bad bytes are found when they arrive. All others are opened as ever.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import io
import os
import stat
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sdcrun.shim import boot, fingerprint
from sdcrun.shim.checkpoints import files
from sdcrun.shim.checkpoints.followers import Followers

KEPT_IN_MEMORY = 8
PIECE = 4 << 20


@dataclass
class InMemory:
    """A save into memory that must not get into a file: its bytes' number and fingerprint. `found(path, contents)` is
    called when it would: the file at `path` was not written, its contents are in `contents`."""

    size: int
    row: tuple[int, int]
    found: Callable[[str, str], None]


class Held(io.BufferedWriter):
    """A file that is written beside its place. `place` is where it will be, `written` where its bytes are until then.

    The save that goes into it says what is to come of it at the end: `withheld` and `failed` leave the old file,
    `describe` makes the sidecar of a file into which one save went, `settled(problem)` is called once it is in its
    place, with why it has no sidecar, or None.
    """

    def __init__(self, raw: io.FileIO, buffering: int, opened: Opened, room: str, place: str) -> None:
        super().__init__(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        self._opened, self._room, self._process = opened, room, os.getpid()
        self.place, self.written = place, os.path.join(room, os.path.basename(place))
        self.withheld = self.failed = False
        self.saves = 0
        self.describe: files.Describe | None = None
        self.settled: Callable[[str | None], None] = lambda problem: None

    def close(self) -> None:
        """Closes it and puts it into its place, or not. Raises OSError as ever."""
        room, self._room = self._room, None
        if room is None:
            super().close()
            return
        try:
            try:
                super().close()
            except BaseException:
                self.failed = True
                raise
            if os.getpid() == self._process:
                self._opened.closed(self)
        finally:
            if os.getpid() == self._process:
                files.leave(room)


class _Open:
    """`open`. No function: as an attribute of a class that would become a method, which the builtin does not."""

    def __init__(self, original: Any, opened: Opened) -> None:
        functools.update_wrapper(self, original)
        self._opened = opened

    def __call__(self, file, mode="r", buffering=-1, *rest, **named):
        plain = not any(value for value in (*rest, *named.values()) if value is not True)  # closefd is True
        if plain and mode in ("wb", "bw") and buffering not in (0, 1):
            held = self._opened.hold(file, buffering)
            if held is not None:
                return held
        return self.__wrapped__(file, mode, buffering, *rest, **named)

    def __reduce__(self) -> str:
        return "open"


class Opened:
    """Wraps `open` in a rank; `mark` tells this rank's files from those of others."""

    def __init__(self, followers: Followers, mark: Callable[[], str]) -> None:
        self._followers, self._mark = followers, mark
        self._in_memory: deque[InMemory] = deque(maxlen=KEPT_IN_MEMORY)
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        self._original: Any = None

    def install(self) -> None:
        """Wraps `open`, once."""
        if self._original is not None:
            return
        self._original = builtins.open
        wrapper = _Open(self._original, self)
        for module in (builtins, io):
            module.open = wrapper
        atexit.register(self._at_exit)

    def undo(self) -> None:
        """Takes the wrapper off."""
        if self._original is not None:
            for module in (builtins, io):
                module.open = self._original
            self._original = None
            atexit.unregister(self._at_exit)

    def saved_in_memory(self, contents: memoryview, found: Callable[[str, str], None]) -> None:
        """A save that should be withheld went into memory. Keeps no reference to `contents`."""
        self._in_memory.append(InMemory(contents.nbytes, fingerprint.fingerprint_bytes([contents]), found))

    def hold(self, file: Any, buffering: int) -> Held | None:
        """The file that is opened instead of `file`, None where that is opened as ever. Never raises."""
        try:
            return self._hold(file, buffering)
        except Exception as error:
            boot.trace(f"{file} is opened as ever: {error!r}")
            return None

    def _hold(self, file: Any, buffering: int) -> Held | None:
        if not isinstance(file, (str, os.PathLike)) or not isinstance(os.fspath(file), str):
            return None
        known = os.path.exists(files.sidecar_of(os.fspath(file)))
        if not known and not self._in_memory:
            return None
        place = os.path.realpath(file)
        folder, name = os.path.split(place)
        try:
            status = os.stat(place)
        except FileNotFoundError:
            status = None
        if status is not None:
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or not os.access(place, os.W_OK):
                return None
            if files.free(folder) < status.st_size + files.SPARE:
                return None
        room = files.room_in(folder, f".{name}{files.ROOM}{self._mark()}-open")
        try:
            raw = io.FileIO(os.path.join(room, name), "w")
            raw.name = file
            held = Held(raw, buffering, self, room, place)
        except BaseException:
            files.leave(room)
            raise
        if status is not None:
            files.keep_owner(held.written, status)
        self._held.add(held)
        return held

    def closed(self, held: Held) -> None:
        """All bytes are written: puts them where they belong."""
        if held.withheld or held.failed:
            return
        bad = self._bad(held.written)
        if bad is not None:
            files.quietly(files.replace, held.written, held.place + files.WITHHELD)
            self._followers.saved(held.place, True)
            bad.found(held.place, held.place + files.WITHHELD)
            return
        problem = values = None
        if held.describe is not None and held.saves == 1:
            try:
                values = held.describe(held.written)
            except (OSError, ValueError, TypeError) as error:
                problem = str(error)
        with files.alone(os.path.dirname(held.place)):
            # Whatever it is now, it is not what an older sidecar describes.
            files.quietly(files.unlink, files.sidecar_of(held.place))
            files.replace(held.written, held.place)
            if values is not None:
                problem = files.write_sidecar(held.place, values)
        held.settled(problem)

    def _bad(self, path: str) -> InMemory | None:
        """The save into memory with which a file begins."""
        size = os.path.getsize(path)
        for one in self._in_memory:
            if size >= one.size and fingerprint.fingerprint_bytes(_first(path, one.size)) == one.row:
                return one
        return None

    def _at_exit(self) -> None:
        """What the script has left open is closed while all of this still works."""
        for held in list(self._held):
            if not held.closed:
                files.quietly(held.close)


def _first(path: str, size: int) -> Iterator[bytes]:
    with io.FileIO(path) as file:
        while size > 0:
            piece = file.read(min(PIECE, size))
            if not piece:
                return
            size -= len(piece)
            yield piece
