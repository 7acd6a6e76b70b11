"""One audit as an exchange between the ranks of a group: ring, arbiters, repeats; all ranks end with the same record.

Every round is: micro-batches travel to those who compute them, they compute, their comparisons are gathered. What a
rank cannot do becomes a declined comparison, so that local trouble never breaks the order of the rounds.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sdcrun.core import attribute, ballot, topology
from sdcrun.core.audit import ARBITER, OWN, REPEAT, RING, Audit, Comparison, Difference
from sdcrun.shim.checks.opinion import Parcel, compare, differing_names
from sdcrun.shim.exchange import ExchangeFailed
from sdcrun.shim.microbatch import to_bytes
from sdcrun.shim.replay.asked import Asked, flips_bits
from sdcrun.shim.replay.collectives import CollectiveRefused
from sdcrun.shim.replay.run import NotReplayable, Result, replay
from sdcrun.shim.transport import BallotFailed

SENT_BYTES = 16 << 20
ROUNDS = 32
PHASE_QUIET = 8
LOUD, FAILED = 4, 2  # the first of the two words that a digest leaves free; what it says besides yes and no

_OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


@dataclass
class ByRank:
    """What this rank has seen of a forward that may depend on the rank. `owners`: it does, and replays take the owners'
    variables of the script; `cleared`: owners whose bits came out without, so that what differs later is a fault."""

    owners: bool = False
    cleared: set[int] = field(default_factory=set)


class Rounds:
    """One audit of `group` (group ranks inside, global ranks in the record). `parcel`: this rank's micro-batch, or why
    there is none ("": none is asked for); `excluded`: names that are not compared;
    `limit`: how long one message may take, in seconds; `by_rank`: what earlier audits have shown of the forward."""

    def __init__(
        self, group, guards: list, step: int, parcel: Parcel | str, local: dict, excluded: frozenset, turn: int,
        limit: float, by_rank: ByRank,
    ) -> None:  # fmt: skip
        self.by_rank = by_rank
        self.group, self.guards, self.step = group, guards, step
        self.mine, self.local, self.excluded = parcel, local, excluded
        self.domains = topology.failure_domains(group.nodes)
        self.partner = topology.replayer_of(range(group.size), self.domains, group.devices, turn)
        self.seconds = {"ship": 0.0, "replay": 0.0, "compare": 0.0}
        self.parcels: dict[int, Parcel | str] = {group.rank: parcel}
        self.unstable: set[str] = set()
        # All ranks have heard from one another that all is well, and need not meet again for it.
        self.met = False
        self._limit = limit
        self._tag = 1000 + (step % 100_000) * ROUNDS

    def run(
        self, statement: dict[str, Any], weights: Callable[[], dict[str, list[int]]], own: bool, cause: str
    ) -> Audit:
        """The whole audit. `statement`: {position, window, scope} of this rank; `weights` gives the digests of this
        rank's weights by module; `own`: every owner also computes its own micro-batch again. Raises ExchangeFailed."""
        group = self.group
        without = topology.without_partner(range(group.size), self.domains, group.devices)
        comparisons: list[Comparison] = []
        held, failure = {}, None
        try:
            received = self._ship({owner: [replayer] for owner, replayer in self.partner.items()})
            comparisons += [self._compute(owner, RING) for owner in received]
            if own and self.mine:
                comparisons.append(self._compute(group.rank, OWN))
            held = weights()
        except Exception as error:
            # The others wait in the all-reduce: they must hear of it there.
            failure = error
        if self._quiet(statement, held, comparisons, failure, loud=bool(without)):
            self.met = True
            return Audit(
                step=self.step, group=tuple(group.ranks), domains=tuple(self.domains), calibration=own,
                weights_agree=True, cause=cause, agreed=group.size, own_agreed=group.size if own else 0, **statement,
            )  # fmt: skip
        said = self.gather(
            {
                **statement,
                "weights": held,
                "declined": (self.mine if isinstance(self.mine, str) else "") or None,
                "unstable": sorted(self.unstable),
                "comparisons": [c.to_json() for c in comparisons],
            }
        )
        declined = {rank: reason for rank, reason in without.items()}
        declined |= {rank: said[rank]["declined"] for rank in range(group.size) if said[rank]["declined"]}
        self.unstable = {name for one in said for name in one["unstable"]}
        audit = Audit(
            step=self.step,
            group=tuple(group.ranks),
            domains=tuple(self.domains),
            comparisons=_comparisons(said),
            calibration=own,
            weights_agree=_alike([one["weights"] for one in said]),
            declined=tuple((group.ranks[rank], reason) for rank, reason in sorted(declined.items())),
            cause=cause,
            position=said[0]["position"],
            window=said[0]["window"],
            scope=said[0]["scope"],
        )
        return self._dispute(audit)

    def _quiet(
        self, statement: dict[str, Any], weights: dict[str, list[int]], comparisons: list[Comparison],
        failure: Exception | None, loud: bool,
    ) -> bool:  # fmt: skip
        """Whether all ranks have nothing to tell but that everything agrees: eight integers in one all-reduce, while
        statements of every rank to every rank are for what is `loud`, faults above all. Raises `failure`, which kept
        this rank from its part of the audit, or ExchangeFailed, also where another rank failed."""
        started = self.group.clock()
        loud |= isinstance(self.mine, str) or bool(self.unstable)
        loud |= any(not c.agrees or c.nonfinite_owner or c.nonfinite_replayer for c in comparisons)
        text = json.dumps([statement, weights], sort_keys=True).encode()
        first, second = struct.unpack("<QQ", hashlib.blake2b(text, digest_size=16).digest())
        words = ballot.digest_words((first, second), ballot.tag(self.step, 0, PHASE_QUIET))
        words[LOUD] = FAILED if failure is not None else int(loud)
        try:
            maxima = self.group.all_reduce_max(words)
        except BallotFailed as error:
            raise ExchangeFailed(str(error)) from error
        self.seconds["compare"] += self.group.clock() - started
        agree = ballot.digests_agree(maxima)
        if agree is None:
            raise ExchangeFailed("the ranks were not at the same place")
        if maxima[LOUD] == FAILED:
            raise failure or ExchangeFailed("another rank could not take its part in an audit")
        return agree and not maxima[LOUD]

    def _dispute(self, audit: Audit) -> Audit:
        """Own results, arbiters and repeats, as far as the record asks for them."""
        if audit.weights_agree is False or not (audit.disputed() or attribute.own_wanted(audit)):
            return audit
        again = attribute.own_wanted(audit)
        if again:
            mine = [self._compute(self.group.rank, OWN)] if self._here(again) else []
            audit = self._more(audit, mine)
        if attribute.not_replayable(audit):
            return audit
        place = {rank: i for i, rank in enumerate(audit.group)}
        pairs = [(place[owner], place[replayer]) for owner, replayer in audit.disputed()]
        jury = topology.jury(pairs, self.domains, self.group.devices)
        seats: dict[int, list[int]] = {}
        for (owner, _), ranks in jury.items():
            seats.setdefault(owner, []).extend(rank for rank in ranks if rank not in seats.get(owner, []))
        received = self._ship(seats)
        audit = self._more(audit, [self._compute(owner, ARBITER) for owner in received])
        wanted = [(place[owner], place[rank]) for owner, rank in attribute.repeats_wanted(audit)]
        repeats = [
            self._compute(owner, REPEAT)
            for owner, rank in wanted
            if rank == self.group.rank
            for _ in range(self.group.config.replay_repeats)
        ]
        audit = self._more(audit, repeats)
        return self._measure(audit, place)

    def _measure(self, audit: Audit, place: dict[int, int]) -> Audit:
        """How large the differences are: the convicted device and one that agrees compute once more and keep the
        tensors that differ; the latter compares. Nothing comes of a fault that does not show again."""
        sizes: dict[str, dict[str, float]] = {}
        for conviction in attribute.convictions(audit):
            owner, wrong, right = (place[r] for r in (conviction.owner, conviction.rank, conviction.peers[0]))
            shown = {d.tensor for c in audit.cases[conviction.owner] for d in c.differing}
            me = self.group.rank
            kept = self._kept(owner, shown) if me in (wrong, right) else {}
            got = self._swap({right: _blob(kept)} if me == wrong else {}, [wrong] if me == right else [])
            if got:
                sizes[str(conviction.owner)] = _relative(kept, got[wrong])
        said = self.gather({"sizes": sizes})
        merged = {owner: table for one in said for owner, table in one["sizes"].items()}
        comparisons = tuple(
            replace(c, differing=tuple(_sized(d, merged.get(str(c.owner), {})) for d in c.differing))
            if c.failed and c.differing
            else c
            for c in audit.comparisons
        )
        return replace(audit, comparisons=comparisons)

    def _kept(self, owner: int, shown: Iterable[str]) -> dict[str, torch.Tensor]:
        parcel = self.parcels.get(owner, "not here")
        if isinstance(parcel, str):
            return {}
        wanted, room = [], SENT_BYTES
        for name, (_, shape) in parcel.details.items():
            size = 4 * torch.Size(shape).numel()
            if self.name(name) in shown and size <= room:
                wanted.append(name)
                room -= size
        try:
            result = replay(parcel.program, self.guards, self.local, keep=wanted, owners=self.by_rank.owners)
        except Exception:
            return {}
        return {self.name(name): tensor.to("cpu", torch.float32) for name, tensor in result.kept.items()}

    # -- one round ----------------------------------------------------------------------------------------------

    def _here(self, ranks: Iterable[int]) -> bool:
        return self.group.ranks[self.group.rank] in ranks

    def name(self, name: str) -> str:
        """A table's name for people: the parameter's, with the module's in front where the group guards several."""
        module, colon, parameter = name.partition(":")
        return f"{module}.{parameter}" if colon and module else parameter if colon else name

    def _swap(self, sends: dict[int, bytes], receives: list[int]) -> dict[int, bytes]:
        self._tag += 1
        return self.group.exchange.swap(sends, receives, self._tag, self._limit)

    def _ship(self, routes: dict[int, list[int]]) -> list[int]:
        """Sends micro-batches along owner -> ranks; returns the owners whose case this rank must compute now."""
        started = self.group.clock()
        me = self.group.rank
        receivers = [rank for rank in routes.get(me, []) if rank != me]
        data = b""
        try:
            if receivers and not isinstance(self.mine, str):
                data = self.mine.dumps()
        except Exception as error:
            self.mine = f"the micro-batch cannot be packed: {type(error).__name__}: {error}"[:200]
        owners = [owner for owner, ranks in routes.items() if me in ranks and owner != me]
        for owner, blob in self._swap(dict.fromkeys(receivers, data), owners).items():
            if not blob:
                self.parcels[owner] = ""
                continue
            try:
                self.parcels[owner] = Parcel.loads(blob)
            except Exception as error:
                self.parcels[owner] = f"the micro-batch did not arrive whole: {error}"
        self.seconds["ship"] += self.group.clock() - started
        return [owner for owner in owners if self.parcels[owner] != ""]

    def _compute(self, owner: int, role: str) -> Comparison:
        """This rank's opinion on a micro-batch that it holds."""
        started = self.group.clock()
        parcel = self.parcels.get(owner, "the micro-batch is not here")
        ranks = self.group.ranks
        if isinstance(parcel, str):
            return Comparison(ranks[owner], ranks[self.group.rank], role, False, declined=parcel or "no micro-batch")
        result = self._replay(parcel, self.by_rank.owners)
        if role == OWN and isinstance(result, Result):
            self.unstable.update(differing_names(parcel.expected, result.table, self.excluded))
        elif isinstance(result, Result) and parcel.expected and not self.by_rank.owners:
            if not self._differs(parcel, result):
                self.by_rank.cleared.add(owner)
            elif owner not in self.by_rank.cleared:
                result = self._explained(parcel, result)
        self.seconds["replay"] += self.group.clock() - started
        return compare(ranks[owner], ranks[self.group.rank], role, parcel, result, self.excluded, self.name)

    def _differs(self, parcel: Parcel, result: Result) -> bool:
        return bool(differing_names(parcel.expected, result.table, self.excluded))

    def _explained(self, parcel: Parcel, first: Result) -> Result:
        """`first` differs from the owner's result. That is no fault if the owner's bits come with the owner's variables
        of the script, and the same other bits again without them: the forward depends on the rank. Where it flips bits
        by its rank, somebody tries the guard."""
        with_theirs, with_ours = Asked(), Asked()
        theirs = self._replay(parcel, owners=True, asked=with_theirs)
        if isinstance(theirs, str) or theirs.table == first.table:
            return first
        again = self._replay(parcel, owners=False, asked=with_ours)
        if isinstance(again, str) or again.table != first.table or flips_bits(with_theirs, with_ours):
            return first
        # Where these are not the owner's bits either, they are still this rank's opinion: the first are not comparable.
        self.by_rank.owners |= not self._differs(parcel, theirs)
        return theirs

    def _replay(self, parcel: Parcel, owners: bool, asked: Asked | None = None) -> Result | str:
        """What the replay of a micro-batch computed here, or why it could not."""
        try:
            return replay(parcel.program, self.guards, self.local, owners=owners, asked=asked)
        except (NotReplayable, CollectiveRefused) as error:
            return str(error)
        except _OUT_OF_MEMORY:
            return "out of memory"
        except Exception as error:
            return f"the replay failed: {type(error).__name__}: {error}"

    def gather(self, statement: dict[str, Any]) -> list[dict[str, Any]]:
        started = self.group.clock()
        self._tag += 1
        payload = json.dumps(statement).encode()
        said = [json.loads(part) for part in self.group.exchange.gather(payload, self._tag, self._limit)]
        self.seconds["compare"] += self.group.clock() - started
        return said

    def _more(self, audit: Audit, mine: list[Comparison]) -> Audit:
        said = self.gather(
            {"comparisons": [c.to_json() for c in mine], "unstable": sorted(self.unstable)}
        )
        self.unstable = {name for one in said for name in one["unstable"]}
        return replace(audit, comparisons=audit.comparisons + _comparisons(said))


