"""Which tensors of a save are those of guarded modules and their optimizers, under whatever name.

By storage where the script hands over the tensors themselves; else by name and shape, tensors of one container
together: `module.` and `_orig_mod.` mean nothing, a prefix of the script's own (`model.`) may be there, and where a
part of a module was saved a prefix of the module's may be missing.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from sdcrun.shim.checkpoints.contents import Leaf

WRAPPERS = ("module", "_orig_mod", "_parameters", "_modules", "_buffers", "_module")


@dataclass
class Part:
    """Tensors of one container that stand for one table of a group: `leaves` maps the table's names to them.

    `kind` is "weights" or "optimizer", `place` the container's path; `buffers` maps names to those beside weights.
    """

    group: Any
    kind: str
    place: str
    leaves: dict[str, Leaf] = field(default_factory=dict)
    buffers: dict[str, Leaf] = field(default_factory=dict)


class Known:
    """The guarded tensors of one group as they are now. `parameters` maps table names to tensors, `trainable` the names
    of those that training changes, `state` those of the optimizers' state."""

    def __init__(self, group, optimizer_state: dict[str, torch.Tensor]) -> None:
        self.group = group
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.state = optimizer_state
        self.order: list[list[str | None]] = []
        for gone in group.dropped:
            self.parameters.update(gone.parameters())
            self.aliases.update(gone.aliases)
        for guard in group.guards:
            if guard.ddp is None:
                continue
            self.parameters.update({guard.qualified(n): p.detach() for n, p in guard.parameters.items()})
            self.buffers.update({guard.qualified(n): b for n, b in guard.buffers.items()})
            self.aliases.update(aliases_of(guard))
        by_identity = {id(p): g.qualified(n) for g in group.guards for n, p in g.parameters.items()}
        for reference in group.optimizers:
            optimizer = reference()
            groups = optimizer.param_groups if optimizer is not None else ()
            self.order.append([by_identity.get(id(p)) for one in groups for p in one["params"]])
        self.buffer_aliases = {clean(n.split(".")): g.qualified(n) for g in group.guards for n in g.buffers}
        trainable = {g.qualified(n) for g in group.guards for n, p in g.parameters.items() if p.requires_grad}
        self.trainable = trainable or set(self.parameters)
        self.places = {_place(t): name for name, t in self.parameters.items() if t.numel() and not t.is_meta}
        self.state_places = {_place(t): name for name, t in self.state.items() if t.numel()}
        self.tails: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for alias, name in self.aliases.items():
            segments = alias.split(".")
            for i in range(1, len(segments)):
                self.tails[".".join(segments[i:])].append((".".join(segments[:i]), name))


