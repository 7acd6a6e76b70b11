"""The live question: what do all ranks of a group hold at this version? Asked for a save that no vote covers.

Rank 0 mostly saves alone, so a collective would hang. The controller passes the question on; the link thread of every
rank answers while its main thread waits for us somewhere, and answers that agree travel as one short digest. Every wait
is bounded; who cannot answer makes the checkpoint unverified.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import torch

from sdcrun.core.vote import weight_vote
from sdcrun.shim import boot
from sdcrun.shim.checkpoints.clock import NotThatVersion
from sdcrun.shim.checkpoints.tables import Table, table_of
from sdcrun.shim.checks.weights import Table as Read
from sdcrun.shim.checks.weights import WeightVote

QUERY = "weights"
PAGE = 4096
SHORT = 0.5
LEAVE_SECONDS = 1.0
WITNESS_ROWS = 2048


@dataclass
class Answer:
    """What the ranks said, by kind: `tables` has the majority's table, `dissent` rank -> number of tensors in which its
    own table differs from it, `named` those tensors. `why` says why there is no answer."""

    tables: dict[str, Table] = field(default_factory=dict)
    dissent: dict[str, dict[int, int]] = field(default_factory=dict)
    named: dict[str, list[str]] = field(default_factory=dict)
    why: str | None = None


class Snapshots:
    """Fingerprints of one group's weights and optimizer state at the last few versions, taken at most once each."""

    def __init__(self, group) -> None:
        self.group = group
        self._taken: deque[tuple[int, dict[str, Read]]] = deque(maxlen=2)
        self._side: torch.cuda.Stream | None = None
        self._marks: list[tuple[torch.Tensor, int, int]] = []
        self._moves: dict[int, list[int]] = {}

    def mark(self) -> None:
        """An optimizer step is over: what is changed from now on is changed by other means (a swap for evaluation)."""
        guards = self.group.guards
        if guards and guards[0].parameters and guards[-1].parameters:
            ends = next(iter(guards[0].parameters.values())), next(reversed(guards[-1].parameters.values()))
            self._marks = [(parameter, parameter._version, parameter.data_ptr()) for parameter in ends]

    def moves(self, version: int) -> list[int]:
        """How often the first and the last parameter had been changed since the step when `version` was read."""
        return self._moves.get(version, [])

    def read(self, version: int, kinds: list[str], timeout: float) -> dict[str, Read]:
        """Tables by kind as this rank holds them at `version`. Any thread. Raises NotThatVersion."""
        known = next((tables for number, tables in self._taken if number == version), {})
        missing = [kind for kind in kinds if kind not in known]
        if missing:
            taken = self.group.weights_clock.read(version, timeout, lambda: self._take(missing))
            known = known | taken
            self._taken.append((version, known))
            self._moves = {number: self._moves.get(number, []) for number, _ in self._taken}
            # `p.data = ...` counts as one change more: no version tells it.
            self._moves[version] = [p._version - mark + (p.data_ptr() != place) for p, mark, place in self._marks]
        return known

    def forget(self) -> None:
        """Something but an optimizer step may have changed the weights."""
        self._taken.clear()

    def _take(self, kinds: list[str]) -> dict[str, Read]:
        vote = self.group.weights or WeightVote(self.group)
        sources = {"weights": vote.parameters, "optimizer": vote.optimizer_state}
        tables = {kind: Read(kind, sources[kind]()) for kind in kinds}
        place = next((t.device for table in tables.values() for t in table.tensors if t.is_cuda), None)
        if place is not None:
            # The stream that others use may hold a collective that waits for the rank that asks.
            self._side = self._side or torch.cuda.Stream(place)
            moment = self.group.weights_clock.moment
            if moment is not None:
                self._side.wait_event(moment)
            with torch.cuda.device(place), torch.cuda.stream(self._side):
                for table in tables.values():
                    table.read()
        else:
            for table in tables.values():
                table.read()
        return tables


def group_key(group) -> str:
    """A short name of a process group, the same on all its ranks."""
    return hashlib.sha256(repr(group.ranks).encode()).hexdigest()[:16]


def _digest(table: Read) -> str:
    return hashlib.blake2b(table.pack(), digest_size=16).hexdigest()


