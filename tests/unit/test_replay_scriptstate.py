"""What a forward changes outside its module is changed once, however often the micro-batch is computed again."""

import argparse
import array
import collections
import copy
import pickle
import random
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from replaykit import Solo
from torch import nn

from sdcrun.shim.replay import modulestate, scriptobjects, scriptstate
from sdcrun.shim.replay.run import replay
from sdcrun.shim.replay.state import keep_in_replay
from sdcrun.shim.replay.tree import Tree

COUNT = 0
HISTORY = []
BY_NAME = collections.defaultdict(list)
SEEN = torch.zeros(3)
TABLE = np.zeros(3)
RECENT = collections.deque(maxlen=2)
SHAPES = set()
DRAWS = torch.Generator().manual_seed(3)
OLD_DRAWS = random.Random(3)
NEW_DRAWS = np.random.default_rng(3)
LONG = list(range(scriptobjects.LONGEST + 1))


class Meter:
    def __init__(self):
        self.total, self.values = 0.0, []

    def update(self, value):
        self.total += value
        self.values.append(value)


METER = Meter()


class Tally:
    """Counts in its class, from a method that an object of it is called for."""

    total = 0

    def __call__(self, value):
        Tally.total += value
        BY_NAME["tallied"].append(value)


TALLY = Tally()


class Kept(Tally):
    seen = 0

    def note(self):
        Kept.seen += 1


def helper(value):
    helper.calls = getattr(helper, "calls", 0) + 1
    BY_NAME["losses"].append(value)
    METER.update(value)


class Dotted(dict):
    """Keys as attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Window(list):
    """A list with a method more."""


class Progress:
    __slots__ = ("step",)

    def __init__(self):
        self.step = 0


BAG, ARGS = types.SimpleNamespace(n=0), argparse.Namespace(n=0)
DOTTED, WINDOW, PROGRESS, NUMBERS = Dotted(n=0, inner=Dotted(n=0)), Window(), Progress(), array.array("l", [0])
LEGACY_DRAWS = np.random.RandomState(3)
PERCEPTUAL = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)


def other_kinds(value):
    """Changes variables of the kinds that no container of Python's own is."""
    BAG.n, ARGS.n, DOTTED.n, DOTTED.inner.n, PROGRESS.step = (value,) * 5
    WINDOW.append(value)
    NUMBERS.append(1)
    LEGACY_DRAWS.rand()


class Scaled(torch.autograd.Function):
    passes = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Scaled.passes += 1
        return gradient * 2


def made(limit):
    """A class with variables around it."""
    rounds, names = 0, []

    class Around(nn.Module):
        made_outputs = 0

        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 3)
            self.draws = torch.Generator().manual_seed(4)
            self.notes = {"inner": {"outputs": []}}
            self.kept = Kept()
            self.bag = types.SimpleNamespace(n=0)

        def forward(self, x, kept=[]):  # noqa: B006
            global COUNT, FIRST
            nonlocal rounds
            COUNT, FIRST = COUNT + 1, x.shape
            rounds += 1
            names.append(limit)
            type(self).made_outputs += 1
            y = Scaled.apply(self.a(x))
            value = float(y.sum())
            helper(value)
            other_kinds(value)
            self.bag.n += 1
            TALLY(value), self.kept.note()
            PERCEPTUAL(y)
            HISTORY.append(value)
            kept.append(value)
            LONG.append(value)
            RECENT.append(value)
            SHAPES.add(value)
            SEEN[0] += 1
            TABLE[1] += 1
            for draw in (OLD_DRAWS.random, NEW_DRAWS.random):
                draw()
            torch.rand(2, generator=DRAWS), torch.rand(2, generator=self.draws)
            return y

    return Around(), lambda: (rounds, list(names))


def state(net, around):
    values = (
        COUNT, globals().get("FIRST"), HISTORY, dict(BY_NAME), SEEN.tolist(), TABLE.tolist(), RECENT, SHAPES,
        vars(METER), helper.__dict__, Scaled.passes, around(), type(net).made_outputs, type(net).forward.__defaults__,
        DRAWS.get_state().tolist(), OLD_DRAWS.getstate(), NEW_DRAWS.bit_generator.state, LONG,
        net.draws.get_state().tolist(), net.notes, repr(BAG), vars(ARGS), repr(DOTTED), PROGRESS.step,
        list(WINDOW), NUMBERS, pickle.dumps(LEGACY_DRAWS.get_state()), net.bag.n, Tally.total, Kept.seen,
        {name: buffer.tolist() for name, buffer in PERCEPTUAL.named_buffers()},
    )  # fmt: skip
    return copy.deepcopy(values)


