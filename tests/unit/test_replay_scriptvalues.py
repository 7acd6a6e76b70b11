"""Variables that the script moves between a forward and its update: the replay computes with the forward's values."""

import argparse
import copy
import random
import sys
import types
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from replaykit import Solo
from torch import nn

from sdcrun.shim.replay import scriptobjects, scriptvalues
from sdcrun.shim.replay.generators import state_of
from sdcrun.shim.replay.run import replay
from sdcrun.shim.replay.scriptstate import reach
from sdcrun.shim.replay.tree import Tree

TEMPERATURE = 1.0
STEP = 0
DEVICE = "cuda:1"
MODE = None


class Net(nn.Module):
    """Reads the script's globals, and counts in one."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        global STEP
        STEP += 1
        y = self.a(x) / TEMPERATURE * STEP
        return y if MODE is None and DEVICE else -y


def around():
    """A module whose forward reads a variable of the function that made its class, and what moves that."""
    factor = 1.0

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x):
            return self.a(x) * factor

    def move(value):
        nonlocal factor
        factor = value

    return Inner(), move, lambda: factor


@pytest.fixture(autouse=True)
def own_values(monkeypatch):
    for name, value in {"TEMPERATURE": 1.0, "STEP": 0, "DEVICE": "cuda:1", "MODE": None}.items():
        monkeypatch.setitem(globals(), name, value)


def record(solo):
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    F.cross_entropy(solo(x), y).backward()


def moved(solo):
    return {address[-1]: value for address, value in solo.recorder.case.program.entries[0].moved.items()}


def test_a_global_moved_behind_the_forward():
    global TEMPERATURE, STEP, MODE
    with Solo(Net()) as solo:
        record(solo)
        TEMPERATURE, STEP, MODE = 0.5, 7, "other"
        parcel = solo.parcel()
    assert moved(solo) == {"TEMPERATURE": 1.0, "STEP": 0, "MODE": None}
    result = replay(parcel.program, solo.guards, solo.recorder.local)
    assert parcel.expected == result.table and "loss" in result.table
    assert (TEMPERATURE, STEP, MODE) == (0.5, 7, "other")


def test_a_counter_that_the_forward_moves_itself():
    with Solo(Net()) as solo:
        record(solo)
        expected, result = solo.again()
    assert moved(solo) == {"STEP": 0} and expected == result.table and STEP == 1


def test_what_has_not_moved_stays_the_replayers():
    """A device's name above all: it is another one in every rank."""
    global DEVICE, MODE
    with Solo(Net()) as solo:
        record(solo)
        DEVICE = "cuda:0"
        parcel = solo.parcel()
    assert set(moved(solo)) == {"STEP"}
    MODE = "this rank's"
    assert replay(parcel.program, solo.guards, solo.recorder.local).table != parcel.expected
    MODE = None
    assert replay(parcel.program, solo.guards, solo.recorder.local).table == parcel.expected


def test_a_variable_of_the_enclosing_function():
    net, move, factor = around()
    with Solo(net) as solo:
        record(solo)
        move(3.0)
        expected, result = solo.again()
    assert moved(solo) == {"factor": 1.0} and expected == result.table and factor() == 3.0


def test_variables_that_share_an_address_are_left_alone():
    """Two modules made by one function: nobody can say which of the two is meant."""
    (one, move, factor), (other, _, _) = around(), around()
    both = nn.Sequential(one, nn.Linear(3, 6), other)
    with Solo(both) as solo:
        record(solo)
        move(3.0)
        solo.parcel()
    assert moved(solo) == {} and factor() == 3.0


def test_two_forwards_of_a_window_have_their_own_values():
    global TEMPERATURE
    net, x, y = Net(), torch.randn(4, 6), torch.randint(0, 3, (4,))
    with Solo(net) as solo:
        first = solo(x)
        TEMPERATURE = 0.25
        F.cross_entropy(first + solo(x), y).backward()
        TEMPERATURE = 9.0
        expected, result = solo.again()
    assert [call.moved[__name__, "TEMPERATURE"] for call in solo.recorder.case.program.entries[:2]] == [1.0, 0.25]
    assert expected == result.table and TEMPERATURE == 9.0


class Settings:
    """Of the script, with attributes in slots."""

    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0


class Schedule:
    scale = 1.0


