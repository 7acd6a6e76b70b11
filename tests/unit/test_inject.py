"""The injector on a real DDP module of one process: what is hit at each site, and that nothing else moves."""

import math
import os
import random
import struct
import threading
import types

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sdcrun.core.faultspec import parse
from sdcrun.core.types import Config
from sdcrun.shim.guard import Guard
from sdcrun.shim.inject import Injector
from sdcrun.shim.inject_device import home_of
from sdcrun.shim.inject_values import Hit, strike
from sdcrun.shim.patches import autograd
from sdcrun.shim.replay.record import Recorder
from sdcrun.shim.replay.run import replay
from sdcrun.shim.replay.state import kept_in_replay


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def backward_watched():
    autograd.install()
    yield
    autograd.observers.clear()
    autograd.undo()


class Net(nn.Module):
    """Two layers, a normalisation with buffers, a parameter nobody uses."""

    def __init__(self, unused=True):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        if unused:
            self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))


class Rank:
    """One rank of a job with these faults, driven by hand."""

    def __init__(self, *faults, model=None, rank=0, attempt=0, job_dir="", seed=0):
        self.events = []
        runtime = types.SimpleNamespace(
            config=Config(faults=faults, job_dir=job_dir, seed=seed), rank=rank, attempt=attempt, campaign=None,
            emit=lambda kind, data: self.events.append((kind, data)))
        torch.manual_seed(5)
        self.model = model if model is not None else Net()
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=hasattr(self.model, "unused"))
        self.group = types.SimpleNamespace(step=0, runtime=runtime, off_reason=None)
        self.guard = Guard(self.ddp, self.group, "")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.injector = Injector(runtime) if faults else None
        if self.injector:
            self.injector.attach(self.guard)

    def forward(self, x):
        if self.injector:
            self.injector.forward_begins(self.guard, self.group.step)
        self.guard.window_open = True
        output = self.ddp(x)
        if self.injector:
            self.injector.forward_ends()
        return output

    def step(self, micro_batches=1):
        """One window as the guard drives it; returns the losses."""
        losses = []
        for _ in range(micro_batches):
            torch.manual_seed(100 + self.group.step)
            loss = self.forward(torch.randn(5, 6)).square().mean()
            loss.backward()
            losses.append(loss.item())
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        if self.injector:
            self.injector.optimizer(self.guard, self.optimizer, self.group.step)
            self.injector.weight(self.guard, self.group.step)
        self.optimizer.zero_grad()
        self.guard.window_open = False
        self.group.step += 1
        return losses

    def injected(self):
        return [data for kind, data in self.events if kind == "inject"]


def differences(a, b):
    """Flat numbers of the elements whose bits differ, by name."""
    return {n: torch.nonzero(a[n].view(torch.int32).flatten() != b[n].view(torch.int32).flatten()).flatten().tolist()
            for n in a if not torch.equal(a[n].view(torch.int32), b[n].view(torch.int32))}


def state(rank):
    return {n: t.detach().clone() for n, t in rank.model.state_dict().items() if t.is_floating_point()}


# -- values ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.floats(width=32, allow_nan=False), st.integers(0, 31))
def test_bit_flip_in_fp32_against_struct(value, bit):
    tensor = torch.tensor([1.0, value, 2.0])
    hit = strike(tensor, parse(f"weight:index=1,bit={bit}"), random.Random(0))
    before = struct.unpack("<I", struct.pack("<f", value))[0]
    assert struct.unpack("<I", struct.pack("<f", tensor[1].item()))[0] & 0x7FBFFFFF == (before ^ 1 << bit) & 0x7FBFFFFF
    assert tensor.view(torch.int32)[1].item() & 0xFFFFFFFF == before ^ 1 << bit
    assert (tensor[0], tensor[2]) == (1.0, 2.0)
    assert (hit.index, hit.bits, hit.elements) == (1, [bit], 1)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32,
          torch.int16, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_flip_changes_that_bit_alone_in_every_dtype(dtype):
    shape = (4, 3)
    tensor = torch.arange(12).view(shape).to(dtype)
    width = 8 * torch.view_as_real(tensor).element_size() if dtype.is_complex else 8 * tensor.element_size()
    for bit in (0, width - 1):
        wrong = tensor.clone()
        hit = strike(wrong, parse(f"weight:index=5,bit={bit}"), random.Random(0))
        pattern = [a ^ b for a, b in zip(_patterns(wrong, width), _patterns(tensor, width), strict=True)]
        assert [p & (1 << width) - 1 for p in pattern] == [1 << bit if i == 5 else 0 for i in range(len(pattern))]
        assert hit.bits == [bit]
    if width < 64:
        assert f"bits 0 to {width - 1}" in strike(tensor, parse(f"weight:bit={width}"), random.Random(0))