def test_variables_of_the_script_are_as_they_were():
    net, around = made(3)
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    before = state(net, around)
    assert before[0] and before[11] == (1, [3]) and before[8]["values"], "the forward changes what is looked at"
    expected, result = solo.again()
    after = state(net, around)
    assert expected == result.table and "loss" in expected
    assert [place for place, pair in enumerate(zip(before, after)) if pair[0] != pair[1]] == []


def test_a_variable_that_the_replay_makes_is_gone_again():
    net, _ = made(3)
    with Solo(net) as solo:
        solo(torch.randn(4, 6)).sum().backward()
    del globals()["FIRST"]
    BY_NAME.clear()
    solo.again()
    assert "FIRST" not in globals() and BY_NAME == {}


def test_they_are_put_back_after_a_replay_that_fails(monkeypatch):
    net, around = made(3)
    with Solo(net) as solo:
        solo(torch.randn(4, 6)).sum().backward()
    before = state(net, around)
    monkeypatch.setattr(F, "linear", lambda *args: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        solo.again()
    assert state(net, around) == before


def test_a_training_step_that_stands_in_for_the_forward_is_looked_at_too():
    net, losses = nn.Linear(6, 3), []
    own = net.forward

    def training_step(x):
        net.forward = own
        losses.append(net(x).sum())
        return losses[-1]

    net.forward = training_step
    with Solo(net) as solo:
        solo(torch.randn(4, 6)).backward()
    solo.again()
    assert len(losses) == 1


def test_what_libraries_keep_is_their_own():
    reach = scriptstate.Reach([nn.Linear, nn.Module, made(1)[0].__class__], [])
    homes = {around["__name__"] for around in reach.names.values()}
    assert homes == {__name__}
    assert {cls.__name__ for cls, _ in reach.attributes} >= {"Around", "Scaled"}


def test_hooks_of_the_guard_keep_what_they_know():
    """The injector counts how often a fault fired, in replays too."""
    fired = []
    own = {"__name__": "sdcrun.shim.inject", "fired": fired}
    exec("def made(seen):\n return lambda *_: seen.append(1)", own)
    net, _ = made(3)
    net.a.register_forward_hook(keep_in_replay(own["made"](fired)))
    with Solo(net) as solo:
        solo(torch.randn(4, 6)).sum().backward()
    solo.again()
    assert fired == [1, 1]


class Counts(nn.Module):
    """Computes something else each time, by what it has counted."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.counts = {"calls": 0, "sizes": collections.defaultdict(list), "kinds": {"a"}}
        self.recent = collections.deque(maxlen=2)

    def forward(self, x):
        self.counts["calls"] += 1
        self.counts["sizes"][len(x) % 2].append(len(x))
        self.counts["kinds"].add(self.counts["calls"])
        self.recent.append(self.counts["calls"])
        return self.a(x) * (sum(self.recent) + sum(map(sum, self.counts["sizes"].values())) + len(self.counts["kinds"]))


def test_counts_in_containers_travel_with_the_micro_batch():
    net = Counts()
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    net(x)
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    inner, sizes = net.counts, net.counts["sizes"]
    held = copy.deepcopy((net.counts, net.recent))
    parcel = solo.parcel()
    for _ in range(2):
        assert replay(parcel.program, solo.guards, solo.recorder.local).table == parcel.expected
        assert (net.counts, net.recent) == held and net.counts is inner and net.counts["sizes"] is sizes
    sizes.clear(), net.recent.extend([7, 7])
    net.counts["calls"] = 40
    assert replay(parcel.program, solo.guards, solo.recorder.local).table == parcel.expected
    assert net.counts["calls"] == 40 and sizes == {} and type(sizes) is collections.defaultdict


def test_a_container_of_something_else_that_the_forward_changes_is_a_reason():
    net = Counts()
    net.counts["clock"] = object()
    with Solo(net) as solo:
        solo(torch.randn(4, 6)).sum().backward()
    assert "cannot be shipped" in solo.recorder.pack()


def test_the_name_of_a_device_stays_the_replayers_own():
    """Ranks of one host name different devices; a replay on another's would not find its tensors there."""
    net = nn.Linear(6, 3)
    net.place, net.options, net.mode = "cuda:1", {"device": "cuda:1", "mode": "a"}, "a"
    plain, _, _ = modulestate.state_before(Tree(net))
    net.place, net.options, net.mode = "cuda:0", {"device": "cuda:0", "mode": "b"}, "b"
    modulestate.assign(Tree(net), plain)
    assert (net.place, net.options, net.mode) == ("cuda:0", {"device": "cuda:0", "mode": "a"}, "a")