class Dropped:
    """What is known of a guarded module after the script has dropped its DDP, to save the inner one mostly."""

    def __init__(self, guard) -> None:
        self.aliases = aliases_of(guard)
        self._parameters = {
            guard.qualified(n): (weakref.ref(p), torch.empty(p.shape, dtype=p.dtype, device="meta"))
            for n, p in guard.parameters.items()
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        """Table name -> the parameter, or one without data where that is gone as well."""
        found = {name: (reference(), stand_in) for name, (reference, stand_in) in self._parameters.items()}
        return {name: stand_in if real is None else real.detach() for name, (real, stand_in) in found.items()}


def aliases_of(guard) -> dict[str, str]:
    """Cleaned name -> table name of a module's parameters, of tied ones under each of their names."""
    names = {id(p): guard.qualified(n) for n, p in guard.parameters.items()}
    every = guard.module.named_parameters(remove_duplicate=False)
    return {clean(name.split(".")): names[id(parameter)] for name, parameter in every if id(parameter) in names}


def clean(segments: list[str] | tuple[str, ...]) -> str:
    """A tensor's name without the parts that wrappers add."""
    return ".".join(s for part in segments for s in part.split(".") if s not in WRAPPERS)


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def parts(found: list[Leaf], known: Known) -> list[Part]:
    """The parts of a save that stand for guarded tensors of one group; empty when there is none."""
    result: list[Part] = []
    taken: set[int] = set()
    for place, members in _grouped([leaf for leaf in found if _in_state(leaf.path)], lambda path: path[:-2]):
        named = _states(members, known)
        if named:
            taken.update(id(leaf.tensor) for leaf in members)
            result.append(Part(known.group, "optimizer", "/".join(place), named))
    rest = [leaf for leaf in found if id(leaf.tensor) not in taken or not _in_state(leaf.path)]
    for place, members in _grouped(rest, _container):
        named = _weights(members, known)
        if named:
            where = "/".join(place) or "the object itself"
            result.append(Part(known.group, "weights", where, named, _buffers(members, known)))
    return result


def _grouped(found: list[Leaf], container) -> list[tuple[tuple[str, ...], list[Leaf]]]:
    groups: dict[tuple[str, ...], list[Leaf]] = defaultdict(list)
    for leaf in found:
        groups[container(leaf.path)].append(leaf)
    return list(groups.items())


def _container(path: tuple[str, ...]) -> tuple[str, ...]:
    """The container of a parameter: above the attributes that a pickled module consists of."""
    for i, segment in enumerate(path):
        if segment in ("_parameters", "_modules", "_buffers"):
            return path[:i]
    return path[:-1]


def _in_state(path: tuple[str, ...]) -> bool:
    """Whether a path looks like .../state/<parameter>/<key>, an entry of an optimizer's state."""
    return len(path) >= 3 and path[-3] == "state"


def _weights(members: list[Leaf], known: Known) -> dict[str, Leaf]:
    named: dict[str, Leaf] = {}
    for leaf in members:
        name = known.places.get(_place(leaf.tensor)) if leaf.tensor.layout is torch.strided else None
        if name is not None:
            named.setdefault(name, leaf)
    votes: Counter = Counter()
    options: list[tuple[Leaf, dict[tuple[str, str], str]]] = []
    depth = len(_container(members[0].path))
    for leaf in members:
        fits = _fits(clean(leaf.path[depth:]), tuple(leaf.tensor.shape), known)
        votes.update(fits.keys())
        options.append((leaf, fits))
    if votes:
        best = min(votes, key=lambda option: (-votes[option], option[1] != "", option[0].count("."), option))
        # A single tensor called "weight" is not yet a piece of a module.
        if best[1] == "" or named or 2 * votes[best] >= len(members) and votes[best] >= 2:
            for leaf, fits in options:
                if best in fits:
                    named.setdefault(fits[best], leaf)
    return named or _in_order(members, known)


def _buffers(members: list[Leaf], known: Known) -> dict[str, Leaf]:
    """Buffer -> tensor of that name and kind in a container of weights."""
    named: dict[str, Leaf] = {}
    for leaf in members:
        segments = clean(leaf.path).split(".")
        for i in range(len(segments)):
            name = known.buffer_aliases.get(".".join(segments[i:]))
            if name is not None:
                named.setdefault(name, leaf)
                break
    return named


def _fits(name: str, shape: tuple[int, ...], known: Known) -> dict[tuple[str, str], str]:
    """(prefix of the script's, prefix of the module's) under which `name` is a parameter of this shape -> its name."""
    fits: dict[tuple[str, str], str] = {}
    segments = name.split(".")
    for i in range(len(segments)):
        target = known.aliases.get(".".join(segments[i:]))
        if target is not None and tuple(known.parameters[target].shape) == shape:
            fits[".".join(segments[:i]), ""] = target
    for prefix, target in known.tails.get(name, ()):
        if tuple(known.parameters[target].shape) == shape:
            fits["", prefix] = target
    return fits


def _in_order(members: list[Leaf], known: Known) -> dict[str, Leaf]:
    """A plain list of all parameters, [p.cpu() for p in model.parameters()]."""
    names = list(known.parameters)
    if len(members) != len(names) or not all(leaf.path and leaf.path[-1] == str(i) for i, leaf in enumerate(members)):
        return {}
    if any(leaf.tensor.shape != known.parameters[name].shape for leaf, name in zip(members, names)):
        return {}
    return dict(zip(names, members))


def _states(members: list[Leaf], known: Known) -> dict[str, Leaf]:
    """Table name "<optimizer>.<key>.<parameter>" -> tensor, of the entries of an optimizer's state dict: the tensors of
    the optimizer itself by where they lie, those that the script has copied by their path."""
    named: dict[str, Leaf] = {}
    for leaf in members:
        name = known.state_places.get(_place(leaf.tensor)) if leaf.tensor.layout is torch.strided else None
        if name is not None:
            named.setdefault(name, leaf)
    best: dict[str, Leaf] = {}
    for number, order in enumerate(known.order):
        tried: dict[str, Leaf] = {}
        for leaf in members:
            owner, key = leaf.path[-2], leaf.path[-1]
            if owner.isdigit():
                parameter = order[int(owner)] if int(owner) < len(order) else None
            else:
                parameter = known.aliases.get(clean((owner,)))
            target = f"{number}.{key}.{parameter}"
            if target in known.state and known.state[target].shape == leaf.tensor.shape:
                tried[target] = leaf
        # Which optimizer this is: the one whose own tensors lie here, else the one that most of the paths fit.
        best = max(best, tried, key=lambda one: (sum(named.get(name) is leaf for name, leaf in one.items()), len(one)))
    return best | named