def _patterns(tensor, width):
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(integer).flatten().tolist()


@pytest.mark.parametrize(("kind", "expected"), [
    ("nan", "nan"), ("inf", "-inf"), ("zero", 0.0), ("scale,by=-4", 10.0), ("sign", 2.5), ("stuck,bit=31,to=0", 2.5),
])
def test_kinds(kind, expected):
    tensor = torch.tensor([[7.0, 8.0], [-2.5, 9.0]])
    hit = strike(tensor, parse(f"weight:index=2,kind={kind}"), random.Random(0))
    assert isinstance(hit, Hit) and (hit.before, hit.after) == (-2.5, expected)
    observed = tensor[1, 0].item()
    assert observed == float(expected) or math.isnan(observed) and expected == "nan"
    assert tensor[0].tolist() == [7.0, 8.0] and tensor[1, 1] == 9.0


def test_a_run_of_neighbours_and_a_strided_tensor():
    tensor = torch.arange(1.0, 13.0).view(3, 4).t()
    strike(tensor, parse("weight:index=5,count=3,kind=zero"), random.Random(0))
    flat = tensor.flatten().tolist()
    assert [i for i, v in enumerate(flat) if v == 0] == [5, 6, 7]
    end = torch.ones(10)
    strike(end, parse("weight:index=9,count=4,kind=zero"), random.Random(0))
    assert end.tolist() == [1.0] * 6 + [0.0] * 4
    scalar = torch.tensor(3.0)
    assert strike(scalar, parse("loss:kind=scale,by=2"), random.Random(0)).after == 6.0 and scalar == 6.0


def test_operand_range_and_draws_only_what_can_change():
    tensor = torch.tensor([0.0, 1e-6, 5.0, 0.0, 100.0])
    for number in range(20):
        wrong = tensor.clone()
        hit = strike(wrong, parse("weight:kind=sign,when=1e-3:10"), random.Random(number))
        assert hit.index == 2
        assert strike(tensor.clone(), parse("weight:kind=zero"), random.Random(number)).index in (1, 2, 4)
    run = strike(tensor, parse("weight:kind=sign,index=0,count=5,when=1e-3:10"), random.Random(0))
    assert (run.index, run.elements) == (2, 1)
    assert "magnitude" in strike(tensor, parse("weight:when=1e5:1e6"), random.Random(0))


@pytest.mark.parametrize(("text", "tensor", "words"), [
    ("weight:kind=nan", torch.ones(3, dtype=torch.int64), "means nothing for a int64"),
    ("weight:index=7", torch.ones(3), "past the end"),
    ("weight:bit=40", torch.ones(3), "bits 0 to 31"),
    ("weight:kind=zero,index=0", torch.zeros(3), "kept their values"),
    ("weight:kind=zero", torch.zeros(3), "no element"),
    ("weight", torch.ones(0), "means nothing"),
])
def test_what_cannot_fire_says_why(text, tensor, words):
    before = tensor.clone()
    assert words in strike(tensor, parse(text), random.Random(0))
    assert torch.equal(tensor, before)


def test_random_bits():
    def bits(site, dtype):
        tensors = [torch.ones(1, dtype=dtype) for _ in range(300)]
        return {strike(t, parse(site), random.Random(n)).bits[0] for n, t in enumerate(tensors)}

    assert bits("gradient", torch.float32) == set(range(32))
    assert bits("activation", torch.float32) == set(range(11, 32)) == bits("saved", torch.float32)
    assert bits("activation", torch.bfloat16) == set(range(16))
    assert bits("input", torch.int64) == {0}


