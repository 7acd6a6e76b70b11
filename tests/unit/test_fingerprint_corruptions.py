"""What FP1 must see: every pattern of corruption that some weaker and tempting sum misses.

Each test also shows that the weaker sum does miss the pattern; otherwise it would prove nothing about FP1.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun.shim import fingerprint as fp

pytestmark = pytest.mark.usefixtures("each_implementation")

WORDS = 4096


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(words: int = WORDS, seed: int = 0) -> torch.Tensor:
    return torch.randn(words, generator=generator(seed))


def caught(before: torch.Tensor, damaged: list[torch.Tensor]) -> int:
    """How many of the damaged copies FP1 tells from the original."""
    table = fp.fingerprints([before, *damaged])
    return int((table[1:] != table[0]).any(1).sum())


def plain_pair(t: torch.Tensor, words: torch.dtype = torch.int32) -> tuple[int, int]:
    """The textbook pair (Σ w, Σ (i+1)·w) modulo 2^64."""
    w = t.view(words).long()
    return int(w.sum()), int((w * torch.arange(1, w.numel() + 1)).sum())


def pair64(t: torch.Tensor) -> tuple[int, int]:
    return plain_pair(t, torch.int64)


def xor(t: torch.Tensor) -> int:
    value = t.view(torch.int32)
    while value.numel() > 1:
        if value.numel() % 2:
            value = torch.cat([value, value.new_zeros(1)])
        value = value[::2] ^ value[1::2]
    return int(value)


def float_norm(t: torch.Tensor) -> float:
    return float(t.double().norm())


def float_sum(t: torch.Tensor) -> float:
    return float(t.sum())


def word_sum(t: torch.Tensor) -> int:
    return plain_pair(t)[0]


def missed_by(weak, before: torch.Tensor, damaged: list[torch.Tensor]) -> int:
    expected = weak(before)
    return sum(weak(each) == expected for each in damaged)


def flipped(t: torch.Tensor, indices, bit: int) -> torch.Tensor:
    """A copy with one bit of the given 32-bit words flipped."""
    damaged = t.clone()
    mask = -(2**31) if bit == 31 else 1 << bit
    damaged.view(torch.int32)[indices] ^= mask
    return damaged


def two_signs():
    t = floats()
    draws = torch.randint(0, WORDS // 2, (200, 2), generator=generator(1))
    return t, [flipped(t, torch.tensor([2 * a + 1, 2 * b + 1]), 31) for a, b in draws.tolist() if a != b]


def odd_negated():
    t = floats()
    damaged = t.clone()
    damaged[1::2] *= -1
    return t, [damaged]


def lane_negated():
    t = floats()
    result = []
    for lane in range(1, 16, 2):
        damaged = t.clone()
        damaged[lane::16] *= -1
        result.append(damaged)
    return t, result


def odd_bit_30():
    t = torch.rand(WORDS, generator=generator(0))
    return t, [flipped(t, torch.arange(1, WORDS, 2), 30)]


def second_difference():
    t = floats()
    result = []
    for start in range(0, 900, 9):
        damaged = t.clone()
        d = 12345 + start
        damaged.view(torch.int32)[start : start + 3] += torch.tensor([d, -2 * d, d], dtype=torch.int32)
        result.append(damaged)
    return t, result


def same_bit_in_a_line():
    """The same bit in four words of one 64-byte line: it often cancels in the plain pair when words agree in the bit in
    two and differ in two."""
    t = floats(65536)
    draws = torch.rand(3000, 16, generator=generator(2)).argsort(1)[:, :4]
    lines = torch.randint(0, 65536 // 16, (3000, 1), generator=generator(3))
    bits = torch.randint(0, 23, (3000,), generator=generator(4))
    return t, [flipped(t, row, bit) for row, bit in zip(draws + 16 * lines, bits.tolist())]


def swapped(size: int):
    def make():
        t = floats()
        result = []
        for a, b in torch.randint(0, WORDS // size, (100, 2), generator=generator(5)).tolist():
            if a != b:
                damaged = t.clone()
                damaged[a * size : (a + 1) * size] = t[b * size : (b + 1) * size]
                damaged[b * size : (b + 1) * size] = t[a * size : (a + 1) * size]
                result.append(damaged)
        return t, result

    return make


def swapped_mask_lines():
    """Two 64-byte lines of a 0/1 mask change places: small numbers, so the plain pair can cancel."""
    t = torch.randint(0, 2, (WORDS,), generator=generator(6)).float()
    result = []
    for a, b in torch.randint(0, WORDS // 16, (3000, 2), generator=generator(7)).tolist():
        one, two = slice(16 * a, 16 * a + 16), slice(16 * b, 16 * b + 16)
        if not torch.equal(t[one], t[two]):
            damaged = t.clone()
            damaged[one], damaged[two] = t[two], t[one]
            result.append(damaged)
    return t, result


def one_low_bit():
    t = floats()
    return t, [flipped(t, i, 0) for i in range(0, WORDS, 10)]


def any_bit_twice():
    t = floats()
    draws = torch.randint(0, WORDS, (400, 2), generator=generator(8)).tolist()
    return t, [flipped(t, torch.tensor([a, b]), i % 32) for i, (a, b) in enumerate(draws) if a != b]


def random_flips(count: int):
    def make():
        t = floats()
        result = []
        for seed in range(300):
            where = torch.randperm(WORDS, generator=generator(seed))[:count]
            bits = torch.randint(0, 31, (count,), generator=generator(1000 + seed), dtype=torch.int32)
            damaged = t.clone()
            damaged.view(torch.int32)[where] ^= torch.ones((), dtype=torch.int32) << bits
            result.append(damaged)
        return t, result

    return make


# Pattern, the weaker sum that is blind to it, and the least share of the cases that it misses.
CASES = {
    "two sign flips, 64-bit words": (two_signs, pair64, 0.05),
    "two sign flips, norm": (two_signs, float_norm, 1.0),
    "two sign flips, xor": (two_signs, xor, 1.0),
    "all odd elements negated, 64-bit words": (odd_negated, pair64, 1.0),
    "a lane negated, 64-bit words": (lane_negated, pair64, 1.0),
    "bit 30 of all odd elements, 64-bit words": (odd_bit_30, pair64, 1.0),
    "+d, -2d, +d, plain pair": (second_difference, plain_pair, 1.0),
    "same bit in four words of a line, plain pair": (same_bit_in_a_line, plain_pair, 0.005),
    "same bit in four words of a line, sum": (same_bit_in_a_line, word_sum, 0.2),
    "words swapped, sum": (swapped(1), word_sum, 1.0),
    "words swapped, xor": (swapped(1), xor, 1.0),
    "lines swapped, sum": (swapped(16), word_sum, 1.0),
    "lines swapped, norm": (swapped(16), float_norm, 0.3),
    "pages swapped, sum": (swapped(1024), word_sum, 1.0),
    "mask lines swapped, plain pair": (swapped_mask_lines, plain_pair, 0.001),
    "mask lines swapped, xor": (swapped_mask_lines, xor, 1.0),
    "one low bit, float sum": (one_low_bit, float_sum, 0.1),
    "the same bit twice, xor": (any_bit_twice, xor, 1.0),
    "two random flips, xor": (random_flips(2), xor, 0.005),
}


@pytest.mark.parametrize("name", CASES)
def test_fp1_sees_what_the_weaker_sum_misses(name):
    make, weak, share = CASES[name]
    before, damaged = make()
    damaged = [each for each in damaged if not torch.equal(each.view(torch.int32), before.view(torch.int32))]
    assert missed_by(weak, before, damaged) >= max(1, share * len(damaged))
    assert caught(before, damaged) == len(damaged) > 0


@pytest.mark.parametrize("count", [1, 3, 4, 8, 64])
def test_random_flips(count):
    before, damaged = random_flips(count)()
    assert caught(before, damaged) == len(damaged) == 300


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.bool])
def test_swaps_in_other_types(dtype):
    t = (torch.randn(4096, generator=generator(9)) > 0) if dtype is torch.bool else floats().mul(50).to(dtype)
    size = 64 // t.element_size()
    damaged = []
    for a in range(0, 20, 2):
        one, two = slice(a * size, (a + 1) * size), slice((a + 1) * size, (a + 2) * size)
        each = t.clone()
        each[one], each[two] = t[two], t[one]
        if not torch.equal(each, t):
            damaged.append(each)
    assert caught(t, damaged) == len(damaged) > 5


@settings(max_examples=60)
@given(
    words=st.lists(st.tuples(st.integers(0, 65535), st.integers(-(2**31), 2**31 - 1)), min_size=1, max_size=2),
    base=st.sampled_from([0, -1, 1, 2**31 - 1, -(2**31)]),
)
def test_any_corruption_of_two_words_of_a_chunk_is_seen(words, base):
    t = torch.full((65536,), base, dtype=torch.int32)
    damaged = t.clone()
    for index, value in words:
        damaged[index] = value
    assert caught(t, [damaged]) == int(not torch.equal(t, damaged))


def test_corruption_across_chunks_is_seen():
    """What one chunk loses another gains at the same position: only the mixing tells chunks apart."""
    t = torch.randint(-(2**31), 2**31, (4 * 65536,), generator=generator(10)).int()
    moved = t.clone()
    moved[5] += 1000
    moved[65536 + 5] -= 1000
    exchanged = t.clone()
    exchanged[:65536], exchanged[65536 : 2 * 65536] = t[65536 : 2 * 65536], t[:65536]
    assert missed_by(word_sum, t, [moved, exchanged]) == 2
    assert caught(t, [moved, exchanged]) == 2


def test_length_shows_where_zeros_do_not_add():
    zeros = [torch.zeros(n, dtype=torch.int32) for n in (65536, 65537)]
    assert caught(zeros[0], [zeros[1]]) == 1
    short, longer = torch.zeros(5), torch.zeros(6)
    assert caught(short, [longer]) == 0 and fp.metadata(short) != fp.metadata(longer)
