"""What the comparisons of an audit amount to: opinions on each case, the bits that are agreed, who differs from them.

The rule that convicts: *a device is accused only when a result of its differs from bits on which devices of two other
failure domains agree*, and when more domains stand behind those bits than behind any other. Two wrong results agree
only by the same defect, so one arbiter is enough against one bad device, and `topology.jury` seats more where there
are more domains. Convicting whoever is in two failed comparisons instead (as a ring alone allows) accuses healthy
devices as soon as two are bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdcrun.core.audit import OWN, RING, Audit

ORIGINAL = "original"  # the owner's computation in training, an opinion without a comparison of its own

CLEAN, DECLINED, MISMATCH, NOT_REPLAYABLE, WEIGHTS_DIFFER = (
    "clean", "declined", "mismatch", "not-replayable", "weights-differ",
)  # fmt: skip


@dataclass(frozen=True)
class Opinion:
    """One computation of a case: `rank` (of `domain`) got `digest` in `role` ("original" or a role of a comparison)."""

    rank: int
    domain: int
    role: str
    digest: str
    nonfinite: bool | None = None


@dataclass(frozen=True)
class Conviction:
    """`rank` got other bits than `agreed` in the case of `owner`, against `peers` of at least two other domains.

    `wrong` and `right` are its own opinions on the case, in the order they were made.
    """

    owner: int
    rank: int
    agreed: str
    peers: tuple[int, ...]
    wrong: tuple[Opinion, ...]
    right: tuple[Opinion, ...]


def opinions(audit: Audit, owner: int) -> list[Opinion]:
    """All opinions on the owner's micro-batch, the original first.

    Empty when there is no result, when a digest is missing, or when the record contradicts itself: nobody is accused on
    the strength of a record that cannot be true.
    """
    domain = audit.domain_of
    made = audit.cases.get(owner, [])
    originals = {c.digest_owner for c in made}
    if len(originals) != 1 or None in originals or owner not in domain:
        return []
    original = originals.pop()
    result = [Opinion(owner, domain[owner], ORIGINAL, str(original), made[0].nonfinite_owner)]
    for c in made:
        if c.digest_replayer is None or c.replayer not in domain or c.agrees != (c.digest_replayer == original):
            return []
        result.append(Opinion(c.replayer, domain[c.replayer], c.role, c.digest_replayer, c.nonfinite_replayer))
    return result


def _agreed(held: Sequence[Opinion]) -> tuple[str, dict[int, list[int]]] | None:
    """The digest behind which more domains stand than behind any other, at least two, with its ranks by domain."""
    support: dict[str, dict[int, list[int]]] = {}
    for opinion in held:
        ranks = support.setdefault(opinion.digest, {}).setdefault(opinion.domain, [])
        if opinion.rank not in ranks:
            ranks.append(opinion.rank)
    order = sorted(support, key=lambda digest: -len(support[digest]))
    if not order or len(support[order[0]]) < 2:
        return None
    if len(order) > 1 and len(support[order[1]]) == len(support[order[0]]):
        return None
    return order[0], support[order[0]]


def convictions(audit: Audit) -> list[Conviction]:
    """Everything the rule of this module says about this audit, by owner and rank. None where the weights differed or
    the script turned out not to be replayable."""
    if audit.weights_agree is False or not_replayable(audit):
        return []
    result = []
    for owner, made in sorted(audit.cases.items()):
        held = opinions(audit, owner) if any(c.failed for c in made) else []
        agreed = _agreed(held)
        if agreed is None:
            continue
        digest, support = agreed
        for rank in sorted({o.rank for o in held if o.digest != digest}):
            mine = [o for o in held if o.rank == rank]
            peers = [r for domain, ranks in support.items() if domain != mine[0].domain for r in ranks]
            if len([d for d in support if d != mine[0].domain]) >= 2:
                wrong = tuple(o for o in mine if o.digest != digest)
                right = tuple(o for o in mine if o.digest == digest)
                result.append(Conviction(owner, rank, digest, tuple(sorted(peers)), wrong, right))
    return result


def own_results(audit: Audit) -> dict[int, bool]:
    """Global rank of an owner to whether its own second computation gave the bits of the first."""
    result = dict.fromkeys(audit.left_out(), True) if audit.own_agreed else {}
    for c in audit.comparisons:
        if c.role == OWN and c.declined is None:
            result[c.owner] = result.get(c.owner, True) and c.agrees
    return result


def not_replayable(audit: Audit) -> bool:
    """Whether this audit shows that the script does not compute the same bits twice: most owners' own second results
    differ from their first ones. Few own results show nothing."""
    own = own_results(audit)
    failed = sum(1 for agrees in own.values() if not agrees)
    return 2 * len(own) > len(audit.group) and 2 * failed > len(own)


def own_wanted(audit: Audit) -> tuple[int, ...]:
    """Global ranks that should compute their own micro-batch again before anybody arbitrates: all owners, when more
    than half of the pairs differ and it has not been done in this audit; else none."""
    ring = [c for c in audit.comparisons if c.role == RING and c.declined is None]
    failed = sum(1 for c in ring if c.failed)
    if own_results(audit) or 2 * failed <= len(ring):
        return ()
    return tuple(sorted({c.owner for c in ring}))


def repeats_wanted(audit: Audit) -> list[tuple[int, int]]:
    """(owner, device) of the cases to be computed again, sorted: one case for each convicted device. With two failure
    domains nobody is convicted; then owner and replayer of each failed pair both repeat it."""
    if audit.weights_agree is False or not_replayable(audit):
        return []
    first: dict[int, int] = {}
    for conviction in convictions(audit):
        # Its own micro-batch, if that is among them: nothing has to travel.
        if conviction.rank not in first or conviction.owner == conviction.rank:
            first[conviction.rank] = conviction.owner
    wanted = {(owner, rank) for rank, owner in first.items()}
    if len(set(audit.domains)) == 2:
        wanted |= {(owner, rank) for owner, replayer in audit.failed_pairs() for rank in (owner, replayer)}
    return sorted(wanted)


def outcome(audit: Audit) -> str:
    """What kind of audit this was: "clean" (something was compared, nothing differs), "mismatch", "not-replayable" (the
    audit must narrow itself or go off, and say so), "weights-differ" (take the weight vote now) or "declined" (nothing
    was compared)."""
    if audit.weights_agree is False:
        return WEIGHTS_DIFFER
    if not_replayable(audit):
        return NOT_REPLAYABLE
    if any(c.failed for c in audit.comparisons):
        return MISMATCH
    compared = audit.agreed or any(c.role == RING and c.declined is None for c in audit.comparisons)
    return CLEAN if compared else DECLINED
