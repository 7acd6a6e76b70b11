"""Small tensors and arrays of the script, which may be others on each rank or move behind the forward."""

import numpy as np
import pytest
import torch
from replaykit import Solo, data
from torch import nn

from sdcrun.shim.replay.filling import LARGEST, fill, filling_of
from sdcrun.shim.replay.run import replay

SCALE, TABLE, BANK = torch.ones(3), np.ones((2, 3), dtype="float32"), [torch.ones(6)]
MEAN = torch.zeros(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        y = self.a(x + BANK[0]) * SCALE * torch.as_tensor(TABLE[0]) - MEAN
        MEAN.mul_(0.5).add_(y.detach().mean(0))
        return y


def change(factor):
    SCALE.mul_(factor)
    TABLE[0] *= factor
    BANK[0] = BANK[0] * factor


def contents():
    return [SCALE.tolist(), TABLE.tolist(), BANK[0].tolist(), MEAN.tolist()]


@pytest.fixture
def solo():
    MEAN.zero_()
    with Solo(Net()) as solo:
        solo(data()[0]).sum().backward()
    yield solo
    for tensor in (SCALE, BANK[0]):
        tensor.fill_(1.0)
    TABLE[:] = 1


def test_what_has_moved_since_is_as_the_forward_found_it(solo):
    change(3.0)
    before, versions = contents(), (SCALE._version, BANK[0]._version)
    expected, result = solo.again()
    assert expected == result.table and "loss" in expected
    assert contents() == before and (SCALE._version, BANK[0]._version) == versions


def test_those_of_the_owner_for_a_forward_that_depends_on_the_rank(solo):
    parcel = solo.parcel()
    change(3.0)
    before, local = contents(), solo.recorder.local
    assert replay(parcel.program, solo.guards, local).table != parcel.expected
    assert replay(parcel.program, solo.guards, local, owners=True).table == parcel.expected
    assert contents() == before


KINDS = {
    "numbers": torch.tensor([1.5, 2.0]),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]),
    "flags": torch.tensor([True, False]),
    "a number": torch.tensor(3),
    "nothing": torch.zeros(0, 2),
    "array": np.arange(6).reshape(2, 3),
    "array of columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_where_it_came_from(kind):
    value = KINDS[kind]
    filling = filling_of(value)
    cleared = torch.zeros_like(value) if isinstance(value, torch.Tensor) else np.zeros_like(value)
    fill(cleared, filling)
    assert filling_of(cleared) == filling and (cleared == value).all()


OTHERS = [torch.ones(3), torch.ones(2, dtype=torch.float64), np.ones(2), np.ones(3, "float32")]


@pytest.mark.parametrize("other", OTHERS)
def test_another_kind_of_place_is_left_alone(other):
    before = other.tolist()
    fill(other, filling_of(torch.zeros(2)))
    assert other.tolist() == before


@pytest.mark.parametrize("value", [
    torch.zeros(LARGEST // 4 + 1), np.zeros(LARGEST // 8 + 1), torch.zeros(2, requires_grad=True), torch.eye(2)[:, :1],
    nn.Parameter(torch.zeros(1)), torch.eye(2).to_sparse(), torch.zeros(2, device="meta"), np.array(["a"]),
    np.array([object()]), np.broadcast_to(np.zeros(1), (3,)), torch.nn.Linear(1, 1), "text", None,
])  # fmt: skip
def test_what_is_none(value):
    assert filling_of(value) is None
