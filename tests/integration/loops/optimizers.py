"""Training loops that differ in what they do with optimizers."""

import math

import torch
import torch.nn.functional as F
from record import MLP, batch, main
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 6


def train(model, optimizer, rank, steps=STEPS, after_step=None):
    """The loop of the tutorial."""
    losses = []
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if after_step is not None:
            after_step(step)
        losses.append(loss.item())
    return losses


def plain(rank, world):
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train(model, optimizer, rank), [model], [optimizer]


def raw_module_optimizer(rank, world):
    """The optimizer is made from the module before it is wrapped."""
    net = MLP()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    model = DDP(net)
    return train(model, optimizer, rank), [net], [optimizer]


def fused(rank, world):
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return train(model, optimizer, rank), [model], [optimizer]


def foreach(rank, world):
    model = DDP(MLP())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True, amsgrad=True)
    return train(model, optimizer, rank), [model], [optimizer]


def many_classes(rank, world):
    """One after another, every built-in optimizer that takes plain dense parameters."""
    model, losses, optimizers = DDP(MLP()), [], []
    for kind in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor"):
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        losses += train(model, optimizer, rank, steps=2)
        optimizers.append(optimizer)
    return losses, [model], optimizers


def two_optimizers_one_module(rank, world):
    """Weights by SGD, biases by Adam, one backward for both."""
    model = DDP(MLP())
    weights = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1, momentum=0.9)
    biases = torch.optim.Adam([p for p in model.parameters() if p.dim() <= 1], lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in (weights, biases):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [model], [weights, biases]


def lr_schedule(rank, world):
    """A scheduler wraps the instance's `step`; one is stepped per batch, another one on a plateau of the loss."""
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def after_step(step):
        schedule.step()
        plateau.step(0.5 if step > 2 else 1.0)

    return train(model, optimizer, rank, after_step=after_step), [model], [optimizer]


def one_cycle(rank, world):
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1)
    return train(model, optimizer, rank, after_step=lambda step: schedule.step()), [model], [optimizer]


class Lookahead(torch.optim.SGD):
    """A class that overrides `step` and calls the one above it."""

    def __init__(self, params, lr, every=2):
        super().__init__(params, lr=lr, momentum=0.9)
        self.every, self.calls = every, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure=None):
        loss = super().step(closure)
        self.calls += 1
        if self.calls % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s += 0.5 * (p.detach() - s)
                    p.data.copy_(s)
        return loss


