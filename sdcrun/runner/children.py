"""The supervisor's child processes: started from the main thread, reaped, and nothing of theirs left behind.

The kernel's parent-death signal fires when the *thread* that started a child ends, so `Children.start` is called from
the main thread only. As a subreaper the supervisor inherits the workers of an agent that was killed, and ends them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import sdcrun.runner.start

PR_SET_CHILD_SUBREAPER = 36
START = sdcrun.runner.start.__file__


@dataclass
class Child:
    """A process that the supervisor started as `role`. `code` is its exit code as a shell shows it (128 + n after
    signal n), None while it lives; `workers` are the pids of the processes that an agent has started so far, each the
    leader of a session of its own, `has_workers` whether one of them lived when it was last observed."""

    role: str
    index: int
    process: subprocess.Popen
    code: int | None = None
    workers: set[int] = field(default_factory=set)
    has_workers: bool = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def send(self, number: int) -> None:
        """Send a signal to this process alone, if it still lives."""
        if self.code is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass


class Children:
    """All children of this process, own ones and adopted ones."""

    def __init__(self) -> None:
        self.own: dict[int, Child] = {}
        self.sessions: set[int] = set()
        self._orphans: set[int] = set()
        self._doomed: dict[int, float] = {}
        self.subreaper = _become_subreaper()

    def start(
        self,
        role: str,
        index: int,
        arguments: Iterable[str],
        environ: Mapping[str, str],
        pet: Mapping[str, str] | None = None,
        report: int = -1,
        linger: tuple[int, int] = (-1, -1),
    ) -> Child:
        """Start `role` ("torchrun" or "controller") in a session of its own. `pet` are PET_* defaults for torchrun's
        parser, `report` a descriptor on which an agent tells of failed ranks, `linger` the ends of a pipe by which
        local agents know of each other's end. Raises OSError."""
        wishes = {"parent": os.getpid(), "pet": dict(pet or {}), "report": report, "linger": linger}
        process = subprocess.Popen(
            [sys.executable, START, role, *arguments],
            env={**environ, "SDCRUN_START": json.dumps(wishes)},
            start_new_session=True,
            pass_fds=[descriptor for descriptor in (report, *linger) if descriptor >= 0],
        )
        child = Child(role, index, process)
        self.own[child.pid] = child
        return child

    def reap(self, grace: float) -> list[Child]:
        """Collect every child that has ended; returns the own ones among them. The workers that a dead agent left
        behind are told to end (SIGTERM) and are killed when they have not after `grace` seconds."""
        ended: list[Child] = []
        while (pid := _ended_child()) is not None:
            child = self.own.pop(pid, None)
            if child is None:
                _collect(pid)
                self._orphans.discard(pid)
                continue
            code = child.process.wait()
            child.code = code if code >= 0 else 128 - code
            ended.append(child)
        adopted = self.adopted()
        for child in (c for c in ended if c.role == "torchrun"):
            # What has just become ours was started by the one that has just ended; what came earlier is an orphan of
            # a worker, and may be a daemon that the script wants.
            for pid in [p for p in adopted if p in child.workers or p not in self._orphans]:
                self.end(pid, grace)
        self._orphans = set(adopted)
        return ended

    def observe(self) -> None:
        """Remember the workers of living agents, to know them again later."""
        for child in (c for c in self.own.values() if c.role == "torchrun"):
            present = {pid for pid in _children_of(child.pid) if _session(pid) == pid}
            child.has_workers = bool(present)
            child.workers |= present
            self.sessions |= present

    def adopted(self) -> list[int]:
        """Pids of living children that this process did not start itself."""
        return [pid for pid in _children_of(os.getpid()) if pid not in self.own] if self.subreaper else []

    def end(self, pid: int, grace: float) -> None:
        """SIGTERM to a process (and to its group, if it leads one), SIGKILL after `grace` seconds by `press`."""
        if pid not in self._doomed:
            self._doomed[pid] = time.monotonic() + grace
            _signal_group(pid, signal.SIGTERM)

    def press(self, hurry: bool = False) -> bool:
        """Kill what was told to end and has not in time (`hurry`: all of it, now). True while any of it lives."""
        living = set(_children_of(os.getpid()))
        now = time.monotonic()
        for pid, deadline in list(self._doomed.items()):
            if pid not in living:
                del self._doomed[pid]
            elif hurry or now >= deadline:
                _signal_group(pid, signal.SIGKILL)
        return bool(self._doomed)

    def left_behind(self) -> list[int]:
        """Adopted processes in the session of a worker: what a rank's end should have ended. A process that has made a
        session of its own is a daemon the script wants and is not listed."""
        return [pid for pid in self.adopted() if _session(pid) in self.sessions]


def _become_subreaper() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _ended_child() -> int | None:
    """Pid of a child that has ended, or None. It is not collected: a Popen object must collect its own."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def _collect(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _children_of(pid: int) -> list[int]:
    """Direct children of a process, zombies left out; empty when it has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        pids: list[int] = []
        for thread in threads:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                pids += [int(word) for word in file.read().split()]
        return [p for p in pids if _state(p) not in ("Z", "X", "")]
    except FileNotFoundError:
        if os.path.isdir("/proc/self/task"):
            return []
    except (OSError, ValueError):
        return []
    import psutil

    try:
        return [c.pid for c in psutil.Process(pid).children() if c.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return []


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _signal_group(pid: int, number: int) -> None:
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
