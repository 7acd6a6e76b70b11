"""The modules in a module are those that torch's own iterators give."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from sdcrun.shim.replay.tree import Tree


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.none = nn.Linear(2, 2), None
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("kept", torch.zeros(1), persistent=False)
        self.register_module("nothing", None)
        self.register_parameter("no_bias", None)
        self.step, self.names = 3, ["a"]

    def forward(self, x):
        return self.norm(self.one(x))


def tied():
    block, other = Block(), Block()
    other.one.weight = block.one.weight
    return nn.Sequential(block, other)


def shared():
    block = Block()
    return nn.ModuleDict({"a": block, "b": nn.ModuleList([block, Block()]), "c": block.one})


def circular():
    block = Block()
    block.one.add_module("up", block)
    return block


def parametrized():
    block = Block()
    parametrize.register_parametrization(block.one, "weight", nn.Identity())
    return block


TREES = [
    Block, nn.Identity, tied, shared, parametrized, circular, lambda: nn.LSTM(2, 2),
    lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), lambda: torch.compile(Block()),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", TREES)
def test_it_holds_what_torch_names(make):
    module = make()
    tree = Tree(module)
    assert tree.parts == list(module.named_modules())
    assert [id(p) for p in tree.parameters()] == [id(p) for p in module.parameters()]
    for registry, named in (("_parameters", module.named_parameters()), ("_buffers", module.named_buffers())):
        found = tree.registered(registry)
        first = {}
        for name, held, key, tensor in found:
            assert held[key] is tensor and name.rpartition(".")[2] == key
            first.setdefault(id(tensor), name)
        assert list(first.values()) == [name for name, _ in named]
        holders = [getattr(part, registry) for _, part in module.named_modules()]
        assert len(found) == sum(tensor is not None for held in holders for tensor in held.values())


def test_attributes_are_what_the_script_has_put_in():
    found = [(name, attribute) for name, attribute, _ in Tree(nn.Sequential(Block())).attributes]
    assert [one for one in found if one[0] == "0"] == [("0", "none"), ("0", "step"), ("0", "names")]
    assert ("0.one", "in_features") in found and not any(attribute.startswith("_") for _, attribute in found)


def test_an_attribute_that_a_forward_adds_is_in_the_next_tree():
    block = Block()
    before = Tree(block)
    assert "late" not in {attribute for _, attribute, _ in before.attributes}
    block.late, block.more = 1, nn.Linear(1, 1)
    assert "late" not in {attribute for _, attribute, _ in before.attributes}
    assert "late" in {attribute for _, attribute, _ in Tree(block).attributes}
    assert Tree(block).parts[-1] == ("more", block.more)
