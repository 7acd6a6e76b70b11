"""FP1: every implementation gives the bits of the numpy reference, for every kind of tensor."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun.shim import fingerprint as fp
from sdcrun.shim.fingerprint import engines, fp1, layout, reference, torch_ops
from sdcrun.shim.fingerprint.quiet import quiet

pytestmark = pytest.mark.usefixtures("each_implementation")

SIZES = [0, 1, 7, 1023, 1024, 1025, 65535, 65536, 65537, 131072, 300001, 8 * 65536 + 3]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, uint8."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def rows(table: torch.Tensor) -> list[tuple[int, int]]:
    assert table.dtype == torch.int64 and table.device.type == "cpu"
    return [tuple(row) for row in table.tolist()]


def one(tensor: torch.Tensor) -> tuple[int, int]:
    return rows(fp.fingerprints([tensor]))[0]


@pytest.mark.parametrize("words", SIZES)
def test_sizes(words):
    tensor = noise(4 * words).view(torch.int32)
    assert one(tensor) == reference.fingerprint(tensor)


def test_extreme_words_wrap_as_the_definition_says():
    for value in (-(2**31), 2**31 - 1, -1):
        tensor = torch.full((65536 * 2 + 5,), value, dtype=torch.int32)
        assert one(tensor) == reference.fingerprint(tensor)


def test_known_values():
    """Literal values, so that the definition cannot drift in all implementations at once."""
    assert one(torch.empty(0)) == (0, 0)
    inner = fp1.mix64(fp1.PHI64 + 1)
    expected = fp1.signed64(fp1.mix64(fp1.weight(0) ^ inner))
    assert one(torch.tensor([1], dtype=torch.int32)) == (1, expected) == (1, 8986730347980439525)
    assert one(torch.arange(100_000, dtype=torch.int32)) == (4999950000, -7083989373261308330)


def test_weights_are_distinct_31_bit_and_equal_everywhere():
    with quiet():
        weights = torch_ops.table(torch.device("cpu")).tolist()
    assert weights == reference.weights().tolist() == [fp1.weight(c) for c in range(fp1.CHUNK_WORDS)]
    assert len(set(weights)) == fp1.CHUNK_WORDS
    assert min(weights) >= 0 and max(weights) < 2**31


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 3, 262_147])
def test_dtypes_and_odd_lengths(dtype, elements):
    raw = noise(elements * torch.empty(0, dtype=dtype).element_size())
    tensor = raw.bitwise_and(1).view(torch.bool) if dtype is torch.bool else raw.view(dtype)
    assert one(tensor) == reference.fingerprint_of_bytes(tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("nbytes", [1, 2, 9, 4096, 262_144, 600_001])
def test_odd_storage_offsets_and_byte_lengths(offset, nbytes):
    tensor = noise(nbytes + offset)[offset:]
    assert one(tensor) == reference.fingerprint(tensor)


def test_memory_that_starts_misaligned():
    data = bytearray(noise(70_001).numpy().tobytes())
    tensor = torch.frombuffer(data, dtype=torch.uint8, offset=1)
    assert one(tensor) == reference.fingerprint_of_bytes(bytes(data[1:]))


STRIDED = {
    "transposed": lambda: torch.randn(300, 257).t(),
    "permuted": lambda: torch.randn(7, 8, 9).permute(2, 0, 1),
    "channels_last": lambda: torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last),
    "ones": lambda: torch.randn(1, 5, 1, 3).transpose(0, 3),
    "sliced": lambda: torch.randn(40, 50)[:, ::2],
    "rows": lambda: torch.randn(40, 50)[3:7],
    "columns": lambda: torch.randn(40, 50)[:, 3:7],
    "sliced_transposed": lambda: torch.randn(40, 50)[::2].t(),
    "expanded": lambda: torch.randn(6, 1).expand(6, 50),
    "expanded_scalar": lambda: torch.randn(()).expand(5, 5),
    "expanded_sliced": lambda: torch.randn(6, 9)[:, ::3].unsqueeze(1).expand(6, 4, 3),
    "overlapping": lambda: torch.randn(20).unfold(0, 5, 1),
    "zero_dim": lambda: torch.tensor(2.5),
    "empty_2d": lambda: torch.empty(0, 5),
    "empty_strided": lambda: torch.empty(4, 0, 3).transpose(0, 2),
    "conjugate": lambda: torch.randn(33, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(33, dtype=torch.complex64).conj().imag,
    "half_offset": lambda: torch.randn(1001).bfloat16()[1:],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides(name):
    tensor = STRIDED[name]()
    assert one(tensor) == reference.fingerprint(tensor)


def test_dense_tensors_are_read_in_storage_order_without_a_copy():
    base = torch.randn(64, 48)
    assert one(base.t()) == one(base) != one(base.t().contiguous())
    assert fp.metadata(base.t()) != fp.metadata(base)


def test_expand_counts_its_storage_once():
    column = torch.randn(6, 1)
    assert one(column.expand(6, 1000)) == one(column)
    assert fp.metadata(column.expand(6, 1000)) != fp.metadata(column)


def test_negative_zero_and_nan_payloads_are_different_bits():
    assert one(torch.tensor([0.0])) != one(torch.tensor([-0.0]))
    quiet_nan = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    signalling = torch.tensor([0x7FA00001], dtype=torch.int32).view(torch.float32)
    assert len({one(quiet_nan), one(other_nan), one(signalling)}) == 3


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_are_indices_then_values():
    dense = torch.zeros(50, 3)
    dense[7, 1], dense[40] = 2.0, -1.0
    coo = dense.to_sparse()
    data = coo.indices().contiguous().numpy().tobytes() + coo.values().numpy().tobytes()
    assert one(coo) == reference.fingerprint_of_bytes(data)
    csr = dense.to_sparse_csr()
    data = b"".join(part.numpy().tobytes() for part in (csr.crow_indices(), csr.col_indices(), csr.values()))
    assert one(csr) == reference.fingerprint_of_bytes(data)


def test_a_sparse_gradient_as_autograd_makes_it():
    embedding = torch.nn.Embedding(20, 4, sparse=True)
    embedding(torch.tensor([3, 3, 5])).sum().backward()
    gradient = embedding.weight.grad
    other = gradient.clone()
    assert one(other) == one(gradient)
    other._values()[1, 2] += 1
    assert one(other) != one(gradient)


@pytest.mark.filterwarnings("ignore")
def test_quantised_and_nested_tensors():
    quantised = torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.qint8)
    assert one(quantised) == one(quantised.int_repr())
    assert fp.metadata(quantised) != fp.metadata(torch.quantize_per_tensor(torch.zeros(9), 0.2, 3, torch.qint8))
    a, b = torch.randn(3, 4), torch.randn(5, 4)
    for kind in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([a, b], layout=kind)
        same = torch.nested.nested_tensor([a, b], layout=kind)
        other = torch.nested.nested_tensor([a, b + 1], layout=kind)
        assert one(nested) == one(same) != one(other)
        assert fp.metadata(nested) == fp.metadata(same)


def test_dtensor_is_its_local_part():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        local = torch.randn(8, 4)
        sharded = distribute_tensor(local, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert one(sharded) == one(local)
        assert fp.metadata(torch.nn.Parameter(sharded)) == fp.metadata(local)
    finally:
        dist.destroy_process_group()


def test_parameters_buffers_and_grads_with_their_names_shuffled():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(70000, 2))
    tensors = [*model.parameters(), *model.buffers()]
    expected = [reference.fingerprint(t) for t in tensors]
    assert rows(fp.fingerprints(tensors)) == expected
    assert rows(fp.fingerprints(tensors[::-1])) == expected[::-1]


def test_tensors_without_data_are_refused():
    with pytest.raises(ValueError, match="no data"):
        fp.fingerprints([torch.empty(3, device="meta")])
    freed = torch.randn(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no data|freed"):
        fp.fingerprints([freed])
    assert freed.untyped_storage().nbytes() == 0
    shrunk = torch.randn(100)
    shrunk.untyped_storage().resize_(200)
    with pytest.raises(ValueError, match="freed or is too small"):
        fp.fingerprints([shrunk])
    assert shrunk.untyped_storage().nbytes() == 200


def test_zero_tensor_is_zeros():
    assert one(torch._efficientzerotensor((5, 2))) == one(torch.zeros(5, 2))


def test_nothing_at_all():
    assert fp.fingerprints([]).shape == (0, 2)
    assert rows(fp.fingerprints([torch.empty(0), torch.empty(3, 0)])) == [(0, 0), (0, 0)]


def test_more_small_pieces_than_the_scratch_holds():
    tensors = [noise(4 * n + n % 3, seed=n) for n in range(1, 900, 3)]
    tensors += [noise(40_000 * 4, seed=n) for n in range(12)]
    assert rows(fp.fingerprints(tensors)) == [reference.fingerprint(t) for t in tensors]


def test_many_copies_are_not_held_at_once():
    tensors = [torch.randn(400, 400, generator=torch.Generator().manual_seed(i))[:, ::2] for i in range(12)]
    assert rows(fp.fingerprints(tensors)) == [reference.fingerprint(t) for t in tensors]


def test_collector_reads_at_once_and_keeps_the_order():
    collector = fp.Collector()
    tensors = [noise(n) for n in (5, 300_000, 0, 64, 700_001)]
    for i, tensor in enumerate(tensors):
        assert collector.add(tensor) == i
    expected = [reference.fingerprint(t) for t in tensors]
    for tensor in tensors:
        tensor.zero_()
    assert len(collector) == 5
    assert rows(collector.table()) == expected
    assert len(collector) == 0 and collector.table().shape == (0, 2)
    collector.add(tensors[0])
    assert rows(collector.table()) == [reference.fingerprint(tensors[0])]


def test_two_collectors_at_once_do_not_disturb_each_other():
    a, b, tensors = fp.Collector(), fp.Collector(), [noise(n) for n in (9, 400_000, 80)]
    for tensor in tensors:
        a.add(tensor)
        b.add(tensor)
        fp.fingerprints([tensor])
    assert torch.equal(a.table(), b.table())


def test_collector_in_autograd_hooks():
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
    collector, order = fp.Collector(), []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: order.append((collector.add(grad), name)) and None)
    model(torch.randn(4, 300)).square().sum().backward()
    table = rows(collector.table())
    assert len(order) == 4
    for slot, name in order:
        assert table[slot] == reference.fingerprint(model.get_parameter(name).grad)


@settings(max_examples=40)
@given(data=st.binary(max_size=2000), cuts=st.lists(st.integers(0, 2000), max_size=5), repeat=st.sampled_from([1, 700]))
def test_streams_equal_tensors_however_cut(data, cuts, repeat):
    data = data * repeat
    bounds = [0, *sorted(min(c * repeat, len(data)) for c in cuts), len(data)]
    pieces = [data[a:b] for a, b in zip(bounds, bounds[1:])]
    expected = reference.fingerprint_of_bytes(data)
    assert fp.fingerprint_bytes(pieces) == expected
    assert one(torch.tensor(bytearray(data), dtype=torch.uint8)) == expected


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 6), max_size=4),
    order=st.randoms(use_true_random=False),
    step=st.sampled_from([1, 1, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
)
def test_any_view_of_any_shape(shape, order, step, dtype):
    count = 1
    for size in shape:
        count *= size
    tensor = noise(count * torch.empty(0, dtype=dtype).element_size()).view(dtype).view(shape)
    dims = list(range(len(shape)))
    order.shuffle(dims)
    tensor = tensor.permute(dims)
    if shape and step > 1:
        tensor = tensor[::step]
    assert one(tensor) == reference.fingerprint(tensor)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_where_there_is_a_compiler_the_library_is_used():
    with quiet():
        assert engines._choose(torch.device("cpu"))[1] == "native"


def test_a_library_that_cannot_be_used_is_replaced_and_the_reason_kept(monkeypatch):
    cpu = torch.device("cpu")
    with quiet():
        monkeypatch.setattr(engines, "agree", lambda *_: False)
        assert engines._choose(cpu) == (torch_ops.Sums, "torch (native gave other bits)")
        monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
        monkeypatch.delitem(sys.modules, "sdcrun.shim.fingerprint.native", raising=False)
        kind, text = engines._choose(cpu)
    assert kind is torch_ops.Sums
    assert "FileNotFoundError: there was no C compiler when sdcrun was installed" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: Triton is to work on it")
def test_a_triton_that_does_not_work_is_replaced_and_the_reason_kept():
    kind, text = engines._choose(torch.device("cuda"))
    assert kind is torch_ops.Sums
    assert text.startswith("torch (triton does not work here: ") and len(text) > 40


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_bits_of_the_reference():
    given = [make() for make in STRIDED.values()] + [noise(n) for n in (1, 262_144, 3_000_001)]
    there = [t.cuda() for t in given]
    expected = [reference.fingerprint(t) for t in there]
    assert rows(fp.fingerprints(there)) == expected
    collector = fp.Collector()
    for i, tensor in enumerate(there):
        with torch.cuda.stream(torch.cuda.Stream()) if i % 3 == 0 else torch.cuda.stream(None):
            collector.add(tensor)
    assert rows(collector.table()) == expected
    mixed_devices = [x for pair in zip(given, there) for x in pair]
    assert rows(fp.fingerprints(mixed_devices)) == [reference.fingerprint(t) for t in mixed_devices]
    with quiet():
        device = there[0].device
        result = torch.zeros(len(there), 2, dtype=torch.int64, device=device)
        sums = torch_ops.Sums(device)
        sums.add([layout.span(t) for t in there], list(range(len(there))))
        sums.add_to(result)
    assert rows(result.cpu()) == expected


def test_equal_in_another_process():
    code = (
        "import torch; from sdcrun.shim import fingerprint as fp\n"
        "t = [torch.arange(100_000, dtype=torch.int32), torch.ones(3).bfloat16()]\n"
        "print(fp.digest(fp.fingerprints(t), [fp.metadata(x) for x in t]))"
    )
    tensors = [torch.arange(100_000, dtype=torch.int32), torch.ones(3).bfloat16()]
    here = fp.digest(fp.fingerprints(tensors), [fp.metadata(t) for t in tensors])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(here)
