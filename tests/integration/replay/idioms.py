"""Ways in which people write one training step, each with what the replay audit must make of it.

`@idiom(WHOLE)`: loss and gradients are audited; `OUTPUTS`: the loss is out of reach, gradients from the module's
outputs back and the outputs themselves are; a text: declined, and the reason contains it. A function `f(rank)` returns
(losses, modules, optimizers).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import typing
from collections import namedtuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

WHOLE, OUTPUTS = "whole", "outputs"
IDIOMS: dict[str, tuple[typing.Callable, str]] = {}
COMPILED: set[str] = set()
WIDTH, CLASSES, STEPS = 24, 7, 4


def idiom(expected: str, compiled: bool = False):
    def register(function):
        IDIOMS[function.__name__] = (function, expected)
        if compiled:
            COMPILED.add(function.__name__)
        return function

    return register


class Net(nn.Module):
    """Three layers, with BatchNorm and dropout if wanted."""

    def __init__(self, norm: bool = False, dropout: float = 0.0, outputs: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 40)
        self.norm = nn.BatchNorm1d(40) if norm else nn.Identity()
        self.second = nn.Linear(40, 40)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(40, outputs)

    def body(self, x):
        return self.drop(F.gelu(self.second(torch.relu(self.norm(self.first(x))))))

    def forward(self, x):
        return self.head(self.body(x))


class Language(nn.Module):
    """Two attention blocks over tokens; `again`: how activations are recomputed; `tied`: input and output embedding."""

    def __init__(self, tokens: int = 30, again: str = "", tied: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.out = nn.Linear(16, tokens, bias=False)
        self.again = again
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, use_reentrant=self.again == "reentrant")
            else:
                x = block(x)
        return self.out(x)


def batch(step: int, size: int = 6):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


def tokens(step: int):
    return torch.randint(0, 30, (3, 8), generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


def train(model, step_loss, optimizer=None, steps=STEPS):
    """Plain loop: `step_loss(step)` runs forward and backward and returns a number."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(torch.as_tensor(step_loss(step)).detach()))
        optimizer.step()
    return losses, [model], [optimizer]


def classify(model, steps=STEPS, call=None):
    def step_loss(step):
        x, y = batch(step)
        loss = F.cross_entropy((call or model)(x), y)
        loss.backward()
        return loss

    return train(model, step_loss, steps=steps)


def next_token(model):
    def step_loss(step):
        ids = tokens(step)
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
        loss.backward()
        return loss

    return train(model, step_loss, torch.optim.AdamW(model.parameters(), lr=0.01))


@idiom(WHOLE)
def plain(rank):
    return classify(DDP(Net()))


@idiom(WHOLE)
def batchnorm_and_dropout(rank):
    return classify(DDP(Net(norm=True, dropout=0.2)))


@idiom(WHOLE)
def attention_with_dropout(rank):
    return next_token(DDP(Language()))


@idiom(WHOLE)
def tied_embedding(rank):
    return next_token(DDP(Language(tied=True)))


@idiom(WHOLE)
def checkpoint_modern(rank):
    return next_token(DDP(Language(again="modern")))


@idiom(WHOLE)
def checkpoint_reentrant(rank):
    return next_token(DDP(Language(again="reentrant"), static_graph=True))


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Language()

    def forward(self, ids=None, labels=None, extra=None):
        logits = self.inner(ids)
        return Answer(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


@idiom(WHOLE)
def loss_inside_with_dataclass(rank):
    model = DDP(WithLoss())

    def step_loss(step):
        ids = tokens(step)
        answer = model(ids=ids, labels=ids, extra={"mask": [ids.float(), {"deep": (1, ids)}]})
        answer.loss.backward()
        return answer.loss

    return train(model, step_loss)


@idiom(WHOLE)
def accumulation_no_sync(rank):
    model = DDP(Net(norm=True, dropout=0.1))

    def step_loss(step):
        total = 0.0
        for part in range(3):
            x, y = batch(10 * step + part)
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y) / 3
                loss.backward()
            total += loss.item()
        return total

    return train(model, step_loss)


