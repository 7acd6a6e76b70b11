"""The modules inside a module, found in one walk: an audit looks at them some twenty times."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

# What every module has. Whether it is training is among them.
REGISTRIES = frozenset(vars(torch.nn.Module()))


def registry_of(module: torch.nn.Module, name: str) -> dict[str, Any]:
    """What `module` has registered as "_parameters", "_buffers" or "_modules"; a traced module makes it when asked."""
    held = vars(module).get(name)
    return getattr(module, name) if held is None else held


class Registered(NamedTuple):
    """A parameter or a buffer: its name, and where it is registered."""

    name: str
    registry: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor


class Tree:
    """`parts`: (name, module) of `module` ("") and of all inside it, each once, in the order of `named_modules()`, as
    they were when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.parts: list[tuple[str, torch.nn.Module]] = []
        seen: set[int] = set()
        pending = [("", module)]
        while pending:
            name, part = pending.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            self.parts.append((name, part))
            children = registry_of(part, "_modules")
            if children:
                prefix = f"{name}." if name else ""
                pending += [(prefix + key, child) for key, child in children.items() if child is not None][::-1]

    @functools.cached_property
    def attributes(self) -> list[tuple[str, str, Any]]:
        """(module's name, attribute, value) of what the modules hold besides `REGISTRIES`, when first asked for."""
        return [
            (name, attribute, value)
            for name, part in self.parts for attribute, value in vars(part).items() if attribute not in REGISTRIES
        ]  # fmt: skip

    def registered(self, registry: str) -> list[Registered]:
        """All of "_parameters" or "_buffers"; one that is shared comes with each of the modules that have it."""
        return [
            Registered(f"{name}.{key}" if name else key, held, key, tensor)
            for name, part in self.parts if (held := registry_of(part, registry))
            for key, tensor in held.items() if tensor is not None
        ]  # fmt: skip

    def parameters(self) -> list[torch.nn.Parameter]:
        """Each once, in the order of `parameters()`."""
        found = {id(p): p for _, part in self.parts for p in registry_of(part, "_parameters").values() if p is not None}
        return list(found.values())