def test_strike_is_unseen_by_version_counters_and_by_the_global_generators():
    tensor, generators = torch.ones(100, requires_grad=True), (torch.get_rng_state(), random.getstate())
    version = tensor._version
    strike(tensor, parse("weight:kind=bitflip,count=9"), random.Random(3))
    assert tensor._version == version
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]


# -- sites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nan", "inf", "bitflip,bit=30", "bitflip,bit=0", "zero,count=4", "scale,by=8",
                                  "sign"])
def test_gradient_is_wrong_in_one_place_of_one_parameter(kind):
    healthy, faulty = Rank(), Rank(f"gradient:rank=0,step=2,kind={kind},tensor=second.weight")
    for step in range(4):
        healthy.step(), faulty.step()
        wrong = differences(healthy.gradients, faulty.gradients)
        if step < 2:
            assert not wrong and not differences(state(healthy), state(faulty))
        elif step == 2:
            [event] = faulty.injected()
            assert list(wrong) == ["second.weight"] and event["index"] == wrong["second.weight"][0]
            assert len(wrong["second.weight"]) == event["elements"] == (4 if "count" in kind else 1)
            assert (event["step"], event["site"], event["phase"]) == (2, "gradient", "step")
            assert event["tensor"] == "second.weight"
            observed = faulty.gradients["second.weight"].flatten()[event["index"]].item()
            assert event["after"] == (observed if math.isfinite(observed) else repr(observed))
            assert event["before"] == healthy.gradients["second.weight"].flatten()[event["index"]].item()
    assert len(faulty.injected()) == 1 and faulty.injector.unfired() == []


def test_another_rank_is_untouched():
    healthy, other = Rank(), Rank("gradient:rank=1,step=1", "weight:rank=1,step=1", "saved:rank=1,step=1",
                                  "activation:rank=1,step=1", "optimizer:rank=1", "loss:rank=1", "input:rank=1")
    for _ in range(3):
        assert healthy.step() == other.step()
    assert not differences(state(healthy), state(other)) and not other.injected()


@pytest.mark.parametrize("site", ["activation", "saved", "gradient", "weight", "optimizer", "loss", "input"])
def test_steps_that_are_not_hit_have_the_bits_of_a_run_without_faults(site):
    healthy, faulty = Rank(), Rank(f"{site}:rank=0,step=3,kind=bitflip,bit=20")
    for _ in range(3):
        assert healthy.step() == faulty.step()
        assert not differences(healthy.gradients, faulty.gradients)
        assert not differences(state(healthy), state(faulty))
    assert not faulty.injected()
    faulty.step()
    [event] = faulty.injected()
    assert event["site"] == site and event["bits"] == [20] and event["step"] == 3


def test_random_numbers_of_the_script_are_not_used_up():
    draws = []
    for faults in ((), ("gradient:repeat=always", "activation:repeat=always", "weight:p=0.5")):
        rank = Rank(*faults)
        rank.step()
        draws.append((torch.rand(3).tolist(), random.getstate()))
    assert draws[0] == draws[1]


def test_weight_is_wrong_after_the_update_once_for_two_optimizers():
    healthy, faulty = Rank(), Rank("weight:rank=0,step=1,tensor=first.*,bit=22")
    for rank in (healthy, faulty):
        rank.step(), rank.step()
    faulty.injector.weight(faulty.guard, 1)
    [event] = faulty.injected()
    assert differences(state(healthy), state(faulty)) == {event["tensor"]: [event["index"]]}
    assert event["tensor"].startswith("first.")


def test_optimizer_state():
    healthy, faulty = Rank(), Rank("optimizer:rank=0,step=1,tensor=second.weight.exp_avg_sq,kind=zero,index=3")
    for rank in (healthy, faulty):
        rank.step(), rank.step()
    moments = faulty.optimizer.state[faulty.model.second.weight]["exp_avg_sq"].flatten()
    assert moments[3] == 0 and torch.count_nonzero(moments) == moments.numel() - 1
    assert not differences(state(healthy), state(faulty)), "it shows only in the next update"
    healthy.step(), faulty.step()
    assert list(differences(state(healthy), state(faulty))) == ["second.weight"]


