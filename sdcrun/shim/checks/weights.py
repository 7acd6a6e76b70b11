"""Check 3: fingerprints of every replica's parameters after the update; a strict majority of each tensor decides.

All ranks first compare one combined digest. Only when those differ do the tables travel, each tensor gets its own
majority, and the minority takes the tensor (and the optimizer's state) from a majority rank, because DDP never sends
parameters again and one flip would fail every later vote.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections import deque

import torch

from sdcrun.core import ballot
from sdcrun.core.vote import VoteResult, weight_vote
from sdcrun.shim import fingerprint
from sdcrun.shim.checkpoints import tables
from sdcrun.shim.exchange import ExchangeFailed
from sdcrun.shim.transport import BallotFailed

TAG_TABLE, TAG_TENSOR, TAG_NAMES = 11, 12, 13
KEPT_TABLES = 4
ON_PURPOSE = "the replicas differ in every tensor since the first vote: this script keeps them apart on purpose"


class Table:
    """Named tensors that should be equal on all ranks, and their fingerprints."""

    def __init__(self, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        self.kind, self.names, self.tensors = kind, list(tensors), list(tensors.values())
        self.metas = [fingerprint.metadata(tensor) for tensor in self.tensors]
        self.structure = hashlib.sha256(repr((self.names, self.metas)).encode()).digest()
        self.rows = torch.zeros(0, 2, dtype=torch.int64)
        self._encoded = fingerprint.encode_metas(self.metas)

    def read(self) -> tuple[int, int]:
        """Takes the fingerprints anew; returns the combined digest."""
        self.rows = fingerprint.fingerprints(self.tensors)
        return fingerprint.digest(self.rows, self._encoded)

    def pack(self) -> bytes:
        """Structure (32 bytes) and rows as little-endian int64."""
        flat = self.rows.reshape(-1).tolist()
        return self.structure + struct.pack(f"<{len(flat)}q", *flat)


def unpack_rows(payload: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """Inverse of `Table.pack`: (structure, rows)."""
    flat = struct.unpack(f"<{(len(payload) - 32) // 8}q", payload[32:])
    return payload[:32], list(zip(flat[::2], flat[1::2]))


class WeightVote:
    """The votes of one group; lives as long as the group."""

    def __init__(self, group) -> None:
        self.group = group
        self.weights: Table | None = None
        self.clean_before = False
        self.off = False
        self.agreed: dict[str, deque] = {kind: deque(maxlen=KEPT_TABLES) for kind in ("weights", "optimizer")}
        self.optimizer_off = False
        self._optimizer_voted: int | None = None
        # Modules that some rank holds no more: the script has dropped them, and collectors run when they like.
        self._dropped: set[str] = set()

    def tables(self) -> list[tables.Table]:
        """What all ranks agreed on lately, weights and optimizer state, the oldest first."""
        return [tables.table_of(*agreed) for kind in self.agreed.values() for agreed in kind]

    def _keep(self, step: int, table: Table) -> None:
        """Remembers a table that all ranks agreed on; this step's number of the weights' clock is still to come."""
        version = self.group.weights_clock.version + 1
        self.agreed[table.kind].append((table.kind, step, version, "vote", table.names, table.rows, table.metas))

    def forget(self) -> None:
        """The guarded modules have changed."""
        self.weights = None

    def run(self, step: int, asked: bool = False) -> None:
        """The vote after `step`'s update; a collective of the group. Failures turn the check off, never the job.

        `asked`: not (only) because the interval says so; then the optimizer's state is voted on as well.
        """
        if self.off:
            return
        group = self.group
        self._take()
        group.checks["weights"]["run"] += 1
        try:
            if self._agree_on_weights(step):
                self.clean_before = True
                self._keep(step, self.weights)
                self._buffers(step)
            else:
                group.checks["weights"]["fired"] += 1
                self._dissent(step)
            self._optimizer(step, asked)
        except BallotFailed as error:
            group.turn_off(f"the weight vote of step {step} failed: {error}")
        except ExchangeFailed as error:
            self.turn_off(step, f"the exchange after a dissenting vote failed: {error}")

    def turn_off(self, step: int, reason: str) -> None:
        """No more votes in this attempt."""
        self.off = True
        self.group.emit("check_off", {"check": "weights", "reason": reason, "step": step})

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters of all guarded modules by their names in events."""
        return {
            guard.qualified(name): parameter.detach()
            for guard in self._guards()
            for name, parameter in guard.parameters.items()
        }

    def _guards(self) -> list:
        return [guard for guard in self.group.guards if guard.name not in self._dropped]

    def _agree_on_weights(self, step: int) -> bool:
        """Whether all ranks hold the same weights of the modules that all of them hold."""
        if self._agree(self.weights, step, ballot.PHASE_VOTE):
            return True
        mine = [guard.name for guard in self._guards()]
        held = [json.loads(names) for names in self.group.exchange.gather(json.dumps(mine).encode(), TAG_NAMES)]
        gone = {name for names in held for name in names if any(name not in others for others in held)}
        if not gone:
            return False
        self._dropped |= gone
        self._take()
        return self._agree(self.weights, step, ballot.PHASE_VOTE)

    def _take(self) -> None:
        """The table of the weights where they are now: a script may put others in their place (`p.data = ...`)."""
        known = self.weights
        if known is not None:
            live = [p for guard in self._guards() for p in guard.parameters.values()]
            if len(live) == len(known.tensors) and all(map(_is_placed_as, live, known.tensors)):
                return
        self.weights = Table("weights", self.parameters())

    def _agree(self, table: Table, step: int, phase: int) -> bool:
        words = ballot.digest_words(table.read(), ballot.tag(step, 0, phase))
        agree = ballot.digests_agree(self.group.all_reduce_max(words))
        if agree is None:
            raise BallotFailed("the ranks were not at the same place")
        return agree

    def _vote(self, table: Table) -> VoteResult | None:
        """Per-tensor majorities, or None where the ranks do not hold the same tensors."""
        tables = [unpack_rows(payload) for payload in self.group.exchange.gather(table.pack(), TAG_TABLE)]
        if len({structure for structure, _ in tables}) > 1:
            return None
        return weight_vote({self.group.ranks[place]: rows for place, (_, rows) in enumerate(tables)}, table.names)

    def _dissent(self, step: int) -> None:
        group, table = self.group, self.weights
        result = self._vote(table)
        if result is None:
            self.turn_off(step, "the ranks hold different tensors")
            return
        if not self.clean_before and not result.minority and len(result.no_majority) > len(table.names) // 2:
            if group.size > 2:
                self.turn_off(step, ON_PURPOSE)
                return
        action, again, why = "reported", None, None
        if group.config.on_weight_fault == "stop":
            action = "stopped"
        elif group.config.on_weight_fault == "repair" and result.minority and not result.no_majority:
            why = self._repair_all(step, table, result)
            action = "repaired" if why is None else "declined"
            agree = self._agree(table, step, ballot.PHASE_REVOTE)
            again = "clean" if agree else "dissent"
            if agree:
                self.clean_before = True
                self._keep(step, table)
        elif group.config.on_weight_fault == "repair":
            action, why = "declined", "no strict majority"
            self._evidence_only(step, table, result)
        self._say(step, table.kind, result, action, again, why)

    def _repair_all(self, step: int, table: Table, result: VoteResult) -> str | None:
        """Weights, then the optimizer's state, which a wrong gradient spoils as well. Returns why not, or None."""
        self._repair(step, table, result)
        state = Table("optimizer", self.optimizer_state())
        if not state.tensors or self._agree(state, step, ballot.PHASE_STATE):
            return None
        differing = self._vote(state)
        if differing is None:
            return "the optimizer's state is not the same set of tensors on all ranks"
        self._repair(step, state, differing)
        return "no strict majority for the optimizer's state" if differing.no_majority else None

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Tensors of the optimizers' state that belong to guarded parameters: "<number>.<key>.<parameter>"."""
        names = {id(p): guard.qualified(n) for guard in self._guards() for n, p in guard.parameters.items()}
        found = {}
        for number, reference in enumerate(self.group.optimizers):
            optimizer = reference()
            for parameter, state in (optimizer.state.items() if optimizer is not None else ()):
                if id(parameter) in names:
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor):
                            found[f"{number}.{key}.{names[id(parameter)]}"] = value.detach()
        return dict(sorted(found.items()))

    def _repair(self, step: int, table: Table, result: VoteResult) -> None:
        """Sends each tensor from a majority rank to its minority, in place; the minority says what it had held."""
        group = self.group
        me = group.ranks[group.rank]
        for name, minority in result.minority.items():
            source = result.sources[name]
            tensor = table.tensors[table.names.index(name)]
            if me == source:
                payload = _to_bytes(tensor)
                group.exchange.swap({group.ranks.index(rank): payload for rank in minority}, [], TAG_TENSOR)
            elif me in minority:
                peer = group.ranks.index(source)
                expected = _from_bytes(group.exchange.swap({}, [peer], TAG_TENSOR)[peer], tensor)
                self._word(step, table.kind, name, expected, tensor, source)
                with torch.no_grad():
                    tensor.copy_(expected)

    def _evidence_only(self, step: int, table: Table, result: VoteResult) -> None:
        """Without a majority nobody is right, but the bits are evidence: each rank compares with the first rank's."""
        group = self.group
        me = group.ranks[group.rank]
        for name in list(result.no_majority)[:4]:
            tensor = table.tensors[table.names.index(name)]
            if group.rank == 0:
                payload = _to_bytes(tensor)
                group.exchange.swap(dict.fromkeys(range(1, group.size), payload), [], TAG_TENSOR)
            else:
                other = _from_bytes(group.exchange.swap({}, [0], TAG_TENSOR)[0], tensor)
                if me != group.ranks[0]:
                    self._word(step, table.kind, name, other, tensor, group.ranks[0])

    def _word(self, step: int, kind: str, name: str, expected: torch.Tensor, observed: torch.Tensor, peer: int) -> None:
        difference = fingerprint.differing_words(expected, observed).as_dict()
        if difference["words"] == 0:
            return
        self.group.emit(
            "word",
            {"step": step, "table": kind, "tensor": name, "dtype": str(observed.dtype).removeprefix("torch."),
             "shape": list(observed.shape), "words": difference["words"], "index": difference["index"],
             "expected": difference["expected_word"], "observed": difference["observed_word"],
             "expected_value": difference["expected_value"], "observed_value": difference["observed_value"],
             "bits": difference["element_bits"], "peer": peer, "rank": self.group.ranks[self.group.rank]},
        )  # fmt: skip

    def _optimizer(self, step: int, asked: bool) -> None:
        """The vote on the optimizers' state, at its own rate and whenever a vote was asked for."""
        every, last = self.group.config.optimizer_every, self._optimizer_voted
        due = every > 0 and (last is None or step - last >= every)
        if self.off or self.optimizer_off or not (due or asked and every > 0):
            return
        first, self._optimizer_voted = last is None, step
        table = Table("optimizer", self.optimizer_state())
        if self._agree(table, step, ballot.PHASE_STATE):
            self._keep(step, table)
            return
        result = self._vote(table)
        if result is None or first and 2 * len(result.no_majority) > len(table.names):
            self.optimizer_off = True
            self.group.runtime.limit(
                "the optimizer's state differs from rank to rank by design (sharded, say): it is not voted on",
                "weights",
            )
            return
        self.group.checks["weights"]["fired"] += 1
        action, again = "reported", None
        if self.group.config.on_weight_fault == "stop":
            action = "stopped"
        elif self.group.config.on_weight_fault == "repair":
            self._repair(step, table, result)
            agree = self._agree(table, step, ballot.PHASE_REVOTE)
            action, again = ("declined" if result.no_majority else "repaired"), ("clean" if agree else "dissent")
            if agree:
                self._keep(step, table)
        self._say(step, table.kind, result, action, again, "no strict majority" if result.no_majority else None)

    def _buffers(self, step: int) -> None:
        """Buffers as they were right after DDP synced them in this window's first forward; nothing to repair, since the
        next forward syncs them again."""
        group = self.group
        seen = group.vote_buffers
        if not all(synced for _, synced in seen) or not any(guard.saved_buffers for guard, _ in seen):
            return
        table = Table(
            "buffers", {g.qualified(n): b for g, _ in group.vote_buffers for n, b in g.saved_buffers.items()}
        )
        if self._agree(table, step, ballot.PHASE_STATE):
            return
        result = self._vote(table)
        if result is not None:
            self._say(step, table.kind, result, "reported", None, "the next forward sends the buffers again")

    def _say(self, step: int, kind: str, result: VoteResult, action: str, again: str | None, why: str | None) -> None:
        group = self.group
        me = group.ranks[group.rank]
        if group.rank == 0 or any(me in ranks for ranks in result.minority.values()):
            group.emit(
                "vote",
                {"step": step, "group": group.said_ranks, "table": kind, "minority": {name: list(ranks) for name,
                ranks in result.minority.items()},
                 "no_majority": list(result.no_majority), "action": action, "again": again, "why": why},
            )  # fmt: skip


def _is_placed_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
        and one.dtype == other.dtype
    )  # fmt: skip


def _to_bytes(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in logical order."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


def _from_bytes(payload: bytes, like: torch.Tensor) -> torch.Tensor:
    """Inverse of `_to_bytes`, on the device of `like`. Raises ExchangeFailed on another size."""
    if len(payload) != like.numel() * like.element_size():
        raise ExchangeFailed(f"{len(payload)} bytes for a tensor of {like.numel() * like.element_size()}")
    if not payload:
        return torch.empty_like(like)
    flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return flat.view(like.dtype).reshape(like.shape).to(like.device)
