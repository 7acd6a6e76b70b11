"""How ranks meet: over torch's own default store, every wait bounded.

The store may outlive an attempt (torchrun's agents keep theirs over restarts of the ranks), so every key carries the
attempt's number. One rank that has no shim, or cannot connect, must not hang the others: each posts a key, the first
rank of the group publishes what comes of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist

from sdcrun.shim import boot
from sdcrun.wire.opening import answers

CONTROLLER = "sdcrun/controller"
KNOWN = "sdcrun/known"
LEAD_SECONDS = 3.0


def attempt_number() -> int:
    """The number of this attempt, the same on all ranks of it: the round of torchrun's rendezvous, which sdcrun's agent
    passes on; where that is not known, torchrun's restart count, which a node that joins later counts from 0."""
    for name in ("SDCRUN_ROUND", "TORCHELASTIC_RESTART_COUNT"):
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0


class Rendezvous:
    """Bounded meetings of the ranks of one attempt over `store`; `limit` in seconds."""

    def __init__(self, store, limit: float) -> None:
        self.store = dist.PrefixStore(f"sdcrun/{attempt_number()}", store)
        self.limit = timedelta(seconds=limit)
        root = store
        while hasattr(root, "underlying_store"):
            root = root.underlying_store
        self.root = root

    def controller(self, rank: int, known: Iterable[dict], own: Callable[[], dict | None]) -> dict | None:
        """Address of the job's controller, the same on all ranks that share the store.

        `known` are controllers that this node has heard of in earlier attempts, the surest first; `own()` is the one
        that its supervisor offers. Global rank 0 decides; another rank does where that one says nothing.
        """
        try:
            known = list(known)
            if known:
                self.root.set(KNOWN, json.dumps(known))
            if rank != 0:
                self._there(self.store, "controller", LEAD_SECONDS)
            if not self.store.check(["controller"]) and self.store.add("controller/chooser", 1) == 1:
                self.store.set("controller", json.dumps(self._choose(known) or own()))
            self.store.wait(["controller"], self.limit)
            address = json.loads(self.store.get("controller"))
            if address is not None:
                self.root.set(CONTROLLER, json.dumps(address))
            return address
        except Exception as error:
            boot.trace(f"no common controller: {error!r}")
            return None

    def _choose(self, known: list[dict]) -> dict | None:
        """The first that answers, of those that may have the record already."""
        found = [json.loads(self.root.get(CONTROLLER))] if self.root.check([CONTROLLER]) else []
        found += known
        if not known and attempt_number() > 0 and self._there(self.root, KNOWN, LEAD_SECONDS):
            found += json.loads(self.root.get(KNOWN))
        tried: list[dict] = []
        for address in found:
            if address not in tried:
                tried.append(address)
                if answers(address):
                    return address
        return None

    @staticmethod
    def _there(store, key: str, seconds: float) -> bool:
        try:
            store.wait([key], timedelta(seconds=seconds))
        except Exception:
            return False
        return True

    def agree(self, name: str, place: int, size: int, statement: dict) -> list[dict] | str:
        """Everyone's `statement`, by place; or, the same on all who are there, the reason why not."""
        self.store.set(f"{name}/{place}", json.dumps(statement))
        if place == 0:
            keys = [f"{name}/{other}" for other in range(size)]
            try:
                self.store.wait(keys, self.limit)
                result = [json.loads(self.store.get(key)) for key in keys]
            except Exception:
                absent = [other for other, key in enumerate(keys) if not self.store.check([key])]
                result = f"ranks {absent[:8]} of the group did not answer within {self.limit.seconds} s"
            self.store.set(f"{name}/all", json.dumps(result))
        try:
            self.store.wait([f"{name}/all"], 2 * self.limit)
            return json.loads(self.store.get(f"{name}/all"))
        except Exception:
            return f"the group's first rank did not answer within {2 * self.limit.seconds} s"
