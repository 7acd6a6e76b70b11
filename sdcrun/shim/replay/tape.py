"""The tape: names every tensor that depends on a guarded module's outputs or parameters, and the operators between.

Only what depends on the modules or carries gradients is recorded; everything else (labels, masks, a teacher's outputs)
enters by value where it is used first. Dependence is tracked by storage, so that views and writes in place are seen.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from sdcrun.shim.microbatch import Autocast, Packed, Random, dumps, freeze, pack, tensors_of
from sdcrun.shim.patches import autograd
from sdcrun.shim.replay import compiled
from sdcrun.shim.replay.collectives import NAMESPACES, collective_counts
from sdcrun.shim.replay.program import Apply, Entry, Gradient, Op, Ref

COPY_UP_TO = 64 << 20

# References are never used twice in a process, so that recordings can be joined.
_numbers = itertools.count()

_PASSING = ("profiler", "prim", "inductor")


def version_of(tensor: torch.Tensor) -> int:
    """Counter of changes in place; tensors made in inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def storage_of(tensor: torch.Tensor) -> Any:
    """Identity of the memory behind a tensor; the tensor's own where it has no single storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return ("no storage", id(tensor))


@dataclass
class External:
    """A tensor from outside: a frozen copy, or the tensor itself if it is large. `loose`: it hangs on a graph that the
    tape does not know, so gradients would flow where the program does not follow."""

    tensor: torch.Tensor
    version: int
    copied: bool
    requires_grad: bool
    loose: bool

    @property
    def intact(self) -> bool:
        """Its values are still those of first use."""
        return self.copied or version_of(self.tensor) == self.version

    def packed(self) -> Packed:
        """As bytes, for the program."""
        return pack(self.tensor, self.requires_grad)


class Tape:
    """References, externals and entries of one recording. `soft` collects reasons why the script's part behind the
    module cannot be replayed, `hard` reasons why nothing of this window can."""

    def __init__(self) -> None:
        self.parameters: dict[int, tuple[torch.nn.Parameter, Ref]] = {}
        self.entries: list[Entry] = []
        self.externals: dict[Ref, External] = {}
        self.alias: dict[Ref, Any] = {}
        self.soft: list[str] = []
        self.hard: list[str] = []
        self.paused = False
        self._ids: dict[int, tuple[Callable[[], torch.Tensor | None], Ref, int]] = {}
        self._tracked = set()
        self._floor = next(_numbers)
        self._mode: TapeMode | None = None

    def know(self, parameter: torch.nn.Parameter, ref: Ref) -> None:
        """A guarded module's parameter; a tied one has the name met first."""
        if id(parameter) not in self.parameters:
            self.parameters[id(parameter)] = (parameter, ref)
            self.alias[ref] = storage_of(parameter)
            self._tracked.add(self.alias[ref])

    # -- references ---------------------------------------------------------------------------------------------

    def known(self, tensor: torch.Tensor) -> Ref | None:
        """The reference of a tensor that the tape has met and that was not changed behind its back."""
        entry = self._ids.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            _, ref, version = entry
            if ref[0] == "v" and self._made_leaf(tensor):
                return None
            if ref[0] == "v" or self.alias[ref] in self._tracked:
                return ref
            # A leaf with gradient is one and the same for forward and torch.autograd.grad.
            if (tensor.requires_grad or ref[1] >= self._floor) and version_of(tensor) == version:
                return ref
        parameter = self.parameters.get(id(tensor))
        return parameter[1] if parameter is not None and parameter[0] is tensor else None

    def _made_leaf(self, tensor: torch.Tensor) -> bool:
        """The script has cut it off and wants its gradient (`x.detach().requires_grad_()`): it enters by value."""
        return tensor.requires_grad and tensor.grad_fn is None and id(tensor) not in self.parameters

    def forget_values(self) -> None:
        """Outside values met so far are copied again when they are used again: not every change in place moves a
        version counter (`.data`, BatchNorm's statistics)."""
        self._floor = next(_numbers)

    def tracked(self, tensor: torch.Tensor) -> bool:
        """The tensor depends on a module's outputs or parameters."""
        ref = self.known(tensor)
        return (ref is not None and ref[0] != "x") or storage_of(tensor) in self._tracked

    def _matters(self, tensors: list[torch.Tensor]) -> bool:
        """An operator on these belongs to the program: it depends on the modules, or it carries gradients."""
        grad = torch.is_grad_enabled()
        return any((grad and tensor.requires_grad) or self.tracked(tensor) for tensor in tensors)

    def make(self, tensor: torch.Tensor, weak: bool = False) -> Ref:
        """A new reference for a tensor that the program computes; `weak`: without keeping it alive."""
        ref = ("v", next(_numbers))
        self._name(tensor, ref, weak)
        if not weak:
            # Memory of a tensor that may die can come back as somebody else's.
            self._tracked.add(self.alias[ref])
        return ref

    def same(self, tensor: torch.Tensor, ref: Ref) -> None:
        """`tensor` stands for what `ref` names (DDP hands out copies of outputs)."""
        if self.known(tensor) is None:
            self._name(tensor, ref)
            self._tracked.add(storage_of(tensor))

    def _name(self, tensor: torch.Tensor, ref: Ref, weak: bool = False) -> None:
        self.alias.setdefault(ref, storage_of(tensor))
        if weak:
            self._ids[id(tensor)] = (weakref.ref(tensor), ref, version_of(tensor))
        else:
            self._ids[id(tensor)] = (lambda: tensor, ref, version_of(tensor))

    def refer(self, tensor: torch.Tensor) -> Ref:
        """The reference under which a recorded entry uses `tensor` now."""
        ref = self.known(tensor)
        if ref is not None:
            return ref
        if storage_of(tensor) in self._tracked and not self._made_leaf(tensor):
            base = tensor._base
            if base is not None and self.known(base) is not None and tensor.layout is torch.strided:
                return self._view(tensor, self.known(base))
            self._soften("a tensor shares memory with a module's output in a way that was not seen")
        return self.by_value(tensor)

    def _view(self, tensor: torch.Tensor, base: Ref) -> Ref:
        place = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset() - tensor._base.storage_offset())
        blob = dumps(((tensor._base, *place), {}), lambda _: base)
        ref = self.make(tensor)
        self.entries.append(
            Op(blob, [base], [ref], [], torch.is_grad_enabled(), None, name="aten.as_strided.default")
        )
        return ref

    def by_value(self, tensor: torch.Tensor) -> Ref:
        """The reference of `tensor` as a shipped value, copied now unless it is large."""
        ref = ("x", next(_numbers))
        copied = tensor.numel() * tensor.element_size() <= COPY_UP_TO
        loose = tensor.requires_grad and tensor.grad_fn is not None
        if storage_of(tensor) in self._tracked:
            self.alias[ref] = ref  # a copy of computed values: from here on it has nothing to do with them
        self.externals[ref] = External(
            freeze(tensor) if copied else tensor, version_of(tensor), copied, tensor.requires_grad, loose
        )
        self._name(tensor, ref)
        return ref

    def pickled(self, value: Any) -> tuple[bytes, list[Ref]]:
        """`value` with its tensors as references, and those references."""
        uses: list[Ref] = []

        def refer(tensor: torch.Tensor) -> Ref:
            uses.append(self.refer(tensor))
            return uses[-1]

        return dumps(value, refer), uses

    def hooked(self, refs: Iterable[Ref]) -> bool:
        """The script has put a hook on one of these values, which a replay would not run."""
        wanted = set(refs)
        return any(
            ref in wanted and ref[0] == "v" and tensor() is not None and tensor()._backward_hooks
            for tensor, ref, _ in self._ids.values()
        )

    def _soften(self, reason: str) -> None:
        if reason not in self.soft:
            self.soft.append(reason)

    # -- recording ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listens to operators from here on, unless somebody else's dispatch mode is active."""
        if self._mode is not None:
            return
        self.forget_values()
        if dispatch._len_torch_dispatch_stack() > 0:
            self._soften("a dispatch mode of the script's own is active around the model")
            return
        if compiled.inside():
            self._soften("the model is called from inside compiled code")
            return
        self._mode = TapeMode(self)
        self._mode.__enter__()
        autograd.watch(self)

    def stop(self) -> bool:
        """Stops listening. False if that must wait, because a mode of the script lies on top of ours or compiled code
        is running."""
        if self._mode is None:
            return True
        autograd.unwatch()
        if compiled.inside():
            self._soften("compiled code was running at the backward")
            self.paused = True
            return False
        if dispatch._get_current_dispatch_mode() is not self._mode:
            self._soften("a dispatch mode of the script's own was active at the backward")
            self.paused = True
            return False
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        return True

    def adopt(self, other: Tape, entries: list[Entry]) -> None:
        """Takes over entries of another tape, with what they refer to."""
        self.entries.extend(entries)
        named = {ref for entry in entries for ref in (*entry.uses, *entry.outs, *entry.writes)}
        for ref in named:
            if ref in other.externals:
                self.externals[ref] = other.externals[ref]
            self.alias.setdefault(ref, other.alias[ref])
        for key, (tensor, ref, version) in other._ids.items():
            if ref in named and ref[0] == "v" and tensor() is not None:
                self._ids[key] = (tensor, ref, version)
                if other.alias[ref] in other._tracked:
                    self._tracked.add(other.alias[ref])

    def clear(self) -> None:
        """Drops every tensor; hooks and modes may still hold on to the tape itself."""
        self._ids.clear()
        self._tracked.clear()
        self.alias.clear()
        self.externals.clear()
        self.entries.clear()

    def operator(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Runs one operator and records it if it depends on the modules. Raises only what the operator raises."""
        if self.paused or function.namespace in _PASSING:
            return function(*args, **kwargs)
        begun = self._guarded(str(function), self._begin, function, args, kwargs)
        result = function(*args, **kwargs)
        if begun is not None:
            self._guarded(str(function), self._end, function, begun, result)
        return result

    def _guarded(self, name: str, part: Callable, *args: Any) -> Any:
        """Our own trouble must not become the script's: the tail is then not followed any more."""
        try:
            return part(*args)
        except Exception as error:
            self._soften(f"{name} cannot be recorded: {type(error).__name__}")
            return None

    def _begin(self, function: Any, args: tuple, kwargs: dict) -> tuple | None:
        tensors = tensors_of((args, kwargs))
        if function.namespace in NAMESPACES:
            self._received(function, args)
            return None
        if not self._matters(tensors):
            return None
        written = written_by(function, args, kwargs)
        for tensor in written:
            self._own_base(tensor)
        blob, uses = self.pickled((args, kwargs))
        drawn = Random.of_torch().shipped() if torch.Tag.nondeterministic_seeded in function.tags else None
        return blob, uses, written, drawn

    def _received(self, function: Any, args: tuple) -> None:
        """What a collective writes comes from outside: it enters by value where it is used next, unless gradients flow
        through its memory."""
        schema = function._schema.arguments
        outputs = [arg for arg, spec in zip(args, schema) if spec.name.startswith("output")]
        for tensor in tensors_of(outputs or list(args)):
            if self.known(tensor) is None and not self.tracked(tensor):
                continue
            storage = storage_of(tensor)
            sharing = {key: held() for key, (held, ref, _) in self._ids.items() if self.alias.get(ref) == storage}
            flowing = any(other is not None and other.requires_grad for other in (*sharing.values(), tensor))
            if flowing or id(tensor) in self.parameters:
                obstacle = f"a collective operation in the loss: {function}"
                self.entries.append(Op(writes=[self.refer(tensor)], name=str(function), obstacle=obstacle))
                continue
            for key in sharing:
                del self._ids[key]
            self._tracked.discard(storage)

    def _end(self, function: Any, begun: tuple, result: Any) -> None:
        blob, uses, written, drawn = begun
        writes = [self._changed(tensor) for tensor in written]
        outs = [self._made(tensor) for tensor in tensors_of(result)]
        self.entries.append(Op(blob, uses, outs, writes, torch.is_grad_enabled(), drawn, name=str(function)))

    def _own_base(self, tensor: torch.Tensor) -> None:
        """A write into a view of an outside tensor: the program needs the whole tensor, and the view as its view."""
        base = tensor._base
        if base is not None and not self.tracked(tensor) and tensor.layout is torch.strided:
            known = self.known(base)
            self._view(tensor, known if known is not None else self.by_value(base))

    def _changed(self, tensor: torch.Tensor) -> Ref:
        entry = self._ids[id(tensor)] if id(tensor) in self._ids else None
        ref = entry[1] if entry is not None else self.parameters[id(tensor)][1]
        if ref[0] == "x":
            self._tracked.add(self.alias[ref])
        if ref[0] != "p":
            self._name(tensor, ref)
        return ref

    def _made(self, tensor: torch.Tensor) -> Ref:
        ref = self.known(tensor)
        return ref if ref is not None else self.make(tensor)

    def function(self, run: Callable, cls: type, args: tuple, kwargs: dict) -> Any:
        """A custom autograd.Function in the script's loss."""
        if self._mode is None or self.paused or not self._matters(tensors_of((args, kwargs))):
            return run(cls, *args, **kwargs)
        name = "a compiled function" if cls.__name__ == "CompiledFunction" else f"{cls.__qualname__}.apply"
        begun = self._guarded(f"a call of {name}", self.pickled, (cls, args, kwargs))
        drawn, modes, grad = Random.now().shipped(), Autocast.now(), torch.is_grad_enabled()
        result, obstacle = self._aside(name, run, cls, *args, **kwargs)

        def end() -> None:
            blob, uses = begun or (b"", [])
            outs = [self._made(tensor) for tensor in tensors_of(result)]
            writes = [ref for ref in uses if ref in outs]
            self.entries.append(Apply(blob, uses, outs, writes, grad, drawn, obstacle, autocast=modes))

        self._guarded(name, end)
        return result

    def gradient(self, run: Callable, outputs: Any, inputs: Any, args: tuple, kwargs: dict) -> Any:
        """torch.autograd.grad between forward and backward (a gradient penalty)."""
        if self._mode is None or self.paused:
            return run(outputs, inputs, *args, **kwargs)
        name = "a call of torch.autograd.grad"
        begun = self._guarded(name, self.pickled, (outputs, inputs, args, kwargs))
        result, obstacle = self._aside(name, run, outputs, inputs, *args, **kwargs)

        def end() -> None:
            blob, uses = begun or (b"", [])
            outs = [self.make(tensor) for tensor in tensors_of(result)]
            self.entries.append(Gradient(blob, uses, outs, [], torch.is_grad_enabled(), obstacle=obstacle))

        self._guarded(name, end)
        return result

    def _aside(self, name: str, run: Callable, *args: Any, **kwargs: Any) -> tuple[Any, str]:
        """Runs something that is one entry as a whole: what happens inside is not recorded. Also returns why it cannot
        be run again: for collectives inside."""
        self.paused, before = True, collective_counts()
        try:
            result = run(*args, **kwargs)
        finally:
            self.paused = False
        return result, f"a collective operation in the loss: {name}" if collective_counts() != before else ""


class TapeMode(dispatch.TorchDispatchMode):
    """Hands every operator to the tape. Compiled code must neither see it nor be recompiled because of it."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo ignores such modes."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled graphs run without it."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.tape.operator(func, args, kwargs or {})


def written_by(function: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The arguments that an operator changes in place."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))
    return found
