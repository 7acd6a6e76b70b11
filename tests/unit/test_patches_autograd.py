"""The patches of torch.autograd: what they are told of, on which thread, and that they can be taken off again."""

import threading

import pytest
import torch
import torch.nn.functional as F
from replaykit import Solo
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sdcrun.shim.patches import autograd


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def data():
    return torch.randn(4, 6), torch.randint(0, 3, (4,))


def test_torchscript_still_knows_the_patched_function():
    autograd.install()

    def loss(x: torch.Tensor):
        torch.autograd.backward([x.sum()], None)
        return x

    assert "aten::backward" in str(torch.jit.script(loss).graph)


def test_undo_restores_torch():
    autograd.install()
    patched = torch.autograd.backward
    autograd.undo()
    try:
        assert torch.autograd.backward is not patched
        assert torch.autograd.backward.__module__ == "torch.autograd"
        assert not hasattr(torch.autograd.Function.apply, "__wrapped__")
    finally:
        autograd.install()


class Meeting(torch.autograd.Function):
    """Its backward waits until somebody opens the gate."""

    opened, reached = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Meeting.reached.set()
        assert Meeting.opened.wait(60)
        return gradient


def elsewhere(work):
    """Runs `work` on another thread to its end; raises what it raised."""
    raised = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def test_backward_of_another_thread_does_not_hide_this_one(net):
    Meeting.opened.clear(), Meeting.reached.clear()
    other = torch.ones(3, requires_grad=True)
    thread = threading.Thread(target=lambda: Meeting.apply(other).sum().backward())
    x, y = data()
    with Solo(net) as solo:
        thread.start()
        assert Meeting.reached.wait(60)
        try:
            F.cross_entropy(solo(x), y).backward()
        finally:
            Meeting.opened.set()
            thread.join()
    expected, result = solo.again()
    assert expected == result.table and "loss" in expected


class Deep(torch.autograd.Function):
    """Its backward runs another backward, `depth` deep. From the 60th on the engine uses threads of its own."""

    threads: set[int] = set()

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Deep.threads.add(threading.get_ident())
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.ones(3, requires_grad=True), ctx.depth - 1).sum().backward()
        return gradient, None


def test_backward_inside_a_backward_is_nobodys_business():
    calls = []

    class Counting:
        def around_backward(self, run, tensors, grad_tensors, options):
            calls.append(threading.get_ident())
            return run(tensors, grad_tensors, options)

    counting = Counting()
    autograd.install()
    autograd.observers.append(counting)
    try:
        w = torch.ones(3, requires_grad=True)
        Deep.apply(w, 80).sum().backward()
        elsewhere(lambda: (w * 2).sum().backward())
    finally:
        autograd.observers.remove(counting)
    assert len(Deep.threads) > 1, "no backward was run by a thread of the engine's own"
    assert len(calls) == 2 and calls[0] == threading.get_ident() != calls[1]


def test_what_another_thread_differentiates_is_not_recorded(net):
    """While a loss is followed, a thread that trains something beside it neither enters the tape nor stops it."""
    x, y = data()
    reached, go_on = threading.Event(), threading.Event()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            reached.set()
            assert go_on.wait(60)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def beside():
        other = torch.ones(3, requires_grad=True)
        torch.autograd.grad(Slow.apply(other).sum(), other)

    thread = threading.Thread(target=beside)
    with Solo(net) as solo:
        out = solo(x)
        thread.start()
        assert reached.wait(60)
        try:
            loss = F.cross_entropy(out, y)
        finally:
            go_on.set()
            thread.join()
        recorded = {type(entry).__name__ for entry in solo.recorder.tape.entries}
        loss.backward()
    expected, result = solo.again()
    assert recorded == {"Call", "Op"}
    assert expected == result.table and "loss" in expected


def test_the_last_loss_is_kept_as_a_number_alone():
    autograd.install()
    w = torch.ones(3, requires_grad=True)
    (w * 3).sum().backward()
    assert autograd.last_loss().item() == 9.0 and not autograd.last_loss().requires_grad
    torch.autograd.backward([w, w], [torch.ones(3), torch.ones(3)])
    assert autograd.last_loss() is None


def test_a_dispatch_mode_of_the_scripts_own_sees_the_same_operators():
    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def step():
        w = torch.ones(3, requires_grad=True)
        with Listing():
            (w * 3).sum().backward()

    seen = []
    autograd.undo()
    step()
    plain, seen = seen, []
    autograd.install()
    step()
    assert seen == plain
