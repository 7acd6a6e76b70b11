"""The guarded step: ballot, audit, commit or skip, weight vote, in this order in every step.

The window opens at the first training forward after a decision and ends at the first `optimizer.step` (the gate)
after a backward in which DDP reduced gradients. Only then do all ranks come here alike: a forward on rank 0 alone, or
a step under no_sync(), holds no ballot.
"""

from __future__ import annotations

import functools
import os
import signal
import time

import torch

from sdcrun.core import ballot, saves, schedule
from sdcrun.shim import boot
from sdcrun.shim.checks import nonfinite
from sdcrun.shim.checks.weights import WeightVote
from sdcrun.shim.guard import ELSEWHERE, RUN, SKIP
from sdcrun.shim.transport import BallotFailed

HOLD_SECONDS = 120.0
UNGATED_WINDOWS = 20
MOVED_UNGATED = 8


def quiet(function):
    """What goes wrong in our code is said and never reaches the user's."""

    @functools.wraps(function)
    def wrapper(*args):
        try:
            return function(*args)
        except Exception as error:
            boot.trace(f"{function.__name__}: {error!r}")
            from sdcrun.shim import runtime

            if runtime.CURRENT is not None:
                runtime.CURRENT.limit(f"sdcrun's own code failed in {function.__name__}: {error!r}"[:300])
                for group in runtime.CURRENT.groups.values():
                    group.ask_off(f"sdcrun's own code failed in {function.__name__}: {error!r}"[:200])
            return None

    return wrapper


# -- forward ------------------------------------------------------------------------------------------------------


def forward_begins(runtime, guard, ddp, inputs, kwargs, register):
    """A training forward of a guarded module starts; returns a token for `forward_ends`, or None."""
    group = guard.group
    started = group.clock()
    register()
    if group.step < 2 and guard.steps_in_backward() and not guard.off_reason:
        guard.off_reason = "the optimizer runs inside the backward: no gate lies between gradient and update"
        runtime.unguarded(guard.off_reason)
    if guard.off_reason:
        return None
    if runtime.inside_step:
        runtime.limit("a closure's later evaluations within one optimizer step are seen only after the update")
        return None
    if guard.synced and guard.ungated < UNGATED_WINDOWS:
        _look_for_updates(runtime, guard)
    if not group.window_open:
        if runtime.campaign is not None:
            runtime.campaign.window_opens(group)
        group.window_open = True
        audit = bool(group.audit_every) and group.size > 1 and (
            group.audit_next or schedule.audit_due(group.step, group.audit_every)
        )
        group.audit_next, group.auditing = False, audit
        runtime.recording = runtime.recording or audit
        if group.auditor is not None:
            group.auditor.window_opens(group.step, audit)
    if runtime.injector is not None:
        runtime.injector.forward_begins(guard, group.step)
    if not guard.window_open:
        guard.open_window()
        guard.buffers_synced = ddp.will_sync_module_buffers()
    token = None
    if group.auditor is not None:
        token = group.auditor.before_forward(guard, inputs, kwargs)
    group.spend("capture", group.clock() - started)
    return guard, token


def forward_ends(runtime, token, output) -> None:
    """The module's forward has returned."""
    guard, inner = token
    guard.token = inner
    if runtime.injector is not None:
        runtime.injector.forward_ends()
    if guard.group.auditor is not None and inner is not None:
        guard.group.auditor.after_forward(guard, inner, output)


def forward_left(runtime, ddp, output) -> None:
    """DDP.forward has returned; only called while an audit records."""
    guard = runtime.guards.get(ddp)
    if guard is not None and guard.group.auditor is not None and guard.token is not None:
        guard.group.auditor.left_ddp(guard, guard.token, output)


def _look_for_updates(runtime, guard) -> None:
    """A backward was reduced and another forward begins without a gate: fine unless the weights have moved."""
    parameter = next((p for p in guard.parameters.values() if p.requires_grad and p.numel()), None)
    if parameter is None:
        return
    now = (parameter._version, float(parameter.detach().sum()))
    before, guard.sample = guard.sample, now
    if before is not None and before != now:
        guard.ungated += 1
        # An attack on the weights before the first update (PGD) moves them as well, a few times.
        if guard.ungated == MOVED_UNGATED:
            guard.off_reason = ELSEWHERE
            runtime.unguarded(guard.off_reason)


# -- gate ---------------------------------------------------------------------------------------------------------


