"""Makes the events that the ranks of a job would send, for tests of what the controller and the report make of them."""

from __future__ import annotations

from typing import Any

from sdcrun.core.types import Config, Event

START = 1_760_000_000.0


class Job:
    """A job of `world` ranks, one a node, whose events are in `events` in the order they were made."""

    def __init__(self, world: int = 4, **config: Any) -> None:
        settings = {"job_id": "job", "audit_every": 0, "weights_every": 1, "optimizer_every": 1, **config}
        self.config = Config(**settings)
        self.world = world
        self.ranks = range(world)
        self.group = list(self.ranks) if world <= 64 else [[0, world]]
        self.events: list[Event] = []
        self._seq: dict[tuple[int, str], int] = {}

    def emit(self, kind: str, source: Any, data: dict[str, Any], attempt: int = 0) -> Event:
        """Add one event; an integer `source` is a rank."""
        name = f"rank:{source}" if isinstance(source, int) else source
        key = attempt, name
        self._seq[key] = self._seq.get(key, 0) + 1
        event = Event(kind, name, attempt, self._seq[key], START + len(self.events), data, "s1")
        self.events.append(event)
        return event

    def node_up(self, command: list[str] | None = None, nnodes: Any = None) -> None:
        """The one supervisor of a job whose nodes are all local."""
        self.emit("node_up", "node:gpu:7", {
            "host": "gpu", "node": None, "nnodes": self.world if nnodes is None else nnodes, "nproc": 1,
            "command": command or ["sdcrun", "--nnodes", str(self.world), "train.py"],
            "versions": {"sdcrun": "0.1.0"}, "local_nodes": self.world,
        })  # fmt: skip

    def hello(self, attempt: int = 0, skip: tuple[int, ...] = (), shift: int = 0, host: str = "gpu-{}") -> None:
        """All ranks but `skip` say hello and that they are guarded; `shift` moves ranks to other devices."""
        for rank in self.ranks:
            if rank in skip:
                continue
            node = (rank + shift) % self.world
            self.emit("hello", rank, {
                "rank": rank, "local_rank": 0, "node": node, "world_size": self.world, "local_world_size": 1,
                "restart_count": attempt, "pid": 100 + rank,
                "device": {"host": host.format(node), "uuid": f"GPU-{node:04d}", "pci": None, "model": "H100",
                           "serial": f"S{node}"},
                "versions": {"sdcrun": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}, "interpreter": "python",
                "session": "s1",
            }, attempt)  # fmt: skip
            modules = [{"name": "", "parameters": 10, "tensors": 2, "bytes": 40}]
            self.emit("guarded", rank, {"group": self.group, "modules": modules}, attempt)

    def nonfinite(self, step: int, local: dict[int, list[str]] | None = None,
                  reduced: dict[int, list[str]] | None = None, amp: bool = False, silent: tuple[int, ...] = (),
                  attempt: int = 0) -> None:  # fmt: skip
        """Every rank but `silent` says what it found; `reduced` None: what is local anywhere is reduced everywhere."""
        local = local or {}
        if reduced is None:
            everywhere = sorted({name for found in local.values() for name in found})
            reduced = dict.fromkeys(self.ranks, everywhere)
        for rank in self.ranks:
            if rank not in silent:
                self.emit("nonfinite", rank, {
                    "step": step, "group": self.group, "amp": amp, "skipped": True,
                    "local": [bad(name) for name in local.get(rank, ())],
                    "reduced": [bad(name) for name in reduced.get(rank, ())],
                }, attempt)  # fmt: skip

    def vote(self, step: int, minority: dict[str, list[int]] | None = None, no_majority: tuple[str, ...] = (),
             action: str = "repaired", again: str | None = "clean", table: str = "weights", attempt: int = 0,
             word: bool = True) -> None:  # fmt: skip
        """The first rank and each of the minority tell of a dissenting vote, the latter with evidence."""
        minority = minority or {}
        accused = sorted({rank for ranks in minority.values() for rank in ranks})
        for rank in sorted({0, *accused}):
            self.emit("vote", rank, {
                "step": step, "group": self.group, "table": table, "minority": minority,
                "no_majority": list(no_majority), "action": action, "again": again, "why": None,
            }, attempt)  # fmt: skip
        if word:
            for tensor, ranks in minority.items():
                for rank in ranks:
                    self.word(step, tensor, rank, table, attempt)

    def word(self, step: int, tensor: str, rank: int, table: str = "weights", attempt: int = 0) -> None:
        """Evidence of one flipped bit."""
        self.emit("word", rank, {
            "step": step, "table": table, "tensor": tensor, "dtype": "float32", "shape": [4, 2], "words": 1, "index": 5,
            "expected": "0x3f800000", "observed": "0x7f800000", "expected_value": 1.0, "observed_value": "inf",
            "bits": [30], "peer": 0, "rank": rank,
        }, attempt)  # fmt: skip

    def inject(self, step: int, rank: int, spec: int = 0, site: str = "weight", before: Any = 1.0, after: Any = 2.0,
               phase: str = "step", attempt: int = 0) -> None:  # fmt: skip
        """A fault fires."""
        self.emit("inject", rank, {
            "spec": spec, "step": step, "site": site, "tensor": "w", "index": 5, "kind": "bitflip", "bits": [30],
            "before": before, "after": after, "phase": phase,
        }, attempt)  # fmt: skip

    def audit(self, step: int, attempt: int = 0, **values: Any) -> None:
        """The first rank tells of an audit; clean unless `values` says otherwise."""
        self.emit("audit", 0, {
            "step": step, "group": self.group, "domains": self.group, "comparisons": [], "calibration": False,
            "weights_agree": True, "declined": [], "cause": "interval", "position": 0, "window": 1, "scope": "all",
            "skipped": False, "agreed": self.world, **values,
        }, attempt)  # fmt: skip

    def summaries(self, seen: int, skipped: int = 0, seconds: float = 0.5, attempt: int = 0) -> None:
        """Every rank's counters after `seen` steps."""
        for rank in self.ranks:
            self.emit("summary", rank, {
                "group": self.group, "steps": {"seen": seen, "committed": seen - skipped, "skipped": skipped},
                "checks": {"nonfinite": {"run": seen, "fired": skipped, "seconds": seconds},
                           "replay": {"run": 0, "fired": 0, "seconds": 0.0},
                           "weights": {"run": seen, "fired": 0, "seconds": seconds}},
                "parts": {"ballot": 0.1}, "train_seconds": 100.0, "last_audit_step": None,
            }, attempt)  # fmt: skip

    def end(self, code: int = 0, status: str = "finished") -> None:
        """The supervisor says that the job ended."""
        self.emit("job_end", "node:gpu:7", {"exit_code": code, "status": status})


def bad(tensor: str) -> dict[str, Any]:
    """Two NaN of eight elements."""
    return {"tensor": tensor, "elements": 2, "nan": 2, "inf": 0, "numel": 8}


def comparison(owner: int, replayer: int, role: str, agrees: bool, digest: str = "aa", other: str = "bb",
               **values: Any) -> dict[str, Any]:  # fmt: skip
    """One comparison of an audit."""
    return {"owner": owner, "replayer": replayer, "role": role, "agrees": agrees, "digest_owner": digest,
            "digest_replayer": digest if agrees else other, **values}  # fmt: skip
