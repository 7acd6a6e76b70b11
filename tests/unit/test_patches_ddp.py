"""What the patch of DistributedDataParallel's construction leaves as it was, and what it takes under guard."""

import copy
import inspect
import types
import warnings
import weakref

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sdcrun.shim.patches import ddp as patch


@pytest.fixture
def claimed():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = []
    patch.install(types.SimpleNamespace(
        active=True, claim=found.append, guards=weakref.WeakKeyDictionary(), recording=False))
    yield found
    patch.undo()
    dist.destroy_process_group()


def test_every_module_is_claimed_once_and_a_copy_never(claimed):
    class Own(DistributedDataParallel):
        def __init__(self, module, extra):
            super().__init__(module)
            self.extra = extra

    plain, own = DistributedDataParallel(nn.Linear(2, 2)), Own(nn.Linear(2, 2), 3)
    assert [id(module) for module in claimed] == [id(plain), id(own)]
    copy.deepcopy(plain)
    assert len(claimed) == 2


def test_warnings_of_the_constructor_point_at_the_script(claimed):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
    assert seen and {warning.filename for warning in seen} == {__file__}


def test_signature_and_identity_of_the_constructor_stay(claimed):
    assert DistributedDataParallel.__init__.__module__ == "torch.nn.parallel.distributed"
    assert "broadcast_buffers" in inspect.signature(DistributedDataParallel).parameters
    assert not hasattr(DistributedDataParallel.__init__, "__wrapped__")
