"""What of a step is recorded as a program, what enters it by value, what starts from the outputs, and what declines."""

import pytest
import torch
import torch.nn.functional as F
from replaykit import Net, Solo, data
from torch import nn

from sdcrun.shim.checks.opinion import differing_names
from sdcrun.shim.replay.program import FALLBACK, FULL


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_fallback_starts_from_the_gradients_of_the_outputs(net):
    x, y = data()
    with Solo(net) as solo:
        output = solo(x)
        output.register_hook(lambda gradient: gradient * 0.5)
        F.cross_entropy(output, y).backward()
    expected, result = solo.again()
    assert solo.parcel().program.kind == FALLBACK
    assert expected == result.table and "output" in expected and "loss" not in expected


def test_fallback_is_refused_where_it_would_differ(net):
    x, y = data()
    with Solo(net) as solo:
        output = solo(x)
        output.register_hook(lambda gradient: gradient * 0.5)
        (F.cross_entropy(output, y) + net.a.weight.pow(2).sum()).backward()
    assert "other ways than the module's outputs" in solo.recorder.pack()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, y):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def test_outputs_that_follow_from_each_other_are_counted_once():
    torch.manual_seed(0)
    both = Both()
    x, y = data()
    with Solo(both) as solo:
        out = solo(x, y)
        out["logits"].register_hook(lambda gradient: None)
        (out["loss"] + out["logits"].pow(2).mean()).backward()
    expected, result = solo.again()
    assert solo.parcel().program.kind == FALLBACK and expected == result.table


def test_forward_is_carried_over_an_update_of_another_module():
    torch.manual_seed(0)
    maker, judge = nn.Linear(6, 6), nn.Linear(6, 1)
    x, _ = data()
    with Solo(maker, judge) as first:
        fake = first(x)
        first(fake.detach(), which=1).sum().backward()
    assert set(first.recorder.case.expected) == {"loss", "module1:weight", "module1:bias"}
    with torch.no_grad():
        judge.weight.mul_(0.9)
    with Solo(before=first) as second:
        second(fake, which=1).pow(2).sum().backward()
    expected, result = second.again()
    assert second.recorder.case.program.guards == [0, 1]
    assert expected == result.table and {":weight", "module1:weight"} <= set(expected)


def test_a_forward_after_the_audited_backward_is_carried_over_too():
    maker, judge = nn.Linear(6, 6), nn.Linear(6, 1)
    x, _ = data()
    with Solo(maker, judge, onwards=True) as first:
        first(x, which=1).sum().backward()
        case = first.recorder.case
        fake = first(x)
        first(fake.detach(), which=1).sum().backward()
    assert first.recorder.case is case
    expected, result = first.again()
    assert expected == result.table
    with Solo(before=first) as second:
        second(fake, which=1).pow(2).sum().backward()
    expected, result = second.again()
    assert expected == result.table and ":weight" in expected and not second.recorder.case.uncovered


def test_what_the_script_cuts_off_the_graph_is_computed_again():
    """A wrong value in the maker's forward is seen although its gradient is not wanted."""
    maker, judge = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)), nn.Linear(6, 1)
    x, _ = data()
    with Solo(maker, judge) as solo:
        solo(solo(x).detach().mul(2), which=1).sum().backward()
    expected, result = solo.again()
    assert expected == result.table and "module1:weight" in expected
    with torch.no_grad():
        maker[0].weight[0, 0] += 1
    assert "module1:weight" in differing_names(expected, solo.again()[1].table, frozenset())


@pytest.mark.parametrize("obstacle", ["updated", "hooked"])
def test_what_is_cut_off_enters_by_value_where_it_cannot_be_computed_again(obstacle):
    maker, judge = nn.Linear(6, 6), nn.Linear(6, 1)
    x, _ = data()
    with Solo(maker, judge) as solo:
        fake = solo(x)
        if obstacle == "updated":
            with torch.no_grad():
                maker.weight.mul_(0.9)
        else:
            fake.register_hook(lambda gradient: None)
        solo(fake.detach(), which=1).sum().backward()
    assert solo.recorder.case.program.guards == [1] and solo.recorder.case.program.kind == FULL
    expected, result = solo.again()
    assert expected == result.table and not solo.recorder.case.uncovered


def test_values_of_a_window_before_the_last_enter_by_value_and_the_case_is_partial():
    maker, judge = nn.Linear(6, 6), nn.Linear(6, 1)
    x, _ = data()
    with Solo(maker, judge) as first:
        fake = first(x)
        first(fake.detach(), which=1).sum().backward()
    with Solo(before=first) as second:
        second(fake.detach(), which=1).sum().backward()
    with Solo(before=second) as third:
        third(fake, which=1).pow(2).sum().backward()
    for solo, partial in ((first, False), (second, False), (third, True)):
        expected, result = solo.again()
        assert expected == result.table and bool(solo.recorder.case.uncovered) is partial


def test_weights_changed_between_forward_and_backward_decline(net):
    x, y = data()
    with Solo(net) as solo:
        loss = F.cross_entropy(solo(x), y)
        with torch.no_grad():
            net.b.bias.mul_(0.9)
        loss.backward()
    assert "changed between" in solo.recorder.pack()


def test_input_changed_behind_the_version_counter_before_the_loss(net):
    """Forward and loss use one tensor with other contents, and no counter says so."""
    x, _ = data()
    plain, net.forward = net.forward, lambda x: plain(x + 0.0)
    with Solo(net) as solo:
        output = solo(x)
        x.data.mul_(3)
        (output * x[:, :3]).sum().backward()
    expected, result = solo.again()
    assert expected == result.table
