"""A bucket is divided with torch's bits, and judged in the same pass."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdcrun.shim.checks import divide

needs_library = pytest.mark.skipif(divide._scale() is None, reason="no compiled library")


@needs_library
@given(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=70), st.integers(2, 20_000), st.integers(0, 7)
)
def test_bits_and_verdict_are_those_of_torch(words, world, start):
    buffer = torch.tensor([0] * start + words, dtype=torch.int32).view(torch.float32)[start:]
    right = buffer.clone().mul_(1.0 / world)
    finite = bool(buffer.isfinite().all())
    assert divide.multiplied(buffer, 1.0 / world) is finite
    numbers = ~right.isnan()
    assert torch.equal(buffer.isnan(), right.isnan())
    assert torch.equal(buffer[numbers].view(torch.int32), right[numbers].view(torch.int32))


@needs_library
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 1000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_one_that_is_not_finite_is_found_at_every_place(length, bad):
    for place in range(length):
        buffer = torch.full((length,), torch.finfo(torch.float32).max)
        assert divide.multiplied(buffer, 0.25) is True
        buffer[place] = bad
        assert divide.multiplied(buffer, 0.25) is False


@needs_library
def test_numbers_below_the_normal_ones_follow_the_setting_of_the_thread():
    tiny = torch.full((33,), 3e-39)
    for flush in (True, False):
        if not torch.set_flush_denormal(flush):
            pytest.skip("this processor has no such setting")
        ours, theirs = tiny.clone(), tiny.clone().mul_(0.5)
        divide.multiplied(ours, 0.5)
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize(
    "buffer",
    [
        torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.complex64),
        torch.ones(8)[::2], torch.eye(2).to_sparse(), torch.ones(2, device="meta"),
    ],
    ids=["float64", "bfloat16", "complex", "gaps", "sparse", "elsewhere"],
)  # fmt: skip
def test_everything_else_is_left_alone(buffer):
    before = buffer.clone()
    assert divide.multiplied(buffer, 0.5) is None
    assert buffer.device.type == "meta" or torch.equal(buffer.to_dense(), before.to_dense())


@pytest.mark.parametrize("wrong", [lambda a, n, f: 0, lambda a, n, f: 1])
def test_a_library_that_computes_something_else_is_not_used(wrong):
    assert divide.agrees(wrong) is False


def test_without_a_library():
    code = (
        "import sys; sys.modules['sdcrun.shim.fingerprint.native'] = None\n"
        "import torch; from sdcrun.shim.checks import divide\n"
        "assert divide.multiplied(torch.ones(3), 0.5) is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=100)
