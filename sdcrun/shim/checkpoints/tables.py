"""Tables of fingerprints that ranks agreed on, and how the tensors of a save compare with one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sdcrun.shim import fingerprint
from sdcrun.shim.checkpoints.contents import Leaf
from sdcrun.shim.checkpoints.locate import Word, locate_in_tensor
from sdcrun.shim.fingerprint.quiet import quiet

Row = tuple[int, int]
# Damage is a word, a run of words, a page; what a script does to a tensor changes this share of its elements, or more.
REWRITTEN = 1 / 8


@dataclass
class Table:
    """Fingerprints of named tensors. `step`: the window after whose update they were taken; `version`: of the group's
    clock; `how`: "vote" (all ranks agreed in band) or "question" (they were asked for a save)."""

    kind: str
    step: int
    version: int
    how: str
    rows: dict[str, Row]
    metas: dict[str, tuple]


def table_of(kind: str, step: int, version: int, how: str, names, rows: torch.Tensor, metas) -> Table:
    """A `Table` from parallel lists; `rows` is int64 [n, 2]."""
    pairs = [tuple(row) for row in rows.tolist()]
    return Table(kind, step, version, how, dict(zip(names, pairs)), dict(zip(names, metas)))


class Saved:
    """The tensors of a save with their fingerprints, each taken once."""

    def __init__(self, found: list[Leaf]) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.unreadable: list[str] = []
        tensors: list[torch.Tensor] = []
        for leaf in found:
            if leaf.tensor.device.type == "meta":
                self.unreadable.append(leaf.name)
            else:
                self.leaves[leaf.name] = leaf
                tensors.append(leaf.tensor)
        rows = fingerprint.fingerprints(tensors)
        self.rows: dict[str, Row] = {name: tuple(row) for name, row in zip(self.leaves, rows.tolist())}
        self.metas = {name: fingerprint.metadata(leaf.tensor) for name, leaf in self.leaves.items()}

    def row_as(self, leaf: Leaf, meta: tuple) -> Row | str:
        """The fingerprint that a saved tensor has in the layout `meta` of a table, or why it cannot be compared."""
        mine = self.metas.get(leaf.name)
        if mine is None:
            return "it has no data"
        if mine == meta:
            return self.rows[leaf.name]
        if mine[0] != meta[0]:
            return f"it is {mine[0].removeprefix('torch.')}, the weights are {meta[0].removeprefix('torch.')}"
        if mine[1] != meta[1]:
            return "it has another shape"
        return tuple(fingerprint.fingerprints([laid_out(leaf.tensor, meta)])[0].tolist())


def laid_out(tensor: torch.Tensor, meta: tuple) -> torch.Tensor:
    """The tensor with the strides of a table's entry: a fingerprint reads in the order of the storage."""
    with torch.no_grad():
        strides = tuple(stride or 1 for stride in meta[2])
        return torch.empty_strided(meta[1], strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.device, tensor.data_ptr()


@dataclass
class Comparison:
    """Saved tensors against one table. `words` has the single word in which a differing tensor differs, where it is
    one; `foreign` says why tensors cannot be compared (another dtype, say)."""

    table: Table
    equal: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    foreign: dict[str, str] = field(default_factory=dict)
    words: dict[str, Word] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Every tensor is what the table says."""
        return bool(self.equal) and not self.differing and not self.foreign

    def same_weights(self, saved: Saved, leaves: dict[str, Leaf], moving: set[str]) -> bool:
        """Whether these are the table's weights, damaged, rather than other weights on purpose (an average, an older
        state): at least half of the tensors that every step changes are equal, or each that differs does so in one
        word."""
        if self.foreign:
            return False
        names = moving & leaves.keys() or set(leaves)
        if 2 * sum(name in names for name in self.equal) >= len(names):
            return True
        if len(self.differing) > 8:
            return False
        self.find_words(saved, leaves)
        large = any(self.table.metas[name][3] > 4 for name in self.words)
        return large and len(self.words) == len(self.differing)

    def find_words(self, saved: Saved, leaves: dict[str, Leaf], most: int = 8) -> None:
        """Locates the wrong word in the first differing tensors."""
        for name in self.differing[:most]:
            if name not in self.words:
                meta = self.table.metas[name]
                tensor = leaves[name].tensor
                if saved.metas[leaves[name].name] != meta:
                    tensor = laid_out(tensor, meta)
                word = locate_in_tensor(tensor, self.table.rows[name])
                if word is not None:
                    self.words[name] = word

    def rewritten(self, saved: Saved, leaves: dict[str, Leaf], held: dict[str, torch.Tensor]) -> bool:
        """Whether differing tensors are other values on purpose (adapters merged into the weights, a head that was set
        to zero, weights clamped) and not damaged ones: a good part of their elements is not what `held`, the same
        tensors of this rank, has. False where that cannot be told, as where `held` is not the table's either."""
        changed = total = 0
        self.find_words(saved, leaves)
        for name in self.differing:
            mine, other = leaves[name].tensor.detach(), held.get(name)
            if name in self.words:
                continue
            if other is None or mine.layout is not torch.strided or mine.shape != other.shape:
                return False
            if other.is_meta:
                return True  # of a module that is gone there is nothing to hold against the script
            if _place(mine) == _place(other) or fingerprint.metadata(other) != self.table.metas[name]:
                return False
            if tuple(fingerprint.fingerprints([other])[0].tolist()) != self.table.rows[name]:
                return False
            with quiet():
                changed += int((mine.cpu() != other.cpu()).sum())
            total += mine.numel()
        return changed > REWRITTEN * total


def compare(saved: Saved, leaves: dict[str, Leaf], table: Table) -> Comparison:
    """Each saved tensor against its entry in a table."""
    result = Comparison(table)
    for name, leaf in leaves.items():
        if name not in table.rows:
            result.foreign[name] = "the table does not have it"
            continue
        row = saved.row_as(leaf, table.metas[name])
        if isinstance(row, str):
            result.foreign[name] = row
        elif row == table.rows[name]:
            result.equal.append(name)
        else:
            result.differing.append(name)
    return result


def moving_names(tables: list[Table], fallback: set[str]) -> set[str]:
    """Names whose fingerprint differs between tables of different versions: what training changes in every few steps.
    `fallback` where only one version is known."""
    found: set[str] = set()
    for one, other in zip(tables, tables[1:]):
        if one.version != other.version:
            found |= {name for name, row in one.rows.items() if other.rows.get(name, row) != row}
    return found or fallback
