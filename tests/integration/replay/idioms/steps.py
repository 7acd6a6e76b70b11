"""How the step is arranged: accumulation, scalers, several forwards or modules, options of DDP."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from idioms.base import (
    CLASSES,
    STEPS,
    WHOLE,
    WIDTH,
    Language,
    Net,
    batch,
    classify,
    idiom,
    next_token,
    tokens,
    train,
)


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


@idiom(WHOLE)
def gan_made_between_backwards(rank):
    """The generator's forward comes after the judge's first backward, before the judge's update."""
    maker, judge = DDP(Net(outputs=WIDTH)), DDP(Net(outputs=1), broadcast_buffers=False)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (maker, judge)]
    right, losses = F.binary_cross_entropy_with_logits, []
    for step in range(STEPS):
        real, _ = batch(step)
        noise, _ = batch(step + 500)
        optimizers[1].zero_grad()
        of_real = right(judge(real), torch.ones(6, 1))
        of_real.backward()
        fake = maker(noise)
        of_fake = right(judge(fake.detach()), torch.zeros(6, 1))
        of_fake.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        made = right(judge(fake), torch.ones(6, 1))
        made.backward()
        optimizers[0].step()
        losses += [of_real.item(), of_fake.item(), made.item()]
    return losses, [maker, judge], optimizers


@idiom(WHOLE)
def an_estimate_cut_off_the_graph_goes_in_again(rank):
    model = DDP(Net(outputs=WIDTH, norm=True, dropout=0.2))

    def step_loss(step):
        x, _ = batch(step)
        estimate = model(x).detach()
        loss = (model(x + 0.5 * estimate) - x).square().mean()
        loss.backward()
        return loss

    return train(model, step_loss)


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


@idiom(WHOLE)
def trained_part_in_front(rank):
    before = nn.Linear(WIDTH, WIDTH)
    model = DDP(Net())
    return classify(model, call=lambda x: model(before(x)))


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
