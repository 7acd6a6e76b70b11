"""A replay can be told the rank of the micro-batch's owner; nobody else is."""

import threading

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sdcrun.shim.replay.ownrank import rank_here, told_rank
from sdcrun.shim.replay.state import replay_scope


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


def test_the_replaying_thread_is_told_and_no_other(world):
    said = []
    with told_rank(5):
        assert dist.get_rank() == 0
        with replay_scope():
            assert dist.get_rank() == distributed_c10d.get_rank() == dist.get_rank(dist.group.WORLD) == 5
            assert dist.get_rank(world) == dist.get_rank(group=world) == 0
            thread = threading.Thread(target=lambda: said.append(dist.get_rank()))
            thread.start()
            thread.join()
    assert said == [0] and rank_here() == dist.get_rank() == 0


def test_without_a_process_group():
    before = dist.get_rank
    assert rank_here() == 0
    with pytest.raises(RuntimeError), told_rank(2):
        raise RuntimeError
    assert dist.get_rank is before