def test_buffer():
    rank = Rank("buffer:rank=0,step=0,tensor=*running_mean,kind=bitflip,bit=30,index=2")
    rank.injector.forward_begins(rank.guard, 0)
    assert rank.model.norm.running_mean.tolist() == [0, 0, 2.0, 0, 0, 0, 0, 0]
    assert rank.injected()[0]["tensor"] == "norm.running_mean"


def test_activation_goes_on_through_forward_and_backward():
    healthy, faulty = Rank(), Rank("activation:rank=0,step=0,tensor=first,kind=scale,by=100")
    assert healthy.step() != faulty.step()
    assert set(differences(healthy.gradients, faulty.gradients)) >= {"first.weight", "second.weight"}
    assert faulty.injected()[0]["tensor"] == "first"


def test_saved_activation_leaves_the_loss_and_spoils_one_gradient():
    healthy, faulty = Rank(), Rank("saved:rank=0,step=0,tensor=second,kind=scale,by=100")
    assert healthy.step() == faulty.step()
    assert list(differences(healthy.gradients, faulty.gradients)) == ["second.weight"]
    assert faulty.injected()[0]["tensor"] == "second"


def test_loss_is_wrong_in_value_alone():
    healthy, faulty = Rank(), Rank("loss:rank=0,step=0,kind=scale,by=3")
    [right], [wrong] = healthy.step(), faulty.step()
    assert wrong == pytest.approx(3 * right)
    assert not differences(healthy.gradients, faulty.gradients)


def test_loss_of_something_else_that_another_thread_trains_is_left_alone():
    rank, other = Rank("loss:rank=0,step=0,kind=scale,by=3"), torch.ones(3, requires_grad=True)
    seen = []

    def beside():
        loss = other.square().sum()
        loss.backward()
        seen.append(loss.item())

    loss = rank.forward(torch.randn(5, 6)).square().mean()
    right = loss.item()
    for work in (beside, loss.backward):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [3.0] and loss.item() == pytest.approx(3 * right)


def test_input_is_a_wrong_copy():
    rank, batch = Rank("input:rank=0,step=0,kind=zero,count=30"), torch.randn(5, 6)
    kept = batch.clone()
    out = rank.forward(batch)
    assert torch.equal(batch, kept)
    assert rank.injected()[0]["elements"] == 30
    assert torch.equal(out, rank.model(torch.zeros(5, 6)))


def test_reduced_hits_its_parameter_within_the_flat_bucket():
    rank = Rank("reduced:rank=0,step=0,tensor=first.bias,index=2,kind=nan",
                "allreduce:step=0,tensor=second.bias,kind=zero")
    parameters = [rank.model.second.bias, rank.model.first.bias, rank.model.first.weight]
    flat = torch.arange(1.0, 1 + 3 + 8 + 48)
    rank.guard.window_open = True
    rank.injector.reduced(rank.guard, flat, parameters)
    assert [i for i, v in enumerate(flat.tolist()) if math.isnan(v)] == [3 + 2]
    assert flat[:3].count_nonzero() == 2 and flat[3 + 8 :].tolist() == list(range(12, 60))


def test_a_wrong_sum_is_the_same_on_every_rank():
    results = []
    for number in range(3):
        rank = Rank("allreduce:step=0,kind=bitflip", rank=number)
        flat = torch.arange(1.0, 60.0)
        parameters = [rank.model.second.bias, rank.model.first.bias, rank.model.first.weight]
        rank.injector.reduced(rank.guard, flat, parameters)
        results.append(flat)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not torch.equal(results[0], torch.arange(1.0, 60.0))


