"""Which micro-batch of an accumulation window is audited, window after window."""

from types import SimpleNamespace

import pytest
import torch

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
