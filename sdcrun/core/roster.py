"""Who takes part: ranks, places and devices of each attempt, and who of them is guarded. Pure bookkeeping over events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from sdcrun.core.audit import unruns
from sdcrun.core.types import Device, Event

NEVER_SAID_HELLO = (
    "never said hello (python -I or -S, another interpreter, PYTHONPATH replaced, an inner launcher, SDCRUN_DISABLE, "
    "or torch was never imported)"
)
MAX_PEERS = 64
NO_DDP = "said hello, but no DistributedDataParallel module was made in it"


@dataclass
class Place:
    """Where one rank of one attempt runs, as its hello said."""

    rank: int
    local_rank: int
    node: int
    device: Device
    versions: dict[str, Any] = field(default_factory=dict)
    interpreter: str = ""


@dataclass
class Attempt:
    """What is known of one attempt. Keys of `places`, `modules`, `unguarded`, `byes` are global ranks, those of
    `summaries` (rank, session, group as text)."""

    number: int
    world_size: int = 0
    places: dict[int, Place] = field(default_factory=dict)
    modules: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    groups: set[tuple[int, ...]] = field(default_factory=set)
    unguarded: dict[int, str] = field(default_factory=dict)
    so_far: set[int] = field(default_factory=set)
    byes: dict[int, str] = field(default_factory=dict)
    summaries: dict[tuple[int, str, str], dict[str, Any]] = field(default_factory=dict)
    checks_off: dict[str, str] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    last_step: int = -1
    first_seen: float | None = None
    missing_said: bool = False

    def device(self, rank: int) -> Device:
        """Device of `rank`; one made of the rank's number when it never said hello (it then counts in this attempt
        only)."""
        place = self.places.get(rank)
        return place.device if place else Device(host="unknown host", uuid=f"attempt-{self.number}-rank-{rank}")


def rank_of(source: str) -> int | None:
    """Global rank in a source "rank:<n>", None for any other source."""
    kind, _, number = source.partition(":")
    return int(number) if kind == "rank" and number.isdigit() else None


def group_of(values: Any) -> Group:
    """Global ranks of a group, sorted, from a list of them or of runs [first, length]; ValueError or TypeError when
    they are not distinct integers."""
    coded = tuple(tuple(item) if isinstance(item, list) else int(item) for item in values)
    return _distinct(coded)


class Group(tuple[int, ...]):
    """Global ranks, sorted. Its hash and the set of its members are made once: a group may have 16,384 ranks and is
    part of every key."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def members(self) -> frozenset[int]:
        """The ranks as a set."""
        return frozenset(self)


@lru_cache(maxsize=64)
def _distinct(coded: tuple[Any, ...]) -> Group:
    ranks = Group(sorted(unruns(list(coded), 1)))
    if len(ranks.members) != len(ranks):
        raise ValueError("a rank twice in one group")
    return ranks


def domain_count(attempt: Attempt, group: tuple[int, ...]) -> int:
    """Failure domains among `group`: nodes when there are three or more of them, else devices."""
    nodes = {attempt.places[r].node for r in group if r in attempt.places}
    return len(nodes) if len(nodes) >= 3 else len({attempt.device(r).key for r in group})


class Roster:
    """Attempts, nodes and supervisors of one job."""

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.nodes: list[dict[str, Any]] = []
        self.hosts: dict[int, str] = {}

    def attempt(self, number: int) -> Attempt:
        """The record of attempt `number`, made on first use."""
        if number not in self.attempts:
            self.attempts[number] = Attempt(number)
        return self.attempts[number]

    @property
    def last(self) -> Attempt | None:
        """The newest attempt in which a rank said anything."""
        return self.attempts[max(self.attempts)] if self.attempts else None

    def hello(self, event: Event) -> None:
        """Place a rank. The last hello of a rank in an attempt stands."""
        data = event.data
        rank, attempt = int(data["rank"]), self.attempt(event.attempt)
        known = {k: data["device"].get(k) for k in ("host", "uuid", "pci", "model", "serial")}
        device = Device(**{**known, "host": str(known["host"]), "uuid": str(known["uuid"])})
        attempt.places[rank] = Place(
            rank,
            int(data["local_rank"]),
            int(data["node"]),
            device,
            dict(data.get("versions") or {}),
            str(data.get("interpreter") or ""),
        )
        attempt.world_size = max(attempt.world_size, int(data["world_size"]), rank + 1)

    def node_up(self, event: Event) -> None:
        """Remember a supervisor and the world it was asked for."""
        self.nodes.append({"source": event.source, "time": event.time, **event.data})

    def expected_world(self, attempt: Attempt | None) -> int:
        """World size by the attempt's hellos, else nnodes x nproc as the supervisors were told; 0 when nobody knows."""
        if attempt and attempt.world_size:
            return attempt.world_size
        sizes = [
            n["nnodes"] * n["nproc"]
            for n in self.nodes
            if isinstance(n.get("nnodes"), int) and isinstance(n.get("nproc"), int)
        ]
        return max(sizes, default=0)

    def missing(self, attempt: Attempt | None) -> list[int]:
        """Ranks of the expected world that never said hello in `attempt`."""
        known = attempt.places if attempt else {}
        return [rank for rank in range(self.expected_world(attempt)) if rank not in known]

    def host_of_missing(self, rank: int, attempt: Attempt | None) -> str | None:
        """Host of a rank that never spoke: from its node's other ranks, or the only supervisor's; None when unknown."""
        places = list(attempt.places.values()) if attempt else []
        sizes = {n["nproc"] for n in self.nodes if isinstance(n.get("nproc"), int)}
        if len(sizes) == 1 and (size := sizes.pop()) > 0:
            near = [p.device.host for p in places if p.rank // size == rank // size]
            if near:
                return near[0]
        hosts = {str(n.get("host")) for n in self.nodes if n.get("host")}
        return hosts.pop() if len(hosts) == 1 else None

    def unguarded(self, attempt: Attempt | None, ended: bool) -> list[dict[str, Any]]:
        """Rows {rank, host, reason} of ranks that are not guarded, sorted by rank. `ended`: nothing more will come."""
        rows = [
            {"rank": r, "host": self.host_of_missing(r, attempt), "reason": NEVER_SAID_HELLO}
            for r in self.missing(attempt) if not attempt or r not in attempt.unguarded
        ]
        if attempt:
            for rank, reason in attempt.unguarded.items():
                rows.append(
                    {
                        "rank": rank,
                        "host": attempt.device(rank).host if rank in attempt.places else None,
                        "reason": reason,
                    }
                )
            silent = set(attempt.places) - set(attempt.modules) - set(attempt.unguarded)
            for rank in silent if ended else silent & set(attempt.byes):
                rows.append({"rank": rank, "host": attempt.device(rank).host, "reason": NO_DDP})
        return sorted(rows, key=lambda row: (row["rank"], row["reason"]))
