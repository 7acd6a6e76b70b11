"""A fault among several modules falls on the one whose step it is, whatever the order of a script's forwards."""

import types

import pytest
import torch
from injectkit import backward_watched, process_group  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sdcrun.core.types import Config
from sdcrun.shim.guard import Guard
from sdcrun.shim.inject import Injector
from sdcrun.shim.inject_aim import farthest


class Double(torch.autograd.Function):
    """A custom function between the two modules."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Gan:
    """A generator `g`, wrapped first, and a critic `d`, driven as the gate drives them."""

    def __init__(self, *faults):
        self.events, self.step = [], 0
        runtime = types.SimpleNamespace(
            config=Config(faults=faults), rank=0, attempt=0, campaign=None,
            emit=lambda kind, data: self.events.append((kind, data)))
        torch.manual_seed(5)
        self.group = types.SimpleNamespace(step=0, runtime=runtime, off_reason=None)
        self.injector = Injector(runtime)
        self.guards, self.modules, self.optimizers = {}, {}, {}
        for name, sizes in (("g", (3, 5)), ("d", (5, 1))):
            net = nn.Sequential(nn.Linear(*sizes), nn.BatchNorm1d(sizes[1]))
            self.modules[name] = DistributedDataParallel(net)
            self.guards[name] = Guard(self.modules[name], self.group, name)
            self.injector.attach(self.guards[name])
            self.optimizers[name] = torch.optim.Adam(net.parameters(), lr=0.01)

    def call(self, name, x):
        guard = self.guards[name]
        if torch.is_grad_enabled():
            self.injector.forward_begins(guard, self.group.step)
            guard.window_open = True
        output = guard.ddp(x)
        if torch.is_grad_enabled():
            self.injector.forward_ends()
        return output

    def update(self, name):
        guard, optimizer = self.guards[name], self.optimizers[name]
        optimizer.step()
        guard.window_open = False
        self.injector.optimizer(guard, optimizer, self.group.step)
        self.injector.weight(guard, self.group.step)
        self.group.step += 1

    def fired(self):
        return [(data["step"], data["tensor"].partition(".")[0]) for kind, data in self.events if kind == "inject"]


def critic_then_generator(gan, rounds):
    """The fakes of the critic's step are used again in the generator's."""
    for _ in range(rounds):
        for optimizer in gan.optimizers.values():
            optimizer.zero_grad()
        (-gan.call("d", torch.randn(6, 5)).mean()).backward()
        fake = gan.call("g", torch.randn(6, 3))
        gan.call("d", fake.detach()).square().mean().backward()
        gan.update("d")
        gan.call("d", Double.apply(fake)).square().mean().backward()
        gan.update("g")


def frozen_critic(gan, rounds):
    """Two steps of the critic, its fakes made without gradient, to one of the generator through the frozen critic."""
    for _ in range(rounds):
        for _ in range(2):
            with torch.no_grad():
                fake = gan.call("g", torch.randn(6, 3))
            (gan.call("d", fake) - gan.call("d", torch.randn(6, 5))).mean().backward()
            gan.update("d")
        gan.guards["d"].module.requires_grad_(False)
        gan.call("d", gan.call("g", torch.randn(6, 3))).square().mean().backward()
        gan.update("g")
        gan.guards["d"].module.requires_grad_(True)


def generator_first(gan, rounds):
    """One forward of the generator serves both; its update comes first."""
    for _ in range(rounds):
        fake = gan.call("g", torch.randn(6, 3))
        gan.call("d", fake).square().mean().backward()
        gan.update("g")
        (gan.call("d", fake.detach()) - gan.call("d", torch.randn(6, 5))).mean().backward()
        gan.update("d")


SCRIPTS = {critic_then_generator: "dg", frozen_critic: "ddg", generator_first: "gd"}


@pytest.mark.parametrize("site", ["gradient", "weight", "optimizer"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_module_that_is_updated_is_hit_in_every_step(script, site):
    gan = Gan(f"{site}:step=0,repeat=always,kind=bitflip,bit=20")
    script(gan, 4)
    assert sorted(set(gan.fired())) == [(step, name) for step, name in enumerate(SCRIPTS[script] * 4)]


@pytest.mark.parametrize("site", ["activation", "saved", "input", "buffer"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_one_module_that_was_called_is_hit_in_every_step(script, site):
    gan = Gan(f"{site}:step=1,repeat=always,kind=bitflip,bit=22")
    script(gan, 3)
    steps = [step for step, _ in sorted(set(gan.fired()))]
    assert steps == list(range(1, 3 * len(SCRIPTS[script]))) or site == "input"
    if site == "input":
        inputs = [data["step"] for kind, data in gan.events if kind == "inject"]
        assert sorted(set(inputs)) == list(range(1, 3 * len(SCRIPTS[script])))


@pytest.mark.parametrize("site", ["reduced", "allreduce"])
def test_the_reduction_of_the_module_that_is_updated_is_hit(site):
    gan = Gan(f"{site}:step=0,repeat=always,kind=scale,by=3")

    def reduce(step):
        for name in "dg":
            guard = gan.guards[name]
            parameters = [p for p in guard.parameters.values() if p.grad is not None]
            bucket = types.SimpleNamespace(parameters=lambda found=parameters: found)
            gan.injector.gradient(guard, bucket)
            gan.injector.reduced(guard, torch.cat([p.grad.flatten() for p in parameters]), parameters)

    for _ in range(2):
        gan.call("d", torch.randn(6, 5)).mean().backward()
        gan.call("g", torch.randn(6, 3)).mean().backward() if gan.group.step == 0 else None
        reduce(gan.group.step)
        gan.update("d")
        gan.call("d", gan.call("g", torch.randn(6, 3))).square().mean().backward()
        reduce(gan.group.step)
        gan.update("g")
    assert gan.fired() == [(0, "d"), (1, "g"), (2, "d"), (3, "g")]


def test_a_forward_without_gradient_is_left_alone():
    gan = Gan("activation:step=0,repeat=always,kind=zero,tensor=0")
    gan.call("d", torch.randn(6, 5)).mean().backward()
    before = len(gan.fired())
    with torch.no_grad():
        gan.call("d", torch.randn(6, 5))
        gan.call("g", torch.randn(6, 3))
    assert before == 1 and len(gan.fired()) == 1


def test_only_modules_of_one_group_are_hit():
    gan = Gan("gradient:step=0")
    other = nn.Linear(2, 2)
    group = types.SimpleNamespace(step=0, runtime=gan.group.runtime, off_reason=None)
    ddp = DistributedDataParallel(other)
    gan.injector.attach(Guard(ddp, group, "other"))
    other(torch.ones(1, 2)).sum().backward()
    gan.call("d", torch.randn(6, 5)).mean().backward()
    assert gan.fired() == [(0, "d")]


def test_farthest_looks_through_functions_of_the_script_and_stops_at_detached_values():
    near, far = nn.Linear(3, 3), nn.Linear(3, 3)
    owners = {id(p): "near" for p in near.parameters()} | {id(p): "far" for p in far.parameters()}
    x = far(torch.ones(2, 3))
    assert farthest([near(Double.apply(x)).sum()], owners) == "far"
    assert farthest([near(x.detach()).sum()], owners) == "near"
    assert farthest([x.detach().requires_grad_().sum()], owners) is None
