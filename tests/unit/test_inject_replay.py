"""Injected faults and the replay: what the audit sees, and where the device has the fault again."""

import copy
import math
import pickle

import pytest
import torch
from injectkit import Net, Rank, backward_watched, process_group, state  # noqa: F401
from torch.utils.checkpoint import checkpoint

from sdcrun.shim.microbatch import Random
from sdcrun.shim.patches import autograd
from sdcrun.shim.replay.record import Recorder
from sdcrun.shim.replay.run import replay
from sdcrun.shim.replay.state import kept_in_replay


def recorded(rank):
    """One step recorded and replayed on this rank: (what the owner computed, what its replay did)."""
    recorder = Recorder([rank.guard], pick=0)
    autograd.observers.append(recorder)
    rank.guard.window_open = True
    batch = torch.randn(5, 6)
    token = recorder.before_forward(rank.guard, (batch,), {}, Random.now())
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


@pytest.mark.parametrize("site", ["activation", "saved", "gradient", "input"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_modules_with_faults_can_be_copied_and_saved_whole_and_copies_are_healthy(site, copied):
    rank = Rank(f"{site}:rank=0,step=0,kind=scale,by=9")
    assert b"sdcrun" not in pickle.dumps((rank.model, rank.ddp._forward_pre_hooks))
    twin = copied(rank.ddp.module)
    rank.injector.forward_begins(rank.guard, 0)
    rank.guard.window_open = True
    twin(torch.randn(5, 6)).square().mean().backward()
    assert not rank.injected() and twin.first.weight.grad is not None
