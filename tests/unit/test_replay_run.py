"""Record a backward and run it again in one process: equal bits, and nothing of it to be seen afterwards."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from replaykit import Net, Probe, Solo, bits, data, guard_of, same
from torch import nn

from sdcrun.shim.checks.opinion import Parcel, compare, differing_names, digest
from sdcrun.shim.replay import state
from sdcrun.shim.replay.muted import muted
from sdcrun.shim.replay.program import FULL
from sdcrun.shim.replay.run import NotReplayable, replay


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_equal_bits_and_no_trace(net):
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    before = bits(net)
    hooks = [p._backward_hooks for p in net.parameters()]
    expected, result = solo.again()
    assert expected == result.table and len(expected) == 7 and "loss" in expected
    assert result.losses and result.finite
    assert same(before, bits(net))
    assert (net.calls, net.seen) == (1, [1])
    assert hooks == [None] * 6 == [p._backward_hooks for p in net.parameters()]
    assert all(p.requires_grad for p in net.parameters())
    assert solo.parcel().program.kind == FULL


def test_recording_itself_changes_nothing():
    def step(record):
        torch.manual_seed(0)
        net = Net()
        x, y = data()
        if record:
            with Solo(net) as solo:
                F.cross_entropy(solo(x), y).backward()
        else:
            F.cross_entropy(net(x), y).backward()
        return bits(net)

    assert same(step(False), step(True))


def test_gradient_of_this_backward_alone(net):
    """A micro-batch in the middle of an accumulation can be computed again by itself."""
    with Solo(net, pick=1) as solo:
        for seed in range(3):
            x, y = data(seed)
            F.cross_entropy(solo(x), y).backward()
    expected, result = solo.again()
    assert expected == result.table
    assert solo.parcel().program.position == 1


def test_a_flipped_bit_in_a_replay_is_seen(net):
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()

    def flip(module, args, output):
        output = output.clone()
        output.detach().view(torch.int32).view(-1)[0] ^= 1 << 10
        return output

    handle = net.a.register_forward_hook(state.keep_in_replay(flip))
    expected, result = solo.again()
    handle.remove()
    assert "loss" in differing_names(expected, result.table, ())
    assert digest(expected, ()) != digest(result.table, ())


def test_replay_scope_is_visible_inside_and_only_there(net):
    seen = Probe()
    net.a.register_forward_hook(state.keep_in_replay(lambda *args: seen.append(state.replaying())))
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    solo.again()
    assert seen == [False, True] and not state.replaying()


def test_exception_in_a_replay_puts_everything_back(net):
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    parcel = solo.parcel()
    before = bits(net)

    def fail(module, args):
        raise RuntimeError("broken device")

    handle = net.b.register_forward_pre_hook(state.keep_in_replay(fail))
    with pytest.raises(RuntimeError, match="broken device"):
        replay(parcel.program, solo.guards, {})
    handle.remove()
    assert same(before, bits(net)) and net.calls == 1
    assert not state.replaying() and all(p.requires_grad for p in net.parameters())
    assert [id(p) for p in net.parameters()] == [id(p) for p in solo.guards[0].parameters.values()]
    assert replay(parcel.program, solo.guards, {}).table == parcel.expected


def test_real_parameters_kept_elsewhere_are_not_reached(net):
    net.__dict__["hidden"] = [net.b.weight]
    net.forward = lambda x: F.linear(torch.tanh(net.a(x)), net.hidden[0])
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    before = bits(net)
    expected, result = solo.again()
    assert same(before, bits(net))
    assert [name for name in expected if name not in result.table] == [":b.weight"]


def test_onlooking_hooks_do_not_run_again_and_acting_ones_do(net):
    seen = Probe()
    net.a.register_forward_hook(lambda module, args, output: seen.append("looked"))
    net.a.register_forward_hook(lambda module, args, output: seen.append("acted") or output * 2)
    net.b.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    assert seen == ["looked", "acted", "backward"]
    expected, result = solo.again()
    assert expected == result.table
    assert seen == ["looked", "acted", "backward", "acted"]


def test_printing_forward_prints_once(net, capsys):
    net.a.register_forward_hook(state.keep_in_replay(lambda *args: print("forward")))
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    solo.again()
    assert capsys.readouterr().out == "forward\n"


def test_buffers_grown_by_the_forward_are_gone_afterwards(net):
    plain = Net.forward

    def forward(x):
        if "table" not in net._buffers or len(net.table) < len(x):
            net.register_buffer("table", torch.linspace(0, 1, len(x)), persistent=False)
        return plain(net, x) * net.table[: len(x), None]

    net.forward = forward
    x, y = data(size=4)
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    del net._buffers["table"]
    expected, result = solo.again()
    assert expected == result.table and "table" not in net._buffers


def test_trouble_while_recording_stays_ours(net, monkeypatch):
    x, y = data()
    with Solo(net) as solo:
        output = solo(x)
        monkeypatch.setattr(solo.recorder.tape, "pickled", lambda value: 1 / 0)
        loss = F.cross_entropy(output, y)
        monkeypatch.undo()
        loss.backward()
    assert "ZeroDivisionError" in solo.recorder.case.program.why
    expected, result = solo.again()
    assert expected == result.table


def test_trouble_before_a_backward_stays_ours(net, monkeypatch):
    x, y = data()
    with Solo(net) as solo:
        monkeypatch.setattr(solo.recorder, "_prepare", lambda *args: 1 / 0)
        F.cross_entropy(solo(x), y).backward()
    assert net.a.weight.grad is not None
    assert "ZeroDivisionError" in solo.recorder.pack()


def test_exception_in_the_scripts_backward_passes_and_leaves_no_hooks(net):
    x, _ = data()
    with Solo(net) as solo:
        output = solo(x)
        output.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
    assert all(p._backward_hooks is None for p in net.parameters())
    assert solo.recorder.case is None


def test_closing_frees_everything(net):
    import gc
    import weakref

    x, y = data()
    with Solo(net) as solo:
        output = solo(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
    watched = weakref.ref(output)
    assert solo.recorder.close()
    del output, loss
    gc.disable()
    try:
        assert watched() is None
    finally:
        gc.enable()


def test_other_module_names_are_not_confused(net):
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    with pytest.raises(NotReplayable, match="no module"):
        replay(solo.parcel().program, [guard_of(net, "module7")], {})


def test_gradients_asked_for_are_kept(net):
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    _, result = solo.again(keep=[":b.bias"], trace=True)
    assert torch.equal(result.kept[":b.bias"], net.b.bias.grad)
    assert [what for what, _ in result.trace][:2] == ["what a is given", "the output of a"]


def test_damaged_parcel_is_refused(net):
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    solo.parcel()
    blob = bytearray(Parcel.of(solo.recorder.case).dumps())
    blob[len(blob) // 2] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        Parcel.loads(bytes(blob))


def test_comparison_names_differences_in_forward_order(net):
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    parcel = solo.parcel()
    _, result = solo.again()
    assert compare(0, 1, "ring", parcel, result, (), str).agrees
    for name in (":b.bias", ":a.weight", "loss"):
        result.table[name] = (1, 2)
    found = compare(0, 1, "ring", parcel, result, (), lambda name: name.lstrip(":"))
    assert [d.tensor for d in found.differing] == ["a.weight", "b.bias", "loss"]
    assert found.failed and found.differing_count == 3 and found.loss_agrees is False
    narrowed = compare(0, 1, "ring", parcel, result, {":b.bias", ":a.weight", "loss"}, str)
    assert narrowed.agrees and narrowed.loss_agrees is None
    assert compare(0, 1, "ring", parcel, "no memory", (), str).declined == "no memory"


def test_function_that_stood_in_for_the_forward_stands_in_again(net):
    """Frameworks call their training step through DDP by putting it in place of the forward for one call."""
    own = net.forward

    def training_step(x, y):
        net.forward = own
        return F.cross_entropy(net(x), y)

    x, y = data()
    net.forward = training_step
    with Solo(net) as solo:
        solo(x, y).backward()
    expected, result = solo.again()
    assert expected == result.table and "loss" in expected
    assert vars(net)["forward"] is own


def test_loggers_of_lightning_modules_are_silent_in_a_replay():
    class LightningModule(nn.Module):
        def log(self, name, value):
            logged.append(name)

    class Mine(LightningModule):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x):
            self.log("seen", 1)
            return self.a(x)

    logged, net = [], Mine()
    with Solo(net) as solo:
        solo(data()[0]).sum().backward()
    expected, result = solo.again()
    assert expected == result.table and logged == ["seen"]
    assert "log" not in vars(net)


def test_only_the_replaying_thread_is_muted(capsys):
    with state.replay_scope(), muted():
        print("replay")
        thread = threading.Thread(target=print, args=("somebody else",))
        thread.start()
        thread.join()
    print("after")
    assert capsys.readouterr().out == "somebody else\nafter\n"


class Cyclic:
    """Is freed by the collector of cycles, and says whether a replay was running then."""

    freed = Probe()

    def __init__(self):
        self.me = self

    def __del__(self):
        self.freed.append(state.replaying())


class Littering(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        Cyclic()
        return self.a(x) + [[0.0] for _ in range(50)][0][0]


@pytest.mark.parametrize("collecting", [True, False])
def test_finalizers_of_the_script_do_not_run_in_a_replay(collecting):
    threshold = gc.get_threshold()
    x, y = data()
    try:
        with Solo(Littering()) as solo:
            F.cross_entropy(solo(x), y).backward()
        parcel = solo.parcel()
        gc.collect()
        Cyclic.freed.clear()
        (gc.enable if collecting else gc.disable)()
        gc.set_threshold(1)
        for _ in range(3):
            replay(parcel.program, solo.guards, solo.recorder.local)
        assert gc.isenabled() is collecting
        gc.enable()
        gc.collect()
        assert list(Cyclic.freed) == [False] * 3
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
