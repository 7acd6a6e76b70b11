"""Which version of the weights a rank holds, and a safe moment for another thread to read them.

A version is the number of optimizer steps that this process group has finished; ranks go in lockstep, so equal numbers
mean equal weights. The lock is held over the inner step alone, never over a rendezvous of ranks, so a reader in the
link thread may keep the main thread for the length of one reading and nothing more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class NotThatVersion(Exception):
    """The weights asked about are no longer, or not yet, in this rank. The text says which."""


class Clock:
    """`version`: finished steps. `moving`: a step is between its first change and the end of all that follows it.

    `moment`: what marks the end of the last step's work on an accelerator, or None.
    """

    def __init__(self) -> None:
        self.version = 0
        self.moving = False
        self.moment = None
        self._weights = threading.Lock()
        self._turn = threading.Condition()
        self._keepers = 0
        self._waited = False

    def begin(self) -> None:
        """The main thread is about to change the weights; waits for a reader to finish."""
        self._weights.acquire()
        self.moving = True

    def written(self) -> None:
        """The inner step has returned; what follows it (a vote, a repair) may still change the weights."""
        self._weights.release()

    def end(self, moment=None) -> None:
        """The step is over: the next version."""
        with self._turn:
            self.moment = moment
            self.version += 1
            self.moving = False
            self._turn.notify_all()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps the main thread from the next step for the length of a `with`: it waits in `let_go`, for a while."""
        with self._turn:
            self._keepers += 1
        try:
            yield
        finally:
            with self._turn:
                self._keepers -= 1
                self._waited = self._waited and self._keepers > 0
                self._turn.notify_all()

    def let_go(self, timeout: float) -> None:
        """The main thread is about to meet the other ranks for the next step, after which none holds this version any
        more: waits for those who keep it, at most `timeout` seconds, and once for each of them."""
        if self._keepers and not self._waited:
            with self._turn:
                self._waited = not self._turn.wait_for(lambda: not self._keepers, timeout)

    def read(self, version: int, timeout: float, reader: Callable[[], T]) -> T:
        """What `reader()` returns while the weights are those of `version` and cannot change. Any thread may call it.

        Waits at most `timeout` seconds for that version and for the weights. Raises NotThatVersion.
        """
        deadline = time.monotonic() + timeout
        with self._turn:
            self._turn.wait_for(lambda: self.version >= version, timeout)
        self._must_be(version)
        if not self._weights.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NotThatVersion("the weights were in use for too long")
        try:
            self._must_be(version)
            return reader()
        finally:
            self._weights.release()

    def _must_be(self, version: int) -> None:
        if self.version < version:
            raise NotThatVersion(f"still at version {self.version} of {version}: not there in time")
        if self.version > version or self.moving:
            raise NotThatVersion("already in the next optimizer step")