@idiom(WHOLE)
def autocast_grad_scaler_clip(rank):
    model = DDP(Net(dropout=0.1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def _two_views(together: bool):
    model = DDP(Net(dropout=0.1), broadcast_buffers=False)

    def step_loss(step):
        x, y = batch(step)
        outputs = []
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=together):
            for shift in (0.0, 0.1):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs.append(model(x + shift))
        loss = sum(F.cross_entropy(output.float(), y) for output in outputs)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def two_forwards_in_one_autocast(rank):
    """The casts of the weights are shared, so their gradients add up in half precision."""
    return _two_views(True)


@idiom(WHOLE)
def two_forwards_in_two_autocasts(rank):
    return _two_views(False)


@idiom(WHOLE)
def contrastive(rank):
    model = DDP(Net(dropout=0.1), broadcast_buffers=False)

    def step_loss(step):
        x, _ = batch(step)
        a, b = (F.normalize(model(v), dim=-1) for v in (x, x + 0.05))
        logits = a @ b.t() * 5
        target = torch.arange(len(x))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def gan(rank):
    maker, judge = DDP(Net(outputs=WIDTH)), DDP(Net(outputs=1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (maker, judge)]
    right, losses = F.binary_cross_entropy_with_logits, []
    for step in range(STEPS):
        real, _ = batch(step)
        noise, _ = batch(step + 500)
        fake = maker(noise)
        optimizers[1].zero_grad()
        judged = right(judge(real), torch.ones(6, 1)) + right(judge(fake.detach()), torch.zeros(6, 1))
        judged.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        made = right(judge(fake), torch.ones(6, 1))
        made.backward()
        optimizers[0].step()
        losses += [judged.item(), made.item()]
    return losses, [maker, judge], optimizers


class Branches(Net):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.ways = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(4))

    def forward(self, x):
        out = super().forward(x)
        return self.ways[int(x[0, 0].abs() * 10) % 4](out), out.detach()


@idiom(WHOLE)
def unused_parameters(rank):
    model = DDP(Branches(), find_unused_parameters=True)
    return classify(model, call=lambda x: model(x)[0])


@idiom(WHOLE)
def static_graph(rank):
    return classify(DDP(Net(norm=True), static_graph=True))


@idiom(WHOLE)
def bucket_views(rank):
    return classify(DDP(Net(norm=True), gradient_as_bucket_view=True))


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


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history = 0, []

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        return super().forward(x) * (1 + 0.01 * self.calls)


@idiom(WHOLE)
def counter_in_forward(rank):
    net = Counting()
    losses, models, optimizers = classify(DDP(net))
    return [*losses, net.calls, *net.history], models, optimizers


@idiom(WHOLE)
def hooks_that_look_on_and_that_act(rank):
    net, seen = Net(), []
    net.first.register_forward_hook(lambda module, args, output: seen.append("forward"))
    net.second.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    net.head.register_forward_hook(lambda module, args, output: output * 1.5)
    net.first.weight.register_hook(lambda gradient: gradient * 0.5)
    losses, models, optimizers = classify(DDP(net))
    return [*losses, len(seen)], models, optimizers


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
def several_roots(rank):
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        first, second = F.cross_entropy(out, y), out.pow(2).mean()
        torch.autograd.backward([first, second], [torch.tensor(1.0), torch.tensor(0.5)])
        return first

    return train(model, step_loss)


@idiom(WHOLE)
def two_backwards_of_one_forward(rank):
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        with model.no_sync():
            out = model(x)
            F.cross_entropy(out, y).backward(retain_graph=True)
            out.pow(2).mean().backward()
        loss = F.cross_entropy(model(x), y)
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


@idiom(OUTPUTS)
def gathered_negatives(rank):
    """A collective in the loss: only its own part of the step can be computed elsewhere."""
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


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.recur = nn.LSTM(16, 16, batch_first=True, dropout=0.1, num_layers=2)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x.unsqueeze(-1).expand(-1, -1, 5))))
        return self.out(self.recur(x.transpose(1, 2))[0][:, -1])


