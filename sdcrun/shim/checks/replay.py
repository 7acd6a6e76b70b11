"""Check 2: each rank's micro-batch is computed again by a rank on another failure domain and compared bit for bit.

`Auditor` stands between the guarded step and the replay: it records in audit windows, keeps micro-batches by reference
in all others, holds the audit at the gate, and narrows itself or goes off where the script cannot be computed twice.
Every decision that ranks must share is made from what all of them have gathered.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sdcrun.core import attribute, ballot, schedule, topology
from sdcrun.core.audit import FIRST, INTERVAL, NARROWED, REQUESTED, RING, TRIAGE, Audit
from sdcrun.shim import boot
from sdcrun.shim.checks.calibrate import Calibration
from sdcrun.shim.checks.lastbatch import LastBatches
from sdcrun.shim.checks.nonfinite import seen_locally
from sdcrun.shim.checks.opinion import Parcel
from sdcrun.shim.checks.rounds import ByRank, Rounds
from sdcrun.shim.exchange import ExchangeFailed
from sdcrun.shim.microbatch import Random
from sdcrun.shim.patches import autograd
from sdcrun.shim.replay.collect import weights_digests, weights_rows
from sdcrun.shim.replay.determinism import StrictKernels
from sdcrun.shim.replay.graph import reaches
from sdcrun.shim.replay.local import Local
from sdcrun.shim.replay.record import Recorder
from sdcrun.shim.replay.state import replaying
from sdcrun.shim.transport import BallotFailed

PHASE_AUDIT = 9
DECLINES = 3
STRANGERS = 2
NEVER = 1 << 30
WINDOWS = 32  # of so many the longest is what the audited places are drawn from
SLOWER = 30  # an audit of a long step takes long: a message may take as many windows


def _all_differ(audit: Audit) -> bool:
    """Not one replica got another one's bits: before any audit was clean, that is no reason to withhold an update."""
    ring = [c for c in audit.comparisons if c.role == RING and c.declined is None]
    return bool(ring) and all(c.failed for c in ring)


def _concise(audit: Audit) -> Audit:
    """Without the comparisons of quiet cases; those of a non-finite result are never quiet, even if all agree on it."""
    loud = {c.owner for c in audit.comparisons if c.nonfinite_owner or c.nonfinite_replayer}
    quiet = replace(audit, comparisons=tuple(c for c in audit.comparisons if c.owner not in loud)).compact()
    return replace(quiet, comparisons=quiet.comparisons + tuple(c for c in audit.comparisons if c.owner in loud))


@dataclass
class AuditOutcome:
    """What the gate must know: `mismatch` is the same on all ranks and means skip; `compared`: some pair was; `clean`:
    and none differs; `event` is the data of an "audit" event; `vote`: the weights differ, take the weight vote now."""

    mismatch: bool = False
    compared: bool = False
    clean: bool = False
    event: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    vote: bool = False


