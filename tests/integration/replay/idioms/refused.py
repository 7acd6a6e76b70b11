"""What cannot be computed on another rank, and must be declined with the reason; and compilers."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from idioms.base import (
    OUTPUTS,
    WHOLE,
    Net,
    batch,
    classify,
    idiom,
    train,
)


class Together(Net):
    def forward(self, x):
        out = super().forward(x)
        mean = out.detach().mean(0)
        dist.all_reduce(mean)
        return out - mean


@idiom("collective operations inside")
def collective_in_the_forward(rank):
    return classify(DDP(Together()))


class Diary(Net):
    def __init__(self) -> None:
        super().__init__()
        self.diary = {"calls": 0, "clock": complex}

    def forward(self, x):
        self.diary["calls"] += 1
        return super().forward(x)


@idiom("the forward changes diary")
def opaque_state(rank):
    return classify(DDP(Diary()))


class Manual(Net):
    """The whole step is the forward, as in frameworks that let the script call backward itself."""

    def forward(self, x, y):
        loss, model = F.cross_entropy(super().forward(x), y), self.model()
        model.require_backward_grad_sync = True
        model.reducer.prepare_for_backward([])
        loss.backward()
        model.require_backward_grad_sync = False
        return loss.detach()


@idiom("the backward runs inside the module's forward")
def backward_in_the_forward(rank):
    net = Manual()
    model = DDP(net)
    net.model = lambda: model
    model.require_backward_grad_sync = False
    return train(model, lambda step: model(*batch(step)))


class Takes(Net):
    def forward(self, x, how):
        return super().forward(how(x))


@idiom("inputs cannot be shipped")
def inputs_that_cannot_travel(rank):
    model = DDP(Takes())
    return classify(model, call=lambda x: model(x, lambda t: t * 2))


class Updates(Net):
    def forward(self, x):
        with torch.no_grad():
            self.second.bias.mul_(0.99)
        return super().forward(x)


@idiom("changes its own parameters")
def forward_that_changes_parameters(rank):
    return classify(DDP(Updates()))


@idiom(OUTPUTS, compiled=True)
def compiled_outside(rank):
    model = DDP(Net(dropout=0.1))
    return classify(model, call=torch.compile(model))


@idiom(WHOLE, compiled=True)
def compiled_inside(rank):
    return classify(DDP(torch.compile(Net(dropout=0.1))))


@idiom(WHOLE, compiled=True)
def compiled_in_place(rank):
    net = Net(dropout=0.1)
    net.compile()
    return classify(DDP(net))


@idiom(OUTPUTS, compiled=True)
def compiled_loss(rank):
    model, loss_of = DDP(Net()), torch.compile(lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1))

    def step_loss(step):
        x, y = batch(step)
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom("other ways than the module's outputs", compiled=True)
def compiled_loss_and_penalty(rank):
    model, loss_of = DDP(Net()), torch.compile(F.cross_entropy)

    def step_loss(step):
        x, y = batch(step)
        loss = loss_of(model(x), y) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        return loss

    return train(model, step_loss)


class Summed(torch.autograd.Function):
    """The identity, whose gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SummedNet(Net):
    def forward(self, x):
        return Summed.apply(super().forward(x))


@idiom("collective operation")
def collective_in_the_backward(rank):
    """Nothing shows it before the micro-batch is run again, where it must not run."""
    return classify(DDP(SummedNet()), steps=6)


@idiom("changed between the recorded backward and the update")
def weights_put_back_before_the_update(rank):
    """The pass at other weights cannot be run again at the gate."""
    model = DDP(Net())
    weight = next(model.parameters())

    def step_loss(step):
        x, y = batch(step)
        kept = weight.data.clone()
        weight.data.add_(0.1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        weight.data = kept
        return loss

    return train(model, step_loss, steps=6)
