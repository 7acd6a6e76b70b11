"""Decides whether this process may hold a rank, waits for the script to import torch, then lays the patches.

Nothing here imports torch: the script may still set variables that torch reads at import. A process becomes *the* rank
only when it wraps a module in DDP (a Python wrapper around the script never does); its children then find
SDCRUN_OWNER and stay inert.
"""

from __future__ import annotations

import os
import sys

OWNER = "SDCRUN_OWNER"


def trace(text: str) -> None:
    """One line on stderr when SDCRUN_DEBUG is set."""
    if os.environ.get("SDCRUN_DEBUG", "0") not in ("", "0"):
        sys.stderr.write(f"[sdcrun] debug: pid {os.getpid()} rank {os.environ.get('RANK', '?')}: {text}\n")


def why_inert() -> str | None:
    """The reason why this process cannot hold a guarded rank, or None."""
    env = os.environ
    if env.get("SDCRUN_DISABLE", "0") not in ("", "0"):
        return "SDCRUN_DISABLE is set"
    if env.get(OWNER, str(os.getpid())) != str(os.getpid()):
        return "a child of a rank"
    if "RANK" not in env and "TORCHELASTIC_RUN_ID" not in env and "--multiprocessing-fork" not in sys.orig_argv:
        return "not started by an agent"
    return None


def arm() -> None:
    """Called at interpreter start: installs the import hook where a rank may be."""
    reason = why_inert()
    if reason is not None:
        trace(f"inert: {reason}")
        return
    if "torch" in sys.modules:
        _lay_patches()
    else:
        sys.meta_path.insert(0, _AfterTorch())
        trace("waiting for torch")


class _AfterTorch:
    """Meta-path finder that lets torch be found as always and acts once its __init__ has run to the end."""

    def __init__(self) -> None:
        self.searching = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            spec = next(
                (s for f in sys.meta_path if f is not self and hasattr(f, "find_spec")
                 for s in [f.find_spec(name, path, target)] if s is not None),
                None,
            )  # fmt: skip
        finally:
            self.searching = False
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            # An instance attribute keeps the loader's class, and goes before torch runs, so that nobody sees it.
            spec.loader.__dict__.pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _lay_patches()

        spec.loader.exec_module = exec_module
        return spec


def _lay_patches() -> None:
    try:
        from sdcrun.shim import runtime

        runtime.start()
        trace("patches laid")
    except Exception as error:
        sys.stderr.write(f"[sdcrun] this rank is not guarded: {error!r}\n")