def test_checkpoint_gets_a_wrong_copy_and_the_script_keeps_its_own():
    rank = Rank("checkpoint:step=2,kind=bitflip,bit=3,tensor=model.first.weight")
    contents = {"model": rank.model.state_dict(), "epoch": 3, "history": [1, (2, torch.ones(2))]}
    kept = {n: t.clone() for n, t in contents["model"].items()}
    assert rank.injector.checkpoint(contents, 1) is contents
    written = rank.injector.checkpoint(contents, 4)
    assert all(torch.equal(contents["model"][n], kept[n]) for n in kept)
    assert [n for n in kept if not torch.equal(written["model"][n], kept[n])] == ["first.weight"]
    assert written["history"] is contents["history"] and type(written["model"]) is type(contents["model"])
    assert rank.injector.checkpoint(contents, 5) is contents, "once"


def test_every_micro_batch_of_the_step_is_hit_at_the_same_element():
    rank = Rank("gradient:rank=0,step=0,kind=sign")
    rank.step(micro_batches=3)
    assert len(rank.injected()) == 3
    assert len({(e["tensor"], e["index"]) for e in rank.injected()}) == 1


def test_unused_parameters_are_not_drawn():
    for seed in range(12):
        rank = Rank("gradient:rank=0,step=1", seed=seed)
        rank.step(), rank.step()
        [event] = rank.injected()
        assert event["tensor"] != "unused"


def test_draws_vary_with_the_seed_and_the_step():
    places = set()
    for seed in range(4):
        rank = Rank("gradient:rank=0,step=1-3", seed=seed)
        for _ in range(4):
            rank.step()
        places |= {(e["tensor"], e["index"]) for e in rank.injected()}
    assert len(places) > 8


# -- replay ---------------------------------------------------------------------------------------------------------


def recorded(rank):
    """One step recorded and replayed on this rank: (what the owner computed, what its replay did)."""
    recorder = Recorder([rank.guard], pick=0)
    autograd.observers.append(recorder)
    rank.guard.window_open = True
    batch = torch.randn(5, 6)
    token = recorder.before_forward(rank.guard, (batch,), {})
    output = rank.model(batch)
    recorder.after_forward(token, output)
    recorder.left_ddp(token, output)
    output.square().mean().backward()
    autograd.observers.remove(recorder)
    assert recorder.pack() is None
    result = replay(recorder.case.program, [rank.guard], recorder.local)
    return recorder.case.expected, result.table


@pytest.mark.parametrize("site", ["activation", "saved", "gradient"])
def test_the_audit_sees_a_fault_and_its_replay_has_it_where_the_device_does(site):
    healthy, _ = recorded(Rank())
    place = "tensor=first.weight" if site == "gradient" else "tensor=second"
    for where in ("device", "step"):
        rank = Rank(f"{site}:rank=0,step=0,{place},kind=scale,by=3,where={where}")
        owned, replayed = recorded(rank)
        wrong = {name for name in healthy if owned[name] != healthy[name]}
        again = {name for name in healthy if replayed[name] != healthy[name]}
        assert wrong and again == (wrong if where == "device" else set())
        assert wrong == {":first.weight"} or site != "gradient"
        events = [(e["phase"], e["tensor"], e["index"]) for e in rank.injected()]
        _, tensor, index = events[0]
        assert events == [("step", tensor, index), ("replay", tensor, index)][: 2 if where == "device" else 1]


def test_a_loss_fault_is_in_what_the_audit_compares():
    healthy, _ = recorded(Rank())
    owned, replayed = recorded(Rank("loss:rank=0,step=0,bit=3"))
    assert {name for name in healthy if owned[name] != healthy[name]} == {"loss"} and replayed == healthy


def test_gradient_faults_come_before_the_script_s_own_hooks():
    seen = []
    rank = Rank("gradient:rank=0,step=1,tensor=first.bias,kind=nan,index=0")
    parameter = rank.model.first.bias
    handle = parameter.register_hook(lambda gradient: seen.append(gradient[0].item()))
    hooks = parameter._backward_hooks
    items = sorted(hooks.items(), key=lambda item: item[0] != handle.id)
    hooks.clear(), hooks.update(items)
    rank.step(), rank.step()
    assert math.isfinite(seen[0]) and math.isnan(seen[1])


