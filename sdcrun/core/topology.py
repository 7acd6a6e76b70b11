"""Failure domains, who recomputes whose micro-batch, who arbitrates between the two, and the tree of messages.

Everything here is a pure function of what all ranks know, so that every rank computes the same answer without a
message. `domains` is either a sequence (index: rank) or a mapping (rank to domain id); ranks are all of one
numbering, group ranks or global ranks, as the caller likes. `classes`, where given, has the same form: devices of
different compatibility class (model, driver, libraries, CPU capability) need not compute equal bits and are never
compared.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

MAX_JURY = 3

T = TypeVar("T")
Table = Mapping[int, T] | Sequence[T]


def tree(rank: int, size: int, fan_out: int) -> tuple[int | None, list[int]]:
    """(parent, children) of `rank` in a tree over ranks 0 to `size` - 1: 0 on top, at most `fan_out` children each.

    Every subtree is a stretch of neighbouring ranks, so most of its edges stay within a node; it is as shallow as such
    a tree can be. Raises ValueError where there is no such rank.
    """
    if not 0 <= rank < size or fan_out < 1:
        raise ValueError(f"rank {rank} of {size}, {fan_out} children each")
    parent, top, end = None, 0, size
    while True:
        # What is below `top`, in at most `fan_out` stretches whose lengths differ by one at most.
        below = end - top - 1
        parts = min(fan_out, below)
        edges = [top + 1 + below * part // parts for part in range(parts + 1)] if parts else []
        if top == rank:
            return parent, edges[:-1]
        place = bisect.bisect_right(edges, rank) - 1
        parent, top, end = top, edges[place], edges[place + 1]


def failure_domains(nodes: Sequence[int]) -> list[int]:
    """Failure domain of each rank from the node of each rank: the node when the job has three or more, else the device.

    With one or two nodes every rank is a domain of its own; the numbers then alternate between the nodes, so that a
    ring in the order of domains crosses from node to node as often as it can.
    """
    distinct = sorted(set(nodes))
    if len(distinct) >= 3:
        number = {node: i for i, node in enumerate(distinct)}
        return [number[node] for node in nodes]
    place: dict[int, tuple[int, int]] = {}
    seen: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        place[rank] = (seen.get(node, 0), distinct.index(node))
        seen[node] = seen.get(node, 0) + 1
    order = sorted(place, key=lambda rank: place[rank])
    return [order.index(rank) for rank in range(len(nodes))]


def replayer_of(
    ranks: Sequence[int],
    domains: Sequence[int],
    classes: Sequence[Hashable] | None = None,
    turn: int = 0,
) -> dict[int, int]:
    """Owner to replayer: each rank's micro-batch is recomputed by a rank of the same class on another failure domain.

    `ranks` and `domains` (and `classes`) are in the same order. While no domain holds more than half of a class's ranks
    this is a permutation: each owns one and replays one. Otherwise the ranks outside the large domain replay several of
    its micro-batches, evenly, and some of its ranks replay none. A rank that is missing from the result has no partner
    (see `without_partner`). `turn` picks another of the possible rings, so that over many audits a device meets several
    partners; two devices with the same defect would otherwise never be told apart.
    """
    if len(ranks) != len(domains) or (classes is not None and len(classes) != len(ranks)):
        raise ValueError("ranks, domains and classes differ in length")
    groups: dict[Hashable, list[int]] = {}
    for index in range(len(ranks)):
        groups.setdefault(None if classes is None else classes[index], []).append(index)
    result: dict[int, int] = {}
    for members in groups.values():
        for owner, replayer in _pairs([(domains[i], ranks[i]) for i in members], turn):
            result[owner] = replayer
    return dict(sorted(result.items()))


def _pairs(members: list[tuple[int, int]], turn: int) -> Iterable[tuple[int, int]]:
    """(owner, replayer) within one class; `members` are (domain, rank)."""
    members = sorted(members)
    count = len(members)
    sizes: dict[int, int] = {}
    for domain, _ in members:
        sizes[domain] = sizes.get(domain, 0) + 1
    if len(sizes) < 2:
        return
    largest = max(sizes.values())
    if 2 * largest <= count:
        # Each domain is a block of at most `largest` places, so any shift from `largest` to `count - largest` leaves
        # it.
        shift = largest + turn % (count - 2 * largest + 1)
        for i, (_, owner) in enumerate(members):
            yield owner, members[(i + shift) % count][1]
        return
    big = next(domain for domain, size in sorted(sizes.items()) if size == largest)
    inside = [rank for domain, rank in members if domain == big]
    outside = [rank for domain, rank in members if domain != big]
    for i, owner in enumerate(inside):
        yield owner, outside[(i + turn) % len(outside)]
    for i, owner in enumerate(outside):
        yield owner, inside[(i + turn) % len(inside)]


def without_partner(
    ranks: Sequence[int], domains: Sequence[int], classes: Sequence[Hashable] | None = None
) -> dict[int, str]:
    """Ranks that cannot be audited, each with the reason in words."""
    paired = replayer_of(ranks, domains, classes)
    if len(ranks) == 1:
        reason = "a single rank: no second device to compute the micro-batch again"
    elif len(set(domains)) < 2:
        reason = "all ranks are in one failure domain"
    else:
        reason = "no device of the same model, driver, libraries and CPU capability in another failure domain"
    return {rank: reason for rank in ranks if rank not in paired}


def jury(
    disputed: Iterable[tuple[int, int]],
    domains: Table[int],
    classes: Table[Hashable] | None = None,
    size: int = MAX_JURY,
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Arbiters for each disputed pair (owner, replayer): up to `size` devices, each of a domain that no other one of
    the case has; empty when there is no third domain.

    One arbiter decides when one device is wrong. Three (five opinions from five domains) decide also when two devices
    are wrong in the same way, for instance both stuck at zero: with one arbiter such a pair outvotes a healthy
    device. With four domains there are two arbiters, and two against two is a tie. With three domains nothing
    protects from two equal wrong results. Preferred are devices in no disputed pair, then domains without one, then
    the least loaded, then by distance from the owner.
    """
    table = dict(domains) if isinstance(domains, Mapping) else dict(enumerate(domains))
    pairs = sorted(set(disputed))
    in_dispute = {rank for pair in pairs for rank in pair}
    shaky = {table[rank] for rank in in_dispute}
    place = {rank: i for i, rank in enumerate(sorted(table))}
    load = dict.fromkeys(table, 0)
    result: dict[tuple[int, int], tuple[int, ...]] = {}
    for owner, replayer in pairs:
        taken = {table[owner], table[replayer]}
        chosen: list[int] = []
        while len(chosen) < size:
            candidates = [
                rank
                for rank, domain in table.items()
                if domain not in taken and (classes is None or classes[rank] == classes[owner])
            ]
            if not candidates:
                break
            best = min(
                candidates,
                key=lambda r: (r in in_dispute, table[r] in shaky, load[r], (place[r] - place[owner]) % len(place)),
            )
            chosen.append(best)
            taken.add(table[best])
            load[best] += 1
        result[owner, replayer] = tuple(chosen)
    return result


def arbiters(
    failed_pairs: Iterable[tuple[int, int]], domains: Table[int], classes: Table[Hashable] | None = None
) -> dict[tuple[int, int], int]:
    """The one arbiter of each failed pair (owner, replayer): `jury` with one seat. A pair without a third domain is
    missing from the result."""
    return {pair: seats[0] for pair, seats in jury(failed_pairs, domains, classes, size=1).items() if seats}
