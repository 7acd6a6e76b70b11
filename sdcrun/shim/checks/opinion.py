"""What an owner sends out to have its micro-batch computed again, and what comes of comparing the results."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection
from dataclasses import dataclass, field

from sdcrun.core.audit import MAX_DIFFERING, Comparison, Difference
from sdcrun.shim.replay.program import Program
from sdcrun.shim.replay.record import Case
from sdcrun.shim.replay.run import Result

Table = dict[str, tuple[int, int]]


@dataclass
class Parcel:
    """A micro-batch on its way: the program and the owner's results. Where `expected` is empty there are no bits to
    compare, only whether everything is finite."""

    program: Program
    expected: Table
    details: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    finite: bool = True

    @classmethod
    def of(cls, case: Case) -> Parcel:
        """The parcel of a recorded backward."""
        return cls(case.program, case.expected, case.details, case.losses, case.finite)

    def dumps(self) -> bytes:
        """Bytes behind their digest. They go between ranks of one script only, which trust each other's code."""
        body = pickle.dumps(self, protocol=5)
        return hashlib.blake2b(body, digest_size=16).digest() + body

    @classmethod
    def loads(cls, data: bytes) -> Parcel:
        """Inverse of `dumps`; raises ValueError when the bytes were damaged on their way."""
        if len(data) < 16 or hashlib.blake2b(data[16:], digest_size=16).digest() != data[:16]:
            raise ValueError("the micro-batch was damaged on its way")
        return pickle.loads(data[16:])


def digest(table: Table, excluded: Collection[str]) -> str:
    """Hex digest over everything that is compared."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(table):
        if name not in excluded:
            hasher.update(f"{name} {table[name][0]} {table[name][1]}\n".encode())
    return hasher.hexdigest()


def differing_names(first: Table, second: Table, excluded: Collection[str]) -> list[str]:
    """Names whose fingerprints differ, or that only one side has, in the order of the first table."""
    if first == second:
        return []
    names = [name for name in (*first, *(n for n in second if n not in first)) if name not in excluded]
    return [name for name in names if first.get(name) != second.get(name)]


def is_value(name: str) -> bool:
    """The name stands for a loss or an output rather than a gradient."""
    return ":" not in name


def compare(
    owner: int, replayer: int, role: str, parcel: Parcel, result: Result | str, excluded: Collection[str], naming
) -> Comparison:
    """The comparison of an owner's results with a recomputation (`result`; a text: why there is none).

    Ranks are global; `naming` turns a table's name into the one for people.
    """
    if isinstance(result, str):
        return Comparison(owner, replayer, role, False, declined=result[:200])
    if not parcel.expected:
        return Comparison(
            owner, replayer, role, parcel.finite == result.finite, *map(_finite_digest, (parcel.finite, result.finite)),
            nonfinite_owner=not parcel.finite, nonfinite_replayer=not result.finite,
        )  # fmt: skip
    names = differing_names(parcel.expected, result.table, excluded)
    values = [name for name in parcel.expected if is_value(name) and name not in excluded]
    theirs = digest(parcel.expected, excluded)
    return Comparison(
        owner,
        replayer,
        role,
        agrees=not names,
        digest_owner=theirs,
        digest_replayer=digest(result.table, excluded) if names else theirs,
        loss_agrees=not any(name in names for name in values) if values else None,
        differing=tuple(
            _difference(name, order, parcel, result, naming) for order, name in _forward(names, parcel)[:MAX_DIFFERING]
        ),
        differing_count=len(names),
        nonfinite_owner=not parcel.finite,
        nonfinite_replayer=not result.finite,
    )


def _finite_digest(finite: bool) -> str:
    return "finite" if finite else "not finite"


def _forward(names: list[str], parcel: Parcel) -> list[tuple[int, str]]:
    """(place, name) in forward order, the reverse of the order in which the backward made gradients; values last."""
    places = {name: i for i, name in enumerate(reversed(parcel.details))}
    last = len(places)
    return sorted((places.get(name, last), name) for name in names)


def _difference(name: str, order: int, parcel: Parcel, result: Result, naming) -> Difference:
    details = parcel.details.get(name) or result.details.get(name)
    texts = []
    for table, losses in ((parcel.expected, parcel.losses), (result.table, result.losses)):
        if name == "loss" and losses:
            texts.append(repr(losses[0]))
        else:
            texts.append(fingerprint_text(table.get(name)))
    dtype, shape = details if details else (None, None)
    return Difference(naming(name), order, dtype=dtype, shape=shape, owner=texts[0], replayer=texts[1])


def fingerprint_text(pair: tuple[int, int] | None) -> str:
    """A fingerprint as 32 hex digits; a gradient that was not there in words."""
    if pair is None:
        return "no gradient"
    return "".join(f"{word & (1 << 64) - 1:016x}" for word in pair)
