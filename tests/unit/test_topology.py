"""Who recomputes whose micro-batch, and who arbitrates: the promises of `core.topology` for any job."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun.core.topology import arbiters, failure_domains, jury, replayer_of, tree, without_partner

node_lists = st.lists(st.integers(0, 8), min_size=1, max_size=40)
domain_lists = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@given(st.integers(1, 400), st.integers(1, 9))
def test_the_tree_joins_all_ranks_and_keeps_neighbours_together(size, fan_out) -> None:
    places = [tree(rank, size, fan_out) for rank in range(size)]
    assert places[0][0] is None
    assert sorted(child for _, children in places for child in children) == list(range(1, size))
    below, depth = {}, [0] * size
    for rank, (parent, children) in reversed(list(enumerate(places))):
        assert len(children) <= fan_out and all(places[child][0] == rank for child in children)
        below[rank] = [rank, *(r for child in children for r in below[child])]
        assert below[rank] == list(range(rank, rank + len(below[rank]))), "a subtree is a stretch of ranks"
        depth[rank] = max((depth[child] + 1 for child in children), default=0)
        assert parent is None or parent < rank
    assert fan_out == 1 or depth[0] == 0 or fan_out ** (depth[0] - 1) < size


@pytest.mark.parametrize("rank, size, fan_out", [(3, 3, 2), (-1, 3, 2), (0, 1, 0)])
def test_there_is_no_place_outside_the_tree(rank, size, fan_out) -> None:
    with pytest.raises(ValueError):
        tree(rank, size, fan_out)


def test_domain_is_the_node_from_three_nodes_on_else_the_device() -> None:
    assert failure_domains([0, 0, 1, 2, 2]) == [0, 0, 1, 2, 2]
    assert failure_domains([7, 3, 5]) == [2, 0, 1]
    assert failure_domains([0, 0, 0]) == [0, 1, 2]
    assert failure_domains([0]) == [0]


def test_with_two_nodes_the_ring_crosses_between_them() -> None:
    nodes = [0, 0, 0, 1, 1, 1]
    pairs = replayer_of(range(6), failure_domains(nodes))
    assert all(nodes[owner] != nodes[replayer] for owner, replayer in pairs.items())


@given(node_lists)
def test_domains_part_ranks_as_nodes_or_devices_do(nodes: list[int]) -> None:
    domains = failure_domains(nodes)
    if len(set(nodes)) >= 3:
        assert len(set(zip(nodes, domains, strict=True))) == len(set(nodes)) == len(set(domains))
    else:
        assert sorted(domains) == list(range(len(nodes)))


@given(domain_lists, st.integers(0, 100))
def test_each_micro_batch_is_recomputed_once_on_another_domain_and_the_work_is_shared(domains, turn) -> None:
    ranks = [3 * i + 1 for i in range(len(domains))]
    domain = dict(zip(ranks, domains, strict=True))
    pairs = replayer_of(ranks, domains, turn=turn)
    if len(set(domains)) == 1:
        assert pairs == {}
        return
    assert list(pairs) == ranks
    assert all(domain[owner] != domain[replayer] for owner, replayer in pairs.items())
    load = Counter(pairs.values())
    biggest = max(Counter(domains).values())
    if 2 * biggest <= len(ranks):
        assert set(load.values()) == {1} and len(load) == len(ranks)
    else:
        assert max(load.values()) == -(-biggest // (len(ranks) - biggest))


def test_turns_bring_other_partners() -> None:
    domains = list(range(6))
    partners = {replayer_of(range(6), domains, turn=turn)[0] for turn in range(10)}
    assert partners == {1, 2, 3, 4, 5}


def test_equal_nodes_make_the_ring_over_nodes() -> None:
    assert replayer_of(range(6), [0, 0, 1, 1, 2, 2]) == {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("ab")), min_size=1, max_size=20))
def test_only_devices_of_one_class_are_paired_and_the_others_are_named(members) -> None:
    domains, classes = [d for d, _ in members], [c for _, c in members]
    ranks = range(len(members))
    pairs = replayer_of(ranks, domains, classes)
    assert all(classes[o] == classes[r] and domains[o] != domains[r] for o, r in pairs.items())
    alone = without_partner(ranks, domains, classes)
    assert set(alone) | set(pairs) == set(ranks) and not set(alone) & set(pairs)
    for rank in alone:
        assert alone[rank]
        assert not any(classes[r] == classes[rank] and domains[r] != domains[rank] for r in ranks)


def test_reasons_for_having_no_partner() -> None:
    assert "single rank" in without_partner([0], [0])[0]
    assert "one failure domain" in without_partner([0, 1], [5, 5])[1]
    assert "same model" in without_partner([0, 1], [0, 1], ["x", "y"])[0]
    assert without_partner([0, 1], [0, 1]) == {}


@settings(max_examples=200)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=24), st.data())
def test_arbiters_are_of_domains_of_their_own_and_all_that_can_be_had(domains, data) -> None:
    pairs = sorted(replayer_of(range(len(domains)), domains).items())
    failed = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    seats = jury(failed, domains)
    assert set(seats) == set(failed)
    for (owner, replayer), arbiter in arbiters(failed, domains).items():
        assert domains[arbiter] not in (domains[owner], domains[replayer])
    involved = {rank for pair in failed for rank in pair}
    for (owner, replayer), chosen in seats.items():
        held = [domains[owner], domains[replayer], *(domains[c] for c in chosen)]
        assert len(set(held)) == len(held)
        assert len(chosen) == min(3, len(set(domains)) - 2)
        untouched = {domains[r] for r in range(len(domains)) if r not in involved} - {domains[owner], domains[replayer]}
        assert sum(c not in involved for c in chosen) == min(len(chosen), len(untouched))


def test_arbiters_do_not_depend_on_the_order_of_the_input_or_its_form() -> None:
    domains = [0, 0, 1, 1, 2, 2, 3, 3]
    failed = [(0, 2), (4, 6), (7, 1)]
    answers = {tuple(jury(order, domains).items()) for order in permutations(failed)}
    assert len(answers) == 1
    assert jury(failed, dict(enumerate(domains))) == jury(failed, domains)


def test_arbitration_is_spread_over_the_healthy_devices() -> None:
    domains = list(range(10))
    chosen = [rank for seats in jury([(0, 1), (9, 0)], domains).values() for rank in seats]
    assert len(set(chosen)) == 6 and not set(chosen) & {0, 1, 9}


def test_no_arbiter_without_a_third_domain_or_of_another_class() -> None:
    assert jury([(0, 1)], [0, 1]) == {(0, 1): ()}
    assert arbiters([(0, 1)], [0, 1]) == {}
    assert jury([(0, 1)], [0, 1, 2, 3], ["x", "x", "y", "x"]) == {(0, 1): (3,)}
