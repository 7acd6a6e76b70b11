"""Scripts that flip bits on a rank are told from those that compute something else there."""

import pytest
import torch
import torch.nn.functional as F
from replaykit import Solo, data
from torch import nn

from sdcrun.shim.replay.asked import Asked, flips_bits
from sdcrun.shim.replay.run import replay

RANK = 0


def flip_of_a_view(x):
    x = x.clone()
    x.view(-1).view(torch.int32)[3] ^= 1 << 20
    return x


def flip_of_a_copy(x):
    return torch.bitwise_xor(x.detach().view(torch.int32), 1 << 20).view(torch.float32) + (x - x.detach())


def flip_in_numpy(x):
    x = x + 0.0
    x.detach().numpy().view("u4").reshape(-1)[3] ^= 1 << 20
    return x + 0.0


def flip_of_the_data(x):
    x.data.view(torch.int32).view(-1)[3] ^= 1 << 20
    return x


def scale(x):
    return x * 1.01


def mask(x):
    odd = torch.arange(x.numel()).view(x.shape) % 2 == 1
    return torch.where(odd & (x > 0) | ~odd, x, 0.5 * x)


def in_place(x):
    y = x.clone()
    y.view(-1).mul_(1.5)
    return y.add_(1.0)


class Net(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(6, 8), nn.Linear(8, 3), act

    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        hidden = in_place(hidden)
        if RANK == 1:
            hidden = self.act(hidden)
        return self.b(hidden)


@pytest.mark.parametrize("act, flips", [
    (flip_of_a_view, True), (flip_of_a_copy, True), (flip_in_numpy, True), (flip_of_the_data, True),
    (scale, False), (mask, False), (in_place, False),
])  # fmt: skip
def test_what_a_rank_does_alone(act, flips, monkeypatch):
    monkeypatch.setitem(globals(), "RANK", 1)
    x, y = data()
    with Solo(Net(act)) as solo:
        F.cross_entropy(solo(x), y).backward()
    parcel = solo.parcel()
    monkeypatch.setitem(globals(), "RANK", 0)
    theirs, ours, local = Asked(), Asked(), solo.recorder.local
    with_theirs = replay(parcel.program, solo.guards, local, owners=True, asked=theirs)
    with_ours = replay(parcel.program, solo.guards, local, asked=ours)
    assert with_theirs.table == parcel.expected != with_ours.table
    assert flips_bits(theirs, ours) is flips and not flips_bits(ours, ours)


def test_what_cannot_be_looked_at_says_nothing():
    asked = Asked()
    with asked:
        assert torch.sparse.sum(torch.eye(3).to_sparse()) == 3.0
        assert torch.ones(2, device="meta").add(1).shape == (2,)
    assert not flips_bits(asked, Asked())


def test_memory_that_is_used_again_is_no_change():
    asked = Asked()
    with asked:
        for number in range(200):
            # Below the dispatch, as what autograd makes of a Python number.
            with torch._C._DisableTorchDispatch():
                scalar = torch.full((), float(number))
            scalar.add(1.0)
            del scalar
    assert asked.changed == 0
