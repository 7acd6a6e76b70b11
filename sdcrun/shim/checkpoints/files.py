"""The file's side of a save: written whole or not at all, its sidecar, and what happens to both afterwards.

The bytes are those of an ordinary save: the writer runs on a path with the same last component (torch puts it into the
archive) in a hidden folder beside the file, and the result is renamed over the old file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
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

# As they were before `Followers` wraps them.
_replace, _unlink, _copyfile = os.replace, os.unlink, shutil.copyfile

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
            room = _room(folder, f".{name}.sdcrun-{mark}")
    if room is None:
        result = writer(path + suffix)
        return result, write_sidecar(path + suffix, describe(path + suffix))
    try:
        temporary = os.path.join(room, name)
        try:
            result = writer(temporary)
        except Exception:
            # Emptied as well: who failed to write it may have it open still, and its room is needed.
            _quietly(os.truncate, temporary, 0)
            _quietly(_unlink, temporary)
            if suffix or status is None or not _only_in_place(folder, status.st_size, size):
                raise
            _quietly(_unlink, sidecar_of(path))
            result = writer(path)
            return result, write_sidecar(path, describe(path))
        if status is not None:
            _keep_owner(temporary, status)
        sidecar, problem = os.path.join(room, "sidecar"), None
        try:
            _dump(sidecar, describe(temporary))
        except (OSError, ValueError, TypeError) as error:
            problem = str(error)
        with _alone(folder):
            # Without a sidecar for a moment: a kill in between must not leave a whole file beside another one's.
            _quietly(_unlink, sidecar_of(path + suffix))
            _replace(temporary, goal)
            if problem is None:
                _quietly(_replace, sidecar, sidecar_of(path + suffix))
        return result, problem
    finally:
        shutil.rmtree(room, ignore_errors=True)
        with _lock:
            _busy.discard(room)


def _only_in_place(folder: str, old: int, size: int) -> bool:
    """Whether a file of `size` bytes fits where one of `old` bytes is, and not beside it."""
    try:
        free = _free(folder)
    except OSError:
        return False
    return bool(size) and free < size + SPARE <= free + old


def _free(folder: str) -> int:
    """Bytes that this process may still write in the file system of a folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
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


def _room(folder: str, name: str) -> str:
    """A new folder; what a killed save of the same file has left there is removed."""
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
    return room


def _keep_owner(path: str, status: os.stat_result) -> None:
    with contextlib.suppress(OSError):
        os.chown(path, status.st_uid, status.st_gid)
    with contextlib.suppress(OSError):
        os.chmod(path, status.st_mode & 0o7777)


def sidecar_of(path: str) -> str:
    """The sidecar's path of a checkpoint."""
    return path.rstrip("/") + SIDECAR


def write_sidecar(path: str, values: dict[str, Any]) -> str | None:
    """Replaces the sidecar of `path`; returns why it could not be, or None. Never raises: a full disk is no reason to
    end a training."""
    target = sidecar_of(path)
    temporary = f"{target}.{secrets.token_hex(4)}"
    try:
        _dump(temporary, values)
        _replace(temporary, target)
        return None
    except (OSError, ValueError, TypeError) as error:
        with contextlib.suppress(OSError):
            _unlink(temporary)
        return str(error)


def _dump(path: str, values: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file)


def read_sidecar(path: str) -> dict[str, Any] | None:
    """The sidecar of a checkpoint, or None where there is none that can be read."""
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