def test_hooks_are_marked_for_the_replay():
    rank = Rank("activation:tensor=first", "saved:tensor=second", "gradient:tensor=first.bias")
    assert all(kept_in_replay(h) for h in rank.model.first._forward_hooks.values()) and rank.model.first._forward_hooks
    assert all(kept_in_replay(h) for h in rank.model.second._forward_pre_hooks.values())
    assert all(getattr(h, "_sdcrun", False) for h in rank.model.first.bias._backward_hooks.values())


class Checkpointed(Net):
    """The middle is computed again in the backward."""

    reentrant = False

    def forward(self, x):
        x.requires_grad_()
        return self.second(checkpoint(lambda y: torch.tanh(self.norm(self.first(y))), x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("site", ["activation", "saved", "loss"])
def test_activation_checkpointing(site, reentrant):
    model = Checkpointed(unused=False)
    model.reentrant = reentrant
    rank = Rank(f"{site}:rank=0,step=1,tensor=*,kind=scale,by=3", model=model)
    for _ in range(3):
        rank.step()
    assert rank.injected() and {e["step"] for e in rank.injected()} == {1}
    assert len({(e["tensor"], e["index"]) for e in rank.injected()}) == 1


# -- places and ends ------------------------------------------------------------------------------------------------


def test_a_device_keeps_its_fault_when_ranks_move(tmp_path, monkeypatch):
    folder = str(tmp_path)
    assert home_of(folder, "host/a", 0, 2, 1) == (2, 1)
    assert home_of(folder, "host/b", 0, 0, 0) == (0, 0)
    assert home_of(folder, "host/a", 1, 0, 0) == (2, 1), "the bad device, now rank 0"
    assert home_of(folder, "host/b", 1, 2, 1) == (0, 0), "a good one, now rank 2"
    assert home_of(folder, "host/spare", 1, 1, 1) is None
    assert home_of("", "host/a", 1, 1, 0) == (1, 0)

    fault = "gradient:rank=2,repeat=always,tensor=second.weight,index=4"
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert len(fired(fault, folder, rank=2, attempt=0)) == 1
    moved = fired(fault, folder, rank=0, attempt=1)
    assert [e["index"] for e in moved] == [4]
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert fired(fault, folder, rank=0, attempt=0) == []
    assert fired(fault, folder, rank=2, attempt=1) == []
    assert len(fired(fault + ",where=step", folder, rank=2, attempt=1)) == 1, "not tied to a device"


def fired(fault, folder, rank, attempt):
    one = Rank(fault, rank=rank, attempt=attempt, job_dir=folder)
    one.step()
    return one.injected()


@pytest.mark.parametrize(("text", "words"), [
    ("gradient:step=50", "before step 50, after 2 steps"),
    ("gradient:tensor=third.*", "no tensor is named 'third.*'; there are unused, first.weight"),
    ("activation:tensor=third", "no module is named 'third'"),
    ("optimizer:step=1,tensor=*.momentum", "no tensor is named '*.momentum'; there are"),
    ("buffer:tensor=first*", "no tensor is named"),
    ("gradient:step=1,bit=40", "bits 0 to 31"),
    ("gradient:step=1,index=99999,tensor=first.bias", "past the end of 8"),
    ("gradient:step=1,tensor=unused", "was computed"),
    ("weight:step=1,when=1e9:", "magnitude"),
    ("weight:p=1e-9", "drew none of 2 steps"),
    ("gradient:rank=7,step=1", "no rank 7 among 4"),
    ("gradient:node=2,step=1", "no node 2 among 2"),
    ("checkpoint:step=1", "nothing was saved"),
])
def test_what_never_fired_is_said_with_the_reason(text, words, monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "4")
    monkeypatch.setitem(os.environ, "GROUP_WORLD_SIZE", "2")
    rank = Rank("gradient:step=0", text)
    rank.step(), rank.step()
    [(position, reason)] = rank.injector.unfired()
    assert position == 1 and words in reason
    rank.injector.finish()
    kind, data = rank.events[-1]
    assert kind == "limit" and data["unfired"] == 1 and words in data["text"] and text.partition(":")[0] in data["text"]


def test_a_rank_that_is_not_meant_reports_nothing():
    rank = Rank("gradient:rank=0,step=99", "allreduce:step=99", rank=1)
    assert rank.injector.unfired() == []
