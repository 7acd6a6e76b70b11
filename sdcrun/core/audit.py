"""What one ring replay audit found, as data: who computed whose micro-batch, and whether the bits were equal.

`Audit` is the `data` of an event of kind "audit" (`Audit.to_json`). Nothing here decides anything; `core.attribute`
does.

A *case* is one owner's micro-batch of this step. Every device that computed it (the owner in training, its replayer,
the arbiters, and anybody again later) holds an opinion about it: one digest over everything that is compared, the
loss included. Two opinions are equal iff the digests are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

RING = "ring"  # the replayer's first computation of the owner's micro-batch
OWN = "own"  # the owner's second computation of its own micro-batch (owner == replayer)
ARBITER = "arbiter"  # a device of a third (fourth, fifth) domain, after a dispute
REPEAT = "repeat"  # a device that had computed the case before computes it once more, to tell transient from persistent
ROLES = (RING, OWN, ARBITER, REPEAT)

FIRST, INTERVAL, REQUESTED, TRIAGE = "first", "interval", "requested", "triage"
CAUSES = (FIRST, INTERVAL, REQUESTED, TRIAGE)

NARROWED = "the replay audit covers less than all: "  # begins a limit; the scope follows

MAX_DIFFERING = 8  # tensors named per comparison; the rest is counted in `differing_count`


@dataclass(frozen=True)
class Difference:
    """One tensor in which a recomputation differs from the owner's result.

    `tensor` is a parameter's name, or "loss"; `order` its place in forward order (0 first; None: unknown). `relative`
    is norm(replayer - owner) / norm(owner) of the local gradients where the shim could get it, may be inf or nan,
    None: unknown. `owner` and `replayer` are the fingerprints (or the value of a loss) as text.
    """

    tensor: str
    order: int | None = None
    relative: float | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    owner: str | None = None
    replayer: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON object without the fields that are unknown; a relative size that is not finite becomes text."""
        values: dict[str, Any] = {"tensor": self.tensor}
        for name in ("order", "relative", "dtype", "owner", "replayer"):
            value = getattr(self, name)
            if value is not None:
                values[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
        if self.shape is not None:
            values["shape"] = list(self.shape)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Difference:
        """Inverse of `to_json`."""
        relative, shape = values.get("relative"), values.get("shape")
        return cls(
            tensor=str(values["tensor"]),
            order=values.get("order"),
            relative=None if relative is None else float(relative),
            dtype=values.get("dtype"),
            shape=None if shape is None else tuple(shape),
            owner=values.get("owner"),
            replayer=values.get("replayer"),
        )


@dataclass(frozen=True)
class Comparison:
    """One recomputation of `owner`'s micro-batch by `replayer`, beside the owner's original result. Ranks are global.

    `digest_owner` is the digest of the owner's *original* computation in training, in every role; `digest_replayer`
    that of this recomputation. A digest is a hex string over everything that is compared: the loss (where it is part
    of the audit) and each parameter's local gradient, or the narrowed subset where the audit is narrowed, the same
    for all. `agrees` says whether they are equal. `loss_agrees` is None where the loss is not compared.
    `nonfinite_owner` and `nonfinite_replayer` say whether that result holds a NaN or an infinity; needed for triage,
    None where not looked at. `declined` is the reason why there is no result: such a comparison says nothing about
    anybody.
    """

    owner: int
    replayer: int
    role: str
    agrees: bool
    digest_owner: str | None = None
    digest_replayer: str | None = None
    loss_agrees: bool | None = None
    differing: tuple[Difference, ...] = ()
    differing_count: int = 0
    declined: str | None = None
    nonfinite_owner: bool | None = None
    nonfinite_replayer: bool | None = None

    @property
    def failed(self) -> bool:
        """There is a result and it is another one than the owner's."""
        return self.declined is None and not self.agrees

    def to_json(self) -> dict[str, Any]:
        """JSON object; fields at their default are left out."""
        values: dict[str, Any] = {
            "owner": self.owner, "replayer": self.replayer, "role": self.role, "agrees": self.agrees,
            "digest_owner": self.digest_owner, "digest_replayer": self.digest_replayer,
        }  # fmt: skip
        for name in ("loss_agrees", "declined", "nonfinite_owner", "nonfinite_replayer"):
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        if self.differing:
            values["differing"] = [d.to_json() for d in self.differing[:MAX_DIFFERING]]
        count = max(self.differing_count, len(self.differing))
        if count:
            values["differing_count"] = count
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Comparison:
        """Inverse of `to_json`. Raises KeyError or ValueError on something else."""
        if values["role"] not in ROLES:
            raise ValueError(f"unknown role {values['role']!r}")
        differing = tuple(Difference.from_json(d) for d in values.get("differing", ()))
        return cls(
            owner=int(values["owner"]),
            replayer=int(values["replayer"]),
            role=values["role"],
            agrees=bool(values["agrees"]),
            digest_owner=values.get("digest_owner"),
            digest_replayer=values.get("digest_replayer"),
            loss_agrees=values.get("loss_agrees"),
            differing=differing,
            differing_count=int(values.get("differing_count", len(differing))),
            declined=values.get("declined"),
            nonfinite_owner=values.get("nonfinite_owner"),
            nonfinite_replayer=values.get("nonfinite_replayer"),
        )


@dataclass(frozen=True)
class Audit:
    """One audit step of one DDP process group. The same on every rank of the group once all results are gathered.

    `group` are the global ranks of the group and `domains` their failure domains, in the same order. `calibration` is
    true when every owner also computed its own micro-batch twice (role "own"), as at the first audit. `weights_agree`
    is false when the weight digests that travel with the micro-batches differ: recomputations cannot agree then, and
    the difference is the weight vote's to judge (None: not looked at). `declined` are (global rank, reason) of those
    whose micro-batch was not audited, without a partner included; rank -1 stands for the whole audit. `position` of
    `window` is the audited micro-batch's place in the accumulation window. `scope` says what was compared: "all", or
    in words what the audit is narrowed to. `hit`: check 1 fired in this step, so that a non-finite result of an owner
    is its triage's to judge. `agreed` and `own_agreed` count the agreeing ring and own comparisons that
    `compact` left out.
    """

    step: int
    group: tuple[int, ...]
    domains: tuple[int, ...]
    comparisons: tuple[Comparison, ...] = ()
    calibration: bool = False
    weights_agree: bool | None = None
    declined: tuple[tuple[int, str], ...] = ()
    cause: str = INTERVAL
    position: int = 0
    window: int = 1
    scope: str = "all"
    skipped: bool = False
    agreed: int = 0
    own_agreed: int = 0
    hit: bool = True

    @cached_property
    def domain_of(self) -> dict[int, int]:
        """Failure domain of each global rank of the group."""
        return dict(zip(self.group, self.domains, strict=True))

    @cached_property
    def cases(self) -> dict[int, list[Comparison]]:
        """Comparisons that have a result, by owner, in the order they were made."""
        by_owner: dict[int, list[Comparison]] = {}
        for comparison in self.comparisons:
            if comparison.declined is None:
                by_owner.setdefault(comparison.owner, []).append(comparison)
        return by_owner

    def failed_pairs(self) -> list[tuple[int, int]]:
        """(owner, replayer) of every ring comparison that differs, sorted."""
        return sorted({(c.owner, c.replayer) for c in self.comparisons if c.role == RING and c.failed})

    def disputed(self) -> list[tuple[int, int]]:
        """(owner, replayer) of every case that needs arbiters, sorted; (owner, owner) where no replayer had a result.

        Those are the failed pairs, and the pairs of owners whose own second computation differs: which of the two was
        wrong, and whether the micro-batch can be computed again at all, also takes other devices to say.
        """
        pairs = set()
        for owner, made in self.cases.items():
            ring = [c for c in made if c.role == RING]
            if any(c.failed for c in ring) or any(c.failed for c in made if c.role == OWN):
                pairs |= {(owner, c.replayer) for c in ring} or {(owner, owner)}
        return sorted(pairs)

    def clean_ranks(self) -> tuple[int, ...]:
        """Global ranks cleared by this audit: their own micro-batch was recomputed elsewhere with equal bits, and no
        comparison in which they took part differs."""
        if self.weights_agree is False or any(rank < 0 for rank, _ in self.declined):
            return ()
        touched = {rank for rank, _ in self.declined}
        compared = set(self.left_out()) if self.agreed else set()
        for c in self.comparisons:
            if c.failed:
                touched |= {c.owner, c.replayer}
            elif c.role == RING and c.declined is None:
                compared.add(c.owner)
            elif c.role == RING:
                touched.add(c.owner)
        return tuple(rank for rank in self.group if rank in compared and rank not in touched)

    def compact(self) -> Audit:
        """The same audit without the comparisons of cases on which all agree; they are counted instead.

        A clean audit is then a few hundred bytes whatever the world size, since group and domains are written as runs.
        Every judgement of the compact audit is that of the full one.
        """
        loud = {c.owner for c in self.comparisons if c.failed or c.declined is not None}
        quiet = [c.role for c in self.comparisons if c.owner not in loud]
        return replace(
            self,
            comparisons=tuple(c for c in self.comparisons if c.owner in loud),
            agreed=self.agreed + quiet.count(RING),
            own_agreed=self.own_agreed + quiet.count(OWN),
        )

    def left_out(self) -> tuple[int, ...]:
        """Global ranks whose case `compact` left out."""
        if not self.agreed and not self.own_agreed:
            return ()
        known = {c.owner for c in self.comparisons} | {rank for rank, _ in self.declined}
        return tuple(rank for rank in self.group if rank not in known)

    def to_json(self) -> dict[str, Any]:
        """JSON object: the `data` of an "audit" event. `group` and `domains` are run-length coded, see `runs`."""
        return {
            "step": self.step, "group": runs(self.group, 1), "domains": runs(self.domains, 0),
            "comparisons": [c.to_json() for c in self.comparisons], "calibration": self.calibration,
            "weights_agree": self.weights_agree, "declined": [list(pair) for pair in self.declined],
            "cause": self.cause, "position": self.position, "window": self.window, "scope": self.scope,
            "skipped": self.skipped, "hit": self.hit, "agreed": self.agreed, "own_agreed": self.own_agreed,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Audit:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on something else."""
        group, domains = unruns(values["group"], 1), unruns(values["domains"], 0)
        if len(group) != len(domains):
            raise ValueError("group and domains differ in length")
        return cls(
            step=int(values["step"]),
            group=group,
            domains=domains,
            comparisons=tuple(Comparison.from_json(c) for c in values.get("comparisons", ())),
            calibration=bool(values.get("calibration", False)),
            weights_agree=values.get("weights_agree"),
            declined=tuple((int(rank), str(reason)) for rank, reason in values.get("declined", ())),
            cause=values.get("cause", INTERVAL),
            position=int(values.get("position", 0)),
            window=int(values.get("window", 1)),
            scope=values.get("scope", "all"),
            skipped=bool(values.get("skipped", False)),
            hit=bool(values.get("hit", True)),
            agreed=int(values.get("agreed", 0)),
            own_agreed=int(values.get("own_agreed", 0)),
        )


def runs(values: tuple[int, ...], stride: int) -> list[list[int]]:
    """Run-length code: [first, length] for each stretch in which every value is the one before plus `stride`."""
    coded: list[list[int]] = []
    for value in values:
        if coded and value == coded[-1][0] + stride * coded[-1][1]:
            coded[-1][1] += 1
        else:
            coded.append([value, 1])
    return coded


def unruns(coded: list[Any], stride: int) -> tuple[int, ...]:
    """Inverse of `runs`; a plain list of integers is taken as it is. ValueError on more than a million values."""
    values: list[int] = []
    for item in coded:
        first, length = item if isinstance(item, (list, tuple)) else (item, 1)
        if len(values) + int(length) > 1_000_000:
            raise ValueError("too many ranks")
        values.extend(int(first) + stride * i for i in range(int(length)))
    return tuple(values)


@dataclass(frozen=True)
class History:
    """What came before, as far as a judgement needs it. Kept by the controller per attempt and process group.

    - `clean_audits`: audits of this attempt whose outcome was clean.
    - `accused`: global ranks whose device was accused by an earlier finding (of another step or another check); a
      second accusation is independent of the first and confirms it.
    - `transients`: accused ranks, one entry per earlier finding of the replay check that was not persistent. Leave out
      those that an injected fault explains: they are there to notice a cause that wanders from device to device.
    - `replayable`: false once the audit found that the script cannot be computed twice with equal bits.
    - `voting`: whether the weight vote is on.
    """

    clean_audits: int = 0
    accused: frozenset[int] = frozenset()
    transients: tuple[int, ...] = ()
    replayable: bool = True
    voting: bool = True
