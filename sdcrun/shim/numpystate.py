"""The state of NumPy's global generator of random numbers, read in every step of every job and set in every replay.

NumPy's own `get_state` and `set_state` copy 624 words one by one in Python, 30 to 90 µs. In most jobs nobody draws from
it, and then a look at the generator's memory tells that nothing has changed.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

_KEY = 4 * 624
_BYTES = _KEY + 4  # of the Mersenne Twister's words, then of its place among them


class State(NamedTuple):
    """A Mersenne Twister that keeps no normal number for the next call: its memory, `raw`. Any other generator: what
    NumPy says of it, `told`."""

    raw: bytes
    told: dict[str, Any] | None

    def full(self) -> dict[str, Any]:
        """What `numpy.random.set_state()` takes."""
        if self.told is not None:
            return self.told
        key = sys.modules["numpy"].frombuffer(self.raw[:_KEY], dtype="uint32")
        words = {"key": key, "pos": int.from_bytes(self.raw[_KEY:], sys.byteorder, signed=True)}
        return {"bit_generator": "MT19937", "state": words, "has_gauss": 0, "gauss": 0.0}


class _Read(NamedTuple):
    bits: Any
    address: int
    state: State


_last: _Read | None = None


def exact() -> State | None:
    """The state now; None while nobody has imported NumPy's generators."""
    global _last
    numpy, _last = sys.modules.get("numpy.random"), None
    if numpy is None:
        return None
    try:
        bits = numpy.mtrand._rand._bit_generator
        address = bits.ctypes.state_address if type(bits).__name__ == "MT19937" else None
        raw = ctypes.string_at(address, _BYTES) if address else b""
    except (AttributeError, ValueError):
        raw = b""
    told = _told(numpy)
    if not _is(told, raw):
        return State(b"", told)
    _last = _Read(bits, address, State(raw, None))
    return _last.state


def _told(numpy: Any) -> dict[str, Any]:
    # The older form, a tuple, warns where the script has put another generator in.
    return numpy.get_state(legacy=False)


def _is(told: dict[str, Any], raw: bytes) -> bool:
    """Whether `raw` is all that there is to it; false too where another thread has drawn in between."""
    if told["bit_generator"] != "MT19937" or told["has_gauss"]:
        return False
    words = told["state"]
    return raw == words["key"].tobytes() + int(words["pos"]).to_bytes(4, sys.byteorder, signed=True)


def _unchanged(numpy: Any) -> _Read | None:
    """What was read last, if nothing was drawn since."""
    known, rand = _last, getattr(getattr(numpy, "mtrand", None), "_rand", None)
    if known is None or getattr(rand, "_bit_generator", None) is not known.bits:
        return None
    return known if ctypes.string_at(known.address, _BYTES) == known.state.raw else None


def glance() -> State | None:
    """The same as `exact` at a tenth of the cost where nothing was drawn since the last time.

    A normal number that is kept for the next call lies elsewhere: only while none is kept, every drawing shows. What
    does not is that somebody puts back a state with such a number whose words are those of the last time.
    """
    known = _unchanged(sys.modules.get("numpy.random"))
    return known.state if known is not None else exact()


def restore(state: State) -> None:
    """Gives NumPy's generator that state; it must have been imported."""
    global _last
    numpy = sys.modules["numpy.random"]
    known = _unchanged(numpy)
    if not state.raw or known is None:
        numpy.set_state(state.full())
        _last = None
    elif state.raw != known.state.raw:
        with known.bits.lock:
            ctypes.memmove(known.address, state.raw, _BYTES)
        _last = known._replace(state=state)
