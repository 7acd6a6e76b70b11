"""What a fault does to values: bits in every dtype, kinds, runs of neighbours, ranges; and what it leaves alone."""

import math
import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun.core.faultspec import parse
from sdcrun.shim.inject_values import Hit, strike


@settings(max_examples=150)
@given(st.floats(width=32, allow_nan=False), st.integers(0, 31))
def test_bit_flip_in_fp32_against_struct(value, bit):
    tensor = torch.tensor([1.0, value, 2.0])
    hit = strike(tensor, parse(f"weight:index=1,bit={bit}"), random.Random(0))
    before = struct.unpack("<I", struct.pack("<f", value))[0]
    assert struct.unpack("<I", struct.pack("<f", tensor[1].item()))[0] & 0x7FBFFFFF == (before ^ 1 << bit) & 0x7FBFFFFF
    assert tensor.view(torch.int32)[1].item() & 0xFFFFFFFF == before ^ 1 << bit
    assert (tensor[0], tensor[2]) == (1.0, 2.0)
    assert (hit.index, hit.bits, hit.elements) == (1, [bit], 1)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32,
          torch.int16, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_flip_changes_that_bit_alone_in_every_dtype(dtype):
    shape = (4, 3)
    tensor = torch.arange(12).view(shape).to(dtype)
    width = 8 * torch.view_as_real(tensor).element_size() if dtype.is_complex else 8 * tensor.element_size()
    for bit in (0, width - 1):
        wrong = tensor.clone()
        hit = strike(wrong, parse(f"weight:index=5,bit={bit}"), random.Random(0))
        pattern = [a ^ b for a, b in zip(_patterns(wrong, width), _patterns(tensor, width), strict=True)]
        assert [p & (1 << width) - 1 for p in pattern] == [1 << bit if i == 5 else 0 for i in range(len(pattern))]
        assert hit.bits == [bit]
    if width < 64:
        assert f"bits 0 to {width - 1}" in strike(tensor, parse(f"weight:bit={width}"), random.Random(0))


def _patterns(tensor, width):
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(integer).flatten().tolist()


@pytest.mark.parametrize(("kind", "expected"), [
    ("nan", "nan"), ("inf", "-inf"), ("zero", 0.0), ("scale,by=-4", 10.0), ("sign", 2.5), ("stuck,bit=31,to=0", 2.5),
])
def test_kinds(kind, expected):
    tensor = torch.tensor([[7.0, 8.0], [-2.5, 9.0]])
    hit = strike(tensor, parse(f"weight:index=2,kind={kind}"), random.Random(0))
    assert isinstance(hit, Hit) and (hit.before, hit.after) == (-2.5, expected)
    observed = tensor[1, 0].item()
    assert observed == float(expected) or math.isnan(observed) and expected == "nan"
    assert tensor[0].tolist() == [7.0, 8.0] and tensor[1, 1] == 9.0


def test_a_run_of_neighbours_and_a_strided_tensor():
    tensor = torch.arange(1.0, 13.0).view(3, 4).t()
    strike(tensor, parse("weight:index=5,count=3,kind=zero"), random.Random(0))
    flat = tensor.flatten().tolist()
    assert [i for i, v in enumerate(flat) if v == 0] == [5, 6, 7]
    end = torch.ones(10)
    strike(end, parse("weight:index=9,count=4,kind=zero"), random.Random(0))
    assert end.tolist() == [1.0] * 6 + [0.0] * 4
    scalar = torch.tensor(3.0)
    assert strike(scalar, parse("loss:kind=scale,by=2"), random.Random(0)).after == 6.0 and scalar == 6.0


def test_operand_range_and_draws_only_what_can_change():
    tensor = torch.tensor([0.0, 1e-6, 5.0, 0.0, 100.0])
    for number in range(20):
        wrong = tensor.clone()
        hit = strike(wrong, parse("weight:kind=sign,when=1e-3:10"), random.Random(number))
        assert hit.index == 2
        assert strike(tensor.clone(), parse("weight:kind=zero"), random.Random(number)).index in (1, 2, 4)
    run = strike(tensor, parse("weight:kind=sign,index=0,count=5,when=1e-3:10"), random.Random(0))
    assert (run.index, run.elements) == (2, 1)
    assert "magnitude" in strike(tensor, parse("weight:when=1e5:1e6"), random.Random(0))


@pytest.mark.parametrize(("text", "tensor", "words"), [
    ("weight:kind=nan", torch.ones(3, dtype=torch.int64), "means nothing for a int64"),
    ("weight:index=7", torch.ones(3), "past the end"),
    ("weight:bit=40", torch.ones(3), "bits 0 to 31"),
    ("weight:kind=zero,index=0", torch.zeros(3), "kept their values"),
    ("weight:kind=zero", torch.zeros(3), "no element"),
    ("weight", torch.ones(0), "means nothing"),
])
def test_what_cannot_fire_says_why(text, tensor, words):
    before = tensor.clone()
    assert words in strike(tensor, parse(text), random.Random(0))
    assert torch.equal(tensor, before)


def test_random_bits():
    def bits(site, dtype):
        tensors = [torch.ones(1, dtype=dtype) for _ in range(300)]
        return {strike(t, parse(site), random.Random(n)).bits[0] for n, t in enumerate(tensors)}

    assert bits("gradient", torch.float32) == set(range(32))
    assert bits("activation", torch.float32) == set(range(11, 32)) == bits("saved", torch.float32)
    assert bits("activation", torch.bfloat16) == set(range(16))
    assert bits("input", torch.int64) == {0}


def test_strike_is_unseen_by_version_counters_and_by_the_global_generators():
    tensor, generators = torch.ones(100, requires_grad=True), (torch.get_rng_state(), random.getstate())
    version = tensor._version
    strike(tensor, parse("weight:kind=bitflip,count=9"), random.Random(3))
    assert tensor._version == version
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
