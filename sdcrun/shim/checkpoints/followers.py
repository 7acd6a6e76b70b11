"""What becomes of a checkpoint after its save: renamed, copied, removed, by the functions that scripts use for it."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

from sdcrun.shim.checkpoints.files import SIDECAR, WITHHELD, quietly, replace, sidecar_of, unlink

# As it was before `Followers` wraps it.
_copyfile = shutil.copyfile


class Followers:
    """Sidecars go where their files go, and an operation on a file that was withheld does not end the training.

    The functions in `NAMES` are wrapped from the first guarded save on. A file renamed over another one while its
    contents are withheld leaves that other one as it is. The newest good file is not removed while what was saved after
    it is withheld; it is once a good one has been saved. `moved(source, goal, kept)` is called with the new place of a
    checkpoint (`kept`: it is at the old one as well), `said(text)` with what a person should know.
    """

    NAMES = ((os, "replace"), (os, "rename"), (os, "link"), (os, "remove"), (os, "unlink"), (os, "chmod"),
             (os.path, "getsize"), (shutil, "copyfile"), (shutil, "copy"), (shutil, "copy2"),
             (shutil, "rmtree"))  # fmt: skip

    def __init__(self, moved: Callable[[str, str, bool], None], said: Callable[[str], None]) -> None:
        self._moved, self._said = moved, said
        self._originals: list[tuple[Any, str, Any]] = []
        self.good: set[str] = set()
        self.withheld: set[str] = set()
        self._newest: str | None = None
        self._trouble = False
        self._put_off: list[tuple[Callable[..., Any], str]] = []

    def saved(self, path: str, withheld: bool) -> None:
        """A save to `path` has been written, or withheld."""
        path = os.path.abspath(path)
        (self.withheld if withheld else self.good).add(path)
        (self.good if withheld else self.withheld).discard(path)
        self._trouble = withheld
        if not withheld:
            self._newest = path
            waiting, self._put_off = self._put_off, []
            for remove, other in waiting:
                if other != path and not path.startswith(other + os.sep):
                    quietly(remove, other)
        if not self._originals:
            self._wrap()

    def gone(self, path: str) -> None:
        """The file at `path` is no longer what was saved there."""
        self.good.discard(os.path.abspath(path))
        quietly(unlink, sidecar_of(path))

    def _wrap(self) -> None:
        # Until Python 3.10 pathlib keeps functions of its own.
        accessor = getattr(pathlib, "_normal_accessor", None)
        also = [(accessor, name) for module, name in self.NAMES if module is os and hasattr(accessor, name)]
        kinds = {"remove": self._removing, "unlink": self._removing, "rmtree": self._removing_folder,
                 "chmod": self._asking, "getsize": self._asking}  # fmt: skip
        for module, name in (*self.NAMES, *also):
            original = getattr(module, name)
            self._originals.append((module, name, original))
            setattr(module, name, functools.wraps(original)(kinds.get(name, self._moving)(original)))

    def undo(self) -> None:
        """Restores what was wrapped."""
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals.clear()

    def _removing(self, original):
        def remove(*args, **kwargs):
            mine = self._known(_given(args, kwargs, 0, "path"), kwargs)
            if mine is not None and mine in self.withheld:
                self.withheld.discard(mine)
                if not os.path.lexists(mine):
                    return None
            if mine is not None and self._must_stay(mine):
                self._put_off.append((remove, mine))
                return None
            result = original(*args, **kwargs)
            if mine is not None and mine in self.good:
                self.good.discard(mine)
                quietly(unlink, sidecar_of(mine))
            return result

        return remove

    def _removing_folder(self, original):
        def rmtree(*args, **kwargs):
            path = _given(args, kwargs, 0, "path")
            text = os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, os.PathLike)) else None
            if text is not None and kwargs.get("dir_fd") is None and self._must_stay(text):
                self._put_off.append((rmtree, text))
                return None
            return original(*args, **kwargs)

        return rmtree

    def _must_stay(self, path: str) -> bool:
        """Whether the newest good checkpoint is `path`, or in that folder, and nothing good was saved after it."""
        newest = self._newest
        if not self._trouble or newest is None or newest != path and not newest.startswith(path + os.sep):
            return False
        if not os.path.lexists(newest):
            return False
        self._said(f"{path} is not removed yet: it is the newest good checkpoint, what was saved after it is withheld")
        return True

    def _asking(self, original):
        name = original.__name__

        def ask(*args, **kwargs):
            mine = self._known(_given(args, kwargs, 0, "filename" if name == "getsize" else "path"), kwargs)
            if mine is not None and mine in self.withheld and not os.path.lexists(mine):
                return original(mine + WITHHELD) if name == "getsize" else None
            return original(*args, **kwargs)

        return ask

    def _moving(self, original):
        name = original.__name__
        keeps = name not in ("replace", "rename")

        def move(*args, **kwargs):
            source, target = _given(args, kwargs, 0, "src"), _given(args, kwargs, 1, "dst")
            mine = self._known(source, kwargs)
            if mine is None or not isinstance(target, (str, os.PathLike)):
                result = original(*args, **kwargs)
                if not keeps:
                    self._folder_moved(source, target)
                return result
            goal = os.path.abspath(os.fsdecode(target))
            if os.path.isdir(goal):
                goal = os.path.join(goal, os.path.basename(mine))
            if mine in self.withheld:
                self._move_withheld(mine, goal, keeps)
                return target if name.startswith("copy") else None
            result = original(*args, **kwargs)
            if name in ("copy", "copy2"):
                return result  # the copyfile inside has seen to the sidecar
            quietly(_copyfile if keeps else replace, sidecar_of(mine), sidecar_of(goal))
            if not keeps:
                self.good.discard(mine)
                if self._newest == mine:
                    self._newest = goal
            self.good.add(goal)
            self.withheld.discard(goal)
            self._moved(mine, goal, keeps)
            return result

        return move

    def _move_withheld(self, source: str, goal: str, keeps: bool) -> None:
        for suffix in (WITHHELD, WITHHELD + SIDECAR):
            quietly(_copyfile if keeps else replace, source + suffix, goal + suffix)
        if not keeps:
            # An open file was emptied when it was opened; what is left of it must not replace a whole one.
            quietly(unlink, source)
            self.withheld.discard(source)
        if not os.path.lexists(goal):
            self.withheld.add(goal)
        self._moved(source + WITHHELD, goal + WITHHELD, keeps)

    def _folder_moved(self, source, target) -> None:
        """A folder with checkpoints in it has been renamed: its sidecars went along."""
        if not (self.good or self.withheld) or not all(isinstance(p, (str, os.PathLike)) for p in (source, target)):
            return
        old, new = os.path.abspath(os.fsdecode(source)) + os.sep, os.path.abspath(os.fsdecode(target)) + os.sep
        for paths, suffix in ((self.good, ""), (self.withheld, WITHHELD)):
            for path in [path for path in paths if path.startswith(old)]:
                paths.discard(path)
                paths.add(new + path[len(old) :])
                if self._newest == path:
                    self._newest = new + path[len(old) :]
                self._moved(path + suffix, new + path[len(old) :] + suffix, False)

    def _known(self, path, kwargs) -> str | None:
        if not (self.good or self.withheld) or any(kwargs.get(k) is not None for k in ("dir_fd", "src_dir_fd")):
            return None
        if not isinstance(path, (str, os.PathLike)):
            return None
        text = os.path.abspath(os.fsdecode(path))
        return text if text in self.good or text in self.withheld else None


def _given(args: tuple, kwargs: dict[str, Any], place: int, name: str) -> Any:
    """An argument that may be given by place or by name; None where it is not."""
    return args[place] if len(args) > place else kwargs.get(name)
