"""Training loops that look at torch itself, copy and pickle what they train, and go through errors."""

import copy
import inspect
import io
import pickle
import weakref

import torch
import torch.nn.functional as F
from record import MLP, ConvNet, batch, main
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 6


def train(model, optimizer, rank, steps=STEPS, inputs=12):
    losses = []
    for step in range(steps):
        x, y = batch(rank, step, inputs)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def signatures(rank, world):
    """Scripts decide by signatures and names what to pass to an optimizer."""
    fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **({"fused": True} if fused else {}))
    losses = train(model, optimizer, rank)
    facts = [
        fused,
        len(inspect.signature(torch.optim.SGD).parameters),
        len(inspect.signature(torch.optim.SGD.step).parameters),
        len(inspect.signature(DDP).parameters),
        len(inspect.signature(DDP.forward).parameters),
        len(inspect.signature(DDP.register_comm_hook).parameters),
        len(inspect.signature(torch.Tensor.backward).parameters),
        len(inspect.signature(torch.autograd.backward).parameters),
        len(inspect.signature(torch.autograd.grad).parameters),
        len(inspect.signature(torch.save).parameters),
        len(inspect.signature(torch.amp.GradScaler.step).parameters),
        torch.save.__name__ == "save" and torch.save.__module__ == "torch.serialization",
        DDP.__init__.__qualname__ == "DistributedDataParallel.__init__",
        type(model) is DDP and DDP.__module__ == "torch.nn.parallel.distributed",
        type(optimizer).__name__ == "AdamW",
        len(vars(model)),
        len(vars(optimizer)),
        inspect.getsource(torch.optim.AdamW.step).startswith("    @"),
    ]
    return losses + [float(fact) for fact in facts], [model], [optimizer]


def pickled(rank, world):
    """The wrapped module and the optimizer go through pickle, and training goes on with the copies."""
    model = DDP(MLP())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = train(model, optimizer, rank, 3)
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    optimizer = type(optimizer)(model.parameters(), lr=0.02)
    losses += train(model, optimizer, rank, 3)
    return losses, [model], [optimizer]


def deep_copied(rank, world):
    """A deep copy of the optimizer steps copies of the weights; a copy of the module is trained on as it is."""
    model = DDP(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train(model, optimizer, rank, 2)
    net, spare = copy.deepcopy((model.module, optimizer))
    F.cross_entropy(net(batch(rank, 0)[0]), batch(rank, 0)[1]).backward()
    spare.step()
    losses += train(model, optimizer, rank, 2)
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses += train(twin, twin_optimizer, rank, 2)
    return losses, [model, net, twin], [optimizer, spare, twin_optimizer]


def saved_to_memory(rank, world):
    """Everything goes through torch.save and torch.load, each rank into a buffer of its own."""
    model = DDP(ConvNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train(model, optimizer, rank, 3, inputs=36)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, file)
    losses.append(float(file.tell()))
    file.seek(0)
    state = torch.load(file)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return losses + train(model, optimizer, rank, 3, inputs=36), [model], [optimizer]


class Fragile(MLP):
    """Raises in some forward passes, on every rank alike."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 3 == 0:
            raise RuntimeError("too large a batch")
        return super().forward(x)


def errors_in_forward(rank, world):
    """Errors in forward, in the loss and in a closure are caught, and the batch is left out or tried again."""
    model = DDP(Fragile())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(9):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        try:
            loss = F.cross_entropy(model(x), y)
        except RuntimeError as error:
            losses.append(float(len(str(error))))
            continue
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def failing():
        raise ValueError("no")

    try:
        optimizer.step(failing)
    except ValueError:
        losses.append(-1.0)
    return losses, [model], [optimizer]


def loss_thrown_away(rank, world):
    """A loss that is not finite is seen by the script on every rank, which leaves out backward and update."""
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y) / (0.0 if step == 2 else 1.0)
        losses.append(loss.item())
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, [model], [optimizer]


def own_gradients(rank, world):
    """Gradients are written and changed by hand between backward and step."""
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for number, p in enumerate(model.parameters()):
            p.grad = p.grad.sign() if number % 2 else p.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def models_come_and_go(rank, world):
    """Ten short-lived modules, as in a search over sizes; none of them may stay alive."""
    losses, gone = [], []
    for size in range(10):
        model = DDP(MLP(hidden=8 + size))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses += train(model, optimizer, rank, 2)
        gone.append(weakref.ref(model.module.fc1.weight))
    del model, optimizer
    return losses + [float(sum(ref() is None for ref in gone[:-2]))], [], []


def unwrapped_training(rank, world):
    """The wrapped module is trained without the wrapper for a while, the same on all ranks."""
    model = DDP(MLP(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer, rank, 2)
    losses += train(model.module, optimizer, 0, 2)
    return losses + train(model, optimizer, rank, 2), [model], [optimizer]


def nested_autograd(rank, world):
    """A backward pass through another graph runs inside a hook of the first one."""
    model = DDP(MLP(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side = torch.ones(3, requires_grad=True)
    losses = []

    def side_backward(grad):
        with torch.enable_grad():
            side.square().sum().backward()

    for step in range(STEPS):
        x, y = batch(rank, step)
        logits = model(x)
        logits.register_hook(side_backward)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses + side.grad.tolist(), [model], [optimizer]


LOOPS = [
    signatures,
    pickled,
    deep_copied,
    saved_to_memory,
    errors_in_forward,
    loss_thrown_away,
    own_gradients,
    models_come_and_go,
    unwrapped_training,
    nested_autograd,
]

if __name__ == "__main__":
    main(LOOPS)