class Config(dict):
    """Keys as attributes, as many scripts have it."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


ARGS = argparse.Namespace(temperature=1.0, size=(1, 2))
CONFIG = {"loss": {"weights": [1.0, 1.0], "name": "plain"}}
DOTTED = Config(gain=1.0)
SLOTTED = Settings()
DRAWS = {"torch": torch.Generator().manual_seed(1), "numpy": np.random.RandomState(1), "python": random.Random(1)}


class Configured(nn.Module):
    """Reads settings of many kinds, the script's and its own, and draws from the script's generators."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.settings = types.SimpleNamespace(rate=1.0)
        self.draws = np.random.default_rng(2)

    def forward(self, x):
        factor = ARGS.temperature * CONFIG["loss"]["weights"][1] * DOTTED.gain * SLOTTED.factor * Schedule.scale
        factor *= self.settings.rate * ARGS.size[0] + self.draws.random()
        factor += DRAWS["numpy"].rand() + DRAWS["python"].random()
        y = self.a(x) * factor + torch.rand(3, generator=DRAWS["torch"])
        return y if CONFIG["loss"]["name"] == "plain" else -y

    def change(self):
        ARGS.temperature, ARGS.size = 2.0, (3, 4)
        CONFIG["loss"]["weights"][1], CONFIG["loss"]["name"] = 3.0, "other"
        DOTTED.gain, SLOTTED.factor, Schedule.scale, self.settings.rate = 4.0, 5.0, 6.0, 7.0

    def state(self):
        values = (vars(ARGS), CONFIG, dict(DOTTED), SLOTTED.factor, Schedule.scale, vars(self.settings))
        states = [state_of(draws) for draws in (*DRAWS.values(), self.draws)]
        return copy.deepcopy(values), states


def test_settings_in_objects_and_states_of_generators_are_the_forwards():
    net = Configured()
    with Solo(net) as solo:
        record(solo)
        net.change()
        before = net.state()
        expected, result = solo.again()
    assert expected == result.table and "loss" in result.table
    assert net.state() == before
    assert sorted(str(value) for value in moved(solo).values() if not isinstance(value, scriptvalues.Draws)) == sorted(
        ["1.0"] * 6 + ["(1, 2)", "plain"]
    )


def test_all_of_the_owners_variables_for_a_forward_that_depends_on_the_rank(monkeypatch):
    with Solo(Net()) as solo:
        record(solo)
        parcel = solo.parcel()
    program, guards, local = parcel.program, solo.guards, solo.recorder.local
    monkeypatch.setitem(globals(), "STEP", 0)
    assert replay(program, guards, local).table == parcel.expected
    monkeypatch.setitem(globals(), "TEMPERATURE", 3.0)
    monkeypatch.setitem(globals(), "DEVICE", "cuda:0")
    assert replay(program, guards, local).table != parcel.expected
    assert replay(program, guards, local, owners=True).table == parcel.expected
    assert (TEMPERATURE, DEVICE) == (3.0, "cuda:0")


LARGE = torch.zeros(scriptobjects.LARGEST // 4 + 1)
AVERAGE = nn.Linear(2, 2).requires_grad_(False)
SPARSE = torch.eye(3).to_sparse()


class Remembering(nn.Module):
    """Changes `what` of the script's in its forward."""

    def __init__(self, what):
        super().__init__()
        self.a, self.what = nn.Linear(6, 3), what

    def forward(self, x):
        if self.what == "LARGE":
            LARGE.add_(1)
        elif self.what == "AVERAGE":
            AVERAGE.weight.mul_(0.5)
        return torch.sparse.mm(SPARSE, self.a(x).T).T


@pytest.mark.parametrize("what", ["LARGE", "AVERAGE", ""])
def test_what_a_replay_could_not_put_back_is_refused(what):
    with Solo(Remembering(what)) as solo:
        record(solo)
        why = solo.recorder.pack()
    assert why == (f"the forward changes {what} of the script, which would not be put back" if what else None)


def test_a_place_that_this_rank_has_not_is_passed_over(monkeypatch):
    monkeypatch.setitem(sys.modules, "of_the_script", types.ModuleType("of_the_script"))
    net = Net()
    reached = reach([Tree(net)], [])
    values = {("of_the_script", "x"): 1, ("not_there", "x"): 1, (__name__, "f", "x"): 1, (__name__, "STEP"): 8}
    with ExitStack() as undo:
        scriptvalues.place(values, reached, Tree(net), undo)
        assert STEP == 8
    assert STEP == 0 and not hasattr(sys.modules["of_the_script"], "x")
