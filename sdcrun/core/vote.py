"""The weight vote of one step: which replica holds other bits than the majority, tensor by tensor. Pure.

What a vote means over time (a difference that goes on, a minority that moves) is `core.votes`'s.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class VoteResult:
    """Outcome of one vote; the same on every rank that has all tables.

    - `minority`: tensor name to the ranks whose row differs from that of a strict majority of all ranks, sorted.
    - `no_majority`: names of tensors that differ and of which no version is held by more than half of the ranks.
    - `sources`: name of each tensor with a minority to the rank a repair takes it from.
    - `clean`: ranks in no minority, sorted.
    """

    minority: dict[str, list[int]] = field(default_factory=dict)
    no_majority: list[str] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    clean: list[int] = field(default_factory=list)

    @property
    def unanimous(self) -> bool:
        """All replicas agree on every tensor."""
        return not self.minority and not self.no_majority


def weight_vote(table_by_rank: Mapping[int, Sequence[Any]], names: Sequence[str]) -> VoteResult:
    """Vote on each tensor by itself.

    `table_by_rank` has every rank's rows, one for each name in the order of `names`; a row is anything whose equality
    means equal bits (a fingerprint, or a list of them with dtype and size). A rank whose table is too short is taken to
    dissent in what is missing. Two ranks bad in different tensors are each in the minority of one; with two ranks
    there is never a majority. A repair's source is a rank in no minority where there is one, so that it copies whole
    states.
    """
    ranks = sorted(table_by_rank)
    tables = {rank: [_hashable(row) for row in table_by_rank[rank]] for rank in ranks}
    minority: dict[str, list[int]] = {}
    no_majority: list[str] = []
    holders: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        versions: dict[Hashable, list[int]] = {}
        for rank in ranks:
            row = tables[rank][index] if index < len(tables[rank]) else ("missing", rank)
            versions.setdefault(row, []).append(rank)
        if len(versions) < 2:
            continue
        most = max(versions.values(), key=len)
        if 2 * len(most) <= len(ranks):
            no_majority.append(name)
        else:
            minority[name] = [rank for rank in ranks if rank not in most]
            holders[name] = most
    accused = {rank for wrong in minority.values() for rank in wrong}
    sources = {name: next((rank for rank in most if rank not in accused), most[0]) for name, most in holders.items()}
    return VoteResult(minority, no_majority, sources, [rank for rank in ranks if rank not in accused])


def _hashable(row: Any) -> Hashable:
    """`row` with every list in it as a tuple (rows that came through JSON are lists)."""
    return tuple(_hashable(item) for item in row) if isinstance(row, (list, tuple)) else row
