"""The controller's process: `python -m sdcrun.runner.controller --runtime FILE --job-dir DIR [--port N] [--bind ADDR]`.

Started and, when it dies, restarted by the supervisor; `SDCRUN_CONFIG` holds the configuration. It listens, writes the
runtime file (0600) that tells its address and the job's secret, and ends with exit code 0 when the supervisor's link
says finish, or on SIGTERM, which it also gets when the supervisor dies. A restarted one keeps port and secret.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

from sdcrun.core import decide
from sdcrun.core.codec import encode_message
from sdcrun.core.types import Config
from sdcrun.report.metrics import Metrics
from sdcrun.report.store import EVENTS, EventLog
from sdcrun.runner.controllerlog import ControllerLog
from sdcrun.runner.conversation import Conversation
from sdcrun.runner.follower import Follower
from sdcrun.runner.intake import Decide, Intake
from sdcrun.runner.server import Server, listen
from sdcrun.wire.runtime import new_secret, read_runtime, write_runtime

TICK_EVERY = 1.0
TERM_GRACE = 2.0
PORT_WAIT = 5.0
_WILDCARDS = ("0.0.0.0", "::")


class Controller:
    """One job's controller on an open listening socket. `run` returns the exit code."""

    def __init__(
        self, config: Config, listener: socket.socket, secret: str, log: ControllerLog, machine: Decide, runtime: str
    ) -> None:
        self._follower = Follower(runtime, os.path.join(config.job_dir, EVENTS), log.log)
        self._intake = Intake(config, machine, self._open_record, log.say, log.log, socket.gethostname())
        self._conversation = Conversation(config, self._intake, log.say, log.log)
        self._metrics = Metrics(config.job_dir, log.log)
        self._job_dir = config.job_dir
        self._server = Server(listener, secret, self._conversation, log.log)
        self._conversation.server = self._server

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.address[1]

    def _open_record(self) -> tuple[EventLog, Iterator[bytes]]:
        self._follower.take_over()
        return open_record(self._job_dir)

    def terminate(self) -> None:
        """Finish soon: what the ranks that end now still send is taken, then their spools."""
        if self._conversation.finish_by is None:
            self._conversation.finish_by = time.monotonic() + TERM_GRACE

    def run(self) -> int:
        """Serve until told to finish. 0: all is on record; 1: it could not be written."""
        talk = self._conversation
        self._follower.start()
        tick_at = time.monotonic() + TICK_EVERY
        while not self._finished():
            self._server.turn(min(0.25, max(0.0, tick_at - time.monotonic())))
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + TICK_EVERY
                talk.tick()
                if self._intake.opened:
                    self._metrics.turn(self._intake.state, time.monotonic())
            talk.settle()
        if not self._intake.opened:
            self._follower.end()
        complete = talk.finish()
        if complete and talk.finisher is not None:
            self._server.send(talk.finisher, encode_message("finished"))
        self._server.shut(1.0)
        return 0 if complete else 1

    def _finished(self) -> bool:
        by = self._conversation.finish_by
        return by is not None and (not self._conversation.others_due() or time.monotonic() >= by)


def open_record(job_dir: str) -> tuple[EventLog, Iterator[bytes]]:
    """The job's record, made if need be, a torn last line cut off, and the lines on it. Raises OSError."""
    record = EventLog(job_dir)
    record.append_lines(b"")
    return record, _lines_of(open(record.path, "rb"))


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    with file:
        yield from file


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent dies; if it already has, exit."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(0)


def raise_file_limit() -> None:
    """Let this process have as many connections as the kernel allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen_again(host: str, port: int) -> socket.socket:
    """Listen on `port`; on another free one when it stays taken for `PORT_WAIT` seconds. Raises OSError."""
    until = time.monotonic() + PORT_WAIT
    while port:
        try:
            return listen(host, port)
        except OSError:
            if time.monotonic() >= until:
                break
            time.sleep(0.05)
    return listen(host, 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sdcrun.runner.controller")
    parser.add_argument("--runtime", required=True, help="file to write {host, port, secret} to")
    parser.add_argument("--job-dir", required=True)
    parser.add_argument("--port", type=int, default=0, help="default: the one in the runtime file, else any free one")
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on; 0.0.0.0 when nodes are elsewhere")
    parser.add_argument("--host", default="", help="name under which other nodes reach this one")
    return parser.parse_args()


def main(machine: Decide = decide) -> int:
    """Run the process with the decisions of `machine`; returns its exit code."""
    parent = os.getppid()
    arguments = _arguments()
    # Ctrl-C goes to the whole foreground group; the controller outlives it, to write down what the ranks still say.
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent(parent)
    raise_file_limit()
    config = Config.from_json({**json.loads(os.environ.get("SDCRUN_CONFIG", "{}")), "job_dir": arguments.job_dir})
    known = read_runtime(arguments.runtime)
    secret = known["secret"] if known else new_secret()
    listener = listen_again(arguments.bind, arguments.port or (known["port"] if known else 0))
    host = arguments.host or (socket.gethostname() if arguments.bind in _WILDCARDS else arguments.bind)
    log = ControllerLog(os.path.join(arguments.job_dir, "logs", f"controller-{socket.gethostname()}.log"))
    controller = Controller(config, listener, secret, log, machine, arguments.runtime)
    signal.signal(signal.SIGTERM, lambda *_: controller.terminate())
    write_runtime(arguments.runtime, host, controller.port, secret)
    return controller.run()


if __name__ == "__main__":
    sys.exit(main())
