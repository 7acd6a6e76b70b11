"""Variables that the script moves between a forward and its update: the replay computes with the forward's values."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from replaykit import Solo
from torch import nn

from sdcrun.shim.replay import scriptvalues
from sdcrun.shim.replay.run import replay
from sdcrun.shim.replay.scriptstate import MISSING, reach

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


def test_a_place_that_this_rank_has_not_is_passed_over(monkeypatch):
    monkeypatch.setitem(sys.modules, "of_the_script", types.ModuleType("of_the_script"))
    reached = reach([Net()], [])
    values = {("of_the_script", "x"): 1, ("not_there", "x"): 1, (__name__, "f", "x"): 1}
    with scriptvalues.restored(values, reached):
        scriptvalues.place(values, reached)
        assert sys.modules["of_the_script"].x == 1
    assert not hasattr(sys.modules["of_the_script"], "x") and MISSING not in vars(sys.modules["of_the_script"]).values()
