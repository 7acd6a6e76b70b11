"""Training loops with something unusual around or inside them: debugging tools, modes, dtypes, rare options."""

import gc
import os
import signal
import sys
import tempfile
import threading
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from record import MLP, ConvNet, batch, main
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

STEPS = 5


def train(model, optimizer, rank, steps=STEPS, inputs=12, around=nullcontext):
    losses = []
    for step in range(steps):
        x, y = batch(rank, step, inputs)
        x = x.to(next(model.parameters()).dtype)
        with around():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


def fresh():
    model = DDP(MLP())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def anomaly_detection(rank, world):
    model, optimizer = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = train(model, optimizer, rank, around=torch.autograd.detect_anomaly)
    return losses, [model], [optimizer]


def profiled(rank, world):
    model, optimizer = fresh()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        losses = train(model, optimizer, rank)
    names = {event.key for event in profile.key_averages()}
    steps = [event.count for event in profile.key_averages() if event.key == "Optimizer.step#AdamW.step"]
    return [*losses, *map(float, steps), float("aten::addmm" in names)], [model], [optimizer]


def flops_counted(rank, world):
    model, optimizer = fresh()
    counted = []

    class Counter(FlopCounterMode):
        def __exit__(self, *args):
            super().__exit__(*args)
            counted.append(float(self.get_total_flops()))

    losses = train(model, optimizer, rank, around=lambda: Counter(display=False))
    return losses + counted, [model], [optimizer]


def user_modes(rank, world):
    """Modes of the script's own, over a whole step and over the forward only."""
    seen = {"functions": 0, "operations": 0}

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen["functions"] += 1
            return function(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen["operations"] += 1
            return function(*args, **(kwargs or {}))

    model, optimizer = fresh()
    losses = train(model, optimizer, rank, 3, around=Functions) + train(model, optimizer, rank, 3, around=Operations)
    for step in range(3):
        x, y = batch(rank, step)
        with Operations():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def saved_tensor_hooks(rank, world):
    model, optimizer = fresh()
    half = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.bfloat16() if t.is_floating_point() and t.dim() == 2 and not t.requires_grad else t,
        lambda t: t.float() if t.dtype == torch.bfloat16 else t,
    )
    losses = train(model, optimizer, rank, around=lambda: half)
    return losses + train(model, optimizer, rank, around=torch.autograd.graph.save_on_cpu), [model], [optimizer]


