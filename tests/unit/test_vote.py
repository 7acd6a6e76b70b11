"""The weight vote: a strict majority for each tensor by itself."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sdcrun.core.vote import weight_vote

tables = st.integers(1, 5).flatmap(
    lambda n: st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 2), min_size=n, max_size=n), min_size=1)
)


@given(tables)
def test_each_tensor_has_its_own_strict_majority(table: dict[int, list[int]]) -> None:
    names = [f"p{i}" for i in range(len(next(iter(table.values()))))]
    result = weight_vote({rank: [[row, 7] for row in rows] for rank, rows in table.items()}, names)
    for index, name in enumerate(names):
        votes = Counter(rows[index] for rows in table.values())
        value, most = votes.most_common(1)[0]
        strict = 2 * most > len(table)
        assert (name in result.no_majority) == (not strict)
        wrong = sorted(rank for rank, rows in table.items() if rows[index] != value) if strict else []
        assert result.minority.get(name, []) == wrong
        assert (name in result.sources) == bool(wrong)
        if wrong:
            assert table[result.sources[name]][index] == value
    accused = {rank for ranks in result.minority.values() for rank in ranks}
    assert result.clean == sorted(set(table) - accused)
    assert result.unanimous == all(rows == table[min(table)] for rows in table.values())


def test_two_ranks_bad_in_different_tensors_are_each_in_one_minority() -> None:
    result = weight_vote({0: [1, 1], 1: [9, 1], 2: [1, 9], 3: [1, 1]}, ["a", "b"])
    assert result.minority == {"a": [1], "b": [2]} and result.clean == [0, 3]
    assert result.sources == {"a": 0, "b": 0}


def test_two_ranks_never_have_a_majority() -> None:
    result = weight_vote({0: [1], 1: [2]}, ["a"])
    assert result.no_majority == ["a"] and not result.minority


def test_source_is_a_rank_that_is_right_everywhere() -> None:
    assert weight_vote({0: [1, 9], 1: [9, 1], 2: [1, 1], 3: [1, 1]}, ["a", "b"]).sources == {"a": 2, "b": 2}


def test_short_table_dissents_in_what_is_missing() -> None:
    result = weight_vote({0: [1, 1], 1: [1], 2: [1, 1]}, ["a", "b"])
    assert result.minority == {"b": [1]}
    assert weight_vote({0: [], 1: [], 2: [1]}, ["a"]).no_majority == ["a"]
