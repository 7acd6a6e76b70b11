"""Acts on a module right after its own code has run, before whoever imports it sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from sdcrun.shim import boot


class AfterImport:
    """Meta-path finder that lets modules be found as always; `actions` maps a module's name to what is done then."""

    def __init__(self, actions: dict[str, Callable]) -> None:
        self._actions = dict(actions)
        self._searching: set[str] = set()

    def install(self) -> None:
        """Acts at once on modules that are there already, and later on the others."""
        for name in [name for name in self._actions if name in sys.modules]:
            self._act(name, sys.modules[name])
        if self._actions:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Watches no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name, path=None, target=None):
        if name not in self._actions or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = next(
                (s for f in sys.meta_path if f is not self and hasattr(f, "find_spec")
                 for s in [f.find_spec(name, path, target)] if s is not None),
                None,
            )  # fmt: skip
        finally:
            self._searching.discard(name)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            spec.loader.__dict__.pop("exec_module", None)
            execute(module)
            self._act(name, module)

        spec.loader.exec_module = exec_module
        return spec

    def _act(self, name: str, module) -> None:
        try:
            self._actions.pop(name)(module)
        except Exception as error:
            boot.trace(f"{name} was not patched: {error!r}")