class Followers:
    """Sidecars go where their files go, and an operation on a file that was withheld does not end the training.

    `os.replace`, `rename`, `link`, `remove`, `unlink` and `shutil.copyfile`, `copy`, `copy2` are wrapped from the first
    guarded save on. A file renamed over another one while its contents are withheld leaves that other one as it is.
    `moved(source, goal)` is called with the new place of a checkpoint.
    """

    NAMES = ((os, "replace"), (os, "rename"), (os, "link"), (os, "remove"), (os, "unlink"),
             (shutil, "copyfile"), (shutil, "copy"), (shutil, "copy2"))  # fmt: skip

    def __init__(self, moved: Callable[[str, str], None]) -> None:
        self._moved = moved
        self._originals: list[tuple[Any, str, Any]] = []
        self.good: set[str] = set()
        self.withheld: set[str] = set()

    def saved(self, path: str, withheld: bool) -> None:
        """A save to `path` has been written, or withheld."""
        path = os.path.abspath(path)
        (self.withheld if withheld else self.good).add(path)
        (self.good if withheld else self.withheld).discard(path)
        if not self._originals:
            for module, name in self.NAMES:
                original = getattr(module, name)
                self._originals.append((module, name, original))
                wrapper = self._removing(original) if name in ("remove", "unlink") else self._moving(original)
                setattr(module, name, functools.wraps(original)(wrapper))

    def undo(self) -> None:
        """Restores what was wrapped."""
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals.clear()

    def _removing(self, original):
        def remove(path, *args, **kwargs):
            mine = self._known(path, kwargs)
            if mine is not None and mine in self.withheld:
                self.withheld.discard(mine)
                if not os.path.lexists(mine):
                    return None
            result = original(path, *args, **kwargs)
            if mine is not None and mine in self.good:
                self.good.discard(mine)
                _quietly(_unlink, sidecar_of(mine))
            return result

        return remove

    def _moving(self, original):
        name = original.__name__
        keeps = name not in ("replace", "rename")

        def move(source, target, *args, **kwargs):
            mine = self._known(source, kwargs)
            if mine is None:
                result = original(source, target, *args, **kwargs)
                if not keeps:
                    self._folder_moved(source, target)
                return result
            goal = os.path.abspath(os.fspath(target))
            if os.path.isdir(goal):
                goal = os.path.join(goal, os.path.basename(mine))
            if mine in self.withheld:
                self._move_withheld(mine, goal, keeps)
                return target if name.startswith("copy") else None
            result = original(source, target, *args, **kwargs)
            if name in ("copy", "copy2"):
                return result  # the copyfile inside has seen to the sidecar
            _quietly(_copyfile if keeps else _replace, sidecar_of(mine), sidecar_of(goal))
            if not keeps:
                self.good.discard(mine)
            self.good.add(goal)
            self.withheld.discard(goal)
            self._moved(mine, goal)
            return result

        return move

    def _move_withheld(self, source: str, goal: str, keeps: bool) -> None:
        for suffix in (WITHHELD, WITHHELD + SIDECAR):
            _quietly(_copyfile if keeps else _replace, source + suffix, goal + suffix)
        if not keeps:
            # An open file was emptied when it was opened; what is left of it must not replace a whole one.
            _quietly(_unlink, source)
            self.withheld.discard(source)
        if not os.path.lexists(goal):
            self.withheld.add(goal)
        self._moved(source + WITHHELD, goal + WITHHELD)

    def _folder_moved(self, source, target) -> None:
        """A folder with checkpoints in it has been renamed: its sidecars went along."""
        if not (self.good or self.withheld) or not isinstance(source, (str, os.PathLike)):
            return
        old, new = os.path.abspath(os.fspath(source)) + os.sep, os.path.abspath(os.fspath(target)) + os.sep
        for paths, suffix in ((self.good, ""), (self.withheld, WITHHELD)):
            for path in [path for path in paths if path.startswith(old)]:
                paths.discard(path)
                paths.add(new + path[len(old) :])
                self._moved(path + suffix, new + path[len(old) :] + suffix)

    def _known(self, path, kwargs) -> str | None:
        if not (self.good or self.withheld) or any(kwargs.get(k) is not None for k in ("dir_fd", "src_dir_fd")):
            return None
        if not isinstance(path, (str, os.PathLike)):
            return None
        text = os.path.abspath(os.fspath(path))
        return text if text in self.good or text in self.withheld else None


def _quietly(function, *arguments: str | int) -> None:
    with contextlib.suppress(OSError):
        function(*arguments)
