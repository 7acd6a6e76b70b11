"""What faults of --inject-fault have in common, whatever their site: whose they are, when they are active, how they
fire, and why one never did."""

from __future__ import annotations

import os
import weakref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from sdcrun.core import faultspec
from sdcrun.core.faultspec import FaultSpec
from sdcrun.shim import identity
from sdcrun.shim.inject_aim import Aim
from sdcrun.shim.inject_device import home_of
from sdcrun.shim.inject_hooks import matching
from sdcrun.shim.inject_values import strike
from sdcrun.shim.replay.state import replaying


class Place:
    """What a fault may hit in one module. Of several names one is drawn per step among those seen in all of its windows
    so far, so that what the script does not use, or not in each step, is not drawn; if there are none, among those of
    the latest window; in a first window it is the first to come."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._window, self._seen, self._used = -1, set(), []
        self._always: set[str] | None = None
        self._chosen = (-1, "")

    def saw(self, step: int, name: str) -> None:
        """`name` is in use in the window `step`."""
        if step != self._window:
            if self._seen:
                self._always = self._seen if self._always is None else self._always & self._seen
                self._used = sorted(self._always or self._seen)
            self._window, self._seen = step, set()
        self._seen.add(name)

    def choose(self, step: int, name: str, rng) -> bool:
        """Whether `name` is the one hit in `step`; decided once a step."""
        if self._chosen[0] != step:
            pool = self._used if step == self._window and self._used else [name]
            self._chosen = (step, rng.choice(pool))
        return self._chosen[1] == name


class Fault:
    """One --inject-fault in this rank.

    `places`: the modules that have what it wants, all of one group; in each step it falls on one of them (`aim`).
    `done`: the latest step of a fault that fires once a step.
    """

    def __init__(self, position: int, text: str) -> None:
        self.position, self.spec = position, faultspec.parse(text)
        self.places: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.aim = Aim()
        self.bound = False
        self.known: list[str] = []
        self.fired = 0
        self.why = ""
        self.done = -1

    @property
    def guards(self) -> list:
        """The guards that are alive, in the order in which the script made their modules."""
        return list(self.places)

    def bind(self, guard, names: list[str]) -> None:
        """`guard` is one of those that the fault may fall on."""
        self.places[guard] = Place(names)
        self.bound = True

    def falls_on(self, guard, step: int) -> bool:
        """Whether this is the module that the fault hits in `step`."""
        return guard in self.places and (len(self.places) == 1 or self.aim.at(guard, step))


class Faults:
    """All faults of one rank. `runtime` gives config, rank, attempt and `emit`."""

    def __init__(self, runtime) -> None:
        self.runtime = runtime
        self.faults = [Fault(position, text) for position, text in enumerate(runtime.config.faults)]
        self.node = int(os.environ.get("GROUP_RANK", os.environ.get("SDCRUN_LOCAL_NODE", "0")))
        self.home: tuple[int, int] | None = None
        self.groups: list = []
        self._settled = False

    def _settle(self, guard) -> None:
        here = (self.runtime.rank, self.node)
        self.home = here
        if any(fault.spec.where == "device" for fault in self.faults):
            key = identity.device_of(guard.ddp).key
            self.home = home_of(self.runtime.config.job_dir, key, self.runtime.attempt, *here)
        self._settled = True

    def _place_of(self, spec: FaultSpec) -> tuple[int, int] | None:
        """(rank, node) that decides whether the spec means this rank: the device's first one, or the one of now."""
        return self.home if spec.where == "device" else (self.runtime.rank, self.node)

    def _mine(self, fault: Fault) -> bool:
        place = self._place_of(fault.spec)
        return place is not None and faultspec.targets(fault.spec, *place)

    def _rng(self, fault: Fault, step: int, salt: str = ""):
        rank = -1 if fault.spec.shared else self._place_of(fault.spec)[0]
        return faultspec.draw(self.runtime.config.seed, *self._drawn(fault, step), rank, salt)

    def _drawn(self, fault: Fault, step: int) -> tuple[int, int]:
        """The number and the step that random choices are made of. A campaign's cell has its own ones: it hits the same
        element wherever in a launch it has its place."""
        campaign = self.runtime.campaign
        return (fault.position, step) if campaign is None else campaign.drawn(fault.position, step)

    def _active(self, fault: Fault, step: int) -> bool:
        """Whether the fault fires here in this step, in the original computation or the replay that is going on."""
        place = self._place_of(fault.spec)
        if place is None or (replaying() and fault.spec.where != "device"):
            return False
        return faultspec.fires(fault.spec, step, *place, *self._drawn(fault, step), self.runtime.config.seed)

    def _of(self, guard, *sites: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.spec.site in sites and guard in fault.places]

    # -- firing -------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault, guard, tensor, name: str, step: int, phase: str | None = None) -> bool:
        """Corrupts `tensor` in place and emits what was done; False (with the reason kept) when nothing changed."""
        # A recording audit must not see these operations: it would replay the fault along with the script's own.
        with torch.no_grad(), _disable_current_modes():
            target = tensor._values() if tensor.layout is torch.sparse_coo else tensor
            hit = strike(target, fault.spec, self._rng(fault, step))
        if isinstance(hit, str):
            fault.why = f"step {step}, {name}: {hit}"
            return False
        fault.fired += 1
        self.runtime.emit(
            "inject",
            {"spec": fault.position, "step": step, "site": fault.spec.site, "tensor": guard.qualified(name),
             "index": hit.index, "kind": fault.spec.kind, "bits": hit.bits, "before": hit.before, "after": hit.after,
             "elements": hit.elements, "phase": phase or ("replay" if replaying() else "step")},
        )  # fmt: skip
        return True

    def _wrong_copy(self, fault: Fault, guard, tensor: torch.Tensor, name: str, step: int, phase: str | None = None):
        """A corrupted copy, or None when nothing changed. The original is never edited: it may be the script's own, or
        the same memory as another tensor (the gradient of both sides of an addition is one tensor)."""
        with torch.no_grad(), _disable_current_modes():
            copy = tensor.detach().clone()
        return copy if self._strike(fault, guard, copy, name, step, phase) else None

    # -- the end ------------------------------------------------------------------------------------------------------

    def unfired(self) -> list[tuple[int, str]]:
        """(position, reason) of every fault meant for this rank that changed nothing so far. What no rank can have
        (rank 7 of 4) is reported by rank 0."""
        reasons = []
        for fault in self.faults:
            if not fault.fired:
                reason = self._why_unfired(fault)
                if reason is not None:
                    reasons.append((fault.position, reason))
        return reasons

    def _why_unfired(self, fault: Fault) -> str | None:
        spec, first = fault.spec, self.runtime.rank == 0
        world, nodes = (int(os.environ.get(name, "0") or 0) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
        if not spec.shared and spec.rank is not None and world and spec.rank >= world:
            return f"there is no rank {spec.rank} among {world}" if first else None
        if not spec.shared and spec.node is not None and nodes and spec.node >= nodes:
            return f"there is no node {spec.node} among {nodes}" if first else None
        if not self._mine(fault) or (spec.rank is None and spec.node is None and not first):
            return None
        if not fault.bound or (fault.known and not matching(fault.known, spec.tensor)):
            known = ", ".join(fault.known[:6]) + (", ..." if len(fault.known) > 6 else "")
            what = "module" if spec.site in ("activation", "saved") else "tensor"
            return f"no {what} is named {spec.tensor!r}; there are {known}" if known else f"there is no {spec.site}"
        steps = max((group.step for group in self.groups), default=0)
        if spec.first >= steps:
            return f"the run ended before step {spec.first}, after {steps} steps"
        if fault.why:
            return fault.why
        if spec.site == "checkpoint":
            return "nothing was saved then"
        if spec.p < 1:
            return f"p={spec.p} drew none of {steps} steps"
        return f"no {spec.site} of {spec.tensor!r} was computed in its steps"

    def finish(self) -> None:
        """Emits a limit for each fault that never fired."""
        for position, reason in self.unfired():
            text = faultspec.format(self.faults[position].spec)
            self.runtime.emit("limit", {"text": f"--inject-fault {text} never fired: {reason}", "check": None,
                                        "unfired": position})
