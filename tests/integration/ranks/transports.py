"""Run by torchrun: the ballot's tree and the exchange on a full and on a lazily connected side group."""

import random
import sys
import time

import torch
import torch.distributed as dist

from sdcrun.shim import group as group_module
from sdcrun.shim import transport as transport_module
from sdcrun.shim.exchange import Exchange, ExchangeFailed
from sdcrun.shim.transport import BallotFailed, TreeTransport

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()


def side(name, limit=20.0):
    return group_module._side_group(dist.PrefixStore(name, store), rank, size, limit)


group_module.SIDE_LIMIT = 1
lazy = side("lazy")
group_module.SIDE_LIMIT = 64
full = side("full")
for pg in (full, lazy):
    for fan_out in (1, 2, 8):
        transport_module.FAN_OUT = fan_out
        transport = TreeTransport(pg, rank, 20.0)
        for turn in range(20):
            draw = random.Random(turn)
            rows = [[draw.randint(-(2**63), 2**63 - 1) for _ in range(8)] for _ in range(size)]
            assert transport.max(rows[rank]) == [max(column) for column in zip(*rows)]

for pg in (full, lazy):
    exchange = Exchange(pg, rank, size, 20.0)
    payloads = [bytes([r]) * (r * 70_000) for r in range(size)]
    assert exchange.gather(payloads[rank], 5) == payloads
    assert exchange.gather(b"", 7) == [b""] * size
    received = exchange.swap({(rank + 1) % size: payloads[rank]}, [(rank - 1) % size], 6)
    assert received == {(rank - 1) % size: payloads[(rank - 1) % size]}

# A rank that is late, by more than the making of the group may take, is waited for.
dist.barrier()
patient = TreeTransport(side("patient", 1.0), rank, 60.0)
if rank == 0:
    time.sleep(3)
assert patient.max([rank] * 8) == [size - 1] * 8

# A rank that stays away costs the others the limit and no more, and itself nothing when it comes at last: at the top
# of the tree, in it and at its end. The script's own group is not affected.
for absent in (0, 1, size - 1):
    dist.barrier()
    limit, transport_module.FAN_OUT = 3.0, 2
    late = TreeTransport(side(f"late {absent}"), rank, limit if rank != absent else 600.0)
    if rank == absent:
        time.sleep(2 * limit)
    started = time.monotonic()
    try:
        late.max([0] * 8)
        sys.exit(f"a ballot without rank {absent} came to an end")
    except BallotFailed:
        assert time.monotonic() - started < 30
try:
    Exchange(side("away", 20.0), rank, size, 1.0).swap({}, [(rank + 1) % size], 9)
    sys.exit("an exchange without a sender came to an end")
except ExchangeFailed:
    pass
dist.all_reduce(torch.ones(1))
print("fine", flush=True)
time.sleep(0.5)
