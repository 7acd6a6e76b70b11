"""The rank's event client. The supervisor speaks the same protocol, so the one implementation lies in `sdcrun.wire`."""

from sdcrun.wire.link import Link
from sdcrun.wire.runtime import runtime_address

__all__ = ["Link", "runtime_address"]
