"""Which tensors of a save are those of guarded modules, under any name; the version clock; what counts as damage."""

import copy
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sdcrun.shim import fingerprint
from sdcrun.shim.checkpoints.clock import Clock, NotThatVersion
from sdcrun.shim.checkpoints.contents import leaves
from sdcrun.shim.checkpoints.recognise import Known, parts
from sdcrun.shim.checkpoints.tables import Saved, compare, moving_names, table_of


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)])
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Group:
    """As much of a group as recognising needs."""

    def __init__(self, module, optimizer):
        self.module = module
        names = dict(module.named_parameters())
        guard = SimpleNamespace(ddp=module, module=module, parameters=names, buffers=dict(module.named_buffers()),
                                qualified=lambda name: name)  # fmt: skip
        self.guards, self.optimizers, self.dropped = [guard], [weakref.ref(optimizer)], []
        self.state = {f"0.{key}.{next(n for n, q in names.items() if q is p)}": value
                      for p, state in optimizer.state.items() for key, value in state.items()}  # fmt: skip


@pytest.fixture
def trained():
    torch.manual_seed(0)
    module = Tied()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.arange(8)).sum().backward()
    optimizer.step()
    group = Group(module, optimizer)
    return SimpleNamespace(module=module, optimizer=optimizer, group=group, known=Known(group, group.state))


def found(trained, contents):
    return parts(leaves(contents), trained.known)


def clones(state):
    return {key: value.detach().clone() for key, value in state.items()}


RENAMED = {
    "as it is": lambda sd: sd,
    "module.": lambda sd: {f"module.{k}": v for k, v in sd.items()},
    "_orig_mod.module.": lambda sd: {f"_orig_mod.module.{k}": v for k, v in sd.items()},
    "the script's own prefix": lambda sd: {f"net.encoder.{k}": v for k, v in sd.items()},
    "nested": lambda sd: {"epoch": 3, "state": {"model": sd}, "metrics": {"loss": torch.tensor(1.0)}},
    "in a list": lambda sd: [1, (sd,)],
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", RENAMED)
def test_a_state_dict_is_found_under_any_naming(trained, name, copied):
    state = trained.module.state_dict()
    (part,) = found(trained, RENAMED[name](clones(state) if copied else state))
    assert part.kind == "weights" and set(part.leaves) == set(trained.known.parameters)
    for key, leaf in part.leaves.items():
        assert torch.equal(leaf.tensor, trained.known.parameters[key])


def test_both_ways_to_a_tied_weight_mean_the_same(trained):
    assert len(trained.known.parameters) == len(trained.module.state_dict()) - 1 - 9
    (part,) = found(trained, {"head.weight": trained.module.head.weight.detach().clone(),
                              "head.bias": trained.module.head.bias.detach().clone()})  # fmt: skip
    assert set(part.leaves) == {"embed.weight", "head.bias"}


def test_a_whole_module_and_parts_of_one(trained):
    (part,) = found(trained, copy.deepcopy(trained.module))
    assert set(part.leaves) == set(trained.known.parameters)
    (part,) = found(trained, {"head": clones(trained.module.blocks[1].state_dict())})
    assert {leaf.path[-1] for leaf in part.leaves.values()} >= {"0.weight", "1.bias"}


def test_a_list_of_all_parameters(trained):
    (part,) = found(trained, [p.detach().clone() for p in trained.module.parameters()])
    assert set(part.leaves) == set(trained.known.parameters)


@pytest.mark.parametrize("copied", [False, True])
def test_optimizer_state(trained, copied):
    state = trained.optimizer.state_dict()
    contents = {"opt": copy.deepcopy(state) if copied else state, "net": trained.module.state_dict()}
    optimizer, weights = found(trained, contents)
    assert (optimizer.kind, weights.kind) == ("optimizer", "weights")
    assert set(optimizer.leaves) == set(trained.known.state) and optimizer.place == "opt/state"
    by_name = {"state": {"module." + n: {"exp_avg": torch.zeros_like(p)} for n, p in trained.module.named_parameters()},
               "param_groups": []}  # fmt: skip
    (part,) = found(trained, by_name)
    assert part.kind == "optimizer" and all(name.startswith("0.exp_avg.") for name in part.leaves)


def test_one_tensor_of_an_optimizers_state_that_is_a_copy_is_found(trained):
    """A tensor that does not lie where the optimizer's does may be the very one that is damaged."""
    state = trained.optimizer.state_dict()
    state["state"] = {number: dict(entry) for number, entry in state["state"].items()}
    copied = state["state"][1]["exp_avg"] = state["state"][1]["exp_avg"].clone()
    (part,) = found(trained, {"opt": state})
    assert set(part.leaves) == set(trained.known.state)
    assert [name.split(".")[1] for name, leaf in part.leaves.items() if leaf.tensor is copied] == ["exp_avg"]


@pytest.mark.parametrize("contents", [
    {"loss": torch.tensor(1.0)}, torch.randn(11), {"weight": torch.ones(11)}, list(range(10_000)),
    {"images": torch.randn(3, 4), "labels": torch.arange(3)}, {"weight": torch.ones(4, 4), "bias": torch.ones(4)}, None,
    "text", {"state": {0: {"step": torch.tensor(1.0)}}},
], ids=str)  # fmt: skip
def test_other_things_are_nothing_of_ours(trained, contents):
    assert [part for part in found(trained, contents) if part.kind == "weights"] == []


def test_cycles_end():
    contents = {"a": torch.ones(1)}
    contents["self"] = contents
    assert [leaf.name for leaf in leaves(contents)] == ["a"]


# -- comparing ----------------------------------------------------------------------------------------------------


def table(trained, version=1):
    tensors = list(trained.known.parameters.values())
    return table_of("weights", version, version, "vote", list(trained.known.parameters),
                    fingerprint.fingerprints(tensors), [fingerprint.metadata(t) for t in tensors])  # fmt: skip


def compared(trained, state):
    (part,) = found(trained, state)
    saved = Saved(leaves(state))
    comparison = compare(saved, {n: leaf for n, leaf in part.leaves.items()}, table(trained))
    return comparison, saved, part.leaves


def test_equal_weights_are_good_in_any_layout(trained):
    state = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in clones(trained.module.state_dict()).items()}
    assert compared(trained, state)[0].good


