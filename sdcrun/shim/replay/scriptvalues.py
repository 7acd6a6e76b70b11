"""Numbers and texts of the script that a forward reads from outside its module: a temperature, a step, a flag.

Every rank has its own, and they are the same by the time of a replay, with one exception: what the script has moved
between the forward and the update. Those alone travel with a micro-batch and are put in for the replay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sdcrun.shim.replay.modulestate import is_device
from sdcrun.shim.replay.scriptstate import MISSING, Address, Reach, content

_SCALARS = (bool, int, float, complex, str, bytes, type(None))


class ScriptValues:
    """The scalars within a `reach`, as they are now."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._then = self._now()

    def _now(self) -> dict[Address, Any]:
        found = {}
        for address, around in self._reach.globals.items():
            found[address] = around.get(address[-1], MISSING)
        for address, cell in self._reach.free.items():
            found[address] = content(cell)
        return {address: value for address, value in found.items() if type(value) in _SCALARS and not is_device(value)}

    def moved(self) -> dict[Address, Any]:
        """Where the script has put another value since: the value from then."""
        now = self._now()
        return {
            address: value for address, value in self._then.items()
            if type(now.get(address, MISSING)) is not type(value) or now[address] != value
        }  # fmt: skip


def place(values: dict[Address, Any], reach: Reach) -> None:
    """Puts values where they belong in this rank, as far as it has such places."""
    for address, value in values.items():
        if address in reach.free:
            reach.free[address].cell_contents = value
        elif len(address) == 2 and address[0] in sys.modules:
            vars(sys.modules[address[0]])[address[1]] = value


@contextmanager
def restored(addresses: Iterable[Address], reach: Reach) -> Iterator[None]:
    """Behind the block this rank's own values are there again."""
    own: dict[Address, Any] = {}
    for address in addresses:
        if address in reach.free:
            own[address] = content(reach.free[address])
        elif len(address) == 2 and address[0] in sys.modules:
            own[address] = vars(sys.modules[address[0]]).get(address[1], MISSING)
    try:
        yield
    finally:
        place({address: value for address, value in own.items() if value is not MISSING}, reach)
        for address in (address for address, value in own.items() if value is MISSING):
            if len(address) == 2:
                vars(sys.modules[address[0]]).pop(address[1], None)
