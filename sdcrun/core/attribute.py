"""Check 2's verdicts: one audit's comparisons -> findings. Pure; every rank and the controller conclude the same.

How the ranks of a group get there, all in the same step, each from the same gathered comparisons:
1. ring comparisons (and "own" ones, at a calibration) make the first `Audit`; when nothing is `disputed` it is done;
2. `own_wanted`: owners who compute their own micro-batch once more; when most pairs differ, the script may be to blame;
3. `topology.jury(audit.disputed(), ...)`: those devices compute the disputed cases too (role "arbiter");
4. `repeats_wanted`: who repeats which case (role "repeat", `Config.replay_repeats` times), for the persistence;
5. `Audit.compact().to_json()` is the "audit" event.
The controller then calls `outcome`, `judge` and, for owners whose own result was non-finite, `core.triage.triage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdcrun.core import words
from sdcrun.core.audit import ARBITER, FIRST, OWN, REPEAT, RING, Audit, Comparison, Difference, History
from sdcrun.core.opinions import (
    CLEAN,
    DECLINED,
    MISMATCH,
    NOT_REPLAYABLE,
    ORIGINAL,
    WEIGHTS_DIFFER,
    Conviction,
    Opinion,
    convictions,
    not_replayable,
    opinions,
    outcome,
    own_results,
    own_wanted,
    repeats_wanted,
)
from sdcrun.core.types import Finding, Verdict

__all__ = [
    "CLEAN", "DECLINED", "MISMATCH", "NOT_REPLAYABLE", "WEIGHTS_DIFFER",
    "Audit", "Comparison", "Conviction", "Difference", "History", "Opinion",
    "convictions", "grade", "judge", "not_replayable", "opinions", "outcome", "own_wanted", "repeats_wanted", "wanders",
]  # fmt: skip

MAX_ROWS = 16


def judge(audit: Audit, history: History | None = None, attempt: int = 0) -> list[Finding]:
    """Findings of one audit: one for each accused device, and at most one that accuses nobody.

    Where check 1 fired, a case whose owner's own result was non-finite is check 1's, and `core.triage` says what that
    means for the owner; other devices are judged by it here. Differing weights are the weight vote's finding; only
    where that check is off (`history.voting`) does this one report them. A script that is not replayable is no finding
    unless audits of this attempt were clean before.
    """
    history = history or History()
    kind = outcome(audit)
    if kind == WEIGHTS_DIFFER and not history.voting:
        text = "The weights of the replicas differ, so no micro-batch can be computed again; the weight vote is off."
        return [_nobody(audit, attempt, "weights-differ", text)]
    if kind == NOT_REPLAYABLE and history.clean_audits:
        own = own_results(audit)
        text = (
            f"{sum(not agrees for agrees in own.values())} of {words.count(len(own), 'rank')} computed their own "
            f"micro-batch twice with different bits, after {words.count(history.clean_audits, 'clean audit')}: the "
            "script is no longer deterministic, or several devices fail at once."
        )
        return [_nobody(audit, attempt, "no-longer-replayable", text)]
    if kind != MISMATCH:
        return []
    born = {c.owner for c in audit.comparisons if c.nonfinite_owner and audit.hit}
    convicted = convictions(audit)
    settled = {c.owner for c in convicted}
    against: dict[int, list[Conviction]] = {}
    for conviction in convicted:
        if conviction.owner != conviction.rank or conviction.owner not in born:
            against.setdefault(conviction.rank, []).append(conviction)
    found = [_accuse(audit, history, attempt, rank, against[rank]) for rank in sorted(against)]
    explained = set(against) | born
    restless = _restless(audit)
    if restless is not None and restless not in explained:
        found.append(_own_replay(audit, history, attempt, restless))
        explained.add(restless)
    unclear = [pair for pair in audit.disputed() if pair[0] not in settled and not explained & set(pair)]
    if unclear:
        found.append(_unclear(audit, history, attempt, unclear))
    return found


def grade(rank: int, history: History) -> Verdict:
    """Suspect, or confirmed where an earlier finding accused the same device."""
    return Verdict.CONFIRMED if rank in history.accused else Verdict.SUSPECT


def wanders(rank: int, domains: Sequence[int], history: History) -> bool:
    """Whether accusing `rank` of a transient makes the accused too many: at least three, and a quarter of the domains.

    One or two bad devices are what this check is built for; a cause that strikes everywhere once is rather a kernel
    that is not quite deterministic.
    """
    struck = set(history.transients) | {rank}
    return len(struck) >= max(3, -(-len(set(domains)) // 4))


def _restless(audit: Audit) -> int | None:
    """The one rank whose own second result differs while everybody else's pass, where no arbiter was to be had.

    Without arbiters this needs three domains, all other own results equal, and no failed pair that it is not part of.
    """
    own = own_results(audit)
    failed = [rank for rank, agrees in own.items() if not agrees]
    if len(failed) != 1 or not opinions(audit, failed[0]):
        return None
    rank = failed[0]
    others = {audit.domain_of[r] for r in own if r != rank} - {audit.domain_of[rank]}
    judged = any(c.role == ARBITER for c in audit.cases[rank])
    elsewhere = any(rank not in pair for pair in audit.failed_pairs())
    return rank if len(others) >= 2 and not judged and not elsewhere else None


def _accuse(audit: Audit, history: History, attempt: int, rank: int, against: list[Conviction]) -> Finding:
    again = _later(against)
    wrong = sum(1 for opinion, agrees in again if not agrees)
    persistence = "unknown"
    if wrong or len(against) > 1:
        persistence = "persistent"
    elif again:
        persistence = "transient"
    peers = sorted({peer for c in against for peer in c.peers})
    said = [f"Rank {rank} computed {_cases(rank, against)} differently from {words.ranks(peers)}, which agree."]
    if again:
        said.append(f"{wrong} of {words.count(len(again), 'repeat')} on it differed.")
    rows = _evidence(audit, rank, against)
    said += _size(audit, rank, against, rows)
    if persistence != "persistent" and wanders(rank, audit.domains, history):
        said.append(
            f"Transients have now struck {words.ranks(set(history.transients) | {rank})}: a cause that moves from "
            "device to device is probably software (a kernel that is not quite deterministic)."
        )
        return Finding(
            attempt, audit.step, "replay", Verdict.INCONCLUSIVE, "wanders", " ".join(said), (), False, rows,
            persistence=persistence,
        )  # fmt: skip
    ruled_out = [f"data and code: {words.ranks(peers)} computed the same micro-batch with equal bits"]
    if audit.weights_agree:
        ruled_out.append("the weights: their digests were equal on all replicas")
    passed = sum(own_results(audit).values())
    if passed:
        ruled_out.append(f"nondeterminism: {words.count(passed, 'rank')} repeated their own bits")
    if audit.cause == FIRST and persistence == "persistent":
        said.append("So it is since the first audit; code that computes something else on this rank looks the same.")
    return Finding(
        attempt, audit.step, "replay", grade(rank, history), "odd-one-out", " ".join(said), (rank,), True, rows,
        tuple(ruled_out), persistence=persistence,
    )  # fmt: skip


def _later(against: list[Conviction]) -> list[tuple[Opinion, bool]]:
    """The convicted device's repeats, each with whether it gave the agreed bits: those made for this purpose, else its
    own second computations of a micro-batch whose first one was wrong."""
    said = [(o, o.digest == c.agreed) for c in against for o in (*c.wrong[1:], *c.right)]
    repeats = [(o, agrees) for o, agrees in said if o.role == REPEAT]
    return repeats or [(o, agrees) for o, agrees in said if o.role == OWN]


def _cases(rank: int, against: list[Conviction]) -> str:
    parts = ["its own micro-batch"] if any(c.owner == rank for c in against) else []
    others = sorted(c.owner for c in against if c.owner != rank)
    if others:
        parts.append(f"the micro-batch{'es' if len(others) > 1 else ''} of {words.ranks(others)}")
    return " and ".join(parts)


def _shown(audit: Audit, rank: int, conviction: Conviction) -> list[Comparison]:
    """Comparisons that show tensors of the convicted device beside the agreed ones."""
    return [
        c for c in audit.cases[conviction.owner]
        if c.failed and c.differing and (
            (c.digest_owner == conviction.agreed and c.replayer == rank)
            or (conviction.owner == rank and c.digest_replayer == conviction.agreed)
        )
    ]  # fmt: skip


def _size(audit: Audit, rank: int, against: list[Conviction], rows: tuple[dict[str, Any], ...]) -> list[str]:
    """A sentence on how many tensors differ, which is first in forward order and how large the differences are."""
    named = [row for row in rows if row["tensor"]]
    if not named:
        return []
    total = max(max(c.differing_count, len(c.differing)) for one in against for c in _shown(audit, rank, one))
    first = words.clean(named[0]["tensor"], 80)
    if total > 1 and named[0]["order"] is not None:
        text = f"{total:,} tensors differ, the first in forward order is {first}"
    else:
        text = f"{words.count(total, 'tensor')} differ{'s' if total == 1 else ''}: {first}"
    sizes = [row["relative"] for row in named if isinstance(row["relative"], (int, float))]
    return [f"{text}; relative difference up to {max(sizes):.3g}." if sizes else f"{text}."]


def _evidence(audit: Audit, rank: int, against: list[Conviction]) -> tuple[dict[str, Any], ...]:
    """Rows of the report schema's `evidence` against `rank`, tensors in forward order, at least one row a case.

    `observed` is what the convicted device got, `expected` the agreed result: fingerprints of the tensor, or digests of
    the whole result where no tensor is named. `replays` are all opinions on the case.
    """
    rows: list[dict[str, Any]] = []
    for conviction in against:
        head = _row(audit, conviction.owner, rank)
        head["phase"] = conviction.wrong[0].role
        head["peers_agreeing"] = list(conviction.peers)
        head["expected"], head["observed"] = conviction.agreed, conviction.wrong[0].digest
        for replay in head["replays"]:
            replay["agrees"] = replay["digest"] == conviction.agreed
        shown = _shown(audit, rank, conviction)
        if not shown:
            rows.append(head)
            continue
        # Differences are told from the owner's side, whose value is the right one unless the owner is convicted.
        swap = shown[0].digest_owner != conviction.agreed
        for d in sorted(shown[0].differing, key=lambda d: (d.order is None, d.order or 0, d.tensor)):
            values = d.to_json()
            rows.append({
                **head, "tensor": d.tensor, "dtype": d.dtype, "shape": values.get("shape"), "order": d.order,
                "relative": values.get("relative"),
                "expected": d.replayer if swap else d.owner, "observed": d.owner if swap else d.replayer,
            })  # fmt: skip
    return tuple(rows[:MAX_ROWS])


def _row(audit: Audit, owner: int, rank: int | None) -> dict[str, Any]:
    """An evidence row about a whole case, with every opinion on it."""
    held = opinions(audit, owner)
    return {
        "step": audit.step, "check": "replay", "phase": ORIGINAL, "rank": rank, "owner": owner, "tensor": None,
        "dtype": None, "shape": None, "order": None, "relative": None, "expected": None,
        "observed": held[0].digest if held else None, "peers_agreeing": [],
        "replays": [{"rank": o.rank, "role": o.role, "digest": o.digest, "agrees": None} for o in held],
    }  # fmt: skip


def _own_replay(audit: Audit, history: History, attempt: int, rank: int) -> Finding:
    others = words.count(len(own_results(audit)) - 1, "other rank")
    text = (
        f"Rank {rank} computed its own micro-batch twice with different bits, while {others} repeated theirs; no "
        "third device could say which was wrong."
    )
    verdict, rule, strike, accused = grade(rank, history), "own-replay", True, (rank,)
    if wanders(rank, audit.domains, history):
        verdict, rule, strike, accused = Verdict.INCONCLUSIVE, "wanders", False, ()
        text += " It is not the first device to do so once: probably a kernel that is not quite deterministic."
    ruled_out = (f"nondeterminism of the script: {others} repeated their own bits",) if strike else ()
    return Finding(
        attempt, audit.step, "replay", verdict, rule, text, accused, strike, (_row(audit, rank, rank),), ruled_out,
    )  # fmt: skip


def _unclear(audit: Audit, history: History, attempt: int, pairs: list[tuple[int, int]]) -> Finding:
    """The finding on disputed cases that convict nobody, with what can be said about each."""
    shown = ", ".join(f"{owner} by {replayer}" for owner, replayer in pairs[:4])
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    text = f"Micro-batches computed again with other bits (owner by replayer): {shown}{more}."
    persistence = "unknown"
    ring = [c for c in audit.comparisons if c.role == RING and c.declined is None]
    if len(set(audit.domains)) < 3:
        rule = "two-domains"
        persistence, said = _sides(audit, pairs)
        text += f" With fewer than three failure domains nobody can say which side is wrong.{said}"
    elif len(ring) > 1 and all(c.failed for c in ring) and not audit.agreed:
        rule = "all-pairs-differ"
        text += (
            f" All pairs differ, after {words.count(history.clean_audits, 'clean audit')}: devices or libraries that "
            "compute other bits, code that depends on the rank, or several bad devices."
        )
    elif not any(c.role == ARBITER for owner, _ in pairs for c in audit.cases[owner]):
        rule = "no-arbiter"
        text += " No device of a third failure domain could compute them."
    else:
        rule = "no-agreement"
        text += " No two failure domains agree against the rest: more than one device is wrong."
    rows = tuple(_row(audit, owner, None) for owner, _ in pairs[:8])
    return Finding(
        attempt, audit.step, "replay", Verdict.INCONCLUSIVE, rule, text, (), False, rows, persistence=persistence
    )


def _sides(audit: Audit, pairs: list[tuple[int, int]]) -> tuple[str, str]:
    """Persistence of a difference between two domains, and a sentence for each side, from their repeats.

    Transient: a side did not get its own first bits again. Persistent: both sides repeat theirs every time.
    """
    said, kinds = [], set()
    for owner, replayer in pairs[:4]:
        steady, answered = True, 0
        for rank in sorted({owner, replayer}):
            mine = [o for o in opinions(audit, owner) if o.rank == rank]
            again = [o for o in mine[1:] if o.role in (OWN, REPEAT)]
            if again:
                same = sum(1 for o in again if o.digest == mine[0].digest)
                said.append(
                    f" Rank {rank} got its own first bits for rank {owner}'s micro-batch in {same} of "
                    f"{words.count(len(again), 'repeat')}."
                )
                steady &= same == len(again)
                answered += 1
        if not steady:
            kinds.add("transient")
        elif answered == 2:
            kinds.add("persistent")
    if len(kinds) != 1:
        return "unknown", "".join(said)
    kind = kinds.pop()
    return kind, f"{''.join(said)} The difference is {kind}."


def _nobody(audit: Audit, attempt: int, rule: str, text: str) -> Finding:
    return Finding(attempt, audit.step, "replay", Verdict.INCONCLUSIVE, rule, text)
