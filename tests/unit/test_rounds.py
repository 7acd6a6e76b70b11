"""One audit as an exchange: a rank that cannot take its part meets the others all the same."""

from types import SimpleNamespace

import pytest

from sdcrun.shim.checks import rounds
from sdcrun.shim.checks.opinion import Parcel
from sdcrun.shim.exchange import ExchangeFailed
from sdcrun.shim.replay.run import Result

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
    return rounds.Rounds(group, [], 7, "nothing recorded", {}, frozenset(), 0, 1.0, rounds.ByRank()), met


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


RIGHT, WRONG, WORSE = ({"loss": (n, n), ":a": (n, n)} for n in (1, 2, 3))


@pytest.fixture
def replays(monkeypatch):
    """`compute(own, owners)` compares micro-batches of rank 1 with what their replays give, in turn, with this rank's
    own variables of the script and with the owner's; a list of these has what was not asked for. `bits`: those with the
    owner's look at the bits of numbers."""
    audit, _ = rounds_of(others=0)

    def compute(own, owners=(), bits=False):
        left = {False: list(own), True: list(owners)}

        def replay(*_, owners, asked):
            if asked is not None and owners and bits:
                asked.bits.add("x")
            return Result(table=left[owners].pop(0))

        monkeypatch.setattr(rounds, "replay", replay)
        audit.parcels[1] = Parcel(None, RIGHT)
        return audit._compute(1, rounds.RING).agrees, left[False] + left[True]

    return compute, audit.by_rank


def test_a_forward_that_depends_on_the_rank_is_no_fault(replays):
    compute, by_rank = replays
    assert compute([WRONG, WRONG], [RIGHT]) == (True, []) and by_rank.owners
    assert compute([], [RIGHT]) == (True, []) and compute([], [WRONG]) == (False, [])


@pytest.mark.parametrize("own, owners", [
    pytest.param([WRONG, WORSE], [RIGHT], id="it is not the same twice"),
    pytest.param([WRONG, RIGHT], [RIGHT], id="it does not come again"),
    pytest.param([WRONG], [WRONG], id="it stays"),
])  # fmt: skip
def test_a_fault_is_not_explained_by_the_rank(replays, own, owners):
    compute, by_rank = replays
    assert compute(own, owners) == (False, []) and not by_rank.owners


def test_a_script_that_flips_bits_on_its_rank_is_a_fault(replays):
    compute, by_rank = replays
    assert compute([WRONG, WRONG], [RIGHT], bits=True) == (False, []) and not by_rank.owners


@pytest.mark.parametrize("again, opinion", [(WRONG, WORSE), (WORSE, WRONG)])
def test_beside_a_fault_of_the_owner_its_variables_make_the_opinion(replays, monkeypatch, again, opinion):
    compute, by_rank = replays
    said = []
    monkeypatch.setattr(rounds, "compare", lambda *args: said.append(args[4].table) or SimpleNamespace(agrees=False))
    assert compute([WRONG, again], [WORSE]) == (False, [])
    assert said == [opinion] and not by_rank.owners


def test_what_came_out_without_the_owners_variables_once_is_a_fault_later(replays):
    compute, by_rank = replays
    assert compute([RIGHT]) == (True, []) and by_rank.cleared == {1}
    assert compute([WRONG]) == (False, []) and not by_rank.owners
