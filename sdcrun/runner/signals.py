"""Signals of the supervisor, turned into a queue that its main loop reads."""

from __future__ import annotations

import os
import select
import signal
from collections import deque
from collections.abc import Iterable

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
WARNING = (signal.SIGUSR1, signal.SIGUSR2)


def named(text: str) -> set[int]:
    """Signal numbers in a value of --signals-to-handle; names that this system does not know are left out, as torchrun
    does."""
    numbers = (getattr(signal, name.strip(), None) for name in text.split(","))
    return {int(number) for number in numbers if isinstance(number, signal.Signals)}


class Inbox:
    """Catches signals from its making on; `wait` returns those that came.

    A hang-up or user signal that was ignored when sdcrun was started (nohup) stays ignored. An ignored SIGINT (a shell
    does that to background jobs) is not left ignored: torchrun's agent takes it as well.
    """

    def __init__(self, more: Iterable[int] = ()) -> None:
        self._queue: deque[int] = deque()
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in {*STOPPING, *WARNING, *more}:
            keep = number not in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
            if keep and signal.getsignal(number) == signal.SIG_IGN:
                continue
            signal.signal(number, lambda received, frame: self._queue.append(received))
        signal.signal(signal.SIGCHLD, lambda received, frame: None)

    def wake(self) -> None:
        """Make a `wait` return early; for other threads."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            # Full: it is going to wake up anyway.
            pass

    def wait(self, seconds: float) -> list[int]:
        """Sleep until a signal comes, a child ends, `wake` is called or the time is over; returns the signals."""
        if not self._queue:
            select.select([self._read], [], [], max(0.0, seconds))
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        numbers = []
        while self._queue:
            numbers.append(self._queue.popleft())
        return numbers
