"""A replay can be told the rank of the micro-batch's owner; nobody else is."""

import functools
import os
import threading

import pytest
import torch
import torch.distributed as dist
from replaykit import Solo
from torch import nn
from torch.distributed import get_rank

from sdcrun.shim.replay import ownrank
from sdcrun.shim.replay.ownrank import rank_here, told_rank
from sdcrun.shim.replay.run import replay
from sdcrun.shim.replay.state import replay_scope


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


def test_the_replaying_thread_is_told_and_no_other(world, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    said = []
    with told_rank(5):
        assert dist.get_rank() == 0
        with replay_scope():
            assert get_rank() == dist.get_rank() == dist.get_rank(dist.group.WORLD) == dist.group.WORLD.rank() == 5
            assert world.rank() == 0 and os.environ["RANK"] == "0"
            thread = threading.Thread(target=lambda: said.append(dist.get_rank()))
            thread.start()
            thread.join()
    assert said == [0] and rank_here() == get_rank() == dist.group.WORLD.rank() == 0


def test_without_a_process_group():
    before = vars(dist.ProcessGroup)["rank"]
    assert rank_here() == 0
    with pytest.raises(RuntimeError), told_rank(2):
        raise RuntimeError
    assert vars(dist.ProcessGroup)["rank"] is before


@functools.cache
def remembered():
    return get_rank()


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x * (1 + get_rank()) + remembered())


def test_a_forward_that_asks_is_told_where_the_owners_variables_are_put_in(world, monkeypatch):
    monkeypatch.setattr(ownrank.dist, "get_rank", lambda: 1)
    monkeypatch.setitem(globals(), "get_rank", lambda: 1)
    with Solo(Asks()) as solo:
        solo(torch.ones(2, 6)).sum().backward()
    parcel = solo.parcel()
    monkeypatch.undo()
    remembered.cache_clear()
    assert remembered() == 0
    kept = remembered
    local = solo.recorder.local
    assert replay(parcel.program, solo.guards, local).table != parcel.expected
    assert replay(parcel.program, solo.guards, local, owners=True).table == parcel.expected
    assert remembered is kept and remembered() == 0
