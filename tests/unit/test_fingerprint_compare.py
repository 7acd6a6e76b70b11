"""Metadata, digests and the place where two tensors differ."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun.shim import fingerprint as fp


def test_metadata_of_plain_tensors():
    assert fp.metadata(torch.randn(3, 4).t()) == ("torch.float32", (4, 3), (1, 4), 48)
    assert fp.metadata(torch.nn.Parameter(torch.ones(2).bfloat16())) == ("torch.bfloat16", (2,), (1,), 4)
    assert fp.metadata(torch.tensor(True)) == ("torch.bool", (), (), 1)


def test_metadata_ignores_strides_that_mean_nothing():
    a = torch.randn(5, 1, 3)
    b = a.as_strided((5, 1, 3), (3, 77, 1))
    assert fp.metadata(a) == fp.metadata(b)
    assert torch.equal(fp.fingerprints([a]), fp.fingerprints([b]))


def test_metadata_of_sparse_tensors_is_plain_data():
    kind, shape, parts, nbytes = fp.metadata(torch.eye(3).to_sparse())
    assert (kind, shape, nbytes) == ("torch.sparse_coo", (3, 3), 2 * 3 * 8 + 3 * 4)
    assert parts == (("torch.int64", (2, 3), (3, 1), 48), ("torch.float32", (3,), (1,), 12))
    json.dumps([kind, shape, parts, nbytes])


def test_digest_depends_on_rows_order_and_metadata():
    table = fp.fingerprints([torch.ones(3), torch.zeros(5), torch.arange(9)])
    metas = [fp.metadata(t) for t in (torch.ones(3), torch.zeros(5), torch.arange(9))]
    base = fp.digest(table, metas)
    assert base == fp.digest(table.clone(), list(metas)) == fp.digest(table, fp.encode_metas(metas))
    others = {
        fp.digest(table.flip(0), metas),
        fp.digest(table, metas[::-1]),
        fp.digest(table[:2], metas),
        fp.digest(table, metas[:2]),
        fp.digest(table.flip(1), metas),
        fp.digest(table),
    }
    assert len(others | {base}) == 7
    assert all(-(2**63) <= half < 2**63 for half in base)
    assert fp.digest(table[::2]) == fp.digest(table[::2].clone())


def test_digest_is_the_same_for_ever():
    table = torch.tensor([[1, -2], [3, 2**63 - 1]])
    assert fp.digest(table, [("torch.float32", (2,), (1,), 8)]) == (-4039611654985113636, 2146254505789902428)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64]),
    flips=st.sets(st.tuples(st.integers(0, 59), st.integers(0, 127)), min_size=1, max_size=6),
    transposed=st.booleans(),
)
def test_differing_words_of_random_flips(dtype, flips, transposed):
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (60 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = raw.view(dtype).view(6, 10)
    damaged = raw.clone()
    bits = {}
    for element, bit in flips:
        bit %= 8 * size
        damaged[element * size + bit // 8] ^= 1 << bit % 8
        bits.setdefault(element, set()).symmetric_difference_update({bit})
    bits = {element: sorted(found) for element, found in bits.items() if found}
    observed = damaged.view(dtype).view(6, 10)
    if transposed:
        observed = observed.t().contiguous().t()
    found = fp.differing_words(expected, observed)
    if not bits:
        assert found == fp.Difference(words=0)
        return
    first = min(bits)
    assert found.index == first
    assert list(found.element_bits) == bits[first]
    assert found.words == len({(element * size * 8 + bit) // 32 for element in bits for bit in bits[element]})
    difference = int(found.expected_word, 16) ^ int(found.observed_word, 16)
    assert [bit for bit in range(32) if difference >> bit & 1] == list(found.bits)
    json.dumps(found.as_dict(), allow_nan=False)


def test_difference_names_word_bits_and_values():
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0])
    observed = expected.clone()
    observed.view(torch.int32)[2] ^= 1 << 30
    observed[3] = -4.0
    found = fp.differing_words(expected, observed)
    assert (found.words, found.index, found.bits, found.element_bits) == (2, 2, (30,), (30,))
    assert (found.expected_word, found.observed_word) == ("40400000", "00400000")
    assert found.expected_value == 3.0 and 0 < found.observed_value < 1e-38


def test_two_elements_of_one_word_count_once():
    expected = torch.ones(4, dtype=torch.bfloat16)
    observed = expected.clone()
    observed[1] = observed[2] = observed[3] = 2.0
    found = fp.differing_words(expected, observed)
    assert (found.words, found.index) == (2, 1)
    assert found.element_bits[0] + 16 == found.bits[0]


def test_nan_payloads_and_negative_zero():
    nan = torch.tensor([math.nan, 0.0])
    assert fp.differing_words(nan, nan.clone()).words == 0
    found = fp.differing_words(nan, torch.tensor([math.nan, -0.0]))
    assert (found.words, found.index, found.bits) == (1, 1, (31,))
    observed = torch.tensor([math.inf, 0.0])
    found = fp.differing_words(nan, observed).as_dict()
    assert (found["expected_value"], found["observed_value"]) == ("nan", "inf")


def test_larger_than_a_block_and_sparse():
    expected = torch.zeros(3 << 20, dtype=torch.int32)
    observed = expected.clone()
    observed[2 << 20] = 1
    observed[(2 << 20) + 5] = 1
    found = fp.differing_words(expected, observed)
    assert (found.words, found.index, found.observed_value) == (2, 2 << 20, 1)
    a, b = torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()
    assert fp.differing_words(a, b).words == 3


def test_a_single_element_of_a_strided_tensor():
    base = torch.randn(4, 4)
    assert fp.differing_words(base[1:2, 1:2].t(), base[1:2, 1:2].clone()).words == 0
    assert fp.differing_words(torch.tensor(1.0), torch.tensor(2.0)).index == 0
    assert fp.differing_words(torch.empty(0, 3), torch.empty(0, 3)).words == 0


def test_unlike_tensors_are_refused():
    with pytest.raises(ValueError, match="cannot compare"):
        fp.differing_words(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="cannot compare"):
        fp.differing_words(torch.ones(2), torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="cannot compare"):
        fp.differing_words(torch.ones(2), torch.ones(2).bfloat16())
