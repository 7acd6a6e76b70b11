"""No healthy device is ever accused, every single bad one is named: enumerated where that is small, else drawn."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_audit import ORIGINAL, Choices, ranks_of, simulate

from sdcrun.core.attribute import History, convictions, judge, not_replayable
from sdcrun.core.audit import Audit
from sdcrun.core.types import Verdict

SMALL = [(1, 1, 1), (2, 1, 1), (1, 2, 3), (2, 2, 2), (1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 1, 1), (3,), (2, 2), (4,)]
LARGE = [nodes for n in range(3, 10) for nodes in ((1,) * n, (8,) * n, tuple(1 + (3 * i) % 8 for i in range(n)))]


def accused(audit: Audit, history: History | None = None) -> set[int]:
    return {rank for finding in judge(audit, history) for rank in finding.ranks}


def always(*_: object) -> bool:
    return True


def size(nodes: tuple[int, ...]) -> int:
    return len(ranks_of(nodes))


def domain_count(nodes: tuple[int, ...]) -> int:
    return len(nodes) if len(nodes) >= 3 else size(nodes)


@pytest.mark.parametrize("nodes", SMALL, ids=str)
@pytest.mark.parametrize("calibration", [False, True])
def test_every_behaviour_of_one_bad_device_is_named_and_nobody_else(nodes: tuple[int, ...], calibration: bool) -> None:
    named = seen = 0
    for bad in range(size(nodes)):
        for audit in Choices.all_of(lambda choose, bad=bad: simulate(nodes, [bad], choose, "fresh", calibration)):
            differs = any(c.failed for c in audit.comparisons)
            assert accused(audit) == ({bad} if differs else set())
            seen += differs
            named += bool(accused(audit))
    assert seen and named == seen


@pytest.mark.parametrize("nodes", LARGE, ids=str)
def test_one_bad_device_in_larger_jobs_is_named_with_the_right_persistence(nodes: tuple[int, ...]) -> None:
    for bad in range(size(nodes)):
        (persistent,) = judge(simulate(nodes, [bad], always, repeats=3))
        assert (persistent.ranks, persistent.persistence, persistent.strike) == ((bad,), "persistent", True)
        assert persistent.verdict is Verdict.SUSPECT and "3 of 3 repeats" in persistent.text
        (transient,) = judge(simulate(nodes, [bad], lambda r, o, role, n: role == ORIGINAL, repeats=3))
        assert (transient.ranks, transient.persistence) == ((bad,), "transient")
        assert "0 of 3 repeats" in transient.text


@pytest.mark.parametrize("nodes", [(1, 1, 1), (3,), (2, 1, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("bits", ["fresh", "device"])
def test_every_behaviour_of_two_bad_devices_accuses_no_healthy_one(nodes: tuple[int, ...], bits: str) -> None:
    for bad in combinations(range(size(nodes)), 2):
        for audit in Choices.all_of(lambda choose, bad=bad: simulate(nodes, bad, choose, bits)):
            assert accused(audit) <= set(bad)
            assert judge(audit) or not_replayable(audit) or not any(c.failed for c in audit.comparisons)


@pytest.mark.parametrize("nodes", [(1, 1, 1, 1), (4,), (1, 2, 1, 1), (1, 1, 1, 1, 1)], ids=str)
def test_two_devices_wrong_in_the_same_way_cannot_outvote_a_healthy_one_from_four_domains_on(nodes) -> None:
    for bad in combinations(range(size(nodes)), 2):
        for audit in Choices.all_of(lambda choose, bad=bad: simulate(nodes, bad, choose, "same", repeats=0)):
            assert accused(audit) <= set(bad)


def test_with_three_domains_or_one_arbiter_two_equal_wrong_results_do_outvote_a_healthy_device() -> None:
    # What the larger jury is for, and the limit that remains.
    assert accused(simulate((1, 1, 1), (0, 1), always, "same")) == {2}
    pairs = list(combinations(range(5), 2))
    assert any(accused(simulate((1,) * 5, bad, always, "same", seats=1)) - set(bad) for bad in pairs)
    assert not any(accused(simulate((1,) * 5, bad, always, "same")) - set(bad) for bad in pairs)


@pytest.mark.parametrize("bits", ["fresh", "device", "same"])
def test_all_pairs_of_persistent_bad_devices_in_larger_jobs(bits: str) -> None:
    named = total = 0
    for nodes in LARGE:
        if bits == "same" and domain_count(nodes) < 4:
            continue
        pairs = list(combinations(range(size(nodes)), 2))
        for bad in pairs[:: max(1, len(pairs) // 20)]:
            audit = simulate(nodes, bad, always, bits)
            assert accused(audit) <= set(bad)
            total += 2
            named += len(accused(audit))
    # Not promised, but what the jury buys: nearly all of both are named at once.
    assert named > 0.9 * total


@st.composite
def jobs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    nodes = tuple(draw(st.lists(st.integers(1, 8), min_size=3, max_size=9)))
    bad = draw(st.lists(st.integers(0, size(nodes) - 1), max_size=2, unique=True))
    return nodes, bad


@settings(max_examples=150)
@given(jobs(), st.data(), st.sampled_from(["fresh", "device", "same"]), st.booleans(), st.integers(0, 3))
def test_two_intermittent_devices_anywhere_accuse_no_healthy_one(job, data, bits, calibration, turn) -> None:
    nodes, bad = job
    if bits == "same" and len(nodes) < 4:
        bits = "device"
    pattern = data.draw(st.lists(st.booleans(), min_size=16, max_size=16))
    choices = (pattern[i % 16] for i in range(10**6))
    audit = simulate(nodes, bad, lambda *_: next(choices), bits, calibration, repeats=3, turn=turn)
    assert accused(audit) <= set(bad)
    if len(bad) == 1 and any(c.failed for c in audit.comparisons):
        assert accused(audit) == set(bad)
    assert [f.ranks for f in judge(audit.compact())] == [f.ranks for f in judge(audit)]


@settings(max_examples=80)
@given(jobs(), st.data())
def test_missing_results_never_accuse_a_healthy_device(job, data) -> None:
    nodes, bad = job
    audit = simulate(nodes, bad, always, "device", calibration=data.draw(st.booleans()))
    lost = data.draw(st.sets(st.integers(0, max(len(audit.comparisons) - 1, 0))))
    kept = tuple(c for i, c in enumerate(audit.comparisons) if i not in lost)
    short = Audit(audit.step, audit.group, audit.domains, kept, audit.calibration)
    assert accused(short) <= set(bad)
    assert {c.rank for c in convictions(short)} <= set(bad)


def test_two_domains_never_accuse_whatever_happens() -> None:
    for nodes, calibration in product([(2,), (1, 1)], [False, True]):
        for bad in ([0], [1], [0, 1]):
            run = partial(simulate, nodes, bad, bits="fresh", calibration=calibration)
            for audit in Choices.all_of(lambda choose, run=run: run(wrong=choose)):
                found = judge(audit)
                assert not any(f.ranks or f.strike for f in found)
                if any(c.failed for c in audit.comparisons) and not not_replayable(audit):
                    assert [(f.verdict, f.rule) for f in found] == [(Verdict.INCONCLUSIVE, "two-domains")]
