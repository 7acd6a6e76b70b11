"""This node's controller as the supervisor sees it: started, started again when it dies, asked to finish."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from sdcrun.core.types import Config
from sdcrun.runner import forward
from sdcrun.runner.children import Child, Children
from sdcrun.runner.speak import Voice
from sdcrun.wire.link import Link
from sdcrun.wire.opening import answers
from sdcrun.wire.runtime import checked_address, read_runtime, write_runtime

QUICK_DEATH = 2.0
MOST_QUICK_DEATHS = 10
KILLED_PAUSE = 1.0


class Control:
    """The controller process and the supervisor's own link to the job's controller.

    `runtime` is the file that tells ranks and supervisor where the controller listens; a rank that chose the controller
    of another node writes that one's address to `runtime`.job, which then counts; in `runtime`.next is the one that
    would follow it. `reach` is the address under which
    other nodes reach this one, None when the whole job is on this host.
    """

    def __init__(
        self,
        config: Config,
        runtime: str,
        children: Children,
        voice: Voice,
        environ: Mapping[str, str],
        reach: str | None,
    ) -> None:
        self._runtime, self._children, self._voice, self._environ = runtime, children, voice, environ
        self._job_dir = config.job_dir
        self._command = ["--runtime", runtime, "--job-dir", config.job_dir]
        self._command += ["--bind", "0.0.0.0", "--host", reach] if reach else []
        self._child: Child | None = None
        self._started = 0.0
        self._deaths = 0
        self._again_at: float | None = None
        self._given_up = False
        self._offered = False
        self._finished: list[bool] = []
        self._own_counts = reach is None
        self.link: Link | None = None

    def start(self) -> None:
        """Start the controller. That it cannot be started is a warning: training does not need it."""
        self._offered = True
        self._again_at = None
        self._started = time.monotonic()
        try:
            self._child = self._children.start("controller", 0, self._command, self._environ)
        except OSError as error:
            self._died(str(error))

    def connect(self, config: Config, source: str, stop: Any) -> None:
        """Make the supervisor's link; `stop` is called (in the link's thread) when the controller ends the job."""
        self.link = Link(config, source, self.address)
        self.link.on("stop", stop)
        self.link.on("next", self._told_next)

    def _told_next(self, address: Any) -> None:
        """In the link's thread: who has a copy of the record, or that nobody has one any more."""
        follower = checked_address(address)
        if follower is not None:
            write_runtime(self._runtime + ".next", **follower)
        else:
            _unlink(self._runtime + ".next")

    def address(self) -> dict[str, Any] | None:
        """Where the job's controller listens; None while the ranks have not chosen one of several."""
        chosen, own = read_runtime(self._runtime + ".job"), read_runtime(self._runtime)
        if chosen is None:
            return own if self._own_counts or not self._offered else None
        # The secret tells whose it is: our own may have come back at another port.
        return own if own and own["secret"] == chosen["secret"] else chosen

    @property
    def ours(self) -> bool:
        """Whether the controller started here keeps the job's record."""
        address = self.address() if self._offered else None
        return address is not None and address == read_runtime(self._runtime)

    def settle(self, leader: bool) -> bool:
        """The ranks have ended. If they never chose a controller, that of the leading node keeps the record; if theirs
        is lost, the one that has the copy does. True when that has become ours just now."""
        chosen = self.address()
        if chosen is None:
            self._own_counts = leader
            return False
        follower = read_runtime(self._runtime + ".next")
        if self.ours or follower is None or answers(chosen):
            return False
        write_runtime(self._runtime + ".job", **follower)
        return self.ours

    def ended(self, child: Child) -> None:
        """The controller's process has ended: have it started again, unless it was to end."""
        if child is self._child:
            self._child = None
            if not self._finished:
                self._died(f"exit code {child.code}", child.code == 128 + signal.SIGKILL)

    def _died(self, why: str, killed: bool = False) -> None:
        quick = time.monotonic() - self._started < QUICK_DEATH
        self._deaths = self._deaths + 1 if quick else 1
        # One that somebody kills, however often, would stay up if it were let.
        if self._deaths >= MOST_QUICK_DEATHS and not killed:
            self._given_up = True
            self._voice.warn(f"the controller does not stay up ({why}); training goes on, without its record")
        else:
            pause = 0.0 if self._deaths < 2 else 0.1 * 2 ** min(self._deaths, 10)
            self._again_at = time.monotonic() + min(KILLED_PAUSE if killed else 5.0, pause)

    def turn(self) -> None:
        """Start the controller again when it is time to; called from the main thread."""
        if self._again_at is not None and time.monotonic() >= self._again_at:
            self.start()

    def finish(self, timeout: float) -> None:
        """Begin to deliver what is left and to end the controller, without waiting; see `finishing`."""
        if self.link is None:
            self._finished.append(False)
            return

        def work(link: Link) -> None:
            address = self.address()
            ours, reachable = self.ours and not self._given_up, address is not None
            if address is not None and not ours:
                forward.spools(self._job_dir, address, link.spool_path, timeout / 2)
            done = link.finish(timeout) if ours else link.close(timeout if reachable else 0.0)
            forward.tidy(self._job_dir)
            self._finished.append(done)

        threading.Thread(target=work, args=(self.link,), name="sdcrun-finish", daemon=True).start()

    @property
    def finishing(self) -> bool:
        """Whether the link is still delivering what is left."""
        return not self._finished

    @property
    def complete(self) -> bool:
        """Whether the controller has said that all is on record."""
        return self._finished == [True]

    def end(self) -> None:
        """End the controller's process (two seconds for what it still writes) and remove the files that hold the
        secret."""
        child, self._again_at = self._child, None
        if child is not None:
            for number, wait in ((signal.SIGTERM, 4.0), (signal.SIGKILL, 2.0)):
                if child.code is None:
                    child.send(number)
                    until = time.monotonic() + wait
                    while child.code is None and time.monotonic() < until:
                        self._children.reap(0.0)
                        time.sleep(0.02)
        for path in (self._runtime, self._runtime + ".job", self._runtime + ".next"):
            _unlink(path)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def is_here(host: str) -> bool:
    """Whether `host` is a name or an address of this machine."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True


def address_towards(host: str) -> str:
    """The address of this host on the way to `host`, under which other nodes of the job can reach it. When `host` is
    this one, its name is what the others use as well."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            address = probe.getsockname()[0]
    except OSError:
        return socket.gethostname()
    return host if address.startswith("127.") or address == "::1" else address
