"""The guards of one DDP process group in this rank: their connections, the step they share, their counters."""

from __future__ import annotations

import hashlib
import os
import time
import weakref

import torch

from sdcrun.core.audit import runs
from sdcrun.shim import identity
from sdcrun.shim.checkpoints.clock import Clock
from sdcrun.shim.checkpoints.recognise import Dropped
from sdcrun.shim.exchange import Exchange
from sdcrun.shim.links import Links
from sdcrun.shim.rendezvous import Rendezvous
from sdcrun.shim.transport import Tree

LISTED_RANKS = 64
KEPT_DROPPED = 4
APART = "the replicas differ on purpose between two averagings (localSGD)"


def _failure_of(said: list[dict] | str) -> str:
    """Why the ranks cannot be guarded together, or ""."""
    if isinstance(said, str):
        return said
    reason = next((one["failure"] for one in said if one["failure"]), "")
    return f"the ranks could not connect to each other: {reason}" if reason else ""


class GuardGroup:
    """Guards that share one DDP process group.

    `ranks`: global ranks; `rank`, `size`: of this process within it; `nodes`: node number per group rank; `step`:
    number of the window now open, counted from 0; `off_reason`: why no ballot is held any more, or None.
    """

    def __init__(
        self, runtime, ranks: tuple[int, ...], links: Links | None, tree: Tree | None, members: list[dict]
    ) -> None:
        self.runtime, self.ranks, self.links, self.tree = runtime, ranks, links, tree
        self.config = runtime.config
        self.rank, self.size = ranks.index(runtime.rank), len(ranks)
        # In events: the ranks, or stretches of them where the list would be the larger part of each event.
        self.said_ranks = list(ranks) if len(ranks) <= LISTED_RANKS else runs(ranks, 1)
        self.nodes = [member["node"] for member in members]
        self.devices = [member["device"] for member in members]
        self.guards: list = []
        self.dropped: list[Dropped] = []
        self.modules_made = 0
        self.optimizers: list = []
        self.exchange = Exchange(links, self.size, self.config.exchange_timeout) if links is not None else None
        self.off_reason: str | None = None
        self.trouble: str | None = None
        self.step = 0
        self.calls = self.calls_last = 0
        self.window_open = False
        self.committed = self.skipped = 0
        self.vote_step: int | None = None
        self.vote_asked = False
        self.vote_buffers: list = []
        self.last_step = 0
        self.audit_next = self.auditing = False
        self.audit_every, self.weights_every = self.config.audit_every, self.config.weights_every
        self.checks = {name: {"run": 0, "fired": 0, "seconds": 0.0} for name in ("nonfinite", "replay", "weights")}
        self.parts: dict[str, float] = {}
        # By `clock`, so that costs and training are counted alike.
        self.first_gate: float | None = None
        self.last_gate = self.last_summary = 0.0
        self.last_audit_step: int | None = None
        self.last_clean_audit: int | None = None
        self.weights_clock = Clock()
        self.snapshots = None
        self.left_version = 0
        # Steps after which this rank saved a checkpoint, and what it asks all ranks for at the next gate.
        self.save_steps: list[int] = []
        self.wanted: set[str] = set()
        self.auditor = None
        self.budget = None
        self.weights = None
        # Costs are counted in this thread's CPU time: waiting for another rank is no cost of ours, and on a shared host
        # wall time is noise. Work queued on an accelerator is not seen by it; there the wall is asked.
        self.clock = time.perf_counter if torch.cuda.is_initialized() else time.thread_time

    @classmethod
    def arm(cls, runtime, meeting: Rendezvous, ranks: tuple[int, ...]):
        """Makes the group on all its ranks or on none: (group, None) or (None, reason). Bounded."""
        size, place = len(ranks), ranks.index(runtime.rank)
        name = "group/" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        config, links, tree, failure = runtime.config, None, None, ""
        try:
            links = Links(place) if size > 1 else None
        except OSError as error:
            failure = f"no address to listen at: {error}"[:160]
        statement = {
            "node": int(os.environ.get("GROUP_RANK", os.environ.get("SDCRUN_LOCAL_NODE", "0"))),
            "device": identity.compatibility(),
            "door": links.door if links is not None else None,
            "failure": failure,
        }
        members = meeting.agree(name, place, size, statement)
        broken = _failure_of(members)
        if not broken and links is not None:
            try:
                links.doors = [member["door"] for member in members]
                tree = Tree(links, size, config.arm_timeout, config.ballot_timeout)
            except OSError as error:
                failure = str(error)[:160] or repr(error)
            broken = _failure_of(meeting.agree(f"{name}/made", place, size, {"failure": failure}))
        if broken:
            if links is not None:
                links.let_go()
            return None, broken
        return cls(runtime, ranks, links, tree, members), None

    def add(self, guard) -> None:
        """Takes a new DDP module of this process group under guard, for as long as the script keeps it."""
        self.guards.append(guard)
        self.dropped = []
        self.modules_made += 1
        if self.budget is None and self.config.budget is not None and self.size > 1:
            from sdcrun.shim.budget import Budget

            self.budget = Budget(self)
        if self.auditor is None and self.audit_every and self.size > 1:
            from sdcrun.shim.checks.replay import Auditor

            self.auditor = Auditor(self)
        weakref.finalize(guard.ddp, self._drop, guard).atexit = False
        if self.weights is not None:
            self.weights.forget()

    def _drop(self, guard) -> None:
        # Most scripts drop their module at the end: the rank that saves after that must still hear what it held.
        self.runtime.keeper.questions.leave(self)
        guard.ends()
        self.guards.remove(guard)
        owners = [self.runtime.owner.get(id(parameter)) for parameter in guard.parameters.values()]
        if all(reference is None or reference() in (guard, None) for reference in owners):
            self.dropped = [*self.dropped[1 - KEPT_DROPPED :], Dropped(guard)]
        # A script that wraps its module anew has both guards for a while: what the later one took over stays with it.
        for parameter in guard.parameters.values():
            reference = self.runtime.owner.get(id(parameter))
            if reference is not None and reference() in (guard, None):
                del self.runtime.owner[id(parameter)]
        if self.weights is not None:
            self.weights.forget()

    def keeps_replicas_apart(self) -> None:
        """The script lets replicas differ on purpose: neither votes nor replays can say anything."""
        from sdcrun.shim.checks.weights import WeightVote

        if self.weights is None:
            self.weights = WeightVote(self)
        self.weights.turn_off(self.step, APART)
        if self.auditor is not None:
            self.auditor.go_off(APART)

    def meet(self, optimizer) -> None:
        """Numbers an optimizer; the order is the script's, so it is the same on all ranks."""
        if all(known() is not optimizer for known in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer))
            if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
                self.runtime.limit(
                    "ZeroRedundancyOptimizer: each parameter's update is computed on one rank and sent to all; what "
                    "goes wrong in it reaches every replica alike and is not seen", "weights",
                )  # fmt: skip

    def number_of(self, optimizer) -> int:
        """The optimizer's number in this group."""
        return next((i for i, known in enumerate(self.optimizers) if known() is optimizer), 0)

    def emit(self, kind: str, data: dict) -> None:
        """Sends an event of this rank."""
        started = self.clock()
        self.runtime.emit(kind, data)
        self.spend("events", self.clock() - started)

    def all_reduce_max(self, words: list[int]) -> list[int]:
        """MAX over the group of eight int64. Raises BallotFailed when it does not end in time."""
        return words if self.size == 1 else self.tree.max(words)

    def ask_off(self, reason: str) -> None:
        """This rank can no longer guard: the next ballot takes all ranks off together, so that none waits for it."""
        self.trouble = self.trouble or reason

    def turn_off(self, reason: str) -> None:
        """No more ballots in this attempt; training goes on unguarded, said aloud."""
        if self.off_reason is None:
            self.off_reason = reason
            for check in ("nonfinite", "replay", "weights"):
                self.emit("check_off", {"check": check, "reason": reason, "step": self.step})

    def spend(self, part: str, seconds: float) -> None:
        """Adds to the counters of where sdcrun's time goes."""
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def summarize(self, now: float | None = None) -> None:
        """Emits the cumulative counters."""
        self.last_summary = now if now is not None else time.monotonic()
        self.emit(
            "summary",
            {
                "group": self.said_ranks,
                "steps": {"seen": self.step, "committed": self.committed, "skipped": self.skipped},
                "checks": self.checks,
                "parts": {part: round(seconds, 6) for part, seconds in self.parts.items()},
                "train_seconds": round(self.last_gate - (self.first_gate or self.last_gate), 6),
                "last_audit_step": self.last_audit_step,
            },
        )
