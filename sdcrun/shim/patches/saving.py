"""Where checkpoints are written and read: torch.save and load, torch.distributed.checkpoint, safetensors, Lightning.

A save in which no tensor of a guarded module is found goes to the original at once. Modules other than torch itself are
patched right after they have been imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading

import torch
import torch.distributed as dist

from sdcrun.shim import boot
from sdcrun.shim.checkpoints import loads
from sdcrun.shim.patches.afterimport import AfterImport
from sdcrun.shim.replay.muted import keeps_files

_originals: list[tuple[object, str, object]] = []
_watch: AfterImport | None = None
_inside = threading.local()


def _replace(module, name: str, make) -> None:
    original = getattr(module, name)
    _originals.append((module, name, original))
    setattr(module, name, functools.wraps(original)(make(original)))


def _foreign_caller(depth: int) -> bool:
    """Whether torch.distributed.checkpoint itself calls: it writes each tensor by a torch.save of its own."""
    return sys._getframe(depth).f_globals.get("__name__", "").startswith("torch.distributed.checkpoint")


def _busy() -> bool:
    return getattr(_inside, "saving", False)


class _saving:  # noqa: N801  (used like a function)
    """Marks this thread as inside one of our saves: what the original calls is not looked at again."""

    def __enter__(self) -> None:
        _inside.saving = True

    def __exit__(self, *exc: object) -> None:
        _inside.saving = False


def install(runtime) -> None:
    """Lays the patches; `undo()` takes them off."""
    global _watch
    keeper = runtime.keeper
    unfinished: set[str] = set()

    def idle() -> bool:
        return not runtime.active or not runtime.groups or _busy()

    def checked(contents, path) -> None:
        """After a load: nothing of this may reach the script."""
        try:
            if runtime.active and isinstance(path, (str, os.PathLike)):
                loads.loaded(runtime, contents, os.fspath(path))
        except Exception as error:
            boot.trace(f"a load was not checked: {error!r}")

    def make_save(original):
        def save(obj, f, *args, **kwargs):
            if isinstance(f, (str, os.PathLike)) and keeps_files():
                return None
            if idle() or _foreign_caller(2):
                return original(obj, f, *args, **kwargs)

            def writer(contents, target):
                with _saving():
                    return original(contents, target, *args, **kwargs)

            return keeper.save(obj, f, writer)

        return save

    def make_load(original):
        def load(f, *args, **kwargs):
            result = original(f, *args, **kwargs)
            if not _busy():
                checked(result, f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None))
            return result

        return load

    def make_save_file(original):
        def save_file(tensors, filename, *args, **kwargs):
            if keeps_files():
                return None
            if idle():
                return original(tensors, filename, *args, **kwargs)

            def writer(contents, target):
                with _saving():
                    return original(contents, target, *args, **kwargs)

            return keeper.save(tensors, filename, writer, "safetensors")

        return save_file

    def make_load_file(original):
        def load_file(filename, *args, **kwargs):
            result = original(filename, *args, **kwargs)
            checked(result, filename)
            return result

        return load_file

    def make_together(original):
        """torch.distributed.checkpoint.save and async_save: every rank takes part."""

        def together(state_dict, **kwargs):
            path = _folder_of(kwargs)
            if idle() or path is None or path in unfinished:
                return original(state_dict, **kwargs)
            state_dict = {
                key: value.state_dict() if _stateful(value) else value for key, value in state_dict.items()
            }

            def writer(contents, place, written):
                given = kwargs if place == path else {**kwargs, "checkpoint_id": place}
                unfinished.add(place)
                try:
                    with _saving():
                        result = original(contents, **given)
                except BaseException:
                    unfinished.discard(place)
                    raise

                def done(future=None):
                    unfinished.discard(place)
                    if future is None or future.exception() is None:
                        with contextlib.suppress(Exception):
                            written()

                future = getattr(result, "upload_completion", result)
                if hasattr(future, "add_done_callback"):
                    future.add_done_callback(done)
                else:
                    done()
                return result

            members = 1 if kwargs.get("no_dist") or not dist.is_initialized() else dist.get_world_size(
                kwargs.get("process_group"))  # fmt: skip
            first = members == 1 or dist.get_rank(kwargs.get("process_group")) == 0
            return keeper.save_together(state_dict, path, writer, first, members)

        return together

    def make_load_together(original):
        def load(state_dict, **kwargs):
            result = original(state_dict, **kwargs)
            checked(state_dict, _folder_of(kwargs))
            return result

        return load

    def make_plugin_save(original):
        """Lightning saves into memory first and writes that: only here is the path known."""

        def save_checkpoint(self, checkpoint, path, *args, **kwargs):
            if idle() or not isinstance(path, (str, os.PathLike)) or "://" in os.fspath(path):
                return original(self, checkpoint, path, *args, **kwargs)

            def writer(contents, target):
                with _saving():
                    return original(self, contents, target, *args, **kwargs)

            return keeper.save(checkpoint, path, writer)

        return save_checkpoint

    def make_destroy(original):
        def destroy_process_group(*args, **kwargs):
            if runtime.active:
                try:
                    keeper.questions.leave()
                except Exception as error:
                    boot.trace(f"at destroy_process_group: {error!r}")
            return original(*args, **kwargs)

        return destroy_process_group

    def saver(module) -> None:
        _replace(module, "save", make_together)
        _replace(module, "async_save", make_together)

    def safetensors(module) -> None:
        _replace(module, "save_file", make_save_file)
        _replace(module, "load_file", make_load_file)

    for module in (torch, torch.serialization):
        _replace(module, "save", make_save)
        _replace(module, "load", make_load)
    for module in (dist, dist.distributed_c10d):
        _replace(module, "destroy_process_group", make_destroy)
    _watch = AfterImport({
        "torch.distributed.checkpoint.state_dict_saver": saver,
        "torch.distributed.checkpoint.state_dict_loader": lambda m: _replace(m, "load", make_load_together),
        "safetensors.torch": safetensors,
        "lightning.fabric.plugins.io.torch_io": lambda m: _replace(
            m.TorchCheckpointIO, "save_checkpoint", make_plugin_save),
        "lightning_fabric.plugins.io.torch_io": lambda m: _replace(
            m.TorchCheckpointIO, "save_checkpoint", make_plugin_save),
    })  # fmt: skip
    _watch.install()


def _folder_of(given: dict) -> str | None:
    """The folder of a distributed checkpoint, where it is one on a file system."""
    path = given.get("checkpoint_id")
    if path is None:
        path = getattr(given.get("storage_writer") or given.get("storage_reader"), "path", None)
    if not isinstance(path, (str, os.PathLike)) or "://" in os.fspath(path):
        return None
    return os.path.abspath(os.fspath(path))


def _stateful(value) -> bool:
    return not isinstance(value, torch.nn.Module) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def undo() -> None:
    """Restores what `install` replaced."""
    for module, name, original in reversed(_originals):
        setattr(module, name, original)
    _originals.clear()
    if _watch is not None:
        _watch.remove()