class Auditor:
    """The replay audits of one group in this rank. `off`: why there are none any more, or None."""

    def __init__(self, group) -> None:
        self.group = group
        self.off: str | None = None
        self.calibration = Calibration()
        self.last = LastBatches()
        self.recorder: Recorder | None = None
        self.guards: list = []
        self._before: Recorder | None = None
        self._auditing = False
        self._local: dict[str, Local] = {}
        self._opened = 0.0
        self._thread = threading.get_ident()
        self._stale: list[Recorder] = []
        self._kernels: StrictKernels | None = None
        self._audits = 0
        self._backwards = 0
        self._windows: deque[int] = deque([1], maxlen=WINDOWS)
        self._why: str | None = None
        self._declines = 0
        self._said: set[str] = set()
        self._strangers = 0
        self._by_rank = ByRank()
        domains = topology.failure_domains(group.nodes)
        if not topology.replayer_of(range(group.size), domains, group.devices):
            reasons = topology.without_partner(range(group.size), domains, group.devices)
            self.go_off(next(iter(reasons.values()), "no partner"))
        autograd.observers.append(self)

    # -- the window ---------------------------------------------------------------------------------------------

    def window_opens(self, step: int, audit: bool) -> None:
        """At the first training forward of a window. `audit`: record it."""
        self._drop()
        self.guards = [guard for guard in self.group.guards if guard.ddp is not None]
        self._opened, self._thread = time.monotonic(), threading.get_ident()
        before, self._before = self._before, None
        if before is not None:
            before.finish()
        self._auditing = audit and self.off is None
        ahead = self.off is None and self._several() and schedule.audit_due(step + 1, self.group.audit_every)
        if self._auditing or ahead:
            # Not of the last window alone: where each audit follows on an epoch's short end, others would never be met.
            longest = max(self._windows)
            pick = schedule.audited_position(step, self.group.audit_every, longest) if audit else NEVER
            self.recorder = Recorder(self.guards, pick, before, ahead)
            self.group.runtime.recording = True
            if self.calibration.strict:
                self._kernels = StrictKernels()
        if before is not None:
            self._stale.append(before)

    def _several(self) -> bool:
        """With several modules a backward may need a forward from before the last update of another one."""
        return len(self.guards) > 1

    def before_forward(self, guard, inputs: tuple, kwargs: dict) -> Any:
        """A training forward begins; returns the token for `after_forward`."""
        if replaying():
            return None
        if guard not in self.guards:
            self.guards.append(guard)
        self._local[guard.name] = Local.of(guard.module)
        recording = self.recorder is not None and not self.recorder.done
        random = Random.now(exact=recording)
        token, held = None, self.last.begin(guard, inputs, kwargs, random)
        if recording:
            token = self._recording(self.recorder.before_forward, guard, inputs, kwargs, random)
        return token, held

    def _recording(self, part, *args: Any) -> Any:
        """Trouble while recording costs this window's audit, nothing else."""
        try:
            return part(*args)
        except Exception as error:
            boot.trace(f"recording: {error!r}")
            self.recorder.fail(f"recording failed: {type(error).__name__}: {error}"[:160])
            return None

    def after_forward(self, guard, token: Any, output: Any) -> None:
        """The module has returned."""
        recorded, held = token
        if held is not None:
            self.last.end(held, output)
        if recorded is not None and self.recorder is not None:
            self._recording(self.recorder.after_forward, recorded, output)

    def left_ddp(self, guard, token: Any, output: Any) -> None:
        """DDP.forward has returned: what follows is the script's own."""
        if token is not None and token[0] is not None and self.recorder is not None and not self.recorder.done:
            self._recording(self.recorder.left_ddp, token[0], output)

    def around_backward(self, run, tensors: Any, grad_tensors: Any, options: dict) -> Any:
        """Counts backwards and lets the recorder stand around them."""
        if threading.get_ident() != self._thread and not self._ours(tensors):
            return run(tensors, grad_tensors, options)
        self._backwards += 1
        if self.recorder is None:
            return run(tensors, grad_tensors, options)
        return self.recorder.around_backward(run, tensors, grad_tensors, options)

    def _ours(self, tensors: Any) -> bool:
        """Whether a backward of another thread is one of the guarded modules': it may train something of its own."""
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return reaches(roots, set(), {id(p) for guard in self.guards for p in guard.parameters.values()})[1]

    def window_closes(self) -> None:
        """Drops everything that belongs to the window."""
        self._windows.append(max(1, self._backwards))
        self._backwards = 0
        if self.recorder is not None and self._several():
            self.recorder.finish()
            self._before, self.recorder = self.recorder, None
        self._drop()
        self.group.runtime.recording = False

    def _drop(self) -> None:
        self.last.clear()
        if self._kernels is not None:
            self._kernels.off()
            self._kernels = None
        if self.recorder is not None:
            self._stale.append(self.recorder)
            self.recorder = None
        # A mode of the script's own may lie on top of ours: try again at the next occasion.
        self._stale = [recorder for recorder in self._stale if not recorder.close()]
        self.guards = []
        self._why = None

    # -- the gate -----------------------------------------------------------------------------------------------

    def ready(self) -> str | None:
        """None if this window can be audited, else why not."""
        if self.off is not None:
            return self.off
        if self.recorder is None or not self._auditing:
            return "the window was not recorded from its beginning"
        if any(guard.ignores for guard in self.guards):
            return "DDP was told to ignore parameters of the module, which may differ by rank"
        if self._why is None:
            try:
                self._why = self.recorder.pack() or ""
                if self.recorder.case is not None:
                    self.recorder.case.program.strict = self.calibration.strict
            except Exception as error:
                self._why = f"recording failed: {type(error).__name__}: {error}"[:160]
        return self._why or None

    def declined(self, step: int, why: str | None) -> None:
        """Some rank could not; called on all ranks, which learn the reasons and say them once."""
        if self.off is not None:
            return
        said, failure = [], None
        try:
            said = self.group.exchange.gather((why or "").encode(), self._tag(step))
        except ExchangeFailed as error:
            failure = f"the ranks could not exchange why an audit was declined: {error}"
        if not self._closing(step, failure, mismatch=False):
            return
        reasons = tuple((self.group.ranks[i], text.decode()) for i, text in enumerate(said) if text)
        self._without(step, reasons[0][1] if reasons else "unknown")

    def _without(self, step: int, text: str) -> None:
        """No audit in this step, for a reason that all ranks know."""
        if text not in self._said:
            self._said.add(text)
            self.group.runtime.limit(f"no replay audit of some steps, the first of them {step}: {text}", "replay")
        self._declines += 1
        if self._declines >= DECLINES and not self._audits:
            self.go_off(text)

    def at_gate(self, step: int, hit: bool) -> AuditOutcome:
        """The audit of this window, or the triage of a non-finite gradient; a collective of the group."""
        outcome = AuditOutcome()
        if not self.guards:
            self.guards = [guard for guard in self.group.guards if guard.ddp is not None]
        parcel = self._parcel(hit)
        rounds = Rounds(
            self.group, self.guards, step, parcel, self._local, self.calibration.excluded, turn=self._audits,
            limit=max(self.group.config.exchange_timeout, SLOWER * (time.monotonic() - self._opened)),
            by_rank=self._by_rank,
        )  # fmt: skip
        failure, audit = None, None
        try:
            audit = rounds.run(
                self._statement(), self._weights, own=hit or not self.calibration.done, cause=self._cause(step)
            )
            kind = attribute.outcome(audit)
            if kind == attribute.NOT_REPLAYABLE and not hit:
                self.calibration.revise(rounds, audit)
        except ExchangeFailed as error:
            failure = f"the exchange of an audit failed: {error}"
        except Exception as error:
            boot.trace(f"audit: {error!r}")
            failure = f"the audit failed: {type(error).__name__}: {error}"[:200]
        outcome.seconds = rounds.seconds
        mismatch = audit is not None and failure is None and kind == attribute.MISMATCH
        everybody = mismatch and not hit and not self.calibration.done and _all_differ(audit)
        mismatch = mismatch and not everybody
        together = rounds.met and failure is None or self._closing(step, failure, mismatch)
        if not together or audit is None:
            return outcome
        outcome.compared, outcome.clean = kind != attribute.DECLINED, kind == attribute.CLEAN
        if self._auditing and outcome.compared:
            self._audits += 1
        elif self._auditing and not hit:
            self._without(step, next((c.declined for c in audit.comparisons if c.declined), "nothing was compared"))
        if kind == attribute.CLEAN and audit.cause != TRIAGE:
            self.calibration.passed()
        self._strangers = self._strangers + 1 if everybody else 0
        if self._strangers >= STRANGERS:
            self.go_off(
                "all pairs differ since the first audit: the forward depends on the rank, or devices compute other bits"
            )
        if self.calibration.hopeless is not None:
            self.go_off(self.calibration.hopeless)
        outcome.mismatch, outcome.vote = mismatch, kind == attribute.WEIGHTS_DIFFER
        outcome.event = _concise(replace(audit, skipped=mismatch, hit=hit)).to_json()
        if audit.scope != "all" and self._auditing:
            self.group.runtime.limit(NARROWED + audit.scope, "replay")
        return outcome

    def _closing(self, step: int, failure: str | None, mismatch: bool) -> bool:
        """All ranks meet once more, so that nobody skips where anybody failed. False: the audit does not count."""
        place = ballot.tag(step, 0, PHASE_AUDIT)
        words = [int(failure is not None), int(mismatch), int(not mismatch), 0, 0, 0, place, -place]
        try:
            maxima = self.group.all_reduce_max(words)
        except BallotFailed as error:
            self.group.turn_off(f"the ranks did not meet after the audit of step {step}: {error}")
            return False
        if maxima[6] != -maxima[7]:
            self.group.turn_off(f"after the audit of step {step} the ranks were not at the same place")
            return False
        if maxima[0] or (maxima[1] and maxima[2]):
            self.go_off(failure or "another rank could not finish an audit")
            return False
        return True

    def _parcel(self, hit: bool) -> Parcel | str:
        nonfinite = hit and any(map(seen_locally, self.guards))
        case = self.recorder.case if self.recorder is not None else None
        if self._auditing and (not hit or not nonfinite or (case is not None and not case.finite)):
            why = self.ready()
            if why is None:
                return Parcel.of(case)
            if not nonfinite:
                return why
        return self.last.parcel(self.guards) if nonfinite else ""

    def _statement(self) -> dict[str, Any]:
        case = self.recorder.case if self.recorder is not None else None
        program = case.program if case is not None else None
        scope = self.calibration.scope(program.kind if program else None)
        if case is not None and case.uncovered:
            less = "without the gradients of modules whose forward was not recorded"
            scope = less if scope == "all" else f"{scope}; {less}"
        return {
            "position": program.position if program else 0,
            "window": max(self._backwards, 1),
            "scope": scope,
        }

    def _weights(self) -> dict[str, list[int]]:
        """Digests of this rank's weights: replicas that differ cannot compute equal bits."""
        known = self.recorder.weights if self.recorder is not None and self.recorder.guards == self.guards else None
        return known or weights_digests(self.guards, weights_rows(self.guards))

    def _cause(self, step: int) -> str:
        if not self._auditing:
            return TRIAGE
        if not self._audits:
            return FIRST
        return INTERVAL if schedule.audit_due(step, self.group.audit_every) else REQUESTED

    def _tag(self, step: int) -> int:
        return 900 + step % 90

    def go_off(self, reason: str) -> None:
        """No more audits in this attempt."""
        if self.off is None:
            self.off = reason
            self.group.emit("check_off", {"check": "replay", "reason": reason, "step": self.group.step})
