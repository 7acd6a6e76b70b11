"""A micro-batch's tensors, random states and modes survive the trip to another rank bit for bit."""

import dataclasses
import pickle
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun.shim.microbatch import ALIGNMENT, Autocast, Random, dumps, freeze, loads, pack, tensors_of, unpack

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def trip(tensor):
    return unpack(pickle.loads(pickle.dumps(pack(freeze(tensor), tensor.requires_grad))), CPU)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 5), max_size=4), st.sampled_from(DTYPES), st.integers(0, 20), st.randoms(), st.booleans()
)
def test_values_strides_and_alignment_survive(shape, dtype, offset, rnd, grad):
    count = int(np.prod(shape)) if shape else 1
    room = torch.randint(0, 100, (count + offset,)).to(dtype)
    tensor = room[offset : offset + count].view(shape)
    axes = list(range(len(shape)))
    rnd.shuffle(axes)
    tensor = tensor.permute(axes)
    grad = grad and dtype.is_floating_point
    tensor.requires_grad_(grad)
    copy = trip(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride() and copy.dtype == dtype
    assert copy.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT or not count
    assert copy.requires_grad == grad and copy.is_leaf and copy._base is None


@pytest.mark.parametrize("tensor", [
    torch.arange(5.0)[:, None].expand(5, 1000),
    torch.randn(50, 4000)[:, :3],
    torch.arange(10.0).unfold(0, 3, 1),
    torch.eye(4).to_sparse(),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),
    torch.tensor(float("nan")),
])  # fmt: skip
def test_odd_layouts_survive(tensor):
    copy = trip(tensor)
    one, two = (t.to_dense() if t.is_sparse else t.resolve_conj() for t in (copy, tensor))
    assert torch.equal(one, two) or bool(torch.isnan(one).all() and torch.isnan(two).all())


def test_broadcast_and_sliced_tensors_travel_without_what_they_do_not_show():
    assert len(pack(torch.arange(5.0)[:, None].expand(5, 1000), False).payload) == 20
    assert len(pack(torch.randn(50, 4000)[:, :3], False).payload) == 600


def test_frozen_copy_keeps_the_original_place():
    tensor = torch.randn(257)[1:]
    before = tensor.clone()
    frozen = freeze(tensor)
    tensor.zero_()
    copy = unpack(pack(frozen, False), CPU)
    assert torch.equal(copy, before)
    assert copy.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Data:
    x: torch.Tensor
    more: object = None


class Plain:
    def __init__(self, x):
        self.x, self.again = x, self


def test_tensors_are_found_in_any_nesting_and_in_order():
    t = [torch.tensor(float(i)) for i in range(6)]
    value = {"a": [t[0], (t[1], "text", 3)], "b": Pair(t[2], {"c": Data(t[3], more=[t[4]])}), "d": Plain(t[5])}
    assert [float(x) for x in tensors_of(value)] == [0, 1, 2, 3, 4, 5]
    assert tensors_of(torch.nn.Linear(2, 2)) == [] and tensors_of(len) == []


def test_pickle_keeps_structure_devices_and_generators():
    generator = torch.Generator().manual_seed(4)
    x = torch.arange(3)
    kept = []
    data = dumps({"x": [x, x], "d": CPU, "g": generator, "n": Pair(1, x)}, lambda t: kept.append(t) or len(kept))
    value = loads(data, lambda number: kept[number - 1], CPU)
    assert value["x"][0] is x and isinstance(value["n"], Pair) and value["d"] == CPU
    assert torch.equal(torch.rand(3, generator=value["g"]), torch.rand(3, generator=generator))
    assert len(kept) == 3


def test_what_cannot_be_shipped_raises():
    with pytest.raises((pickle.PicklingError, AttributeError)):
        dumps([lambda x: x], lambda t: 0)


def test_random_states_come_back():
    def draw():
        return torch.rand(2).tolist(), random.random(), float(np.random.rand())

    state = pickle.loads(pickle.dumps(Random.now().shipped()))
    first = draw()
    assert draw() != first
    state.restore(foreign=True)
    assert draw() == first


def test_autocast_is_applied_and_taken_back():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = pickle.loads(pickle.dumps(Autocast.now()))
    assert inside.on and not Autocast.now().on
    with inside.applied():
        assert torch.is_autocast_enabled("cpu") and torch.mm(torch.eye(2), torch.eye(2)).dtype is torch.bfloat16
        with Autocast.off().applied():
            assert torch.mm(torch.eye(2), torch.eye(2)).dtype is torch.float32
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
