"""The shim's state in one process: configuration, link to the controller, guards, and what is said once.

`start()` runs right after the script's own `import torch`; `claim()` when the process wraps a module in DDP and so
becomes a rank. Everything that fails here is said and leaves the script alone.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import uuid
import weakref

import torch
import torch.distributed as dist

from sdcrun import __version__
from sdcrun.core.types import Config
from sdcrun.shim import boot, identity
from sdcrun.shim.checkpoints.keeper import Keeper
from sdcrun.shim.checkpoints.question import Snapshots
from sdcrun.shim.group import GuardGroup
from sdcrun.shim.guard import Guard
from sdcrun.shim.rendezvous import Rendezvous, attempt_number
from sdcrun.wire.link import Link
from sdcrun.wire.runtime import read_runtime, write_runtime

STRANGE_STEP = "an optimizer stepped parameters that no guarded module has: nothing is checked there"


class Runtime:
    """One per process. `guards` maps DDP modules to their guards; `rank` is None until the process is claimed."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rank: int | None = None
        self.attempt = attempt_number()
        self.guards: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.owner: dict[int, weakref.ref] = {}
        self.groups: dict[tuple[int, ...], GuardGroup] = {}
        self.link: Link | None = None
        self.address: dict | None = None
        self.injector = None
        self.campaign = None
        self.session = uuid.uuid4().hex[:12]
        self.said: set[str] = set()
        self.reason_unguarded: str | None = None
        self.stepped = self.stepped_before = False
        self.active = True
        self.recording = False
        self._inside = threading.local()
        self.started = time.monotonic()
        self.device_key: str | None = None
        self.store = None
        self.keeper = Keeper(self)
        self._optimizers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        # Freeing a gloo group at interpreter exit can deadlock on the GIL: every group lives as long as the process.
        self.kept_groups: list = []

    @property
    def inside_step(self) -> bool:
        """Whether this thread is within an optimizer's step; another thread's step is another matter."""
        return getattr(self._inside, "step", False)

    @inside_step.setter
    def inside_step(self, value: bool) -> None:
        self._inside.step = value

    # -- what is said -------------------------------------------------------------------------------------------

    def emit(self, kind: str, data: dict) -> None:
        """Sends one event; never raises, never waits."""
        if not self.active:
            return
        if self.link is None:
            rank = self.rank if self.rank is not None else os.environ.get("RANK", "0")
            self.link = Link(self.config, f"rank:{rank}", self._controller)
            self.keeper.listen(self.link)
        self.link.emit(kind, data, self.attempt)

    def limit(self, text: str, check: str | None = None) -> None:
        """Says once what this run cannot see."""
        if text not in self.said:
            self.said.add(text)
            boot.trace(text)
            self.emit("limit", {"text": text, "check": check})

    def unguarded(self, reason: str, so_far: bool = False) -> None:
        """Says once that this rank as a whole is not guarded; `so_far`: unless a module of it is later."""
        if reason not in self.said:
            self.said.add(reason)
            self.reason_unguarded = self.reason_unguarded or reason
            boot.trace(f"unguarded: {reason}")
            self.emit("unguarded", {"reason": reason} | ({"so_far": True} if so_far else {}))

    def _controller(self) -> dict | None:
        own = local_controller()
        # The secret tells whose it is: this node's own may have come back at another port.
        return own if self.address is None or own and own["secret"] == self.address["secret"] else self.address

    # -- guards -------------------------------------------------------------------------------------------------

    def claim(self, ddp) -> None:
        """Called in DDP.__init__ on every rank of its process group, once it has a reducer: makes its guard."""
        if not self.active or os.environ.get(boot.OWNER, str(os.getpid())) != str(os.getpid()):
            return
        meeting = Rendezvous(dist.distributed_c10d._get_default_store(), self.config.arm_timeout)
        self.store = meeting.store
        if self.rank is None:
            os.environ[boot.OWNER] = str(os.getpid())
            self.rank = dist.get_rank()
            self.kept_groups.append(dist.group.WORLD)
            self.address = meeting.controller(self.rank, known_controllers(), local_controller)
            self._tell_supervisor()
            self.device_key = identity.device_of(ddp).key
            self.emit("hello", identity.hello(self, ddp))
            if self.config.faults:
                from sdcrun.shim.inject import Injector

                self.injector = Injector(self)
            if self.config.campaign and self.attempt == 0:
                from sdcrun.shim.campaign import Campaign

                self.campaign = Campaign(self, self.config.campaign, meeting)
        self.kept_groups.append(ddp.process_group)
        ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
        group = self.groups.get(ranks)
        if group is None:
            group, reason = GuardGroup.arm(self, meeting, ranks)
            if group is None:
                self.unguarded(reason)
                return
            self.groups[ranks] = group
            self.keeper.opened.install()
            group.snapshots = Snapshots(group)
        guard = Guard(ddp, group, f"module{group.modules_made}" if group.modules_made else "")
        group.add(guard)
        self.guards[ddp] = guard
        for parameter in guard.parameters.values():
            self.owner[id(parameter)] = weakref.ref(guard)
        self._optimizers.clear()
        if self.injector is not None:
            self.injector.attach(guard)
        self.emit("guarded", {"group": group.said_ranks, "modules": [guard.describe()]})
        if self.stepped_before:
            self.stepped_before, self.reason_unguarded = False, None
            self.limit(STRANGE_STEP)
        if self.config.selftest:
            from sdcrun.shim import selftest

            selftest.run(group, guard)

    def _tell_supervisor(self) -> None:
        """Leaves the job's controller where this node's supervisor looks: the ranks choose one of several."""
        path = os.environ.get("SDCRUN_RUNTIME")
        if self.address is not None and path:
            try:
                write_runtime(f"{path}.job", **self.address)
            except OSError as error:
                boot.trace(f"the supervisor cannot be told of the controller: {error}")

    def guards_of(self, optimizer) -> tuple[Guard, ...]:
        """The guards whose parameters `optimizer` updates; cached on the identity of its parameter lists."""
        signature = tuple((id(group["params"]), len(group["params"])) for group in optimizer.param_groups)
        known = self._optimizers.get(optimizer)
        if known is None or known[0] != signature:
            found: dict[int, Guard] = {}
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    reference = self.owner.get(id(parameter))
                    guard = reference() if reference is not None else None
                    if guard is not None:
                        found[id(guard)] = guard
            known = (signature, tuple(found.values()))
            self._optimizers[optimizer] = known
            for guard in known[1]:
                guard.group.meet(optimizer)
        return known[1]

    def unguarded_step(self, optimizer) -> None:
        """An optimizer without any guarded parameter took a step in a process that may be a rank."""
        if self.guards or self.reason_unguarded is not None or int(os.environ.get("WORLD_SIZE", "1") or 1) < 2:
            return
        if self.rank is not None:
            self.limit(STRANGE_STEP)
            return
        self.stepped_before = True
        self.unguarded(identity.why_no_ddp(optimizer), so_far=True)

    # -- ends ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """At interpreter exit: last counters, why nothing was guarded if so, flush within a limit."""
        if not self.active:
            return
        try:
            if self.campaign is not None:
                self.campaign.finish()
            for group in self.groups.values():
                for guard in group.guards:
                    guard.ends()
                group.summarize()
            self.keeper.questions.leave()
            if self.injector is not None:
                self.injector.finish()
            if self.rank is None and self.reason_unguarded is None and identity.looks_like_rank():
                self.unguarded(identity.why_no_ddp(None))
            if self.rank is not None:
                steps = sum(group.step for group in self.groups.values())
                reason = "exception" if getattr(sys, "last_value", None) is not None else "end"
                self.emit("bye", {"reason": reason, "steps": steps})
            if self.link is not None:
                self.link.close(5.0)
        except Exception as error:
            boot.trace(f"at exit: {error!r}")

    def disarm(self) -> None:
        """In a forked child: no links, no ballots, no words."""
        self.active = False
        for group in self.groups.values():
            if group.links is not None:
                group.links.let_go()


