"""A launch from start to end: torchrun's agents as children, the controller beside them, signals, the exit code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sdcrun import config as configuration
from sdcrun.core.types import Config, ExitCode
from sdcrun.errors import UsageError
from sdcrun.report import alive
from sdcrun.runner import agents, environment, inventory, jobfolder, localnodes
from sdcrun.runner.banner import banner
from sdcrun.runner.children import Child, Children
from sdcrun.runner.live import Live
from sdcrun.runner.plan import Plan
from sdcrun.runner.signals import WARNING, Inbox, named
from sdcrun.runner.speak import Voice

# What torchrun handles where it has no option for it.
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
TICK = 0.25
FINISH_SECONDS = 20.0
# More than a link waits for a host that does not answer, and then until it tries again.
TAKE_OVER_SECONDS = 12.0


class Supervisor:
    """One `sdcrun` on one node. `command` is the command line as typed, `environ` the environment it was given."""

    def __init__(
        self, plan: Plan, settings: configuration.Settings, command: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self.plan, self.settings, self.command, self.environ = plan, settings, list(command), environ
        self.voice = Voice(settings.config.quiet)
        self.host = inventory.host_name()
        self.alone = plan.local_nodes > 1 or plan.max_nodes == 1
        self.devices = localnodes.split_devices(plan.local_nodes, plan.nproc, environ) if plan.local_nodes > 1 else None
        self.unseen = configuration.unseen_faults(settings.config, plan.domains, plan.world_size, plan.nodes)
        self.control = None
        self.live: Live | None = None
        self.stop_order: dict[str, Any] | None = None

    def run(self) -> int:
        """Launch, watch and end everything; returns the exit code of sdcrun."""
        handled = named(getattr(self.plan.options, "signals_to_handle", DEFAULT_SIGNALS))
        self.folder = self._folder()
        self.inbox = Inbox(handled)
        self.children = Children()
        port = localnodes.HeldPort() if self.plan.local_nodes > 1 else None
        try:
            values = self._environment()
            self.voice.say(banner(self.plan, self.settings, self.config, self.folder, self.unseen))
            self.live = Live(self.config, self.voice, self._keeps_record, self.environ)
            self.live.begin()
            self.agents = agents.Agents(self.plan, self.children, self.voice, handled)
            self.agents.start(values, self.config.job_id, self.folder.logs, port, self.devices)
            if self.folder.path is not None:
                self._start_control(values)
            self._watch()
            return self._conclude()
        finally:
            self._clean_up(port)

    # -- before ------------------------------------------------------------------------------------------------

    def _folder(self) -> jobfolder.Folder:
        asked = self.settings
        name, shared = jobfolder.job_id(asked.job, self.plan.options, self.environ, self.host)
        if asked.config.off:
            self.config = configuration.with_job(asked.config, name, "")
            return jobfolder.without(None)
        directory = configuration.absolute(asked.directory)
        other = alive.running(os.path.join(directory, name), self.host) if self.alone and shared else None
        if other:
            raise UsageError(f"job {name} is running here (pid {other}); give this one another name with --sdc-job")
        name, folder = jobfolder.prepare(directory, name, self.alone, shared)
        if folder.problem:
            self.voice.warn(f"no record of this run: {folder.problem}; training and its checks go on")
        self.config = configuration.with_job(asked.config, name, folder.path or "")
        return folder

    def _environment(self) -> dict[str, str]:
        if self.config.off:
            return dict(self.environ)
        self.runtime = os.path.join(self.folder.path or self.folder.logs, f"controller-{self.host}-{os.getpid()}.json")
        return environment.guarded(self.environ, self.config, self.runtime, self.host)

    def _start_control(self, values: Mapping[str, str]) -> None:
        """Everything here is sdcrun's own affair: whatever fails, training goes on."""
        try:
            # Imported here: the agents are already on their way while this is read.
            from sdcrun.runner import control, record
            from sdcrun.wire.runtime import write_runtime

            reach = None if self.alone else control.address_towards(self._endpoint())
            plain = self._without_shim(values)
            self.control = control.Control(self.config, self.runtime, self.children, self.voice, plain, reach)
            if self.config.controller:
                host, _, port = self.config.controller.rpartition(":")
                write_runtime(self.runtime, host.strip("[]"), int(port), self.environ.get(environment.SECRET, ""))
            else:
                self.control.start()
            self.control.connect(self.config, f"node:{self.host}:{os.getpid()}", self._ordered_to_stop)
            self._introduce()
            record.begin(self.config, self.command, self.alone)
        except Exception as error:
            self.voice.warn(f"the controller cannot be used ({error}); training goes on, without a record")

    def _endpoint(self) -> str:
        """Host where the ranks meet."""
        endpoint = self.plan.options.rdzv_endpoint or self.plan.options.master_addr
        host, colon, port = endpoint.rpartition(":")
        return (host if colon and port.isdigit() else endpoint).strip("[]")

    def _leads(self) -> bool:
        """Whether this is the node that serves the store in which the ranks meet."""
        from sdcrun.runner.control import is_here

        plan = self.plan
        return self.alone or (plan.options.node_rank == 0 if "node_rank" in plan.given else is_here(self._endpoint()))

    def _without_shim(self, values: Mapping[str, str]) -> dict[str, str]:
        """The controller's environment: the agents' without the shim."""
        plain = dict(values)
        if "PYTHONPATH" in self.environ:
            plain["PYTHONPATH"] = self.environ["PYTHONPATH"]
        else:
            del plain["PYTHONPATH"]
        return plain

    def _introduce(self) -> None:
        gpus, driver = inventory.gpus()
        facts = inventory.host_facts(self.environ)
        plan = self.plan
        self._emit(
            "node_up",
            {
                **facts,
                "node": plan.options.node_rank if "node_rank" in plan.given else None,
                "nnodes": plan.nodes,
                "nproc": plan.nproc,
                "command": self.command,
                "versions": {**inventory.versions(), "driver": driver},
                "local_nodes": plan.local_nodes,
                "gpus": gpus,
            },
        )

    # -- while the ranks run -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until every agent has ended and nothing of theirs is left."""
        while True:
            for number in self.inbox.wait(TICK):
                self._signal(number)
            self.children.observe()
            for child in self.children.reap(self.agents.grace):
                self._ended(child)
            self._turn_control()
            if self.stop_order is not None:
                # Where the record is kept, its controller has said so, with the exit code and what it means.
                why = self.stop_order.get("why")
                self.agents.stop(None if self._keeps_record() else f"the job is stopped: {why}")
            self.agents.turn()
            self.live.turn()
            if self.agents.over:
                return

    def _signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if number in WARNING and number not in self.agents.handled:
            self.voice.warn(f"{name} ignored: torchrun passes it on only when --signals-to-handle names it")
        else:
            self.agents.signal(number)

    def _ended(self, child: Child) -> None:
        if child.role == "controller":
            if self.control is not None:
                self.control.ended(child)
            return
        for row in self.agents.ended(child):
            self._emit("worker_lost", {"node": child.index, **row})

    def _turn_control(self) -> None:
        try:
            if self.control is not None:
                self.control.turn()
        except Exception as error:
            self.voice.warn(f"the controller is lost ({type(error).__name__}: {error}); training goes on")

    def _keeps_record(self) -> bool:
        return self.control is not None and self.control.ours

    def _ordered_to_stop(self, order: dict[str, Any]) -> None:
        """In the link's thread."""
        self.stop_order = order
        self.inbox.wake()

    def _emit(self, kind: str, data: dict[str, Any]) -> None:
        if self.control is not None and self.control.link is not None:
            self.control.link.emit(kind, data)

    # -- after -------------------------------------------------------------------------------------------------

    def _conclude(self) -> int:
        code = self.agents.code
        self.live.end()
        self.agents.explain()
        if self.control is None:
            return self._unproven(code)
        try:
            return self._close_record(code)
        except Exception as error:
            self.voice.warn(f"the record could not be closed ({type(error).__name__}: {error})")
            return self._unproven(code)

    def _unproven(self, code: int) -> int:
        """The exit code of a run without a record: one with --inject-fault has then proven nothing."""
        if code or not self.config.faults:
            return code
        self.voice.warn("--inject-fault: without a record nobody can say whether the faults were caught")
        return ExitCode.INJECTION_FAILED

    def _close_record(self, code: int) -> int:
        from sdcrun.runner import record

        took_over = self.control.settle(self._leads())
        self._emit("node_down", {"exit": code})
        if took_over:
            self._let_others_come()
        said = record.conclude(self.config, code, self.stop_order)
        self._emit("job_end", {"exit_code": said.code, "status": said.status})
        self.control.finish(FINISH_SECONDS)
        until = time.monotonic() + FINISH_SECONDS + 2.0
        while self.control.finishing and time.monotonic() < until:
            if signal.SIGINT in self.inbox.wait(TICK):
                until = min(until, time.monotonic() + 1.0)
            for child in self.children.reap(0.0):
                self._ended(child)
            self._turn_control()
        ours = self.control.ours
        self.control.end()
        if not ours:
            self.voice.say(f"this node has ended with exit code {said.code}; another node keeps the record of the job")
            return said.code
        if not self.control.complete:
            self.voice.warn("the controller did not say that all is on record; the rest is in the folder spool")
        last = record.close(self.config, code, self.stop_order, said, self.control.link.source)
        for line in record.views(self.config, last):
            self.voice.say(line)
        return last.code

    def _let_others_come(self) -> None:
        """This node has just become the one that keeps the record; the others find out by themselves."""
        self.voice.warn("the node that kept the record is lost; this one goes on from its copy")
        until = time.monotonic() + TAKE_OVER_SECONDS
        while time.monotonic() < until and signal.SIGINT not in self.inbox.wait(TICK):
            for child in self.children.reap(0.0):
                self._ended(child)
            self._turn_control()

    def _clean_up(self, port: localnodes.HeldPort | None) -> None:
        if self.live is not None:
            self.live.end()
        if self.control is not None:
            self.control.end()
        if port is not None:
            port.close()
        self.folder.close(self.alone)


def run(plan: Plan, settings: configuration.Settings, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """`Supervisor(...).run()`, after the checks that need both the plan and the settings. Raises UsageError."""
    config: Config = settings.config
    if config.controller and len(environ.get(environment.SECRET, "")) < 32:
        raise UsageError(f"--sdc-controller needs that controller's secret in the variable {environment.SECRET}")
    return Supervisor(plan, settings, [*map(str, command)], environ).run()
