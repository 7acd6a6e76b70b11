"""Check 1's triage: a NaN that another device reproduces is no hardware's; one that it does not accuses."""

from __future__ import annotations

import json
from itertools import product

from sdcrun.core.audit import ARBITER, OWN, REPEAT, RING, Audit, Comparison, History
from sdcrun.core.triage import triage
from sdcrun.core.types import Verdict


def case(owner: int, *results: tuple[int, str, bool], digest: str = "nan", size: int = 3, **more) -> Audit:
    """Audit of one owner with a non-finite result; `results` are (rank, role, non-finite)."""
    made = tuple(
        Comparison(owner, rank, role, bad, digest, digest if bad else "finite",
                   nonfinite_owner=True, nonfinite_replayer=bad)
        for rank, role, bad in results
    )  # fmt: skip
    return Audit(4, tuple(range(size)), tuple(range(size)), made, **more)


def test_reproduced_elsewhere_is_not_hardware() -> None:
    finding = triage(case(0, (1, RING, True)))[0]
    assert (finding.verdict, finding.check) == (Verdict.NOT_HARDWARE, "nonfinite")
    assert not finding.ranks and not finding.strike
    assert "rank 1 got the same bits" in finding.text and "data, learning rate and code" in finding.text


def test_finite_elsewhere_is_a_suspect_with_a_strike() -> None:
    finding = triage(case(0, (1, RING, False), (2, ARBITER, False), (0, REPEAT, True), (0, REPEAT, False)))[0]
    assert (finding.verdict, finding.ranks, finding.strike) == (Verdict.SUSPECT, (0,), True)
    assert finding.persistence == "persistent" and "1 of 2 repeats" in finding.text
    json.dumps(finding.evidence)
    assert triage(case(0, (1, RING, False), (0, OWN, False)))[0].persistence == "transient"
    assert triage(case(0, (1, RING, False), size=2))[0].ranks == (0,)
    assert triage(case(0, (1, RING, False)), History(accused=frozenset({0})))[0].verdict is Verdict.CONFIRMED


def test_owner_whose_nan_anybody_reproduces_is_never_accused() -> None:
    for flags in product([False, True], repeat=3):
        results = [(rank, RING if rank == 1 else ARBITER, bad) for rank, bad in enumerate(flags, 1)]
        finding = triage(case(0, *results, size=4))[0]
        assert bool(finding.ranks) == (not any(flags))


def test_overflow_under_a_scaler_is_its_daily_business_unless_others_do_not_overflow() -> None:
    assert triage(case(0, (1, RING, True)), amp=True)[0].verdict is Verdict.AMP_OVERFLOW
    assert triage(case(0, (1, RING, False)), amp=True)[0].verdict is Verdict.SUSPECT


def test_no_answer_where_nothing_can_be_concluded() -> None:
    assert triage(case(0)) == {}
    assert triage(case(0, (0, OWN, True))) == {}
    assert triage(case(0, (1, RING, False), weights_agree=False)) == {}
    assert triage(case(0, (1, RING, False)), History(replayable=False)) == {}
    unknown = Comparison(0, 1, RING, False, "nan", "x", nonfinite_owner=True)
    assert triage(Audit(4, (0, 1), (0, 1), (unknown,))) == {}
    finite = Comparison(0, 1, RING, False, "a", "x", nonfinite_owner=False, nonfinite_replayer=False)
    assert triage(Audit(4, (0, 1), (0, 1), (finite,))) == {}


def test_several_owners_are_judged_one_by_one() -> None:
    both = case(0, (1, RING, True)).comparisons + case(1, (2, RING, False), digest="inf").comparisons
    found = triage(Audit(4, (0, 1, 2), (0, 1, 2), both))
    assert (found[0].verdict, found[1].verdict) == (Verdict.NOT_HARDWARE, Verdict.SUSPECT)
