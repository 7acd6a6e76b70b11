"""Fingerprints leave no trace in the program in whose middle they are taken."""

import random
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sdcrun.shim import fingerprint as fp
from sdcrun.shim.fingerprint import quiet as quiet_module
from sdcrun.shim.fingerprint import reference
from sdcrun.shim.fingerprint.quiet import quiet

pytestmark = pytest.mark.usefixtures("each_implementation")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def tensors() -> list[torch.Tensor]:
    return [torch.randn(300, 300), torch.randn(65536 * 9 + 1).bfloat16()[1:], torch.randn(7), torch.randn(9, 9)[:, ::2]]


def use_everything(given: list[torch.Tensor]) -> torch.Tensor:
    collector = fp.Collector()
    collector.add(given[0])
    collector.extend(given[1:])
    table = collector.table()
    fp.digest(table, [fp.metadata(t) for t in given])
    fp.differing_words(given[0], given[0] + 0)
    fp.fingerprint_bytes([b"some bytes"])
    return table


def test_random_state_is_untouched():
    given = tensors()
    states = torch.get_rng_state(), random.getstate()
    use_everything(given)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Calls, Operations])
def test_modes_of_the_user_see_nothing(mode):
    given = tensors()
    expected = fp.fingerprints(given)
    with mode() as active:
        collector = fp.Collector()
        for tensor in given:
            collector.add(tensor)
        table = collector.table()
        other = fp.fingerprints(given)
        assert fp.fingerprint_bytes([b"x" * 9]) == reference.fingerprint_of_bytes(b"x" * 9)
        assert fp.differing_words(given[0], given[0]).words == 0
        fp.metadata(given[3])
        assert active.seen == []
        given[0].add(1)
        assert len(active.seen) == 1
    assert torch.equal(table, expected) and torch.equal(other, expected)


def test_a_default_device_is_not_obeyed():
    given = tensors()
    expected = fp.fingerprints(given)
    with torch.device("meta"):
        assert torch.equal(fp.fingerprints(given), expected)
        assert torch.empty(1).device.type == "meta"


def test_subclasses_run_no_user_code():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was called")

    plain = torch.randn(50, 3)
    assert torch.equal(fp.fingerprints([plain.as_subclass(Loud)]), fp.fingerprints([plain]))


def test_no_graph_and_no_version_bump():
    leaf = torch.nn.Parameter(torch.randn(400, 400))
    middle = leaf * 2
    versions = leaf._version, middle._version
    table = fp.fingerprints([leaf, middle, leaf.t(), leaf[:, ::2]])
    assert not table.requires_grad and table.grad_fn is None
    assert torch.is_grad_enabled()
    assert (leaf._version, middle._version) == versions
    middle.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2))


def test_grad_mode_is_restored_also_after_an_error():
    with pytest.raises(ValueError):
        fp.fingerprints([torch.empty(2, device="meta")])
    assert torch.is_grad_enabled()
    with torch.no_grad():
        fp.fingerprints([torch.ones(2)])
        assert not torch.is_grad_enabled()


def test_inference_mode_and_its_tensors():
    """Scratch made in inference mode could not be written outside of it, and the other way round."""
    normal = tensors()
    expected = fp.fingerprints(normal)
    with torch.inference_mode():
        made_inside = [t.clone() for t in normal]
        assert torch.equal(fp.fingerprints(normal), expected)
        inside = fp.fingerprints(made_inside)
        assert torch.is_inference_mode_enabled()
        collector = fp.Collector()
        collector.add(made_inside[1])
    collector.add(made_inside[1])
    assert torch.equal(*collector.table())
    assert not inside.is_inference() and torch.equal(inside, expected)
    assert torch.equal(fp.fingerprints(made_inside), expected)


def test_bits_do_not_depend_on_the_thread_count_and_it_is_restored(threads):
    given = tensors()
    tables = []
    for count in (1, 2, 3):
        threads(count)
        tables.append(use_everything(given))
        assert torch.get_num_threads() == count
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])


def test_thread_count_is_restored_after_an_error(threads):
    threads(3)
    with pytest.raises(ValueError):
        fp.fingerprints([torch.randn(9), torch.empty(2, device="meta")])
    assert torch.get_num_threads() == 3


def test_kernels_run_on_one_thread_and_no_other_thread_notices(threads):
    threads(3)
    with quiet():
        assert torch.get_num_threads() == 1
        seen = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        with quiet():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    assert seen == [3]


def test_without_an_openmp_setter_torch_is_asked(threads, monkeypatch):
    monkeypatch.setattr(quiet_module, "_openmp_setter", lambda: None)
    monkeypatch.setattr(quiet_module, "_threads", quiet_module._Threads())
    threads(3)
    with quiet():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_threads_at_work_at_once_get_the_same_bits():
    given = tensors()
    expected = fp.fingerprints(given)
    wrong = []

    def work():
        for _ in range(10):
            if not torch.equal(fp.fingerprints(given), expected):
                wrong.append(1)

    running = [threading.Thread(target=work) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert wrong == []


def test_scratch_stays_small():
    from sdcrun.shim.fingerprint import torch_ops

    if fp.implementation(torch.device("cpu")) != "torch":
        pytest.skip("the compiled library needs none")
    fp.fingerprints(tensors())
    total = 0
    for _, scratch in torch_ops.pool._idle:
        for part in (scratch.group, scratch.rows, scratch.bytes):
            total += part.untyped_storage().nbytes() if part is not None else 0
    assert 0 < len(torch_ops.pool._idle) <= 2
    assert 0 < total <= 16 << 20


def test_autocast_and_deterministic_algorithms_change_nothing():
    given = tensors()
    expected = fp.fingerprints(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fp.fingerprints(given), expected)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(fp.fingerprints(given), expected)
    finally:
        torch.use_deterministic_algorithms(before)
