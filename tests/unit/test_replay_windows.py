"""Which micro-batch of an accumulation window is audited, window after window."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from replaykit import Solo, guard_of
from torch import nn

from sdcrun.shim.checks.lastbatch import HOLD_BATCHES
from sdcrun.shim.checks.replay import Auditor
from sdcrun.shim.patches import autograd


@pytest.fixture
def auditor():
    group = SimpleNamespace(
        size=3, nodes=[0, 1, 2], devices=[("cpu",)] * 3, guards=[], audit_every=1,
        runtime=SimpleNamespace(recording=False), emit=lambda kind, data: None,
    )  # fmt: skip
    auditor = Auditor(group)
    yield auditor
    auditor.window_closes()
    autograd.observers.remove(auditor)


def picks(auditor, lengths, every, audits):
    """The places picked in the first `audits` audited windows, the lengths of windows repeating themselves."""
    found, step, loss = [], 0, torch.zeros(())
    auditor.group.audit_every = every
    while len(found) < audits:
        audited = step % every == 0
        auditor.window_opens(step, audited)
        if audited:
            found.append(auditor.recorder.pick)
        for _ in range(lengths[step % len(lengths)]):
            auditor.around_backward(lambda *args: None, loss, None, {})
        auditor.window_closes()
        step += 1
    return found


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 8, 100])
def test_every_place_comes_round_whatever_the_interval(auditor, every):
    assert picks(auditor, [4], every, 9) == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("every", [4, 8, 12])
def test_an_interval_of_whole_epochs_does_not_hide_places_behind_the_short_window_at_their_end(auditor, every):
    """Each audit falls on the first window of an epoch, and the one before it has a single micro-batch."""
    assert set(picks(auditor, [3, 3, 3, 1], every, 7)[1:]) == {0, 1, 2}


def test_one_long_window_is_forgotten(auditor):
    assert max(picks(auditor, [50] + [2] * 400, 1, 300)[60:]) == 1


def test_forwards_beyond_those_that_are_held_for_triage_are_recorded_as_well(auditor):
    guard = guard_of(nn.Linear(4, 2))
    auditor.window_opens(0, audit=True)
    for _ in range(HOLD_BATCHES + 2):
        token = auditor.before_forward(guard, (torch.ones(3, 4),), {})
        auditor.after_forward(guard, token, guard.module(torch.ones(3, 4)))
    assert len(auditor.last.held) == HOLD_BATCHES and not auditor.last.whole
    assert len(auditor.recorder.tape.entries) == HOLD_BATCHES + 2


def test_a_pass_at_perturbed_weights_makes_room_for_the_one_before_it():
    """SAM: the picked backward ran at weights that are gone at the gate; the first of the window is audited instead."""
    net, x, y = nn.Linear(6, 3), torch.randn(4, 6), torch.randint(0, 3, (4,))
    with Solo(net, pick=1) as solo:
        F.cross_entropy(solo(x), y).backward()
        kept = net.weight.detach().clone()
        with torch.no_grad():
            net.weight += 0.1 * net.weight.grad
        F.cross_entropy(solo(x), y).backward()
        net.weight.data.copy_(kept)
    expected, result = solo.again()
    assert solo.recorder.case.program.position == 0 and solo.recorder.case.program.window == 2
    assert expected == result.table and "loss" in expected


def test_the_reason_given_is_that_of_the_picked_pass():
    net, x = nn.Linear(6, 3), torch.randn(4, 6)
    with Solo(net, pick=1) as solo:
        solo(x).sum().backward()
        solo(x).sum().backward(inputs=[net.weight])
        with torch.no_grad():
            net.weight += 1
    assert "inputs" in solo.recorder.pack()
