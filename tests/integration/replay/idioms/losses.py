"""What the script does with the outputs: losses of all kinds, in place, by hooks, with gradients of gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from idioms.base import (
    CLASSES,
    OUTPUTS,
    WHOLE,
    WIDTH,
    Net,
    batch,
    idiom,
    train,
)


class ChangesInput(Net):
    def forward(self, x):
        return super().forward(x.mul_(2.0))


@idiom(WHOLE)
def changed_in_place(rank):
    """Model and script both change tensors in place, before and after the backward."""
    model = DDP(ChangesInput())

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        out.div_(2.0)
        out += 1
        y[y == 3] = -100
        loss = F.cross_entropy(out, y)
        loss.backward()
        x.zero_()
        y.zero_()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def losses_in_a_buffer(rank):
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        losses, out = torch.zeros(3), model(x)
        for i in range(3):
            losses[i] = F.cross_entropy(out * (i + 1), y)
        losses.mean().backward()
        return losses.sum()

    return train(model, step_loss)


@idiom(WHOLE)
def features_by_hook(rank):
    net, features = Net(), []
    net.second.register_forward_hook(lambda module, args, output: features.append(output))
    model = DDP(net)

    def step_loss(step):
        x, y = batch(step)
        features.clear()
        loss = F.cross_entropy(model(x), y) + features[0].pow(2).mean()
        loss.backward()
        return loss + len(features)

    return train(model, step_loss)


class Auxiliary(Net):
    def forward(self, x):
        hidden = self.body(x)
        self.auxiliary = hidden.pow(2).mean()
        self.parts = [hidden.mean(), hidden.max()]
        return self.head(hidden)


@idiom(WHOLE)
def auxiliary_loss_in_an_attribute(rank):
    model = DDP(Auxiliary())

    def step_loss(step):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y) + 0.1 * model.module.auxiliary + sum(model.module.parts)
        loss.backward()
        return loss

    return train(model, step_loss)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 1.9 * gradient * x


def _squared(function):
    model = DDP(Net())

    def step_loss(step):
        loss = function.apply(model(batch(step)[0])).mean()
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def custom_function(rank):
    return _squared(Square)


@idiom(OUTPUTS)
def custom_function_made_on_the_spot(rank):
    class Local(Square):
        pass

    return _squared(Local)


@idiom(WHOLE)
def criterion_with_weights_and_penalty(rank):
    """A trainable criterion outside DDP, random weights per sample, L2 over the module's own parameters."""
    model, criterion = DDP(Net(dropout=0.1)), nn.Linear(CLASSES, CLASSES)

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        with torch.no_grad():
            sure = torch.softmax(out, 1).max(1).values
        each = F.cross_entropy(criterion(out), y, reduction="none") * sure * (torch.rand(len(y)) > 0.2)
        loss = each.sum() + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def noise_behind_the_model(rank):
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        out = F.dropout(model(x), 0.3)
        loss = F.cross_entropy(out + 0.1 * torch.randn_like(out), y)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def views_of_the_output(rank):
    model = DDP(Net())

    def step_loss(step):
        out = model(batch(step)[0])
        a, b = out.chunk(2, 0)
        mixed = torch.cat([a * 2, b]).reshape(2, -1)[:, ::2]
        loss = mixed.pow(2).mean() + out.t()[0].sum() + out.unsqueeze(0).expand(3, -1, -1).mean()
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def gradient_penalty(rank):
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.cross_entropy(out, y) + (slope.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def gradient_penalty_between(rank):
    """A point between two batches, one of them another module's output, is made a leaf with a gradient of its own."""
    maker, model = DDP(nn.Linear(WIDTH, WIDTH)), DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        made = maker(x).detach()
        between = (0.3 * x + 0.7 * made).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        loss = F.cross_entropy(model(made), y) + (slope.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        return loss

    return train(model, step_loss)


class Forces(Net):
    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


@idiom(WHOLE)
def gradient_inside_the_model(rank):
    model = DDP(Forces(), find_unused_parameters=True)

    def step_loss(step):
        loss = model(batch(step)[0]).pow(2).mean()
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(OUTPUTS)
def hook_on_the_output(rank):
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        out.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        loss = F.cross_entropy(out, y)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def gathered_negatives(rank):
    """What a collective gathered comes from outside and enters by value."""
    model = DDP(Net())

    def step_loss(step):
        out = F.normalize(model(batch(step)[0]), dim=-1)
        parts = [torch.zeros_like(out) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, out.detach())
        parts[rank] = out
        loss = F.cross_entropy(out @ torch.cat(parts).t(), torch.arange(len(out)))
        loss.backward()
        return loss

    return train(model, step_loss)


class Gathered(torch.autograd.Function):
    """The rows of all ranks, with gradients for all of them."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


@idiom(OUTPUTS)
def gathered_by_a_function(rank):
    """The collective hides in a custom Function, whose backward has one too."""
    model = DDP(Net())

    def step_loss(step):
        out = F.normalize(model(batch(step)[0]), dim=-1)
        loss = F.cross_entropy(out @ Gathered.apply(out).t(), torch.arange(len(out)) + rank * len(out))
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def gradients_that_balance_losses(rank):
    """Gradients of each loss are taken for the weights themselves before the backward."""
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        parts = (F.cross_entropy(out, y), out.pow(2).mean())
        weights = list(model.module.parameters())
        taken = [torch.autograd.grad(part, weights, retain_graph=True, allow_unused=True) for part in parts]
        norms = [torch.stack([g.norm() for g in gradients if g is not None]).norm() for gradients in taken]
        loss = parts[0] + parts[1] * (norms[0] / norms[1])
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def losses_averaged_for_the_log(rank):
    """Two micro-batches in a window; the first one's loss is averaged over all ranks before the second."""
    model = DDP(Net())

    def step_loss(step):
        for part in range(2):
            x, y = batch(2 * step + part)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
        return mean

    return train(model, step_loss)


@idiom(WHOLE)
def sum_over_ranks_in_place(rank):
    """A collective changes what the loss is computed from, under views that were taken before."""
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        scale = out.detach().square()
        halves = scale.chunk(2)
        dist.all_reduce(scale)
        loss = F.cross_entropy(out * halves[0].mean(), y)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(OUTPUTS)
def loss_averaged_in_place(rank):
    """The collective writes into the memory of the loss itself."""
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        dist.all_reduce(loss.detach())
        (loss * loss).backward()
        return loss

    return train(model, step_loss)


@idiom(OUTPUTS)
def dispatch_mode_around_the_model(rank):
    from torch.utils.flop_counter import FlopCounterMode

    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        with FlopCounterMode(display=False):
            out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def dispatch_mode_around_the_loss(rank):
    from torch.utils.flop_counter import FlopCounterMode

    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        with FlopCounterMode(display=False):
            loss = F.cross_entropy(out, y)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(OUTPUTS)
def dispatch_mode_over_the_backward(rank):
    from torch.utils.flop_counter import FlopCounterMode

    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        with FlopCounterMode(display=False):
            loss = F.cross_entropy(out, y)
            loss.backward()
        return loss

    return train(model, step_loss)