class AmpState:
    """What a GradScaler found for one optimizer: `found` tensors are 1.0 where it will not step."""

    def __init__(self, found: list[torch.Tensor]) -> None:
        self.found = found

    @property
    def overflow(self) -> bool:
        """Whether this rank's scaler saw a non-finite gradient."""
        return any(bool(t.item()) for t in self.found)

    def force(self) -> None:
        """Makes the scaler of this rank refuse the step, as all others do."""
        for tensor in self.found:
            tensor.fill_(1.0)


def decide(runtime, optimizer, amp: AmpState | None = None) -> str:
    """RUN or SKIP for this call of `optimizer.step`; the same on all ranks of each group concerned."""
    guards = runtime.guards_of(optimizer)
    if not guards:
        runtime.unguarded_step(optimizer)
        return RUN
    open_guards = [guard for guard in guards if guard.window_open and guard.synced]
    if not open_guards:
        for guard in guards:
            if guard.window_open and not guard.off_reason:
                runtime.limit("an optimizer step without a reduced gradient (no_sync): replicas may differ there")
        return SKIP if any(guard.decision == SKIP for guard in guards if not guard.window_open) else RUN
    groups = list({id(guard.group): guard.group for guard in open_guards}.values())
    if len(groups) > 1:
        runtime.limit("one optimizer updates modules of several process groups: a skip holds for each group alone")
    decisions = [_gate(runtime, group, optimizer, amp) for group in groups]
    return SKIP if SKIP in decisions else RUN


def ready(runtime, optimizer) -> bool:
    """Whether a reduced backward waits for its update: the gate can stand before this step."""
    return any(guard.window_open and guard.synced for guard in runtime.guards_of(optimizer))


def _gate(runtime, group, optimizer, amp: AmpState | None) -> str:
    if group.off_reason is not None:
        return RUN
    group.weights_clock.let_go(group.config.checkpoint_timeout)
    started = group.clock()
    group.first_gate = started if group.first_gate is None else group.first_gate
    step = group.step
    guards = [guard for guard in group.guards if guard.window_open and guard.synced]
    local, reduced = nonfinite.flags(guards)
    if amp is not None:
        reduced = amp.overflow
    phase = ballot.PHASE_AMP if amp is not None else ballot.PHASE_STEP
    requests = _requests(runtime, group)
    auditing = group.auditing and group.auditor is not None
    why_not = group.auditor.ready() if auditing else None
    paper = ballot.Ballot(
        tag=ballot.tag(step, group.number_of(optimizer), phase),
        local=local,
        reduced=reduced,
        ask=ballot.ASK_AUDIT if "audit" in requests else ballot.ASK_VOTE if "vote" in requests else ballot.ASK_NOTHING,
        decline=why_not is not None,
        command=_command(group, requests),
    )
    try:
        result = ballot.outcome(group.all_reduce_max(paper.words()))
    except BallotFailed as error:
        group.turn_off(f"the ballot of step {step} failed: {error}")
        return RUN
    group.spend("ballot", group.clock() - started)
    if not result.lockstep:
        group.turn_off(f"at step {step} the ranks were not at the same place: their optimizers step in different order")
        return RUN
    if result.command == ballot.COMMAND_OFF:
        group.turn_off(group.trouble or "another rank can no longer guard")
        return RUN
    group.checks["nonfinite"]["run"] += 1
    decision = RUN
    overflow = amp is not None and result.reduced_everywhere
    if result.hit:
        decision = RUN if overflow else SKIP
        bad_local, bad_reduced = nonfinite.observe(guards)
        group.checks["nonfinite"]["fired"] += not overflow
        group.emit(
            "nonfinite",
            {"step": step, "group": group.said_ranks, "amp": overflow, "skipped": decision == SKIP,
             "local": bad_local, "reduced": bad_reduced},
        )  # fmt: skip
    vote_now = False
    if auditing or (result.hit and group.auditor is not None):
        before = group.clock()
        mismatch, vote_now = _audit(group, step, auditing, why_not, result)
        decision = SKIP if mismatch else decision
        # What the audit took is counted as the audit's.
        started += group.clock() - before
    if result.command == ballot.COMMAND_SKIP:
        decision = SKIP
    group.audit_next = result.ask >= ballot.ASK_AUDIT
    if decision == SKIP:
        if amp is not None:
            amp.force()
        for guard in guards:
            guard.zero_gradients()
            guard.restore_buffers()
    group.vote_asked = result.ask >= ballot.ASK_VOTE
    vote_now = vote_now or group.vote_asked or schedule.vote_due(step, group.weights_every)
    _close(group, guards, decision, overflow, vote_now, started)
    if result.command == ballot.COMMAND_STOP:
        _hold(runtime)
    return decision


