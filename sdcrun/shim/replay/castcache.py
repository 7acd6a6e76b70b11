"""Whether autocast kept its cache of casts: a replay must share casts between calls exactly where the owner did."""

from __future__ import annotations

import torch

from sdcrun.shim.microbatch import Autocast


class CastCache:
    """Watches autocast's cache through a window. `epoch` counts how often it was emptied."""

    def __init__(self) -> None:
        self.epoch = 0
        self._sentinel: tuple | None = None

    def look(self, module: torch.nn.Module) -> int:
        """The epoch of a forward of `module` that begins now: two uses of one cast add their gradients in half
        precision, two casts in single. A sentinel's cast is the same node iff the cache was kept."""
        modes = Autocast.now()
        if not modes.on or not modes.cache:
            self._sentinel = None
            return self.epoch
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        with torch.enable_grad():
            leaf = self._sentinel[0] if self._sentinel else torch.ones(1, 1, device=device, requires_grad=True)
            product = torch.mm(leaf, leaf)
        cast = product.grad_fn.next_functions[0][0]
        if self._sentinel is not None and self._sentinel[1] != cast._sequence_nr():
            self.epoch += 1
        self._sentinel = (leaf, cast._sequence_nr(), product)
        return self.epoch