@idiom(WHOLE)
def convolution_and_lstm(rank):
    return classify(DDP(Layers()))


@idiom(WHOLE)
def channels_last(rank):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = nn.Sequential(net, nn.Linear(8, CLASSES)).to(memory_format=torch.channels_last)
    return _images(DDP(net))


def _images(model):
    def step_loss(step):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        x = torch.randn(4, 3, 9, 9, generator=generator).to(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(x), torch.arange(4))
        loss.backward()
        return loss

    return train(model, step_loss)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 16, sparse=True), nn.Linear(16, CLASSES)

    def forward(self, ids):
        return self.out(self.embed(ids).mean(1))


@idiom(WHOLE)
def sparse_gradients(rank):
    model = DDP(Sparse())

    def step_loss(step):
        ids = tokens(step)
        loss = F.cross_entropy(model(ids), ids[:, 0] % CLASSES)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def weight_and_spectral_norm(rank):
    net = Net()
    nn.utils.parametrizations.weight_norm(net.first)
    nn.utils.parametrizations.spectral_norm(net.second)
    nn.utils.spectral_norm(net.head)
    return classify(DDP(net))


@idiom(WHOLE)
def frozen_part_and_teacher(rank):
    net, teacher = Net(), Net().eval()
    net.first.weight.requires_grad_(False)
    model = DDP(net)

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        with torch.no_grad():
            wanted = teacher(x)
        loss = F.kl_div(F.log_softmax(out / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean")
        loss = loss + F.cross_entropy(out, y)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def trained_part_in_front(rank):
    before = nn.Linear(WIDTH, WIDTH)
    model = DDP(Net())
    return classify(model, call=lambda x: model(before(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.state = nn.GRUCell(WIDTH, 16), nn.Linear(16, CLASSES), None

    def forward(self, x):
        hidden = self.cell(x, self.state)
        self.state = hidden.detach()
        return self.out(hidden)


@idiom(WHOLE)
def state_in_an_attribute(rank):
    return classify(DDP(Recurrent()))


class Lucky(Net):
    def forward(self, x):
        return super().forward(x) * (1 + random.random()) * (1 + float(np.random.rand()))


@idiom(WHOLE)
def python_and_numpy_random(rank):
    return classify(DDP(Lucky()))


@idiom(WHOLE)
def batches_of_other_shapes_and_empty_ones(rank):
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step, size=(0 if step == 2 and rank == 1 else 3 + rank + step))
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        return loss

    return train(model, step_loss)


Pair = namedtuple("Pair", "x scale")


class Nested(Net):
    def forward(self, *, batch, scale=1.0):
        pair = batch["x"][0]
        return {"logits": super().forward(pair.x * scale + batch["shift"]), "scales": [pair.scale]}


@idiom(WHOLE)
def nested_keyword_inputs(rank):
    model = DDP(Nested())

    def step_loss(step):
        x, y = batch(step)
        out = model(batch={"x": [Pair(x, 3)], "shift": x[:, :1]}, scale=2.0)
        loss = F.cross_entropy(out["logits"], y)
        loss.backward()
        return loss

    return train(model, step_loss)


@idiom(WHOLE)
def zero_grad_between_forward_and_backward(rank):
    model = DDP(Net())

    def step_loss(step):
        x, y = batch(step)
        out = model(x)
        loss = F.cross_entropy(out, y)
        model.zero_grad(set_to_none=False)
        with torch.inference_mode():
            right = (out.argmax(1) == y).float().mean()
        (loss * (1 + float(right))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    return train(model, step_loss)


class Chatty(Net):
    def forward(self, x):
        self.first.extra = getattr(self.first, "extra", 0) + 1
        return super().forward(x)


@idiom(WHOLE)
def attribute_on_a_submodule(rank):
    net = Chatty()
    losses, models, optimizers = classify(DDP(net))
    return [*losses, net.first.extra], models, optimizers


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
        self.diary = {"calls": 0}

    def forward(self, x):
        self.diary["calls"] += 1
        return super().forward(x)


@idiom("the forward changes .diary")
def opaque_state(rank):
    return classify(DDP(Diary()))


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
