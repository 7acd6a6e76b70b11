"""A stand-in for the guarded step: patches DDP, holds an audit before each optimizer step, collects what came of it.

It lets the replay audit be tested by itself, with the real process groups, exchange, recorder and auditor.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from sdcrun.core.types import Config
from sdcrun.shim.checks.replay import Auditor
from sdcrun.shim.exchange import Exchange
from sdcrun.shim.links import Links
from sdcrun.shim.patches import autograd
from sdcrun.shim.rendezvous import Rendezvous
from sdcrun.shim.replay import compiled
from sdcrun.shim.replay.state import replaying
from sdcrun.shim.transport import Tree


class StageGuard:
    """What the auditor reads of a guard."""

    def __init__(self, ddp, number: int) -> None:
        self.ddp, self.module = ddp, ddp.module
        self.name = f"module{number}" if number else ""
        self.parameters = dict(ddp.module.named_parameters())
        self.saved_buffers: dict[str, torch.Tensor] = {}
        self.local_bad: list = []
        self.local_sums: list = []
        self.ignores = False

    def qualified(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


class Stage:
    """One group of all ranks. `outcomes`: what `at_gate` returned; `reasons`: why audits were declined; `gathered`: how
    often statements of all ranks went through the first one."""

    def __init__(self, repeats: int = 3) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranks = tuple(range(self.size))
        links = Links(self.rank)
        links.doors = Rendezvous(dist.distributed_c10d._get_default_store(), 60.0).agree(
            "stage", self.rank, self.size, links.door
        )
        self.tree = Tree(links, self.size, 60.0, 20.0)
        self.exchange = Exchange(links, self.size, 60.0)
        self.exchange.gather = self._gather
        self.gathered = 0
        self.clock = time.thread_time
        self.nodes = list(range(self.size))
        self.devices = [("cpu",)] * self.size
        self.config = Config(replay_repeats=repeats)
        self.audit_every = 1
        self.runtime = SimpleNamespace(recording=False, limit=lambda text, check=None: self.said.append(text))
        self.said: list[str] = []
        self.events: list[tuple[str, dict]] = []
        self.guards: list[StageGuard] = []
        self.step, self.open = 0, False
        self.auditor: Auditor | None = None
        self.outcomes: list = []
        self.reasons: list[str] = []
        self.hit = False
        self.off: str | None = None
        self.before_audit = None
        self._tokens: dict = {}
        autograd.install()
        self._patch()

    def emit(self, kind: str, data: dict) -> None:
        self.events.append((kind, data))

    def turn_off(self, reason: str) -> None:
        self.off = reason

    def all_reduce_max(self, words: list[int]) -> list[int]:
        return self.tree.max(words)

    def _gather(self, *args) -> list[bytes]:
        self.gathered += 1
        return Exchange.gather(self.exchange, *args)

    def fresh(self, auditing: bool) -> None:
        """A new run: no guards, no history."""
        self.guards.clear()
        self._tokens.clear()
        if self.auditor is not None:
            self.auditor.window_closes()
            autograd.observers.clear()
        self.auditor = None
        self.step, self.open, self.hit, self.gathered = 0, False, False, 0
        self.outcomes, self.reasons, self.said, self.events, self.off = [], [], [], [], None
        if auditing:
            self.auditor = Auditor(self)

    def gate(self) -> bool:
        """Before an optimizer step; True if all ranks must skip it."""
        if self.auditor is None or not self.open or self.off is not None:
            return False
        why = self.auditor.ready() if self.recording(self.step) else None
        declined = self.all_reduce_max([int(why is not None)] + [0] * 7)[0]
        skip = False
        if self.recording(self.step) and declined and not self.hit:
            self.auditor.declined(self.step, why)
            self.reasons.append(why or "another rank")
        elif self.recording(self.step) or self.hit:
            if self.before_audit is not None:
                self.before_audit()
            outcome = self.auditor.at_gate(self.step, self.hit)
            if outcome.compared:
                self.outcomes.append(outcome)
            else:
                self.reasons.append(self.said[-1] if self.said else "nothing was compared")
            skip = outcome.mismatch
        self.auditor.window_closes()
        self.step, self.open, self.hit = self.step + 1, False, False
        return skip

    def recording(self, step: int) -> bool:
        """Whether this step is audited; step 0 is not, so that the first steps run as they are."""
        return step > 0

    def _patch(self) -> None:
        run, forward, init, step = DDP._run_ddp_forward, DDP.forward, DDP.__init__, Optimizer.profile_hook_step

        def __init__(ddp, *args, **kwargs):
            init(ddp, *args, **kwargs)
            self.guards.append(StageGuard(ddp, len(self.guards)))

        @torch._disable_dynamo
        def begin(ddp, inputs, kwargs):
            guard = next(g for g in self.guards if g.ddp is ddp)
            if not self.open:
                self.open = True
                self.auditor.window_opens(self.step, self.recording(self.step))
            return guard, self.auditor.before_forward(guard, inputs, kwargs)

        @torch._disable_dynamo
        def end(ddp, token, output):
            if token[1] is not None:
                self.auditor.after_forward(*token, output)
            self._tokens[id(ddp)] = token

        @torch._disable_dynamo
        def left(ddp, output):
            guard, token = self._tokens.pop(id(ddp), (None, None))
            if token is not None:
                self.auditor.left_ddp(guard, token, output)

        def _run_ddp_forward(ddp, *inputs, **kwargs):
            training = torch.is_grad_enabled() and ddp.module.training
            if self.auditor is None or replaying() or not training:
                return run(ddp, *inputs, **kwargs)
            compiled.note()
            token = begin(ddp, inputs, kwargs)
            output = run(ddp, *inputs, **kwargs)
            end(ddp, token, output)
            return output

        def patched_forward(ddp, *inputs, **kwargs):
            output = forward(ddp, *inputs, **kwargs)
            if self.auditor is not None and not replaying():
                left(ddp, output)
            return output

        def profile_hook_step(function):
            inner = step(function)

            def wrapper(optimizer, *args, **kwargs):
                closure = kwargs.get("closure", args[0] if args else None)
                if closure is None and self.gate():
                    return None
                return inner(optimizer, *args, **kwargs)

            wrapper.hooked = True
            return wrapper

        DDP.__init__ = __init__
        DDP._run_ddp_forward = torch._disable_dynamo(_run_ddp_forward, recursive=False)
        DDP.forward = torch._disable_dynamo(patched_forward, recursive=False)
        Optimizer.profile_hook_step = staticmethod(profile_hook_step)


def start() -> Stage:
    """Joins the job and sets the stage."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return Stage()