def test_half_precision_is_foreign_not_damaged(trained):
    state = {k: v.half() if v.is_floating_point() else v for k, v in trained.module.state_dict().items()}
    comparison, saved, mine = compared(trained, state)
    assert not comparison.good and not comparison.differing and "float16" in next(iter(comparison.foreign.values()))
    assert not comparison.same_weights(saved, mine, set(mine))


def test_one_wrong_tensor_is_damage_and_the_word_is_known(trained):
    state = clones(trained.module.state_dict())
    state["blocks.2.0.weight"][1, 2] = 9.0
    comparison, saved, mine = compared(trained, state)
    assert comparison.differing == ["blocks.2.0.weight"] and comparison.same_weights(saved, mine, set(mine))
    comparison.find_words(saved, mine)
    assert comparison.words["blocks.2.0.weight"].index == 8


def test_an_average_is_other_weights_not_damage(trained):
    state = {k: v * 0.99 if v.is_floating_point() else v for k, v in trained.module.state_dict().items()}
    comparison, saved, mine = compared(trained, state)
    assert not comparison.good and not comparison.same_weights(saved, mine, set(mine))


def test_weights_of_which_most_never_move_are_not_taken_for_damaged_ones(trained):
    before = table(trained, 1)
    with torch.no_grad():
        trained.module.head.bias.add_(0.5)
        trained.module.blocks[0][0].bias.add_(0.5)
    moving = moving_names([table(trained, 2), before], set(before.rows))
    assert moving == {"head.bias", "blocks.0.0.bias"}
    state = clones(trained.module.state_dict())
    state["head.bias"] -= 0.25
    state["blocks.0.0.bias"] -= 0.25
    comparison, saved, mine = compared(trained, state)
    assert len(comparison.equal) > 2 * len(comparison.differing)
    assert not comparison.same_weights(saved, mine, moving) and comparison.same_weights(saved, mine, set(mine))


# -- the clock ----------------------------------------------------------------------------------------------------


def step(clock, change=lambda: None):
    clock.begin()
    change()
    clock.written()
    clock.end()


def test_a_reader_gets_its_version_or_is_told_why_not():
    clock = Clock()
    assert clock.read(0, 0.1, lambda: "weights") == "weights"
    step(clock)
    with pytest.raises(NotThatVersion, match="already"):
        clock.read(0, 0.1, lambda: None)
    with pytest.raises(NotThatVersion, match="not there"):
        clock.read(2, 0.01, lambda: None)
    clock.begin()
    clock.written()
    with pytest.raises(NotThatVersion):
        clock.read(1, 0.01, lambda: None)


def test_a_reader_waits_for_a_rank_that_is_behind():
    clock, got = Clock(), []
    reader = threading.Thread(target=lambda: got.append(clock.read(2, 10.0, lambda: clock.version)))
    reader.start()
    step(clock)
    step(clock)
    reader.join(10)
    assert got == [2]


def test_weights_do_not_change_under_a_reader():
    clock, held, go, seen = Clock(), threading.Event(), threading.Event(), []

    def slowly():
        held.set()
        go.wait(10)
        seen.append("read")

    reader = threading.Thread(target=lambda: clock.read(0, 1.0, slowly))
    reader.start()
    held.wait(10)
    stepper = threading.Thread(target=lambda: step(clock, lambda: seen.append("changed")))
    stepper.start()
    assert not seen
    go.set()
    reader.join(10)
    stepper.join(10)
    assert seen == ["read", "changed"] and clock.version == 1


def test_who_keeps_a_version_is_waited_for_once_and_not_for_ever():
    clock = Clock()
    clock.let_go(30)
    with clock.kept():
        clock.let_go(0.05)
        clock.let_go(1000)
    clock.let_go(1000)
