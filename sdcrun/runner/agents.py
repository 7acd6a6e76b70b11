"""torchrun's agents of one launch: started, signalled, ended; what their end means."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from sdcrun.core import words
from sdcrun.runner import environment, localnodes
from sdcrun.runner.children import Child, Children
from sdcrun.runner.plan import Plan
from sdcrun.runner.speak import Voice

LOST_NODE_SECONDS = 15.0
IDLE_SECONDS = 5.0
IDLE_RESTART_SECONDS = 60.0
HURRY_SECONDS = 3.0
LEFT_BEHIND_SECONDS = 3.0
KILLED_SECONDS = 5.0
EMPTY_SECONDS = 10.0


class Agents:
    """The agents of a plan. `handled` are the signals that torchrun takes and passes on to the ranks.

    `grace` is the time that ranks have between a signal and SIGKILL: --shutdown-timeout, its variable, or torchrun's
    30 seconds.
    """

    def __init__(self, plan: Plan, children: Children, voice: Voice, handled: set[int]) -> None:
        self.plan, self.children, self.voice, self.handled = plan, children, voice, handled
        asked = getattr(plan.options, "shutdown_timeout", None)
        default = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
        self.grace = float(asked if asked is not None else default if default.isdigit() else 30)
        self.living: dict[int, Child] = {}
        self.codes: list[int] = []
        self.failures: list[dict[str, Any]] = []
        self.sent: set[int] = set()
        self._reports: dict[int, int] = {}
        self._told: dict[int, bytes] = {}
        self._interrupts = 0
        self._stopped = False
        self._ending_since: float | None = None
        self._killed: set[int] = set()
        self._end_all_at: float | None = None
        self._idle_since: float | None = None
        self._kill_at: float | None = None
        self._sweep_until: float | None = None
        self._swept = False

    def start(
        self,
        values: Mapping[str, str],
        job_id: str,
        logs: str,
        port: localnodes.HeldPort | None,
        devices: list[str] | None,
    ) -> None:
        """Start all agents in the environment `values`. `port` is where local nodes meet, `devices` their GPUs, `logs`
        the folder for torchrun's files (torchrun would leave a temporary one behind). Raises OSError."""
        plan = self.plan
        pet = localnodes.rendezvous(port.number, job_id, plan.options, plan.given) if port else {}
        if logs and not plan.given & {"log_dir", "logs_specs"}:
            pet["PET_LOG_DIR"] = logs
        linger = os.pipe() if port else (-1, -1)
        arguments = [*plan.torchrun, "--", plan.script, *plan.script_args]
        for index in range(plan.local_nodes):
            own = environment.of_node(values, index, devices)
            read, write = os.pipe()
            os.set_blocking(read, False)
            try:
                child = self.children.start("torchrun", index, arguments, own, pet, write, linger)
            finally:
                os.close(write)
            self._reports[child.pid], self._told[child.pid] = read, b""
            self.living[child.pid] = child
        for end in linger:
            if end >= 0:
                os.close(end)

    @property
    def over(self) -> bool:
        """Whether all agents have ended and none of their processes is left (or they could not be ended in time)."""
        return not self.living and self._swept

    @property
    def code(self) -> int:
        """The exit code of the launch: that of the first agent that did not end with 0."""
        return next((code for code in self.codes if code), 0)

    # -- ending them --------------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Pass a signal on, each one once. Another Ctrl-C while the ranks are ending shortens the wait."""
        now = time.monotonic()
        if number == signal.SIGINT and self.sent:
            self._interrupts += 1
            self._kill_at = now + (HURRY_SECONDS if self._interrupts == 1 else 0.0)
            self.voice.say("killing the ranks" + (f" in {HURRY_SECONDS:g} s" if self._interrupts == 1 else " now"))
        elif number not in self.sent:
            self.sent.add(number)
            self._ending_since = self._ending_since or now
            self._kill_at = self._kill_at or now + 2 * self.grace + 30.0
            for child in self.living.values():
                child.send(number)
            more = "; Ctrl-C again to hurry" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            self.voice.say(f"{name} passed on; the ranks have {self.grace:g} s to end{more}")

    def stop(self, why: str | None) -> None:
        """End all agents for a reason of sdcrun's own; None: it has been said."""
        if not self._stopped:
            self._stopped = True
            if why is not None:
                self.voice.say(why)
            now = time.monotonic()
            self._ending_since = self._ending_since or now
            self._kill_at = self._kill_at or now + self.grace + 15.0
            for child in self.living.values():
                child.send(signal.SIGTERM)

    def ended(self, child: Child) -> list[dict[str, Any]]:
        """Note the end of an agent; returns what it told of ranks that failed: {rank, exit, text, at} each."""
        del self.living[child.pid]
        # One that had to be killed because it waited for other agents would have ended with 1, as any other one does
        # after a signal; so would one that torch aborts while it ends, because the agent that served the store has
        # ended before it.
        aborted = child.code == 128 + signal.SIGABRT and (self._stopped or self.sent)
        self.codes.append(1 if child.pid in self._killed or aborted else child.code or 0)
        rows = self._report(child.pid)
        if not self._stopped and not self.sent:
            self.failures += rows
        if child.code and not self._ending and self.living and len(self.living) < self.plan.min_nodes:
            # On a cluster somebody may start the node again; here nobody does, and the others would wait for it.
            self._end_all_at = time.monotonic() + LOST_NODE_SECONDS
        return rows

    @property
    def _ending(self) -> bool:
        return self._stopped or bool(self.sent) or self._end_all_at is not None

    def _listen(self, pid: int) -> bytes:
        """All that an agent has told so far: an empty line each time its ranks are about to start, and which failed."""
        try:
            self._told[pid] += os.read(self._reports[pid], 1 << 16)
        except OSError:
            pass
        return self._told[pid]

    def _report(self, pid: int) -> list[dict[str, Any]]:
        try:
            rows = json.loads(self._listen(pid).strip() or b"[]")
        except ValueError:
            rows = []
        os.close(self._reports.pop(pid))
        # Also a rank that ended before anybody had looked led a session, in which it may have left processes.
        self.children.sessions.update(row["pid"] for row in rows)
        return [
            {
                "rank": row["rank"],
                "exit": row["exit"],
                "text": f"local rank {row['local_rank']}, pid {row['pid']}",
                "at": row["at"],
            }
            for row in rows
        ]

    def turn(self) -> None:
        """What is due now: end the rest of a launch that has lost a node, kill what does not end, sweep up."""
        now = time.monotonic()
        if (self._end_all_at is not None and now >= self._end_all_at) or self._idle(now):
            self.stop("a node of this launch has failed and the others cannot go on without it: ending them")
        if self._ending_since is not None and now >= self._ending_since + EMPTY_SECONDS:
            # Without ranks an agent only waits for others, in code that does not look at signals.
            self._kill([child for child in self.living.values() if not child.has_workers])
        hurry = self._kill_at is not None and now >= self._kill_at
        if hurry:
            for child in self.living.values():
                self._kill_workers(child)
            if now >= self._kill_at + KILLED_SECONDS:
                self._kill(list(self.living.values()))
        if not self.living:
            self._sweep(now, hurry)
        else:
            self.children.press(hurry)

    def _idle(self, now: float) -> bool:
        """Whether the agents that are left have had no rank for a while: torchrun would wait 300 s for one that has
        failed, or that wants another attempt when the ranks of the others are done. Between two attempts there are none
        either."""
        # One may have lived too short to be seen among the agent's children.
        seen = all([self._listen(pid) or child.workers for pid, child in self.living.items()])
        # All agents of a fixed number of local nodes are here: nobody else can come and make the rendezvous whole.
        waiting = self.code or (seen and self.plan.local_nodes > 1 and self.plan.nodes is not None)
        if not self.living or not waiting or any(child.has_workers for child in self.living.values()):
            self._idle_since = None
            return False
        self._idle_since = now if self._idle_since is None else self._idle_since
        final = self.code and seen and not self.plan.options.max_restarts
        return now - self._idle_since >= (IDLE_SECONDS if final else IDLE_RESTART_SECONDS)

    def _kill(self, children: list[Child]) -> None:
        for child in children:
            self._killed.add(child.pid)
            child.send(signal.SIGKILL)

    @staticmethod
    def _kill_workers(child: Child) -> None:
        for pid in child.workers:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def _sweep(self, now: float, hurry: bool) -> None:
        for pid in self.children.left_behind():
            self.children.end(pid, 0.0 if self.sent else LEFT_BEHIND_SECONDS)
        busy = self.children.press(hurry)
        if self._sweep_until is None:
            self._sweep_until = now + self.grace + LEFT_BEHIND_SECONDS + KILLED_SECONDS
        self._swept = not busy
        if busy and now >= self._sweep_until:
            stuck = ", ".join(map(str, self.children.left_behind()))
            self.voice.warn(f"processes that cannot be killed (stuck in the kernel?): {stuck}")
            self._swept = True

    # -- words --------------------------------------------------------------------------------------------------

    def explain(self) -> None:
        """Say which rank failed first, and what its exit code means."""
        if self.failures:
            first = min(self.failures, key=lambda row: row["at"])
            self.voice.say(f"first rank that failed: {first['rank']} ({first['text']}), {words.ended(first['exit'])}")
