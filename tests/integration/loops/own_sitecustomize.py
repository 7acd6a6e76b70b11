"""A training loop that relies on the sitecustomize module of its site (`own_site`, put on PYTHONPATH)."""

import builtins
import sys

import torch
import torch.nn.functional as F
from record import MLP, batch, main
from torch.nn.parallel import DistributedDataParallel as DDP


def own_sitecustomize(rank, world):
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [float(builtins.site_greeting == "seen"), float("own_site" in sys.modules["sitecustomize"].__file__)]
    for step in range(6):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


LOOPS = [own_sitecustomize]

if __name__ == "__main__":
    main(LOOPS)
