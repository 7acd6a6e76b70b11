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
from sdcrun.shim.replay.ownrank import Place, told
from sdcrun.shim.replay.run import replay
from sdcrun.shim.replay.state import replay_scope


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


def test_the_replaying_thread_is_told_and_no_other(world, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    said = []
    with told(Place(5, {"RANK": "5", "SLURM_PROCID": "7"})):
        assert dist.get_rank() == 0 and os.environ["RANK"] == "0"
        with replay_scope():
            assert get_rank() == dist.get_rank() == dist.get_rank(dist.group.WORLD) == dist.group.WORLD.rank() == 5
            assert world.rank() == 0
            assert os.environ["RANK"] == os.getenv("RANK") == "5" and os.environ.get("SLURM_PROCID") == "7"
            assert dict(os.environ, RANK="")["PATH"] == os.environ["PATH"]
            thread = threading.Thread(target=lambda: said.append((dist.get_rank(), os.environ["RANK"])))
            thread.start()
            thread.join()
    assert said == [(0, "0")] and Place.here().rank == get_rank() == dist.group.WORLD.rank() == 0
    assert os.environ["RANK"] == "0" and "SLURM_PROCID" not in os.environ


def test_without_a_process_group(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Place.here().rank == 0 and Place.here().environment["LOCAL_RANK"] == "3"
    before = vars(dist.ProcessGroup)["rank"], vars(type(os.environ))["__getitem__"]
    with pytest.raises(RuntimeError), told(Place(2)):
        raise RuntimeError
    assert (vars(dist.ProcessGroup)["rank"], vars(type(os.environ))["__getitem__"]) == before


@functools.cache
def remembered():
    return get_rank()


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x * (1 + get_rank()) + remembered()) * int(os.environ["RANK"])


def test_a_forward_that_asks_is_told_where_the_owners_variables_are_put_in(world, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr(ownrank.dist, "get_rank", lambda: 1)
    monkeypatch.setitem(globals(), "get_rank", lambda: 1)
    with Solo(Asks()) as solo:
        solo(torch.ones(2, 6)).sum().backward()
    parcel = solo.parcel()
    monkeypatch.undo()
    monkeypatch.setenv("RANK", "0")
    remembered.cache_clear()
    assert remembered() == 0
    kept = remembered
    local = solo.recorder.local
    assert replay(parcel.program, solo.guards, local).table != parcel.expected
    assert replay(parcel.program, solo.guards, local, owners=True).table == parcel.expected
    assert remembered is kept and remembered() == 0
