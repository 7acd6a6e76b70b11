"""The file's side of a save: written whole or not at all, and its sidecar.

The bytes are those of an ordinary save: the writer runs on a path with the same last component (torch puts it into the
archive) in a hidden folder beside the file, and the result is renamed over the old file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SIDECAR = ".sdc.json"
WITHHELD = ".withheld"
LOCK_SECONDS = 2.0
SPARE = 64 << 10
ROOM = ".sdcrun-"
LEFT_SECONDS = 3600.0

# As they were before `Followers` wraps them.
replace, unlink = os.replace, os.unlink

_busy: set[str] = set()
_lock = threading.Lock()


Describe = Callable[[str], "dict[str, Any]"]


def write_whole(
    path: str, mark: str, writer: Callable[[str], Any], describe: Describe, suffix: str = "", size: int = 0
) -> tuple[Any, str | None]:
    """Lets `writer` write `path`, so that a kill at any moment leaves the old file or the new one, and puts what
    `describe(written)` gives into the sidecar. Returns the writer's result and why there is no sidecar, or None.

    With `suffix` the contents go to `path` + `suffix` and `path` is left alone. Symbolic links are followed. A path
    that is no regular file, has hard links (others see the same inode) or lies in a folder in which nothing can be made
    is written directly; so is one of about `size` bytes on a disk that has room for it only in place of the old one,
    where an ordinary save would have succeeded. `mark` tells the ranks of a job apart.
    """
    real = os.path.realpath(path)
    folder, name = os.path.split(real)
    goal = real + suffix
    try:
        status = os.stat(goal)
    except OSError:
        status = None
    room = None
    if status is None or stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        with contextlib.suppress(OSError):
            room = room_in(folder, f".{name}{ROOM}{mark}")
    if room is None:
        result = writer(path + suffix)
        return result, write_sidecar(path + suffix, describe(path + suffix))
    try:
        temporary = os.path.join(room, name)
        try:
            result = writer(temporary)
        except Exception:
            # Emptied as well: who failed to write it may have it open still, and its room is needed.
            quietly(os.truncate, temporary, 0)
            quietly(unlink, temporary)
            if suffix or status is None or not only_in_place(folder, status.st_size, size):
                raise
            quietly(unlink, sidecar_of(path))
            result = writer(path)
            return result, write_sidecar(path, describe(path))
        if status is not None:
            keep_owner(temporary, status)
        sidecar, problem = os.path.join(room, "sidecar"), None
        try:
            _dump(sidecar, describe(temporary))
        except (OSError, ValueError, TypeError) as error:
            problem = str(error)
        with alone(folder):
            # Without a sidecar for a moment: a kill in between must not leave a whole file beside another one's.
            quietly(unlink, sidecar_of(path + suffix))
            replace(temporary, goal)
            if problem is None:
                quietly(replace, sidecar, sidecar_of(path + suffix))
        return result, problem
    finally:
        leave(room)


def only_in_place(folder: str, old: int, size: int) -> bool:
    """Whether a file of `size` bytes fits where one of `old` bytes is, and not beside it."""
    try:
        left = free(folder)
    except OSError:
        return False
    return bool(size) and left < size + SPARE <= left + old


def free(folder: str) -> int:
    """Bytes that this process may still write in the file system of a folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Keeps other ranks that save under the same name from coming between a file and its sidecar, as far as the file
    system has locks; waits two seconds at most."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                    break
            time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def room_in(folder: str, name: str) -> str:
    """A new folder; what a killed save of the same file has left there is removed, that of other jobs after an hour."""
    room = os.path.join(folder, name)
    with _lock:
        if room in _busy:
            room = f"{room}-{secrets.token_hex(3)}"
        _busy.add(room)
    try:
        os.mkdir(room, 0o700)
    except FileExistsError:
        shutil.rmtree(room, ignore_errors=True)
        os.mkdir(room, 0o700)
    except OSError:
        with _lock:
            _busy.discard(room)
        raise
    with contextlib.suppress(OSError):
        _sweep(folder, name[: name.rindex(ROOM) + len(ROOM)], os.stat(room).st_mtime - LEFT_SECONDS)
    return room


def _sweep(folder: str, prefix: str, before: float) -> None:
    """Removes rooms in which nothing was written since `before`, by the clock of the file system."""
    with os.scandir(folder) as entries:
        rooms = [entry.path for entry in entries if entry.name.startswith(prefix)]
    for room in rooms:
        with contextlib.suppress(OSError), os.scandir(room) as inside:
            if max([os.stat(room).st_mtime, *(entry.stat().st_mtime for entry in inside)]) < before:
                shutil.rmtree(room, ignore_errors=True)


def leave(room: str) -> None:
    """Removes a folder made by `room_in`."""
    shutil.rmtree(room, ignore_errors=True)
    with _lock:
        _busy.discard(room)


def keep_owner(path: str, status: os.stat_result) -> None:
    """Gives a new file the owner and the mode of the one that it replaces."""
    with contextlib.suppress(OSError):
        os.chown(path, status.st_uid, status.st_gid)
    with contextlib.suppress(OSError):
        os.chmod(path, status.st_mode & 0o7777)


def sidecar_of(path: str) -> str:
    """The sidecar's path of a checkpoint."""
    return path.rstrip("/") + SIDECAR


def written(path: str) -> int | None:
    """When a checkpoint was written last, in nanoseconds, which a move does not change; of a folder, its metadata."""
    try:
        return os.stat(os.path.join(path, ".metadata") if os.path.isdir(path) else path).st_mtime_ns
    except OSError:
        return None


def write_sidecar(path: str, values: dict[str, Any]) -> str | None:
    """Replaces the sidecar of `path`; returns why it could not be, or None. Never raises: a full disk is no reason to
    end a training."""
    target = sidecar_of(path)
    temporary = f"{target}.{secrets.token_hex(4)}"
    try:
        _dump(temporary, values)
        replace(temporary, target)
        return None
    except (OSError, ValueError, TypeError) as error:
        with contextlib.suppress(OSError):
            unlink(temporary)
        return str(error)


def _dump(path: str, values: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file)


def read_sidecar(path: str) -> dict[str, Any] | None:
    """The sidecar of a checkpoint, or of the one that a symbolic link names; None where none can be read."""
    if os.path.islink(path) and not os.path.exists(sidecar_of(path)):
        path = os.path.realpath(path)
    try:
        with open(sidecar_of(path), encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def update_sidecar(path: str, id: str, changes: dict[str, Any]) -> bool:
    """Changes fields of a sidecar if it is still that of the save `id`; whether it was."""
    values = read_sidecar(path)
    if values is None or values.get("id") != id:
        return False
    return write_sidecar(path, {**values, **changes}) is None


def quietly(function, *arguments: str | int) -> None:
    """Calls it; an OSError is no matter."""
    with contextlib.suppress(OSError):
        function(*arguments)
