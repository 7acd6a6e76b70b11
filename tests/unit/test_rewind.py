"""Everything that training changes, put back bit for bit; what cannot be put back is said."""

import random
import types
import weakref

import pytest
import torch
from torch import nn

from sdcrun.shim.rewind import Snapshot


class Stage:
    """One module with its optimizer, as a guarded group knows them."""

    def __init__(self, make=torch.optim.AdamW, scaler=None, **options):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = make(self.model.parameters(), **{"lr": 0.1, **options})
        self.scaler = scaler
        guard = types.SimpleNamespace(ddp=self.model, module=self.model, name="")
        self.group = types.SimpleNamespace(guards=[guard], optimizers=[weakref.ref(self.optimizer)])

    def train(self, steps=3):
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(16, 4)).square().mean() + random.random()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop,
                                  lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)])  # fmt: skip
def test_training_from_a_snapshot_gives_the_same_losses_to_the_bit(make):
    stage = Stage(make)
    stage.train()
    snapshot = Snapshot(stage.group)
    first = stage.train(5)
    parameters = [p.data_ptr() for p in stage.model.parameters()]
    assert snapshot.put_back() is None
    assert [p.data_ptr() for p in stage.model.parameters()] == parameters
    assert stage.train(5) == first
    assert snapshot.put_back() is None and stage.train(5) == first


def test_a_snapshot_before_the_first_step_takes_the_state_away_again():
    stage = Stage()
    snapshot = Snapshot(stage.group)
    first = stage.train(2)
    assert stage.optimizer.state
    assert snapshot.put_back() is None
    assert not stage.optimizer.state and stage.train(2) == first


def test_every_flipped_bit_shows_in_the_digest():
    stage = Stage()
    stage.train()
    snapshot = Snapshot(stage.group)
    state = stage.optimizer.state[stage.model[0].weight]
    for tensor in (stage.model[3].bias, stage.model[1].running_var, stage.model[1].num_batches_tracked,
                   state["exp_avg"], state["step"]):  # fmt: skip
        kept = tensor.detach().clone()
        tensor.data.reshape(-1).view(torch.uint8)[0] ^= 1
        assert snapshot.digest() != snapshot.before
        tensor.data.copy_(kept)
        assert snapshot.digest() == snapshot.before


def test_not_a_number_goes_too():
    stage = Stage()
    stage.train()
    snapshot = Snapshot(stage.group)
    with torch.no_grad():
        for tensor in (*stage.model.parameters(), *stage.model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    stage.train(1)
    assert snapshot.put_back() is None
    assert all(torch.isfinite(p).all() for p in stage.model.parameters())


def test_the_loss_scale_goes_back():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    stage = Stage(torch.optim.SGD)
    scaler.scale(stage.model(torch.randn(8, 4)).sum()).backward()
    scaler.step(stage.optimizer)
    scaler.update()
    snapshot = Snapshot(stage.group)
    assert scaler in snapshot.scalers
    scaler.update(2.0)
    assert snapshot.put_back() is None and scaler.get_scale() == 1024.0


def test_what_a_scheduler_sets_is_left_alone_and_other_settings_are_not():
    stage = Stage()
    stage.train()
    stage.optimizer.param_groups[0]["d"] = 1.0
    snapshot = Snapshot(stage.group)
    stage.optimizer.param_groups[0].update(lr=0.5, d=7.0)
    assert snapshot.put_back() is None
    assert stage.optimizer.param_groups[0]["lr"] == 0.5 and stage.optimizer.param_groups[0]["d"] == 1.0


def test_a_module_that_has_changed_cannot_be_put_back_and_says_so():
    stage = Stage()
    stage.train()
    snapshot = Snapshot(stage.group)
    stage.model.add_module("late", nn.Linear(2, 2))
    assert "late" in snapshot.put_back()
    stage = Stage()
    snapshot = Snapshot(stage.group)
    stage.group.optimizers.append(weakref.ref(other := torch.optim.SGD(stage.model.parameters(), 0.1)))
    assert "other modules or optimizers" in snapshot.put_back() and other is not None
    stage = Stage()
    snapshot = Snapshot(stage.group)
    stage.model[3].weight.data = torch.zeros(3, 8)
    assert "another shape" in snapshot.put_back()
