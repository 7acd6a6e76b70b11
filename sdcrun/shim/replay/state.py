"""Whether this process is replaying, for whoever must tell a replay from the original computation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0
_thread = 0


def replaying() -> bool:
    """True while a micro-batch is computed again; seen from every thread, the autograd engine's included."""
    return _depth > 0


def replaying_here() -> bool:
    """True while this thread computes a micro-batch again; what others do then is done for the script."""
    return _depth > 0 and threading.get_ident() == _thread


@contextmanager
def replay_scope() -> Iterator[None]:
    """Marks the block as a replay."""
    global _depth, _thread
    _depth, _thread = _depth + 1, threading.get_ident()
    try:
        yield
    finally:
        _depth -= 1


def keep_in_replay(hook):
    """Marks a module hook that must also run in a replay although it returned nothing in the recorded pass."""
    hook._sdcrun_keep = True
    return hook


def kept_in_replay(hook) -> bool:
    """The mark of `keep_in_replay`, also on the function behind a bound method or a partial."""
    inner = getattr(hook, "func", hook)
    return any(getattr(part, "_sdcrun_keep", False) for part in (hook, inner, getattr(inner, "__func__", inner)))


def mark(hook):
    """Marks a hook on a parameter as one that puts a fault in: whoever looks at the gradient must see the fault."""
    hook._sdcrun = True
    return hook


def puts_fault(hook) -> bool:
    """The mark of `mark`."""
    return getattr(hook, "_sdcrun", False)