def local_controller() -> dict | None:
    """Address and secret of the controller that this node's supervisor offers: {host, port, secret}, or None."""
    return read_runtime(os.environ.get("SDCRUN_RUNTIME", ""))


def known_controllers() -> list[dict]:
    """The controller that the ranks of this node chose in an earlier attempt, then the one that was to follow it."""
    path = os.environ.get("SDCRUN_RUNTIME", "")
    return [address for address in (read_runtime(f"{path}.job"), read_runtime(f"{path}.next")) if address]


CURRENT: Runtime | None = None


def start() -> None:
    """Reads the configuration and lays the patches. Called once, after torch has been imported."""
    global CURRENT
    from sdcrun.shim.patches import autograd, ddp, optimizer, saving

    config = Config.from_json(json.loads(os.environ.get("SDCRUN_CONFIG", "{}")))
    if config.off:
        return
    CURRENT = Runtime(config)
    for patch in (ddp, optimizer, autograd, saving):
        patch.install(CURRENT)
    atexit.register(CURRENT.finish)
    os.register_at_fork(after_in_child=CURRENT.disarm)


def versions() -> dict:
    """Versions for the report; None where a part does not exist."""
    cuda = torch.version.cuda
    return {
        "sdcrun": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cuda": cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None,
        "driver": None,
    }