class Lion(torch.optim.Optimizer):
    """Written from scratch on the base class, and moves its momentum also where there is no gradient."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                grad = p.grad if p.grad is not None else torch.zeros_like(p)
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((beta1 * momentum + (1 - beta1) * grad).sign_(), alpha=-group["lr"])
                momentum.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss


def step_overridden_with_super(rank, world):
    model = DDP(MLP())
    optimizer = Lookahead(model.parameters(), lr=0.1)
    return train(model, optimizer, rank), [model], [optimizer]


def step_from_scratch(rank, world):
    model = DDP(MLP())
    optimizer = Lion(model.parameters(), lr=0.01, weight_decay=0.1)
    return train(model, optimizer, rank), [model], [optimizer]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, for matrices (after Jordan et al. 2024, arXiv 2502.16982)."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = buffer / (buffer.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                p.add_(x, alpha=-group["lr"] * math.sqrt(max(1, p.size(0) / p.size(1))))


def muon_and_adamw(rank, world):
    """A list of optimizers stepped in a loop, as speed-run scripts do."""
    model = DDP(MLP())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [Muon(matrices), torch.optim.AdamW(rest, lr=0.01, fused=True)]
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, [model], optimizers


def lbfgs(rank, world):
    """Several evaluations of the closure for one step."""
    model = DDP(MLP(dropout=0.0))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3)
    losses = []
    for step in range(4):
        x, y = batch(rank, step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
            return loss

        losses.append(optimizer.step(closure).item())
    return losses, [model], [optimizer]


def sgd_closure(rank, world):
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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


def clip_gradients(rank, world):
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        losses += [loss.item(), norm.item()]
    return losses, [model], [optimizer]


def step_without_backward(rank, world):
    """Steps in which nothing was computed, and two backward passes for one step."""
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    losses = []
    for step in range(STEPS):
        for half in range(2):
            x, y = batch(rank, 2 * step + half)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if step == 2:
            optimizer.step()
        optimizer.zero_grad()
    return losses, [model], [optimizer]


def bf16_autocast(rank, world):
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def bf16_weights(rank, world):
    """Weights, gradients and optimizer state all in half precision."""
    model = DDP(MLP(dropout=0.0).to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(torch.bfloat16)).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def scaled(rank, overflow, clip):
    """Mixed precision with loss scaling; the loss overflows in step 2 where `overflow` says so."""
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    losses = []
    for step in range(STEPS + 2):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        if step == 2 and overflow:
            loss = loss * 1e38
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.item(), scaler.get_scale()]
    return losses, [model], [optimizer]


def grad_scaler(rank, world):
    return scaled(rank, overflow=False, clip=True)


def grad_scaler_overflow(rank, world):
    """Every rank overflows, as it happens when the scale has grown too far."""
    return scaled(rank, overflow=True, clip=False)


def grad_scaler_one_rank_overflows(rank, world):
    """One rank overflows; the all-reduce brings it to all of them, so every rank leaves the step out."""
    return scaled(rank, overflow=rank == 1, clip=True)


def gan(rank, world):
    """Two modules, two optimizers; the second uses the first twice in a round, once without its gradients."""
    generator, critic = DDP(MLP(6, 16, 12)), DDP(MLP(12, 16, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.999))
    losses = []
    for step in range(STEPS):
        real, _ = batch(rank, step)
        fake = generator(torch.randn(len(real), 6))
        d_optimizer.zero_grad()
        right = torch.ones(len(real), 1)
        d_loss = F.binary_cross_entropy_with_logits(critic(real), right)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), 0 * right)
        d_loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = F.binary_cross_entropy_with_logits(critic(fake), right)
        g_loss.backward()
        g_optimizer.step()
        losses += [d_loss.item(), g_loss.item()]
    return losses, [generator, critic], [g_optimizer, d_optimizer]


def gan_two_critic_steps(rank, world):
    """Two updates of the critic for each of the generator, each with separate backward passes of real and fake."""
    generator, critic = DDP(MLP(6, 16, 12)), DDP(MLP(12, 16, 1))
    g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=0.005)
    d_optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.005)
    losses = []
    for step in range(STEPS):
        for half in range(2):
            real, _ = batch(rank, 2 * step + half)
            critic.zero_grad()
            with torch.no_grad():
                fake = generator(torch.randn(len(real), 6))
            on_real = -critic(real).mean()
            on_real.backward()
            on_fake = critic(fake).mean()
            on_fake.backward()
            d_optimizer.step()
            losses += [on_real.item(), on_fake.item()]
        for p in critic.parameters():
            p.requires_grad_(False)
        generator.zero_grad()
        g_loss = -critic.module(generator(torch.randn(8, 6))).mean()
        g_loss.backward()
        g_optimizer.step()
        for p in critic.parameters():
            p.requires_grad_(True)
        losses.append(g_loss.item())
    return losses, [generator, critic], [g_optimizer, d_optimizer]


def optimizer_replaced(rank, world):
    """A new optimizer takes over half way, with the old one's state loaded into it."""
    model = DDP(MLP())
    first = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = train(model, first, rank, 3)
    second = torch.optim.Adam(model.parameters(), lr=0.5)
    second.load_state_dict(first.state_dict())
    del first
    return losses + train(model, second, rank, 3), [model], [second]


LOOPS = [
    plain,
    raw_module_optimizer,
    fused,
    foreach,
    many_classes,
    two_optimizers_one_module,
    lr_schedule,
    one_cycle,
    step_overridden_with_super,
    step_from_scratch,
    muon_and_adamw,
    lbfgs,
    sgd_closure,
    clip_gradients,
    step_without_backward,
    bf16_autocast,
    bf16_weights,
    grad_scaler,
    grad_scaler_overflow,
    grad_scaler_one_rank_overflows,
    gan,
    gan_two_critic_steps,
    optimizer_replaced,
]

if __name__ == "__main__":
    main(LOOPS)
