"""One audit as an exchange: a rank that cannot take its part meets the others all the same."""

from types import SimpleNamespace

import pytest

from sdcrun.shim.checks import rounds
from sdcrun.shim.exchange import ExchangeFailed

STATEMENT = {"position": 0, "window": 1, "scope": "all"}


def rounds_of(others):
    """Rank 0 of three; `others`: what the other ranks say in the word for faults."""
    met = []

    def all_reduce_max(words):
        met.append(list(words))
        return [max(word, others) if place == rounds.LOUD else word for place, word in enumerate(words)]

    group = SimpleNamespace(
        rank=0, size=3, ranks=(0, 1, 2), nodes=[0, 1, 2], devices=[("cpu",)] * 3, clock=lambda: 0.0,
        all_reduce_max=all_reduce_max,
    )  # fmt: skip
    return rounds.Rounds(group, [], 7, "nothing recorded", {}, frozenset(), 0, 1.0), met


def test_a_rank_that_fails_says_so_where_the_others_wait(monkeypatch):
    audit, met = rounds_of(others=0)
    monkeypatch.setattr(audit, "_ship", lambda routes: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError):
        audit.run(STATEMENT, dict, own=False, cause="interval")
    assert [words[rounds.LOUD] for words in met] == [rounds.FAILED]


def test_all_hear_of_a_rank_that_failed(monkeypatch):
    audit, met = rounds_of(others=rounds.FAILED)
    monkeypatch.setattr(audit, "_ship", lambda routes: [])
    monkeypatch.setattr(audit, "gather", lambda statement: pytest.fail("the rank that failed is not there"))
    with pytest.raises(ExchangeFailed):
        audit.run(STATEMENT, dict, own=False, cause="interval")
    assert len(met) == 1
