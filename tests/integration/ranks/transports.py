"""Run by torchrun: the ballot's tree and the exchange between real ranks, with strangers at the doors."""

import random
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist

from sdcrun.shim import transport as transport_module
from sdcrun.shim.exchange import Exchange, ExchangeFailed
from sdcrun.shim.links import Links
from sdcrun.shim.rendezvous import Rendezvous
from sdcrun.shim.transport import BallotFailed, Tree

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
meeting = Rendezvous(dist.distributed_c10d._get_default_store(), 60.0)


def links(name):
    """Doors that all ranks know, and at which strangers have knocked."""
    made = Links(rank)
    made.doors = meeting.agree(name, rank, size, made.door)
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(24), random.randbytes(1000)):
        with socket.create_connection(made.door[:2]) as caller:
            caller.sendall(words)
    return made


def tree(name, fan_out=2, limit=20.0, seconds=20.0):
    transport_module.FAN_OUT = fan_out
    return Tree(links(f"tree {name}"), size, seconds, limit)


for fan_out in (1, 2, 8):
    ballots = tree(fan_out, fan_out)
    for turn in range(20):
        draw = random.Random(turn)
        rows = [[draw.randint(-(2**63), 2**63 - 1) for _ in range(8)] for _ in range(size)]
        assert ballots.max(rows[rank]) == [max(column) for column in zip(*rows)]

exchange = Exchange(links("exchange"), size, 20.0)
payloads = [bytes([r]) * (r * 70_000) for r in range(size)]
for tag in range(5):
    assert exchange.gather(payloads[rank], tag) == payloads
    assert exchange.gather(b"", tag) == [b""] * size
# All to all, more than the system holds for a peer that does not read yet.
large = bytes([rank]) * (20 << 20)
others = [r for r in range(size) if r != rank]
assert exchange.swap(dict.fromkeys(others, large), others, 6) == {r: bytes([r]) * (20 << 20) for r in others}
# Whoever is ahead has said two things before another listens.
for turn in range(2):
    exchange.swap({(rank + 1) % size: payloads[rank]}, [], 10 + turn)
time.sleep(0.1 * rank)
for turn in range(2):
    received = exchange.swap({}, [(rank - 1) % size], 10 + turn)
    assert received == {(rank - 1) % size: payloads[(rank - 1) % size]}

# A rank that is late, by more than the making of the group may take, is waited for.
dist.barrier()
patient = tree("patient", limit=60.0, seconds=5.0)
if rank == 0:
    time.sleep(6)
assert patient.max([rank] * 8) == [size - 1] * 8

# A rank that stays away costs the others the limit and no more, and itself nothing when it comes at last: at the top
# of the tree, in it and at its end. The script's own group is not affected.
for absent in (0, 1, size - 1):
    dist.barrier()
    late = tree(f"without {absent}", limit=3.0 if rank != absent else 600.0)
    if rank == absent:
        time.sleep(6)
    started = time.monotonic()
    try:
        late.max([0] * 8)
        sys.exit(f"a ballot without rank {absent} came to an end")
    except BallotFailed:
        assert time.monotonic() - started < 30

# So does one whose own code is interrupted in the middle of a ballot, but the others know at once.
dist.barrier()
interrupted = tree("interrupted", limit=600.0)


class Preempted(BaseException):
    """As a script's handler of a scheduler's signal may raise it."""


def preempt(*_):
    raise Preempted


if rank == 2:
    signal.signal(signal.SIGALRM, preempt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
if rank != size - 1:
    try:
        interrupted.max([0] * 8)
        sys.exit("a ballot without its last rank came to an end")
    except (BallotFailed, Preempted) as error:
        assert isinstance(error, Preempted) is (rank == 2)

def fails(exchange, sends, receives, tag, within):
    """Why the swap failed; it must, and in time."""
    started = time.monotonic()
    try:
        exchange.swap(sends, receives, tag)
    except ExchangeFailed as error:
        assert time.monotonic() - started < within
        return str(error)
    sys.exit(f"rank {rank}: an exchange that cannot end came to an end")


# A peer that says nothing is waited for no longer than the limit; one at another place is found out; and whoever waits
# for a rank that has given up knows at once.
dist.barrier()
before, after = (rank - 1) % size, (rank + 1) % size
assert f"from ranks [{before}]" in fails(Exchange(links("silent"), size, 1.0), {}, [before], 1, 10)
dist.barrier()
apart = Exchange(links("apart"), size, 600.0)
assert fails(apart, {after: b"x"}, [before], rank % 2, 30)
assert fails(apart, {after: b"x"}, [before], 5, 30)
dist.barrier()
gone = Exchange(links("gone"), size, 600.0)
gone.swap({after: b"x"}, [before], 1)
if rank == 0:
    gone.close("this rank has enough")
else:
    fails(gone, {}, [before], 2, 30)
dist.all_reduce(torch.ones(1))
print("fine", flush=True)
time.sleep(0.5)
