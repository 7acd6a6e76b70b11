"""The Triton kernel, run by Triton's interpreter on CPU memory: the bits of the reference, for every alignment.

Not collected by itself: Triton decides when it is imported whether it interprets, so `test_fingerprint_triton` runs
this file in a process of its own with TRITON_INTERPRET=1.
"""

import pytest
import torch
import triton

from sdcrun.shim.fingerprint import engines, fp1, reference, torch_ops
from sdcrun.shim.fingerprint import triton_kernel as kernel
from sdcrun.shim.fingerprint.layout import span
from sdcrun.shim.fingerprint.quiet import quiet

assert triton.knobs.runtime.interpret
CPU = torch.device("cpu")


def noise(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))


def run(tensors: list[torch.Tensor], together: bool) -> list[tuple[int, int]]:
    result = torch.zeros(len(tensors), 2, dtype=torch.int64)
    with quiet():
        sums = kernel.Sums(CPU)
        spans = [span(t) for t in tensors]
        if together:
            sums.add(spans, list(range(len(tensors))))
        else:
            for slot, each in enumerate(spans):
                sums.add([each], [slot])
        sums.add_to(result)
    return [tuple(row) for row in result.tolist()]


def tensors() -> list[torch.Tensor]:
    half = noise(2 * 70_001).view(torch.bfloat16)
    return [
        torch.empty(0),
        torch.tensor(3.5),
        torch.randn(7),
        noise(4 * 65536).view(torch.float32),
        noise(4 * 65537).view(torch.int32),
        noise(4 * 65536 + 4)[4:].view(torch.float32),
        half,
        half[1:],
        half[1:2],
        noise(1 << 18)[3:],
        noise(9)[1:],
        noise(2)[1:],
        torch.randn(5, 3, dtype=torch.float64).t(),
        torch.randn(9, dtype=torch.complex64),
        torch.randn(33) > 0,
        torch.randn(31).to(torch.float8_e5m2),
        torch.tensor([float("nan"), -0.0, 0.0, float("inf")]),
        torch.full((70_000,), -(2**31), dtype=torch.int32),
    ]


@pytest.mark.parametrize("together", [True, False], ids=["one launch", "one by one"])
def test_bits_of_the_reference(together):
    given = tensors()
    assert run(given, together) == [reference.fingerprint(t) for t in given]


def test_chunks_in_any_order():
    given = [noise(3 * 65536 * 4 + 5), noise(65536 * 4 + 2)[2:]]
    with quiet():
        table = kernel.chunk_table([span(t) for t in given], [1, 0])
    shuffled = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    assert not torch.equal(shuffled, table)
    result = torch.zeros(2, 2, dtype=torch.int64)
    kernel.table_kernel[(len(table),)](shuffled, result, BLOCK=1024)
    assert [tuple(row) for row in result.tolist()] == [reference.fingerprint(t) for t in given[::-1]]


def test_chunk_table():
    with quiet():
        a, b = span(noise(fp1.CHUNK_BYTES * 2 + 3)), span(noise(8))
        table = kernel.chunk_table([a, b], [4, 9]).tolist()
    chunk = fp1.CHUNK_BYTES
    assert table == [
        [a.address, chunk, 0, 4],
        [a.address + chunk, chunk, 1, 4],
        [a.address + 2 * chunk, 3, 2, 4],
        [b.address, 8, 0, 9],
    ]


def test_the_table_is_kept_for_the_same_memory_only():
    with quiet():
        spans = [span(noise(100)), span(noise(200))]
        first = kernel._table_on(CPU, spans, [0, 1])
        assert kernel._table_on(CPU, spans, [0, 1]) is first
        assert kernel._table_on(CPU, spans[::-1], [0, 1]) is not first
        assert kernel._table_on(CPU, [spans[0], spans[1]._replace(nbytes=199)], [0, 1]) is not first
        for row in range(20):
            kernel._table_on(CPU, spans, [row, row + 1])
        assert len(kernel._tables) == kernel._KEPT_TABLES


def test_more_rows_than_were_made_room_for():
    result = torch.zeros(5000, 2, dtype=torch.int64)
    tensor = noise(50)
    with quiet():
        sums = kernel.Sums(CPU)
        for slot in (0, 1023, 1024, 4999):
            sums.add([span(tensor)], [slot])
        sums.add_to(result)
    expected = torch.tensor(reference.fingerprint(tensor))
    assert result.any(1).nonzero().view(-1).tolist() == [0, 1023, 1024, 4999]
    assert (result[[0, 1023, 1024, 4999]] == expected).all()


def test_the_trial_run_accepts_it_and_refuses_a_wrong_one():
    class Wrong(torch_ops.Sums):
        def add(self, spans, slots):
            super().add([s._replace(nbytes=s.nbytes - (s.nbytes == 300)) for s in spans], slots)

    with quiet():
        assert engines.agree(kernel.Sums, torch_ops.Sums, CPU)
        assert not engines.agree(Wrong, torch_ops.Sums, CPU)
