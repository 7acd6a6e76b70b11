"""A step as a program: what has to be done again, in order, to get one backward's gradients.

Values are named by references: ("v", n) computed by the program · ("x", n) a tensor from outside, shipped by value ·
("p", g, name) a parameter of the g-th guarded module of the group. Programs travel between ranks of one job that run
the same script, under the same trust as the script itself; they are pickled and never leave the data plane.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sdcrun.shim.microbatch import Autocast, Packed, Random
from sdcrun.shim.replay.kernels import Kernels

Ref = tuple

FULL, FALLBACK, FORWARD = "full", "fallback", "forward"


@dataclass
class Entry:
    """One thing the program does. `blob`: pickled arguments; `uses`, `outs`: references read and made; `writes`:
    references changed in place; `obstacle`: why what comes of it cannot be computed again, if so;
    `kernels`: the switches in force, where they are known (None: as the replay finds them)."""

    blob: bytes = b""
    uses: list[Ref] = field(default_factory=list)
    outs: list[Ref] = field(default_factory=list)
    writes: list[Ref] = field(default_factory=list)
    grad_mode: bool = True
    random: Random | None = None
    obstacle: str = ""
    kernels: Kernels | None = None


@dataclass
class Call(Entry):
    """Forward of the `guard`-th module of the group. `epoch` counts how often autocast's cache of casts was emptied
    before; `acting` are the places of hooks that take part (None: hooks run as they are); `compiled`: under dynamo;
    `strict_outs`: there must be as many outputs as `outs`, those left in attributes and shown to hooks included.
    Buffers without a reference keep the replayer's values. `script`: variables of the script that the forward can see;
    `moved`: those of them that have changed since."""

    guard: int = 0
    autocast: Autocast | None = None
    epoch: int = 0
    attributes: dict = field(default_factory=dict)
    buffers: dict[str, Ref] = field(default_factory=dict)
    held: dict[tuple[str, str], Ref] = field(default_factory=dict)
    acting: set | None = None
    compiled: bool = False
    strict_outs: bool = True
    script: dict[tuple, Any] = field(default_factory=dict)
    moved: dict[tuple, Any] = field(default_factory=dict)


@dataclass
class Op(Entry):
    """One operator call below autograd and autocast; `name` is "namespace.operator.overload"."""

    name: str = ""


@dataclass
class Apply(Entry):
    """A custom autograd.Function's `apply`; the blob holds (class, args, kwargs)."""

    autocast: Autocast | None = None


@dataclass
class Gradient(Entry):
    """torch.autograd.grad; the blob holds (outputs, inputs, args, kwargs)."""


@dataclass
class Backward(Entry):
    """torch.autograd.backward from `roots`; the blob holds the gradients of the roots. In a fallback program `given`
    are (reference of a module's output, reference of its gradient) instead, and there are no roots; `outputs` are then
    compared instead of the loss."""

    roots: list[Ref] = field(default_factory=list)
    given: list[tuple[Ref, Ref]] = field(default_factory=list)
    outputs: list[Ref] = field(default_factory=list)
    create_graph: bool = False


@dataclass
class Program:
    """What a replayer needs.

    `names`: names of the guarded modules, which entries and references number; `guards`: those whose gradients count.
    `kind`: FULL (the script's loss is recomputed), FALLBACK (starts its backward from the recorded gradients of the
    module's outputs) or FORWARD (no backward); `why` it is not FULL. `position`: place of this backward among the
    `window` backwards of the window (from 0). `strict`: to be run with deterministic kernels.
    `own_functions`: custom autograd Functions take part, so that collectives must be looked for. `rank`: the owner's.
    """

    entries: list[Entry]
    externals: dict[Ref, Packed]
    names: list[str]
    guards: list[int]
    kind: str = FULL
    why: str = ""
    position: int = 0
    window: int = 1
    strict: bool = False
    own_functions: bool = False
    rank: int = 0


def operator(name: str) -> Any:
    """The operator overload of that name."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def prune(entries: list[Entry], roots: list[Ref], alias: dict[Ref, Any]) -> list[Entry]:
    """The entries that `roots` depend on, in order. `alias` maps a reference to its storage: a write through one view
    is kept for everything that shares its memory, while a mere view of something needed is not."""
    needed = set(roots)
    memory = {alias.get(ref, ref) for ref in roots}
    kept = []
    for entry in reversed(entries):
        if not needed.isdisjoint(entry.outs) or any(alias.get(ref, ref) in memory for ref in entry.writes):
            kept.append(entry)
            needed.update(entry.uses)
            memory.update(alias.get(ref, ref) for ref in entry.uses)
    return kept[::-1]
