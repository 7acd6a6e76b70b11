"""Check 1 within one rank: which non-finite gradients of a window are the rank's own."""

from types import SimpleNamespace

import pytest
import torch

from sdcrun.shim.checks import nonfinite

NAN, INF = float("nan"), float("inf")


class Bucket:
    """What is read of a GradBucket."""

    def __init__(self, number, parameter):
        self.number, self.parameter = number, parameter

    def index(self):
        return self.number

    def parameters(self):
        return [self.parameter]

    def gradients(self):
        return [self.parameter.grad]


class Window:
    """A guard of two buckets with one parameter each, on the CPU or as it is on an accelerator."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in ("last", "first")}
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.reductions, self.tainted = 0, False
        self.local_sums, self.reduced_sums, self.local_bad = [], [], []

    def qualified(self, name):
        return name

    def reduce(self, local, reduced):
        """One backward: the value in each bucket's gradient before the all-reduce, and after it."""
        for number, (parameter, before, after) in enumerate(zip(self.parameters.values(), local, reduced)):
            bucket = Bucket(number, parameter)
            parameter.grad = torch.tensor([0.5, before, 0.5])
            buffer = parameter.grad
            if self.accelerator:
                buffer = SimpleNamespace(
                    layout=torch.strided, dtype=torch.float32, device=torch.device("cuda"),
                    is_floating_point=lambda: True, sum=parameter.grad.sum,
                )  # fmt: skip
            nonfinite.local_bucket(self, bucket, buffer)
            parameter.grad[1] = after
            nonfinite.reduced_bucket(self, parameter.grad)

    def says(self):
        """(local, reduced, the tensors that are this rank's own fault)."""
        flags = nonfinite.flags([self])
        assert flags[0] == nonfinite.seen_locally(self)
        return *flags, {bad["tensor"] for bad in nonfinite.observe([self])[0]}


class Complex(Bucket):
    """As DDP makes it of complex parameters: real numbers, and gradients that count complex ones."""

    def __init__(self, parameters):
        super().__init__(0, parameters)
        self.buffer = torch.zeros(sum(2 * p.numel() for p in parameters))

    def parameters(self):
        return self.parameter

    def gradients(self):
        return self.buffer[: len(self.buffer) // 2].split([p.numel() for p in self.parameter])


def test_gradients_of_complex_parameters_are_found_whole():
    parameters = [torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64)) for _ in range(2)]
    window, bucket = Window(accelerator=False), Complex(parameters)
    window.names = {id(p): name for name, p in zip("ab", parameters)}
    bucket.buffer.copy_(torch.arange(24.0))
    found = nonfinite.gradients_of(bucket, bucket.buffer)
    assert [torch.view_as_real(gradient).flatten().tolist() for _, gradient in found] == [
        list(range(12)), list(range(12, 24))
    ]  # fmt: skip
    assert all(p is q for (p, _), q in zip(found, parameters))
    bucket.buffer[23] = INF
    nonfinite.local_bucket(window, bucket, bucket.buffer)
    assert window.local_bad == [{"tensor": "b", "elements": 1, "nan": 0, "inf": 1, "numel": 6}]


@pytest.fixture(params=[False, True], ids=["cpu", "accelerator"])
def window(request):
    return Window(request.param)


def test_finite(window):
    window.reduce([1.0, 2.0], [1.0, 2.0])
    window.reduce([1.0, 2.0], [1.0, 2.0])
    assert window.says() == (False, False, set())


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_own_and_everybodys(window, bad):
    window.reduce([1.0, bad], [1.0, bad])
    assert window.says() == (True, True, {"first"})


def test_another_ranks(window):
    window.reduce([1.0, 2.0], [NAN, 2.0])
    assert window.says() == (False, True, set())


def test_what_the_first_reduction_brought_is_not_this_ranks_in_the_second(window):
    window.reduce([1.0, 2.0], [NAN, 2.0])
    window.reduce([NAN, NAN], [NAN, NAN])
    assert window.says() == (False, True, set())


def test_what_the_first_reduction_brought_was_this_ranks(window):
    window.reduce([1.0, INF], [1.0, INF])
    window.reduce([NAN, INF], [NAN, INF])
    local, reduced, own = window.says()
    assert (local, reduced) == (True, True) and "first" in own and (window.accelerator or own == {"first"})


def test_buckets_of_one_reduction_do_not_taint_each_other(window):
    window.reduce([1.0, NAN], [INF, NAN])
    assert window.says() == (True, True, {"first"})


def test_its_own_in_the_second_reduction(window):
    window.reduce([1.0, 2.0], [1.0, 2.0])
    window.reduce([NAN, 2.0], [NAN, 2.0])
    assert window.says() == (True, True, {"last"})


def test_a_sum_that_overflows_is_no_finding(window):
    for parameter in window.parameters.values():
        parameter.data = torch.zeros(3)
    window.reduce([3e38, 3e38], [3e38, 3e38])
    for parameter in window.parameters.values():
        parameter.grad = torch.full((3,), 3e38)
        nonfinite.reduced_bucket(window, parameter.grad)
    assert window.says() == (False, False, set())
