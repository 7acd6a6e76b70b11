"""Modules of TorchScript, scripted or traced, alone and inside others, are replayed like any other."""

import pytest
import torch
from replaykit import Solo, bits, data, same
from torch import nn

from sdcrun.shim.replay.tree import Tree

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.dropout(self.norm(self.a(x)), 0.3, self.training)


class Keeps(nn.Module):
    """Has a scripted module that nobody trains outside its tree."""

    def __init__(self):
        super().__init__()
        self.a, self.teachers = nn.Linear(6, 4), [torch.jit.script(Net())]

    def forward(self, x):
        return self.a(x) - self.teachers[0](x).detach()


MADE = {
    "scripted": lambda: torch.jit.script(Net()),
    "a part of it": lambda: nn.Sequential(torch.jit.script(Net()), nn.Linear(4, 2)),
    "traced": lambda: torch.jit.trace(Net(), torch.randn(3, 6), check_trace=False),
    "a traced part": lambda: nn.Sequential(torch.jit.trace(nn.Linear(6, 4), torch.randn(3, 6)), nn.Tanh()),
    "outside": Keeps,
}


@pytest.mark.parametrize("kind", MADE)
def test_it_is_replayed_without_a_trace(kind):
    net = MADE[kind]()
    x, _ = data()
    for _ in range(3):
        with Solo(net) as solo:
            solo(x).pow(2).mean().backward()
        before, attributes = bits(net), [sorted(vars(part)) for part in net.modules()]
        teachers = [bits(teacher) for teacher in getattr(net, "teachers", ())]
        expected, result = solo.again()
        assert result.table == expected and solo.recorder.case.program.kind == "full"
        assert same(bits(net), before) and [sorted(vars(part)) for part in net.modules()] == attributes
        assert all(same(bits(teacher), known) for teacher, known in zip(getattr(net, "teachers", ()), teachers))


@pytest.mark.parametrize("kind", MADE)
def test_its_tree_holds_what_torch_names(kind):
    net = MADE[kind]()
    tree = Tree(net)
    assert [name for name, _ in tree.parts] == [name for name, _ in net.named_modules()]
    assert [p.data_ptr() for p in tree.parameters()] == [p.data_ptr() for p in net.parameters()]
