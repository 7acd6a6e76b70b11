"""Single rules of the replay check: what is said in which words, what is left unsaid, and the record's round trip."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcrun.core.attribute import (
    CLEAN,
    DECLINED,
    MISMATCH,
    NOT_REPLAYABLE,
    WEIGHTS_DIFFER,
    History,
    judge,
    opinions,
    outcome,
    own_wanted,
    repeats_wanted,
)
from sdcrun.core.audit import ARBITER, CAUSES, FIRST, OWN, REPEAT, RING, ROLES, Audit, Comparison, Difference
from sdcrun.core.types import Verdict


def comparison(owner: int, replayer: int, role: str, got: str | None, first: str = "t", **more) -> Comparison:
    return Comparison(owner, replayer, role, got == first, first, got, **more)


def audit(size: int, *comparisons: Comparison, **more) -> Audit:
    return Audit(30, tuple(range(size)), tuple(range(size)), comparisons, **more)


def ring(size: int, **wrong: Comparison) -> list[Comparison]:
    return [wrong.get(f"r{o}") or comparison(o, (o + 1) % size, RING, "t") for o in range(size)]


def test_clean_audit_says_nothing_and_clears_all() -> None:
    clean = audit(3, *ring(3))
    assert outcome(clean) == CLEAN and judge(clean) == []
    assert clean.clean_ranks() == (0, 1, 2) == clean.compact().clean_ranks()
    assert repeats_wanted(clean) == [] and own_wanted(clean) == ()


def test_owner_is_convicted_with_evidence_in_forward_order() -> None:
    differing = (
        Difference("late.weight", order=5, relative=0.5, dtype="float32", shape=(4,), owner="aa", replayer="bb"),
        Difference("early.weight", order=1, relative=0.25, dtype="float32", shape=(2, 2), owner="cc", replayer="dd"),
    )
    bad = comparison(1, 2, RING, "t", first="x", differing=differing, differing_count=12)
    found = judge(audit(4, *ring(4, r1=bad), comparison(1, 3, ARBITER, "t", first="x"),
                        comparison(1, 1, REPEAT, "x", first="x"), comparison(1, 1, REPEAT, "t", first="x"),
                        weights_agree=True))  # fmt: skip
    (finding,) = found
    assert (finding.ranks, finding.rule, finding.strike) == ((1,), "odd-one-out", True)
    assert finding.persistence == "persistent"
    assert finding.verdict is Verdict.SUSPECT and finding.check == "replay" and finding.step == 30
    assert "1 of 2 repeats" in finding.text and "12 tensors differ" in finding.text and "0.5" in finding.text
    assert "early.weight" in finding.text and "late.weight" not in finding.text
    first = finding.evidence[0]
    assert (first["tensor"], first["expected"], first["observed"]) == ("early.weight", "dd", "cc")
    assert first["peers_agreeing"] == [2, 3] and first["shape"] == [2, 2]
    assert [r["rank"] for r in first["replays"]] == [1, 2, 3, 1, 1]
    assert [r["agrees"] for r in first["replays"]] == [False, True, True, False, True]
    assert any("weights" in r for r in finding.ruled_out)
    json.dumps(finding.evidence)


def test_replayer_is_convicted_with_the_owners_value_as_the_expected_one() -> None:
    bad = comparison(1, 2, RING, "x", differing=(Difference("w", owner="aa", replayer="bb"),))
    (finding,) = judge(audit(4, *ring(4, r1=bad), comparison(1, 3, ARBITER, "t")))
    assert finding.ranks == (2,) and finding.persistence == "unknown"
    assert (finding.evidence[0]["expected"], finding.evidence[0]["observed"]) == ("aa", "bb")
    assert "micro-batch of rank 1" in finding.text and "1 tensor differs: w" in finding.text


def test_wrong_arbiter_is_convicted_too_once_others_agree() -> None:
    held = [comparison(1, 1, OWN, "x"), comparison(1, 3, ARBITER, "t"), comparison(1, 4, ARBITER, "z")]
    assert [f.ranks for f in judge(audit(5, *ring(5), *held))] == [(1,), (4,)]


def test_second_accusation_confirms_and_wandering_transients_are_software() -> None:
    bad = audit(4, *ring(4, r1=comparison(1, 2, RING, "t", first="x")), comparison(1, 3, ARBITER, "t", first="x"),
                comparison(1, 1, REPEAT, "t", first="x"))  # fmt: skip
    assert judge(bad, History(accused=frozenset({1})))[0].verdict is Verdict.CONFIRMED
    assert judge(bad, History(accused=frozenset({2})))[0].verdict is Verdict.SUSPECT
    assert judge(bad, History(transients=(0, 0, 1)))[0].ranks == (1,)
    (finding,) = judge(bad, History(transients=(0, 3)))
    assert (finding.rule, finding.ranks, finding.strike) == ("wanders", (), False)
    assert finding.verdict is Verdict.INCONCLUSIVE


def test_persistent_fault_is_never_called_wandering() -> None:
    bad = audit(4, *ring(4, r1=comparison(1, 2, RING, "t", first="x")), comparison(1, 3, ARBITER, "t", first="x"),
                comparison(1, 1, REPEAT, "x", first="x"))  # fmt: skip
    assert judge(bad, History(transients=(0, 2, 3)))[0].ranks == (1,)


def test_two_domains_report_both_sides_without_a_culprit() -> None:
    bad = comparison(0, 1, RING, "x")
    first = audit(2, bad, comparison(1, 0, RING, "t"))
    assert repeats_wanted(first) == [(0, 0), (0, 1)]
    for mine, kind in (("t", "persistent"), ("x", "transient")):
        repeats = [comparison(0, 0, REPEAT, mine), comparison(0, 1, REPEAT, "x")]
        (finding,) = judge(audit(2, bad, comparison(1, 0, RING, "t"), *repeats))
        assert (finding.rule, finding.ranks, finding.persistence) == ("two-domains", (), kind)
        assert "Rank 0 got its own first bits" in finding.text and "Rank 1 got its own first bits" in finding.text
    (finding,) = judge(first)
    assert finding.persistence == "unknown"


def test_not_replayable_only_when_most_own_results_differ() -> None:
    restless = [comparison(o, o, OWN, f"n{o}" if o < 3 else "t") for o in range(4)]
    pairs = [comparison(o, (o + 1) % 4, RING, f"r{o}") for o in range(4)]
    broken = audit(4, *pairs, *restless, calibration=True)
    assert outcome(broken) == NOT_REPLAYABLE and judge(broken) == [] and repeats_wanted(broken) == []
    (finding,) = judge(broken, History(clean_audits=2))
    assert (finding.rule, finding.ranks, finding.verdict) == ("no-longer-replayable", (), Verdict.INCONCLUSIVE)


def test_all_pairs_differ_is_inconclusive_and_never_ignored() -> None:
    pairs = [comparison(o, (o + 1) % 4, RING, f"r{o}") for o in range(4)]
    bare = audit(4, *pairs)
    assert own_wanted(bare) == (0, 1, 2, 3)
    steady = [comparison(o, o, OWN, "t") for o in range(4)]
    judged = [comparison(o, (o + 2) % 4, ARBITER, f"a{o}") for o in range(4)]
    for history in (History(), History(clean_audits=5)):
        (finding,) = judge(audit(4, *pairs, *steady, *judged), history)
        assert (finding.rule, finding.ranks) == ("all-pairs-differ", ())
    assert own_wanted(audit(4, *pairs, *steady)) == ()


def test_one_device_fails_its_own_replay_at_the_first_audit() -> None:
    own = [comparison(o, o, OWN, "x" if o == 2 else "t") for o in range(4)]
    calibration = audit(4, *ring(4), *own, calibration=True, cause=FIRST)
    assert calibration.disputed() == [(2, 3)]
    (alone,) = judge(calibration)
    assert (alone.ranks, alone.rule, alone.strike) == ((2,), "own-replay", True)
    (arbitrated,) = judge(dataclasses.replace(calibration, comparisons=(
        *calibration.comparisons, comparison(2, 0, ARBITER, "t"))))  # fmt: skip
    assert (arbitrated.ranks, arbitrated.rule) == ((2,), "odd-one-out")
    (wandering,) = judge(calibration, History(transients=(0, 1)))
    assert (wandering.ranks, wandering.rule) == ((), "wanders")


def test_own_replay_that_arbiters_cannot_settle_accuses_nobody() -> None:
    # Nobody gets the same bits twice: a kernel that is not deterministic on this micro-batch, not a device.
    own = [comparison(o, o, OWN, "x" if o == 2 else "t") for o in range(4)]
    pairs = ring(4, r2=comparison(2, 3, RING, "y"))
    (finding,) = judge(audit(4, *pairs, *own, comparison(2, 0, ARBITER, "z"), comparison(2, 1, ARBITER, "q")))
    assert (finding.ranks, finding.rule) == ((), "no-agreement")


def test_declined_comparisons_accuse_nobody() -> None:
    gone = [comparison(o, (o + 1) % 3, RING, None, declined="out of memory") for o in range(3)]
    declined = audit(3, *gone)
    assert outcome(declined) == DECLINED and judge(declined) == [] and declined.clean_ranks() == ()
    bad = audit(3, *ring(3, r0=comparison(0, 1, RING, "x")), comparison(0, 2, ARBITER, None, declined="out of memory"))
    (finding,) = judge(bad)
    assert (finding.rule, finding.ranks) == ("no-arbiter", ())
    assert outcome(audit(3, declined=((-1, "a rank is gone"),))) == DECLINED


def test_pair_without_arbiter_is_explained_by_a_device_convicted_elsewhere() -> None:
    pairs = ring(4, r0=comparison(0, 1, RING, "t", first="x"), r3=comparison(3, 0, RING, "x"))
    (finding,) = judge(audit(4, *pairs, comparison(0, 2, ARBITER, "t", first="x")))
    assert finding.ranks == (0,)


def test_differing_weights_are_the_votes_finding_unless_it_is_off() -> None:
    torn = audit(3, *ring(3, r0=comparison(0, 1, RING, "x")), comparison(0, 2, ARBITER, "x"), weights_agree=False)
    assert outcome(torn) == WEIGHTS_DIFFER and judge(torn) == [] and torn.clean_ranks() == ()
    (finding,) = judge(torn, History(voting=False))
    assert (finding.rule, finding.ranks) == ("weights-differ", ())


@pytest.mark.parametrize("lie", [
    Comparison(0, 2, ARBITER, True, "t", "x"), Comparison(0, 2, ARBITER, False, "t", "t"),
    Comparison(0, 2, ARBITER, False, "other", "x"), Comparison(0, 2, ARBITER, False, "t", None),
    Comparison(0, 9, ARBITER, False, "t", "x"),
])  # fmt: skip
def test_record_that_contradicts_itself_accuses_nobody(lie: Comparison) -> None:
    broken = audit(3, *ring(3, r0=comparison(0, 1, RING, "x")), lie)
    assert opinions(broken, 0) == []
    (finding,) = judge(broken)
    assert finding.ranks == () and not finding.strike


def test_owner_with_a_nonfinite_result_is_left_to_triage_but_a_wrong_replayer_is_not() -> None:
    bad = comparison(0, 1, RING, "t", first="nan", nonfinite_owner=True, nonfinite_replayer=False)
    assert judge(audit(3, *ring(3, r0=bad), comparison(0, 2, ARBITER, "t", first="nan", nonfinite_owner=True))) == []
    agree = comparison(0, 2, ARBITER, "nan", first="nan", nonfinite_owner=True, nonfinite_replayer=True)
    assert [f.ranks for f in judge(audit(3, *ring(3, r0=bad), agree))] == [(1,)]


def test_a_nonfinite_result_that_check_1_did_not_see_is_judged_like_any_other() -> None:
    bad = comparison(0, 1, RING, "t", first="nan", nonfinite_owner=True, nonfinite_replayer=False)
    third = comparison(0, 2, ARBITER, "t", first="nan", nonfinite_owner=True, nonfinite_replayer=False)
    record = dataclasses.replace(audit(3, *ring(3, r0=bad), third), hit=False)
    assert [f.ranks for f in judge(record)] == [(0,)]
    assert [f.ranks for f in judge(Audit.from_json(record.to_json()))] == [(0,)]


ranks = st.integers(0, 5)
texts = st.none() | st.text("0123456789abcdef", min_size=1, max_size=4)
differences = st.builds(
    Difference, st.text(max_size=5), st.none() | st.integers(0, 9), st.none() | st.floats(allow_nan=False),
    st.none() | st.just("float32"), st.none() | st.tuples(st.integers(0, 9)), texts, texts,
)  # fmt: skip
comparisons = st.builds(
    Comparison, ranks, ranks, st.sampled_from(ROLES), st.booleans(), texts, texts, st.none() | st.booleans(),
    st.lists(differences, max_size=3).map(tuple), st.just(3), st.none() | st.text(max_size=3),
    st.none() | st.booleans(), st.none() | st.booleans(),
)  # fmt: skip
audits = st.builds(
    Audit, st.integers(0, 10**6), st.just(tuple(range(6))), st.tuples(*[st.integers(0, 3)] * 6),
    st.lists(comparisons, max_size=8).map(tuple), st.booleans(), st.none() | st.booleans(),
    st.lists(st.tuples(st.integers(-1, 5), st.text(max_size=3)), max_size=3).map(tuple), st.sampled_from(CAUSES),
    st.integers(0, 3), st.integers(1, 4), st.text(max_size=5), st.booleans(), st.integers(0, 9), st.integers(0, 9),
)  # fmt: skip


@given(audits)
def test_any_record_survives_json_and_is_judged_without_an_error(record: Audit) -> None:
    text = json.dumps(record.to_json(), allow_nan=False)
    assert Audit.from_json(json.loads(text)) == record
    for finding in judge(record):
        json.dumps(finding.evidence, allow_nan=False)
        assert finding.strike == bool(finding.ranks)
    repeats_wanted(record)
    assert outcome(record) in (CLEAN, DECLINED, MISMATCH, NOT_REPLAYABLE, WEIGHTS_DIFFER)


def test_sizes_that_are_not_numbers_survive_json() -> None:
    back = Difference.from_json(json.loads(json.dumps(Difference("w", relative=math.nan).to_json(), allow_nan=False)))
    assert math.isnan(back.relative)
    assert Difference.from_json(Difference("w", relative=math.inf).to_json()).relative == math.inf


def test_clean_audit_of_a_large_job_is_a_short_message() -> None:
    size = 16_384
    domains = tuple(rank // 8 for rank in range(size))
    pairs = tuple(Comparison(o, (o + 8) % size, RING, True, "ab" * 16, "ab" * 16) for o in range(size))
    large = Audit(100, tuple(range(size)), domains, pairs)
    data = json.loads(json.dumps(large.compact().to_json()))
    assert len(json.dumps(data)) < 40_000
    back = Audit.from_json(data)
    assert outcome(back) == CLEAN and len(back.clean_ranks()) == size and back.agreed == size


@pytest.mark.parametrize("change", [
    {"group": [[0, 10**9]]}, {"group": [0, 1]}, {"comparisons": [{"owner": 0}]},
    {"comparisons": [{"owner": 0, "replayer": 1, "role": "judge", "agrees": True}]}, {"step": None},
])  # fmt: skip
def test_malformed_record_is_refused(change: dict) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Audit.from_json({**audit(3).to_json(), **change})
