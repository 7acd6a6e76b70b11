"""The ballot: eight int64 and MAX must tell every rank the same, and never mix two ranks' words into a third."""

from hypothesis import given
from hypothesis import strategies as st

from sdcrun.core import ballot
from sdcrun.core.ballot import Ballot

int64 = st.integers(-(2**63) + 1, 2**63 - 1)
uint64 = st.integers(0, 2**64 - 1)
ballots = st.builds(
    Ballot, tag=st.integers(0, 2**62), local=st.booleans(), reduced=st.booleans(), ask=st.integers(0, 2),
    decline=st.booleans(), command=st.integers(0, 3),
)  # fmt: skip


def reduce_max(rows):
    return [max(column) for column in zip(*rows)]


@given(st.lists(ballots, min_size=1, max_size=6), st.integers(0, 2**60))
def test_outcome_is_what_any_rank_said(papers, place):
    papers = [Ballot(**{**vars(paper), "tag": place}) for paper in papers]
    result = ballot.outcome(reduce_max(paper.words() for paper in papers))
    assert result.lockstep
    assert result.local == any(paper.local for paper in papers)
    assert result.reduced == any(paper.reduced for paper in papers)
    assert result.reduced_everywhere == all(paper.reduced for paper in papers)
    assert result.hit == (result.local or result.reduced)
    assert result.command == max(paper.command for paper in papers)
    assert result.decline == any(paper.decline for paper in papers)


@given(st.lists(ballots, min_size=2, max_size=6))
def test_ranks_at_different_places_are_noticed(papers):
    result = ballot.outcome(reduce_max(paper.words() for paper in papers))
    assert result.lockstep == (len({paper.tag for paper in papers}) == 1)


@given(st.integers(0, 2**40), st.integers(0, 255), st.integers(0, 4), st.integers(0, 2**40), st.integers(0, 255))
def test_tag_tells_places_apart(step, number, phase, other_step, other_number):
    same = (step, number) == (other_step, other_number)
    assert (ballot.tag(step, number, phase) == ballot.tag(other_step, other_number, phase)) == same
    assert ballot.tag(step, number, phase) < 2**63


@given(st.lists(st.tuples(uint64, uint64), min_size=1, max_size=5))
def test_digests_agree_exactly_when_all_are_equal(digests):
    reduced = reduce_max(ballot.digest_words(digest, 7) for digest in digests)
    assert all(-(2**63) <= word < 2**63 for word in reduced)
    assert ballot.digests_agree(reduced) == (len(set(digests)) == 1)


@given(st.tuples(int64, int64), st.integers(0, 2**40), st.integers(0, 2**40))
def test_digests_of_different_places_mean_nothing(digest, place, other):
    reduced = reduce_max([ballot.digest_words(digest, place), ballot.digest_words(digest, other)])
    assert ballot.digests_agree(reduced) is (True if place == other else None)