def _requests(runtime, group) -> set[str]:
    """What this rank asks all others for: the controller's commands, and what its checkpoints need."""
    asked = set(runtime.link.requests()) if runtime.link is not None else set()
    if group.wanted:
        asked |= group.wanted
        group.wanted.clear()
    if group.save_steps:
        foreseen = saves.wanted(group.step, group.save_steps)
        if foreseen is not None:
            asked.add(foreseen)
    return asked


def _command(group, requests: set[str]) -> int:
    if "stop" in requests:
        return ballot.COMMAND_STOP
    if group.trouble is not None:
        return ballot.COMMAND_OFF
    return ballot.COMMAND_SKIP if "skip" in requests else ballot.COMMAND_NONE


def _audit(group, step: int, auditing: bool, why_not: str | None, result) -> tuple[bool, bool]:
    """The replay audit or the triage of a non-finite hit: (all ranks must skip, the weights must be voted on now)."""
    if auditing and result.decline and not result.hit:
        group.auditor.declined(step, why_not)
        return False, False
    if group.auditor.off is not None:
        return False, False
    outcome = group.auditor.at_gate(step, result.hit)
    for part, seconds in outcome.seconds.items():
        group.spend(part, seconds)
    group.checks["replay"]["seconds"] += sum(outcome.seconds.values())
    if auditing and outcome.compared:
        group.checks["replay"]["run"] += 1
        group.last_audit_step = step
        if outcome.clean:
            group.last_clean_audit = step
    group.checks["replay"]["fired"] += outcome.mismatch
    if outcome.event is not None:
        group.emit("audit", outcome.event)
    return outcome.mismatch, outcome.vote


def _close(group, guards, decision: str, overflow: bool, vote: bool, started: float) -> None:
    step = group.step
    group.vote_step = step if vote and decision == RUN and not overflow and group.size > 1 else None
    group.vote_buffers = [(guard, guard.buffers_synced) for guard in guards] if group.vote_step is not None else []
    group.last_step = step
    group.step += 1
    group.window_open = group.auditing = False
    group.calls_last, group.calls = max(1, group.calls), 0
    group.skipped += decision == SKIP
    group.committed += decision == RUN and not overflow
    for guard in guards:
        guard.close_window(decision)
    if group.auditor is not None:
        group.auditor.window_closes()
        group.runtime.recording = any(other.auditing for other in group.runtime.groups.values())
    if group.budget is not None:
        _keep_budget(group, step)
    group.last_gate = group.clock()
    group.checks["nonfinite"]["seconds"] += group.last_gate - started
    now = time.monotonic()
    if now - group.last_summary >= group.config.summary_every:
        group.summarize(now)


def _keep_budget(group, step: int) -> None:
    try:
        group.budget.gate_passed(step, group.last_audit_step == step or group.vote_step == step)
    except BallotFailed as error:
        group.turn_off(f"the ranks could not agree on intervals at step {step}: {error}")


def _hold(runtime) -> None:
    """The policy says stop: no rank may update any more; supervisors end the job. Bounded, should they not."""
    boot.trace("holding: the job is being stopped")
    for group in runtime.groups.values():
        group.summarize()
    deadline = time.monotonic() + HOLD_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)


def clocks_of(runtime, optimizer) -> list:
    """The clocks of the groups whose weights `optimizer` changes, always in the same order."""
    return [guard.group.weights_clock for guard in {id(g.group): g for g in runtime.guards_of(optimizer)}.values()]


def moment(optimizer):
    """On CUDA an event after all work queued so far: the weights are those of this version once it has passed."""
    if not torch.cuda.is_initialized():
        return None
    place = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    if place is None or place.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(place))
    return event


def after_step(runtime, optimizer) -> None:
    """An outermost `optimizer.step` that was let through has returned: faults for tests, then the vote if it is due."""
    guards = runtime.guards_of(optimizer)
    for group in {id(guard.group): guard.group for guard in guards}.values():
        if group.off_reason is not None or group.window_open:
            continue
        group.calls += 1
        if runtime.injector is not None:
            for guard in (guard for guard in guards if guard.group is group):
                runtime.injector.optimizer(guard, optimizer, group.last_step)
                runtime.injector.weight(guard, group.last_step)
        if group.vote_step is not None and group.calls >= group.calls_last:
            step, group.vote_step = group.vote_step, None
            started = group.clock()
            if group.weights is None:
                group.weights = WeightVote(group)
            group.weights.run(step, group.vote_asked)
            group.vote_buffers = []
            seconds = group.clock() - started
            group.checks["weights"]["seconds"] += seconds
            group.spend("vote", seconds)
        if group.snapshots is not None:
            group.snapshots.mark()
