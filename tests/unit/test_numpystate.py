"""NumPy's state read cheaply is NumPy's state."""

import pickle
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun.shim import numpystate


def is_the_state(found):
    """`found` is what NumPy says itself, and what it takes."""
    right = np.random.get_state(legacy=False)
    np.random.set_state(found.full())
    return repr(found.full()) == repr(right) == repr(np.random.get_state(legacy=False))


@pytest.fixture(autouse=True)
def put_back():
    before = np.random.get_state()
    yield
    np.random.set_state(before)


DRAWINGS = {
    "nothing": lambda: None,
    "uniform": lambda: np.random.rand(),
    "normal": lambda: np.random.randn(),
    "normals": lambda: np.random.randn(2),
    "gamma": lambda: np.random.gamma(0.5),
    "permutation": lambda: np.random.permutation(5),
    "words": lambda: np.random.bytes(2500),
    "seed": lambda: np.random.seed(3),
    "read": lambda: np.random.get_state(),
    "elsewhere": lambda: np.random.default_rng(1).random(),
}


@settings(max_examples=150)
@given(st.lists(st.sampled_from(sorted(DRAWINGS)), max_size=12))
def test_whatever_is_drawn(drawings):
    for name in drawings:
        DRAWINGS[name]()
        assert is_the_state(numpystate.glance())


@settings(max_examples=150)
@given(
    *[st.lists(st.sampled_from(sorted(DRAWINGS)), max_size=4)] * 3,
    st.sampled_from([numpystate.exact, numpystate.glance]),
)
def test_whatever_was_drawn_it_is_put_back(before, between, after, read):
    def draw(names):
        for name in names:
            DRAWINGS[name]()

    draw(before)
    saved, right = pickle.loads(pickle.dumps(read())), repr(np.random.get_state(legacy=False))
    draw(between)
    mine, own = read(), repr(np.random.get_state(legacy=False))
    numpystate.restore(saved)
    assert repr(np.random.get_state(legacy=False)) == right
    draw(after)
    numpystate.restore(mine)
    assert repr(np.random.get_state(legacy=False)) == own


def test_putting_back_asks_numpy_for_nothing_while_nobody_draws(monkeypatch):
    np.random.seed(5)
    here = numpystate.exact()
    np.random.seed(6)
    numpystate.exact()
    for name in ("get_state", "set_state"):
        monkeypatch.setattr(np.random, name, lambda *_: pytest.fail("copied word by word"))
    numpystate.restore(here)
    assert numpystate.glance() is here
    monkeypatch.undo()
    assert is_the_state(here)


def test_while_nobody_draws_it_is_read_once(monkeypatch):
    np.random.seed(5)
    first = numpystate.glance()
    monkeypatch.setattr(numpystate, "_told", lambda numpy: pytest.fail("read again"))
    assert all(numpystate.glance() is first for _ in range(3))


def test_a_normal_number_that_is_kept_is_never_glanced_over():
    np.random.seed(5)
    np.random.randn()
    assert numpystate.glance().full()["has_gauss"] == 1
    np.random.randn()
    assert numpystate.glance().full()["has_gauss"] == 0


@pytest.mark.filterwarnings("error")
def test_another_generator_in_its_place():
    before = np.random.get_bit_generator()
    try:
        for bits in (np.random.MT19937(1), np.random.PCG64(1), np.random.MT19937(1)):
            np.random.set_bit_generator(bits)
            for _ in range(2):
                assert is_the_state(numpystate.glance())
                np.random.rand()
    finally:
        np.random.set_bit_generator(before)


def test_drawn_in_another_thread_while_it_is_read(monkeypatch):
    told = numpystate._told

    def slow(numpy):
        thread = threading.Thread(target=np.random.rand)
        thread.start()
        thread.join()
        return told(numpy)

    np.random.seed(7)
    monkeypatch.setattr(numpystate, "_told", slow)
    assert is_the_state(numpystate.glance())
    monkeypatch.setattr(numpystate, "_told", told)
    assert is_the_state(numpystate.glance())


def test_a_numpy_that_is_built_otherwise_or_not_there(monkeypatch):
    monkeypatch.setattr(np.random.mtrand, "_rand", object())
    assert is_the_state(numpystate.glance())
    monkeypatch.delitem(sys.modules, "numpy.random")
    assert numpystate.glance() is None and numpystate.exact() is None
