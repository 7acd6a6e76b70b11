"""Loops that move their weights within a step, and put them back before the update; optimizers that evaluate closures
where they like; modules that are wrapped again."""

import gc

import torch
import torch.nn.functional as F
from record import MLP, batch, main
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 6


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation: the gradient is taken at the worst place nearby."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, dict(rho=rho, **options))
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _moved(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self._moved()]).norm()
        for p in self._moved():
            self.state[p]["kept"] = p.data.clone()
            p.add_(p.grad * (self.defaults["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self._moved():
            p.data = self.state[p]["kept"]
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


class Extragradient(torch.optim.Optimizer):
    """Goes on with the last gradient before it asks for the next one, all within `step(closure)`."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p].setdefault("last", torch.zeros_like(p)), alpha=group["lr"])
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.state[p]["last"], alpha=group["lr"]).sub_(p.grad, alpha=group["lr"])
                self.state[p]["last"].copy_(p.grad)
        return loss


class Heavy(torch.optim.Optimizer):
    """Momentum, written from scratch; a closure is evaluated first, as torch's own do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=group["lr"])
        return loss


def sam(rank, world):
    """Two passes; the second at perturbed weights, which are put back before the update."""
    model = DDP(MLP())
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step()
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step()
        losses.append(loss.item())
    return losses, [model], [optimizer.base]


def sam_with_a_closure(rank, world):
    """The closure must see the perturbed weights, so it cannot be evaluated before the step."""
    model = DDP(MLP())
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)

        def closure(x=x, y=y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        closure()
        losses.append(optimizer.step(closure).item())
    return losses, [model], [optimizer.base]


def _with_closures(rank, make):
    model = DDP(MLP())
    optimizer = make(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses, [model], [optimizer]


def closure_at_other_weights(rank, world):
    """An optimizer that moves the weights before it evaluates its closure."""
    return _with_closures(rank, Extragradient)


def closure_of_a_foreign_optimizer(rank, world):
    """An optimizer of the script's own that evaluates its closure first."""
    return _with_closures(rank, Heavy)


def adversarial(rank, world):
    """Three attacks on the first layer by .data, which no version counter sees; then the weights are put back."""
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weight = model.module.fc1.weight
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        kept = weight.data.clone()
        for _ in range(3):
            weight.data.add_(0.1 * weight.grad / (weight.grad.norm() + 1e-9))
            F.cross_entropy(model(x), y).backward()
        weight.data = kept
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def wrapped_anew(rank, world):
    """The head alone is trained first; then the whole module, in a new DDP and with a new optimizer."""
    net = MLP()
    net.fc1.requires_grad_(False)
    losses = []
    for stage in range(2):
        model = DDP(net)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
        for step in range(3):
            x, y = batch(rank, 3 * stage + step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        net.requires_grad_(True)
    return losses, [model], [optimizer]


def dropped_at_different_times(rank, world):
    """A module that the script has dropped lives on in a cycle until the collector runs: on each rank when it likes."""
    first = DDP(MLP())
    cycle = [first]
    cycle.append(cycle)
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    del first, cycle
    gc.disable()
    losses = []
    for step in range(STEPS):
        if rank == step // 2:
            gc.collect()
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gc.enable()
    return losses, [model], [optimizer]


LOOPS = [
    sam,
    sam_with_a_closure,
    closure_at_other_weights,
    closure_of_a_foreign_optimizer,
    adversarial,
    wrapped_anew,
    dropped_at_different_times,
]

if __name__ == "__main__":
    main(LOOPS)
