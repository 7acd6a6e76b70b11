"""An audit among simulated devices: the real topology and rules, with digests that a fault model makes up.

`wrong(rank, owner, role, nth)` says whether the nth computation of the owner's micro-batch by `rank` goes wrong; `bits`
says what a wrong result looks like:
- "fresh": other bits each time;
- "device": the same wrong bits each time a device computes the same case, others for each device (a stuck circuit);
- "same": all bad devices get the same wrong bits (two devices stuck at zero).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from sdcrun.core.attribute import Audit, Comparison, own_wanted, repeats_wanted
from sdcrun.core.audit import ARBITER, OWN, REPEAT, RING
from sdcrun.core.topology import failure_domains, jury, replayer_of

ORIGINAL = "original"
Wrong = Callable[[int, int, str, int], bool]


def ranks_of(nodes: Sequence[int]) -> list[int]:
    """Node of each rank, from the number of ranks of each node."""
    return [node for node, size in enumerate(nodes) for _ in range(size)]


class Choices:
    """A binary choice wherever a bad device computes; `all_of` runs a function for every sequence of choices."""

    def __init__(self, path: list[bool]) -> None:
        self.path = path
        self.taken = 0

    def __call__(self, *_: object) -> bool:
        if self.taken == len(self.path):
            self.path.append(False)
        self.taken += 1
        return self.path[self.taken - 1]

    @staticmethod
    def all_of(run: Callable[[Choices], object]) -> Iterator[object]:
        """Results of `run` over all choices, depth first."""
        path: list[bool] = []
        while True:
            yield run(Choices(path))
            while path and path[-1]:
                path.pop()
            if not path:
                return
            path[-1] = True


def simulate(
    nodes: Sequence[int],
    bad: Sequence[int],
    wrong: Wrong,
    bits: str = "device",
    calibration: bool = False,
    repeats: int = 1,
    turn: int = 0,
    seats: int = 3,
) -> Audit:
    """One audit of a job with `nodes[i]` ranks on node i, `bad` devices and up to `seats` arbiters for each dispute."""
    domains = failure_domains(ranks_of(nodes))
    world = range(len(domains))
    serial = count()
    made: dict[tuple[int, int, str], int] = {}

    def compute(rank: int, owner: int, role: str) -> str:
        nth = made[rank, owner, role] = made.get((rank, owner, role), -1) + 1
        if rank not in bad or not wrong(rank, owner, role, nth):
            return f"true-{owner}"
        return {"fresh": f"{next(serial)}-{owner}", "device": f"wrong-{rank}-{owner}", "same": f"wrong-{owner}"}[bits]

    first = {owner: compute(owner, owner, ORIGINAL) for owner in world}

    def compare(owner: int, rank: int, role: str) -> Comparison:
        digest = compute(rank, owner, role)
        return Comparison(owner, rank, role, digest == first[owner], first[owner], digest)

    pairs = replayer_of(world, domains, turn=turn)
    comparisons = [compare(owner, replayer, RING) for owner, replayer in pairs.items()]

    def audit() -> Audit:
        return Audit(7, tuple(world), tuple(domains), tuple(comparisons), calibration, weights_agree=True)

    again = tuple(world) if calibration else own_wanted(audit())
    comparisons += [compare(owner, owner, OWN) for owner in again]
    for (owner, _), arbiters in jury(audit().disputed(), domains, size=seats).items():
        comparisons += [compare(owner, arbiter, ARBITER) for arbiter in arbiters]
    for owner, rank in repeats_wanted(audit()):
        comparisons += [compare(owner, rank, REPEAT) for _ in range(repeats)]
    return audit()
