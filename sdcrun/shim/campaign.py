"""A campaign's part in each rank: many cells in one launch, the state put back before each of them.

Only launches of `sdcrun campaign` have it. The group's step counter is the clock, the same on all ranks: the warm-up,
then slots of `horizon` steps. At the first forward of a slot the state is what it was after the warm-up, and each rank
says whether it could prove that; what it saw in each slot (loss, norm of its local gradients) goes on record for the
detectors that the campaign compares with. After the last slot the ranks meet and end: such a launch is not worth
training on.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from sdcrun.shim import boot
from sdcrun.shim.patches import autograd
from sdcrun.shim.rewind import Snapshot

WARMUP = -1


class Campaign:
    """`plan`, a JSON file: {warmup, horizon, slots: number of cells or empty slots, draws: a number per fault, restore:
    whether the state is put back}. `meeting` is the ranks' bounded rendezvous."""

    def __init__(self, runtime, plan: str, meeting) -> None:
        with open(plan, encoding="utf-8") as file:
            values = json.load(file)
        self.runtime, self.meeting = runtime, meeting
        self.warmup, self.horizon = int(values["warmup"]), int(values["horizon"])
        self.slots, self.draws = int(values["slots"]), list(values["draws"])
        self.restore = bool(values["restore"])
        self.group = None
        self.snapshot: Snapshot | None = None
        self.scalers: list[GradScaler] | None = None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._loss = self._square = 0.0
        self._told = WARMUP - 1
        autograd.observers.append(self)

    def drawn(self, position: int, step: int) -> tuple[int, int]:
        """What a fault's random choices are made of: the same for a cell wherever in a launch it has its place."""
        return self.draws[position], (step - self.warmup) % self.horizon

    # -- what is seen -------------------------------------------------------------------------------------------------

    def gradients(self, buffer: torch.Tensor) -> None:
        """One bucket of local gradients, before the all-reduce."""
        values = buffer._values() if buffer.is_sparse else buffer
        self._square += float(torch.linalg.vector_norm(values.detach().to(torch.float64))) ** 2

    def around_backward(self, run, tensors: Any, grad_tensors: Any, options: dict) -> Any:
        """Notes the loss that a backward starts from, as the script itself may read it afterwards."""
        result = run(tensors, grad_tensors, options)
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        self._loss += sum(float(root.detach()) for root in roots if root.numel() == 1) / self._scale()
        return result

    def _scale(self) -> float:
        if self.scalers is None:
            self.scalers = [found for found in gc.get_objects() if type(found) is GradScaler and found.is_enabled()]
        return float(self.scalers[0].get_scale()) if len(self.scalers) == 1 else 1.0

    # -- the clock ----------------------------------------------------------------------------------------------------

    def window_opens(self, group) -> None:
        """The first forward of the group's window: a step has ended, and perhaps a slot."""
        if self.group is None:
            self.group = group
        if group is not self.group:
            return
        if group.step:
            self._step_ended()
        slot, within = divmod(group.step - self.warmup, self.horizon)
        if group.step == self.warmup:
            self._tell(WARMUP, None)
            if self.restore:
                self.snapshot = Snapshot(group)
        elif slot > 0 and within == 0 and slot <= self.slots:
            state = self._state()
            self._tell(slot - 1, self._put_back() if slot < self.slots else None, state)
            if slot == self.slots:
                self._end()

    def _step_ended(self) -> None:
        self.losses.append(self._loss)
        self.norms.append(math.sqrt(self._square))
        self._loss = self._square = 0.0

    def _put_back(self) -> str | None:
        if self.snapshot is None:
            return "the state is not put back in this launch"
        clock = self.group.weights_clock
        clock.begin()
        try:
            return self.snapshot.put_back()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        finally:
            clock.written()
            clock.end()

    def _state(self) -> str | None:
        """A text for every bit of what training has changed."""
        try:
            return self.snapshot.digest() if self.snapshot is not None else None
        except Exception as error:
            boot.trace(f"no digest of the state: {error!r}")
            return None

    def _tell(self, slot: int, restored: str | None, state: str | None = None) -> None:
        self._told = slot
        self.runtime.emit(
            "segment",
            {"slot": slot, "group": list(self.group.ranks), "rank": self.runtime.rank, "losses": self.losses,
             "norms": self.norms, "restored": restored, "state": state},
        )  # fmt: skip
        self.losses, self.norms = [], []

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The script has ended by itself; the slot that was under way counts if its last step is done."""
        if self.group is None or not self.group.step:
            return
        self._step_ended()
        slot, within = divmod(self.group.step - self.warmup, self.horizon)
        if within == 0 and slot - 1 > self._told and slot <= self.slots:
            self._tell(slot - 1, None, self._state())

    def _end(self) -> None:
        """All ranks leave together: one that goes early would break what another one still waits for."""
        here = self.group
        if here.size > 1:
            self.meeting.agree("campaign/end", here.rank, here.size, {})
        boot.trace("the campaign's slots of this launch are over")
        self.group = None
        self.runtime.finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
