"""Hooks that a forward itself puts on its modules, or takes off, are those of its last run for the script."""

import contextlib

import pytest
import torch
from replaykit import Solo, data
from torch import nn

from sdcrun.shim.replay.run import NotReplayable

KINDS = {
    "forward": lambda part, hook: part.register_forward_hook(hook),
    "with keywords": lambda part, hook: part.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True),
    "always": lambda part, hook: part.register_forward_hook(hook, always_call=True),
    "before": lambda part, hook: part.register_forward_pre_hook(lambda m, a: None),
    "before with keywords": lambda part, hook: part.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True),
    "backward": lambda part, hook: part.register_full_backward_hook(hook),
}


class Hooking(nn.Module):
    def __init__(self, register):
        super().__init__()
        self.a, self.b, self.register, self.handles = nn.Linear(6, 4), nn.Linear(4, 3), register, []

    def forward(self, x):
        y = self.b(self.a(x))
        self.register(self.a, lambda *_: None)
        if self.handles:
            self.handles.pop().remove()
        self.handles.append(self.register(self.b, lambda *_: None))
        return y


def registered(net):
    kept = {}
    for name, part in net.named_modules():
        for kind, registry in vars(part).items():
            if "hooks" in kind and registry:
                kept[name, kind] = list(registry.items())
    return kept


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_neither_adds_nor_takes_any(kind):
    torch.manual_seed(0)
    net = Hooking(KINDS[kind])
    for _ in range(3):
        with Solo(net) as solo:
            solo(data()[0]).sum().backward()
        before, handles = registered(net), list(net.handles)
        with contextlib.suppress(NotReplayable):  # its hooks are not those that the forward began with
            solo.again()
        assert registered(net) == before and net.handles == handles
    assert any(len(hooks) == 3 for hooks in before.values())
