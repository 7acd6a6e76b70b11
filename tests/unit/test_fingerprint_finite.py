"""Whether what was fingerprinted was finite: told by the same reading where the engine can, elsewhere by extremes."""

import pytest
import torch

from sdcrun.shim import fingerprint as fp

pytestmark = pytest.mark.usefixtures("each_implementation")

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
BAD = [float("nan"), float("inf"), float("-inf")]
LENGTHS = [1, 2, 7, 1025, 70_001]


def told(*tensors, judge=True):
    collector = fp.Collector()
    collector.extend(tensors, judge=judge)
    table = collector.table()
    assert torch.equal(table, fp.fingerprints(tensors))
    return collector.finite()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_one_element_anywhere(dtype, bad, length):
    for place in {0, length // 2, length - 1}:
        tensor = torch.ones(length, dtype=dtype)
        assert told(tensor)
        tensor[place] = bad
        assert not told(torch.ones(3), tensor, torch.ones(3))
        assert told(tensor, judge=False)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_misaligned_memory_and_gaps(dtype):
    memory = torch.ones(2_001, dtype=dtype)
    for tensor in (memory[1:], memory[1:1000:2], memory[1:].view(50, 40).t()):
        assert told(tensor)
        tensor[3] = float("inf")
        assert not told(tensor)
        memory.fill_(1.0)


def test_conjugates():
    tensor = torch.ones(5, dtype=torch.complex128).conj()
    assert told(tensor)
    assert not told(tensor * float("inf")) and not told((tensor * float("nan")).conj())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_several_parts():
    """Their own operations are not to be had where they are read: each part is looked at."""
    bad = torch.tensor([1.0, float("inf")])
    for dtype in (torch.float32, torch.float64):
        good = torch.ones(2, dtype=dtype)
        for other, fine in ((good, True), (bad.to(dtype), False)):
            assert told(torch.nested.nested_tensor([good, other])) is fine
            assert told(torch.sparse_coo_tensor([[0, 2]], other, (4,)).coalesce()) is fine


def test_the_largest_and_the_smallest_numbers_are_finite():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        info = torch.finfo(dtype)
        tensor = torch.tensor([info.max, -info.smallest_normal, info.tiny, -0.0], dtype=dtype)
        assert told(tensor) and told(tensor[1:])


def test_every_bit_pattern_of_half_precision():
    """Alone and in either half of a word."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = patterns.view(dtype)
        finite = values.isfinite()
        assert told(values[finite]) and told(torch.ones(1, dtype=dtype), values[finite][1:])
        for value in values[~finite][:: 97 if dtype is torch.float16 else 11]:
            assert not told(torch.stack([value, torch.ones_like(value)]))
            assert not told(torch.stack([torch.ones_like(value), value]))


def test_integers_and_what_is_not_judged_say_nothing():
    words = torch.full((9,), 0x7F80_0000, dtype=torch.int32)
    assert told(words) and told(torch.zeros(0)) and told()
    collector = fp.Collector()
    collector.add(torch.tensor([float("nan")]))
    collector.add(torch.ones(2), judge=True)
    collector.table()
    assert collector.finite()
    collector.add(torch.tensor([float("nan")]), judge=True)
    collector.table()
    assert not collector.finite()


def test_large_finite_numbers_are_not_taken_for_an_overflow():
    """The sum of the elements is infinite and no element is."""
    assert told(torch.full((100,), 3e38))