def deterministic_algorithms(rank, world):
    torch.use_deterministic_algorithms(True)
    try:
        model = DDP(ConvNet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return train(model, optimizer, rank, inputs=36), [model], [optimizer]
    finally:
        torch.use_deterministic_algorithms(False)


def default_dtype_float64(rank, world):
    torch.set_default_dtype(torch.float64)
    try:
        model, optimizer = fresh()
        return train(model, optimizer, rank), [model], [optimizer]
    finally:
        torch.set_default_dtype(torch.float32)


def warnings_as_errors(rank, world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = fresh()
        return train(model, optimizer, rank), [model], [optimizer]


class Looked(nn.Module):
    """An embedding with sparse gradients and a dense layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, ids):
        return self.fc(self.table(ids))


def sparse_gradients(rank, world):
    model = DDP(Looked())
    sparse = torch.optim.SparseAdam(list(model.module.table.parameters()), lr=0.01)
    dense = torch.optim.SGD(model.module.fc.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model((x[:, :3] * 5).long().abs() % 20), y)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    for p in model.parameters():
        p.grad = None
    return losses, [model], [sparse, dense]


def complex_parameters(rank, world, **options):
    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 4, dtype=torch.complex64) * 0.1)

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs()

    model = DDP(Waves(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad(set_to_none=not options)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def complex_in_bucket_views(rank, world):
    return complex_parameters(rank, world, gradient_as_bucket_view=True)


def ignored_parameters(rank, world):
    """A part of the module is left out of DDP and differs from rank to rank on purpose."""
    net = nn.ModuleDict({"shared": MLP(), "own": nn.Linear(4, 4)})
    with torch.no_grad():
        net["own"].weight += rank
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["own.weight", "own.bias"])

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net
            self._ddp_params_and_buffers_to_ignore = ["net.own.weight", "net.own.bias"]

        def forward(self, x):
            return self.net["own"](self.net["shared"](x))

    model = DDP(Both())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return train(model, optimizer, rank), [model], [optimizer]


def unusual_options(rank, world):
    net = MLP()
    torch.manual_seed(0)
    for p in net.parameters():
        nn.init.normal_(p, std=0.1)
    model = DDP(net, init_sync=False, bucket_cap_mb=0.0004, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.01, decoupled_weight_decay=True)
    return train(model, optimizer, rank), [model], [optimizer]


def parameter_groups_added(rank, world):
    """The optimizer begins with a part of the parameters and is given the others later."""
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.module.fc2.parameters(), lr=0.1)
    losses = train(model, optimizer, rank, 3)
    optimizer.add_param_group({"params": model.module.fc1.parameters(), "lr": 0.01, "momentum": 0.9})
    return losses + train(model, optimizer, rank, 3), [model], [optimizer]


def several_losses(rank, world):
    """Two losses in one backward call, one on the outputs' gradients, and one restricted to some parameters."""
    model, optimizer = fresh()
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        logits = model(x)
        first, second = F.cross_entropy(logits, y), logits.square().mean()
        optimizer.zero_grad()
        if step % 3 == 0:
            torch.autograd.backward([first, second], [torch.tensor(1.0), torch.tensor(0.1)])
        elif step % 3 == 1:
            logits.backward(torch.softmax(logits.detach(), 1) - F.one_hot(y, 4))
        else:
            first.backward(inputs=list(model.parameters()))
        optimizer.step()
        losses += [first.item(), second.item()]
    return losses, [model], [optimizer]


def finite_but_huge(rank, world):
    """Gradients that are finite, though their sum is not."""
    model = DDP(nn.Linear(12, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-38)
    losses = []
    for step in range(STEPS):
        x, _ = batch(rank, step)
        loss = (model(torch.ones(8, 12)) * 2.5e37).mean(0).sum() if step == 2 else model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def side_thread_trains(rank, world):
    """All through training another thread trains something small of its own, at another pace on each rank."""
    stop = threading.Event()
    side = nn.Linear(4, 1)
    side_optimizer = torch.optim.SGD(side.parameters(), lr=1e-3)

    def loop():
        while not stop.wait(0.0005 * (rank + 1)):
            side_optimizer.zero_grad()
            side(torch.ones(2, 4)).square().sum().backward()
            side_optimizer.step()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        model, optimizer = fresh()
        losses = []
        for _ in range(4):
            losses += train(model, optimizer, rank, 10)
    finally:
        stop.set()
        thread.join()
    return losses, [model], [optimizer]


def elsewhere(rank, world):
    """The script changes its folder, cleans its environment, and takes signals and the collector into its own hands."""
    here, environment = os.getcwd(), dict(os.environ)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGUSR1, signal.SIGTERM)}
    gc.disable()
    try:
        os.chdir(tempfile.mkdtemp())
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        model, optimizer = fresh()
        losses = train(model, optimizer, rank)
        taken = signal.getsignal(signal.SIGUSR1) is not handlers[signal.SIGUSR1]
    finally:
        gc.enable()
        os.chdir(here)
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return [*losses, float(taken), float(sys.flags.optimize)], [model], [optimizer]


def own_collectives(rank, world):
    """The script's own collectives between backward and step, and a step that all ranks leave out together."""
    model, optimizer = fresh()
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        if step == 2:
            continue
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        everyone = [None] * world
        dist.all_gather_object(everyone, {"rank": rank, "loss": loss.item()})
        losses += [mean.item(), *[entry["loss"] for entry in everyone]]
    return losses, [model], [optimizer]


LOOPS = [
    anomaly_detection,
    profiled,
    flops_counted,
    user_modes,
    saved_tensor_hooks,
    deterministic_algorithms,
    default_dtype_float64,
    warnings_as_errors,
    sparse_gradients,
    complex_parameters,
    complex_in_bucket_views,
    ignored_parameters,
    unusual_options,
    parameter_groups_added,
    several_losses,
    finite_but_huge,
    side_thread_trains,
    elsewhere,
    own_collectives,
]

if __name__ == "__main__":
    main(LOOPS)
