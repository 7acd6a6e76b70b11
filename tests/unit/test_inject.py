"""The injector on a real DDP module of one process: what is hit at each site, and that nothing else moves."""

import math
import os
import random
import threading

import pytest
import torch
from injectkit import Rank, backward_watched, differences, process_group, state  # noqa: F401
from torch import nn

from sdcrun.shim.inject_device import home_of


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


class Turns(nn.Module):
    """One of two branches, by turns, as a router may choose its experts."""

    def __init__(self):
        super().__init__()
        self.stem, self.branches, self.calls = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)]), 0
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.calls += 1
        return self.branches[self.calls % 2](torch.tanh(self.stem(x)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("site", ["activation", "saved", "gradient"])
def test_what_is_not_used_in_each_step_is_not_drawn(site, seed):
    rank = Rank(f"{site}:rank=0,step=3,kind=scale,by=9", model=Turns(), seed=seed)
    for _ in range(4):
        rank.step()
    (hit,) = rank.injected()
    assert hit["step"] == 3 and hit["tensor"].startswith("stem")


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