class Questions:
    """Both ends of the question in one rank. `left` holds the last answers of ranks that are gone."""

    def __init__(self, runtime) -> None:
        self.runtime = runtime
        self.left: dict[tuple[str, int], dict[str, Any]] = {}
        self._silent = False

    # -- answering, in the link thread ------------------------------------------------------------------------------

    def answer(self, data: dict[str, Any]) -> dict[str, Any] | None:
        """Answers the query {group, version, kinds, limit, page: [kind, start] | null}; None for another group."""
        group = next((g for g in self.runtime.groups.values() if group_key(g) == data["group"]), None)
        if group is None:
            return None
        try:
            tables = group.snapshots.read(int(data["version"]), list(data["kinds"]), float(data["limit"]))
        except NotThatVersion as reason:
            return {"why": str(reason)}
        except Exception as error:
            return {"why": f"{type(error).__name__}: {error}"[:200]}
        page = data.get("page")
        if page is None:
            moves = group.snapshots.moves(int(data["version"]))
            return {"digests": {kind: _digest(tables[kind]) for kind in data["kinds"]}, "moves": moves}
        kind, start = page
        return {"rows": _rows_text(tables[kind].rows[start : start + PAGE])}

    def heard(self, data: dict[str, Any]) -> None:
        """A message that was pushed: the last answer of a rank that has left."""
        left = data.get("left")
        if isinstance(left, dict):
            self.left[str(left["group"]), int(left["rank"])] = left

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask(self, group, version: int, step: int, kinds: list[str]) -> Answer:
        """Asks all ranks of `group` for `version`; takes at most the configured time for each of at most a few rounds.
        """
        timeout = SHORT if self._silent else self.runtime.config.checkpoint_timeout
        try:
            mine = group.snapshots.read(version, kinds, timeout)
        except NotThatVersion as reason:
            return Answer(why=f"this rank is {reason}")
        heard = self._ask(group, version, kinds, timeout, None)
        self._silent = not heard
        said = {rank: answer["digests"] for rank, answer in heard.items() if "digests" in answer}
        for (key, rank), left in self.left.items():
            if key == group_key(group) and rank not in said and left["version"] == version:
                said[rank] = left["digests"]
        said[self.runtime.rank] = {kind: _digest(mine[kind]) for kind in kinds}
        missing = [rank for rank in group.ranks if set(kinds) - said.get(rank, {}).keys()]
        if missing:
            whys = [heard[rank].get("why") for rank in missing if rank in heard and heard[rank].get("why")]
            reason = f" ({whys[0]})" if whys else " (the controller is away)" if not heard else ""
            return Answer(why=f"{_ranks(missing)} could not answer{reason}")
        answer = Answer()
        moves = {rank: heard_from.get("moves") for rank, heard_from in heard.items()}
        moves[self.runtime.rank] = group.snapshots.moves(version)
        for kind in kinds:
            digests = {rank: said_by[kind] for rank, said_by in said.items()}
            best = Counter(digests.values()).most_common(1)[0][0]
            usual = next(moves.get(rank) for rank in group.ranks if digests[rank] == best)
            others = [rank for rank in group.ranks if digests[rank] != best and rank != self.runtime.rank]
            early = [rank for rank in others if moves.get(rank) not in (None, usual)]
            if early and usual is not None:
                return Answer(why=f"{_ranks(early)} had changed its weights since the step by other means, a swap say")
            problem = self._settle(group, version, step, kind, mine[kind], digests, answer)
            if problem is not None:
                return Answer(why=problem, dissent=answer.dissent, named=answer.named)
        return answer

    def _settle(self, group, version, step, kind, mine: Read, digests: dict[int, str], answer: Answer) -> str | None:
        """Finds the majority's table of one kind; returns why there is none, or None."""
        best, count = Counter(digests.values()).most_common(1)[0]
        if count == len(digests):
            answer.tables[kind] = table_of(kind, step, version, "question", mine.names, mine.rows, mine.metas)
            return None
        rows = self._all_rows(group, version, kind, mine, digests)
        result = weight_vote(rows, mine.names)
        dissent = answer.dissent.setdefault(kind, {})
        answer.named[kind] = [*result.minority, *result.no_majority]
        for minority in result.minority.values():
            for rank in minority:
                dissent[rank] = dissent.get(rank, 0) + 1
        if set(rows) != set(digests):
            return f"{_ranks(sorted(set(digests) - set(rows)))} holds other {_word(kind)}, which ones is not known"
        if result.no_majority:
            return f"the ranks' {_word(kind)} differ and no version has a majority"
        majority = next(rank for rank in group.ranks if digests[rank] == best)
        table = dict(zip(mine.names, rows[majority]))
        for name, minority in result.minority.items():
            table[name] = rows[next(rank for rank in group.ranks if rank not in minority)][mine.names.index(name)]
        metas = dict(zip(mine.names, mine.metas))
        answer.tables[kind] = Table(kind, step, version, "question", {n: tuple(row) for n, row in table.items()}, metas)
        return None

    def _all_rows(self, group, version, kind, mine: Read, digests: dict[int, str]) -> dict[int, list]:
        """Each rank's rows; those of ranks that gave no table are missing, equal digests share one."""
        rows = {self.runtime.rank: [tuple(row) for row in mine.rows.tolist()]}
        got: dict[int, list] = {}
        for start in range(0, len(mine.names), PAGE):
            heard = self._ask(group, version, [kind], self.runtime.config.checkpoint_timeout, [kind, start])
            for rank, said in heard.items():
                if "rows" in said and rank != self.runtime.rank:
                    got.setdefault(rank, []).extend(_rows_of(said["rows"]))
        for (key, rank), left in self.left.items():
            if key == group_key(group) and rank not in got and kind in left.get("rows", {}):
                got[rank] = _rows_of(left["rows"][kind])
        rows.update({rank: found for rank, found in got.items() if len(found) == len(mine.names)})
        for rank, digest in digests.items():
            twin = next((other for other in rows if digests[other] == digest), None)
            if rank not in rows and twin is not None:
                rows[rank] = rows[twin]
        return rows

    def _ask(self, group, version, kinds, timeout: float, page) -> dict[int, dict[str, Any]]:
        """Answers by rank of the group."""
        data = {"group": group_key(group), "version": version, "kinds": kinds, "limit": 0.8 * timeout, "page": page}
        answers = self.runtime.link.ask(QUERY, data, timeout) if self.runtime.link is not None else {}
        found = {}
        for source, answer in answers.items():
            rank = source.removeprefix("rank:")
            if rank.isdigit() and int(rank) in group.ranks and isinstance(answer, dict):
                found[int(rank)] = answer
        return found

    # -- leaving ----------------------------------------------------------------------------------------------------

    def leave(self, only=None) -> None:
        """Says once per version what this rank holds, before it can no longer be asked: at exit, and when the script
        drops its module (then of that group alone). Never raises."""
        for group in [only] if only is not None else list(self.runtime.groups.values()):
            version = group.weights_clock.version
            if group.size < 2 or group.off_reason is not None or version in (0, group.left_version) or not group.guards:
                continue
            group.left_version = version
            try:
                # Both at once: what one part of a save needs must be of the same moment as the other.
                kinds = ["weights", "optimizer"]
                tables = group.snapshots.read(version, kinds, LEAVE_SECONDS)
                short = all(len(table.names) <= WITNESS_ROWS for table in tables.values())
                rows = {kind: _rows_text(tables[kind].rows) for kind in kinds} if short and group.rank in (1, 2) else {}
                digests = {kind: _digest(tables[kind]) for kind in kinds}
                self.runtime.emit(
                    "left", {"group": group_key(group), "first": group.ranks[0], "rank": group.ranks[group.rank],
                             "version": version, "digests": digests, "rows": rows},
                )  # fmt: skip
            except Exception as error:
                boot.trace(f"no last table: {error!r}")


def _rows_text(rows: torch.Tensor) -> str:
    flat = rows.reshape(-1).tolist()
    return base64.b64encode(struct.pack(f"<{len(flat)}q", *flat)).decode()


def _rows_of(text: str) -> list[tuple[int, int]]:
    raw = base64.b64decode(text)
    flat = struct.unpack(f"<{len(raw) // 8}q", raw)
    return list(zip(flat[::2], flat[1::2]))


def _word(kind: str) -> str:
    return "weights" if kind == "weights" else "optimizer states"


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"