def _alike(held: list[dict[str, list[int]]]) -> bool:
    """Whether the ranks that hold a module hold the same weights. One that the script has dropped lives on in some
    ranks until their collector runs."""
    return all(other.get(name, digest) == digest for one in held for name, digest in one.items() for other in held)


def _comparisons(said: list[dict[str, Any]]) -> tuple[Comparison, ...]:
    return tuple(Comparison.from_json(values) for one in said for values in one["comparisons"])


def _blob(kept: dict[str, torch.Tensor]) -> bytes:
    heads = [[name, tensor.numel()] for name, tensor in kept.items()]
    head = json.dumps(heads).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(to_bytes(tensor) for tensor in kept.values())


def _relative(kept: dict[str, torch.Tensor], blob: bytes) -> dict[str, float]:
    """norm(theirs - ours) / norm(ours) of every tensor that both kept and that differs."""
    length = int.from_bytes(blob[:8], "little")
    at, sizes = 8 + length, {}
    for name, count in json.loads(blob[8:at]):
        data, at = blob[at : at + 4 * count], at + 4 * count
        ours = kept.get(name)
        if ours is None or ours.numel() != count or not count:
            continue
        theirs = torch.frombuffer(bytearray(data), dtype=torch.float32)
        ours = ours.reshape(-1).double()
        difference = float((theirs.double() - ours).norm())
        if difference != 0.0:
            norm = float(ours.norm())
            sizes[name] = difference / norm if norm else float("inf")
    return sizes


def _sized(difference: Difference, sizes: dict[str, float]) -> Difference:
    return replace(difference, relative=sizes.get(difference.tensor))
