"""Running a recorded program on this rank's own weights, without a trace.

The modules get aliases of their parameters (same memory, other autograd identity) and copies of their buffers, over
forward *and* backward: no hook of DDP or of the script on a real parameter runs, no real `.grad` is touched, the
reducer never learns of it. Random states, autocast, attributes, hooks and modes are put back whatever happens.
"""

from __future__ import annotations

import contextlib
import gc
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from sdcrun.shim.microbatch import Autocast, Random, loads, tensors_of, unpack
from sdcrun.shim.patches import autograd
from sdcrun.shim.replay import hooks, modulestate, scriptstate, scriptvalues
from sdcrun.shim.replay.asked import Asked
from sdcrun.shim.replay.collect import GradientTable, dense, values_table
from sdcrun.shim.replay.collectives import NoCollectives
from sdcrun.shim.replay.compiled import set_eval_frame
from sdcrun.shim.replay.determinism import strict_kernels
from sdcrun.shim.replay.local import Local
from sdcrun.shim.replay.muted import muted
from sdcrun.shim.replay.ownrank import told_rank
from sdcrun.shim.replay.program import FORWARD, Apply, Backward, Call, Gradient, Op, Program, Ref, operator
from sdcrun.shim.replay.state import replay_scope
from sdcrun.shim.replay.tree import Registered, Tree


class NotReplayable(RuntimeError):
    """The program cannot be run here; the text says why."""


@dataclass
class Result:
    """What a replay computed. `table`: name -> fingerprint, as in `Case.expected`; `losses`: the roots as numbers;
    `finite`: losses, outputs and gradients are; `kept`: gradients that were asked for by name; `trace`: (what,
    fingerprint) of submodules' inputs and outputs in the order of the forward, if asked."""

    table: dict[str, tuple[int, int]] = field(default_factory=dict)
    details: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    finite: bool = True
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    trace: list[tuple[str, tuple[int, int]]] = field(default_factory=list)


def replay(
    program: Program, guards: list, local: dict[str, Local], keep: Iterable[str] = (), trace: bool = False,
    owners: bool = False, asked: Asked | None = None,
) -> Result:  # fmt: skip
    """Runs `program` on the modules of `guards` (those of its group).

    `local`: module's name -> what was seen at its last forward here. `owners`: with all of the owner's variables of the
    script, not with those alone that have moved, and with its rank. `asked`: notes what is asked of torch. Raises
    NotReplayable; any other exception is the program's own (out of memory, say).
    """
    return _Run(program, guards, local, keep, trace, owners, asked).run()


def _reach(trees: list[Tree], local: dict[str, Local]) -> scriptstate.Reach:
    return scriptstate.reach(trees, [one.forward for one in local.values()])


class _Run:
    def __init__(self, program, guards, local, keep, trace, owners, asked) -> None:
        here = {guard.name: guard for guard in guards}
        self.program, self.local = program, local
        self.guards = [here.get(name) for name in program.names]
        for place in self._places():
            if self.guards[place] is None:
                raise NotReplayable(f"there is no module {program.names[place]!r} here")
        self.table = GradientTable(keep)
        self.trace, self.owners, self.asked = trace, owners, asked
        self.result = Result()
        self.shadows: dict[int, dict[str, torch.nn.Parameter]] = {}
        self.buffers: dict[int, dict[str, torch.Tensor]] = {}
        self.values: dict[Ref, torch.Tensor] = {}
        self.shown: list[torch.Tensor] = []
        self.epoch = 0
        self.trees = {place: Tree(self.guards[place].module) for place in self._places()}
        parameters = (p for tree in self.trees.values() for p in tree.parameters())
        self.device = next((p.device for p in parameters), torch.device("cpu"))

    def _places(self) -> list[int]:
        used = {entry.guard for entry in self.program.entries if isinstance(entry, Call)}
        used.update(ref[1] for entry in self.program.entries for ref in entry.uses if ref[0] == "p")
        return sorted(used)

    def run(self) -> Result:
        """See `replay`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_collected_later())
            stack.enter_context(replay_scope())
            stack.callback(Random.now(exact=False).restore)
            stack.enter_context(muted())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_disable_current_modes())
            stack.enter_context(Autocast.off().applied())
            stack.enter_context(_own_cast_cache())
            if self.owners:
                stack.enter_context(told_rank(self.program.rank))
            if self.program.own_functions:
                stack.enter_context(NoCollectives())
            if self.program.strict:
                stack.enter_context(strict_kernels())
            stack.callback(self.table.drop)
            trees = list(self.trees.values())
            self.reach = _reach(trees, self.local)
            stack.enter_context(scriptstate.preserved(trees, self.reach))
            if self.owners:
                stack.enter_context(self.reach.uncached())
            for place in self.trees:
                self._swap(stack, place)
            self.stack = stack
            for entry in self.program.entries:
                looking = self.asked is not None and not getattr(entry, "compiled", False)
                with (
                    entry.kernels.applied() if entry.kernels is not None else contextlib.nullcontext(),
                    self.asked if looking else contextlib.nullcontext(),
                ):
                    self._do(entry)
            self.result.table = self.table.take() | self.table.others
            if self.table.altered:
                raise NotReplayable(f"the gradient of {self.table.altered[0]} was changed in place during the backward")
            self.result.finite &= self.table.finite()
            self.result.details, self.result.kept = self.table.details, self.table.kept
            self.values.clear()
        return self.result

    def _swap(self, stack: contextlib.ExitStack, place: int) -> None:
        tree = self.trees[place]
        aliases: dict[int, torch.nn.Parameter] = {}
        trained: list[torch.nn.Parameter] = []
        freeing = OrderedDict({"sdcrun": _free})
        shadows, copies = {}, {}
        parameters, buffers = tree.registered("_parameters"), tree.registered("_buffers")
        for name, _, _, parameter in parameters:
            if id(parameter) not in aliases:
                alias = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                vars(alias).update(vars(parameter))
                aliases[id(parameter)] = alias
                if alias.requires_grad:
                    trained.append(parameter)
                    # What register_post_accumulate_grad_hook() does, with one dict for all.
                    alias._post_accumulate_grad_hooks = freeing
            shadows[name] = aliases[id(parameter)]
        for name, _, _, buffer in buffers:
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            self.buffers.setdefault(place, {})[name] = copies[id(buffer)]
        self.shadows[place] = shadows
        stack.enter_context(_without_gradients(trained))
        stack.enter_context(modulestate.preserved(tree))
        stack.enter_context(hooks.preserved(tree))
        modulestate.silence_loggers(tree)
        stack.enter_context(_exchanged([*parameters, *buffers], aliases | copies))
        acting = [e.acting for e in self.program.entries if isinstance(e, Call) and e.guard == place]
        if acting and all(places is not None for places in acting):
            stack.enter_context(hooks.onlookers_silenced(tree, set().union(*acting), lambda t: self.shown.append(t)))

    def _resolve(self, ref: Ref) -> torch.Tensor:
        ref = tuple(ref)
        if ref[0] == "p":
            return self.shadows[ref[1]][ref[2]]
        if ref[0] == "x" and ref not in self.values:
            self.values[ref] = unpack(self.program.externals[ref], self.device)
        try:
            return self.values[ref]
        except KeyError:
            raise NotReplayable(f"the program uses {ref}, which it has not computed") from None

    def _do(self, entry) -> None:
        if isinstance(entry, Call):
            results = self._call(entry)
        elif isinstance(entry, Op):
            args, kwargs = loads(entry.blob, self._resolve, self.device)
            if entry.random is not None:
                entry.random.restore(foreign=True)
            with torch.set_grad_enabled(entry.grad_mode):
                results = tensors_of(operator(entry.name)(*args, **kwargs))
        elif isinstance(entry, Apply):
            cls, args, kwargs = loads(entry.blob, self._resolve, self.device)
            entry.random.restore(foreign=True)
            with torch.set_grad_enabled(entry.grad_mode), entry.autocast.applied():
                results = tensors_of(cls.apply(*args, **kwargs))
        elif isinstance(entry, Gradient):
            outputs, inputs, args, kwargs = loads(entry.blob, self._resolve, self.device)
            results = tensors_of(autograd.grad_now(outputs, inputs, *args, **kwargs))
        else:
            self._backward(entry)
            return
        if len(results) != len(entry.outs) and getattr(entry, "strict_outs", True):
            raise NotReplayable(f"{type(entry).__name__} made {len(results)} tensors, not {len(entry.outs)}")
        self.values.update(zip(entry.outs, results))

    def _call(self, call: Call) -> list[torch.Tensor]:
        tree = self.trees[call.guard]
        module = tree.module
        args, kwargs = loads(call.blob, self._resolve, self.device)
        with torch.no_grad():
            for name, ref in call.buffers.items():
                self._set_buffer(module, self.buffers.get(call.guard, {}).get(name), name, self._resolve(ref))
        local = self.local.get(self.guards[call.guard].name, Local())
        modulestate.assign(tree, call.attributes)
        variables = call.script if self.owners else call.moved
        scriptvalues.place(variables, self.reach, tree, self.stack)
        if local.forward is not None:
            vars(module)["forward"] = local.forward
        modulestate.assign(tree, {key: self._resolve(ref) for key, ref in call.held.items()})
        if call.epoch != self.epoch:
            torch.clear_autocast_cache()
            self.epoch = call.epoch
        call.random.restore(foreign=True)
        self.shown.clear()
        with contextlib.ExitStack() as stack:
            stack.enter_context(call.autocast.applied())
            stack.enter_context(torch.set_grad_enabled(call.grad_mode))
            if self.trace:
                stack.enter_context(_traced(module, self.result.trace))
            if call.compiled:
                output = self._compiled(call, local, args, kwargs)
            else:
                output = local.context.copy().run(module, *args, **kwargs)
        # The forward may have made modules.
        tree = self.trees[call.guard] = Tree(module)
        outputs = tensors_of(output)
        if self.program.kind == FORWARD:
            self.result.finite &= all(map(all_finite, outputs))
        return [*outputs, *modulestate.by_products(tree), *self.shown]

    @staticmethod
    def _set_buffer(module: torch.nn.Module, copy: torch.Tensor | None, name: str, value: torch.Tensor) -> None:
        if copy is not None and copy.shape == value.shape and copy.dtype == value.dtype:
            copy.copy_(value)
        else:
            # The forward makes or grows this buffer: the owner had another one than this rank has.
            where, _, leaf = name.rpartition(".")
            module.get_submodule(where)._buffers[leaf] = value

    def _compiled(self, call: Call, local: Local, args: tuple, kwargs: dict) -> Any:
        """Under the callback of dynamo that the module's forwards run under here, so that the same graphs are used."""
        if not local.compiled:
            raise NotReplayable("the module runs compiled on its owner and not here")
        ddp = self.guards[call.guard].ddp
        before = set_eval_frame(local.callback)
        try:
            return ddp._run_ddp_forward(*args, **kwargs)
        finally:
            set_eval_frame(before)

    def _backward(self, entry: Backward) -> None:
        if entry.given:
            roots, gradients = [], []
            by_node: dict[Any, list[tuple[int, torch.Tensor]]] = {}
            for ref, gradient in entry.given:
                output, total = self._resolve(ref), self._resolve(gradient)
                roots.append(output)
                gradients.append(total)
                by_node.setdefault(output.grad_fn, []).append((output.output_nr, total))
            # An output may be computed from another one (loss and logits): what was recorded is the total already.
            for node, totals in by_node.items():
                node.register_prehook(_overriding(totals))
            self.table.values("output", [self._resolve(ref) for ref in entry.outputs])
        else:
            roots = [self._resolve(ref) for ref in entry.roots]
            gradients = loads(entry.blob, self._resolve, self.device)
            self.table.values("loss", roots)
            self.result.losses = [float(root.detach().sum()) for root in roots]
            self.result.finite &= all(map(all_finite, roots))
        # Only now: gradients that the script takes by torch.autograd.grad pass the same parameters.
        for place in self.program.guards:
            for name in self.guards[place].parameters:
                if self.shadows[place][name].requires_grad:
                    self.table.watch(f"{self.guards[place].name}:{name}", self.shadows[place][name])
        with torch.set_grad_enabled(entry.grad_mode):
            autograd.backward_now(roots, gradients, create_graph=entry.create_graph)


def all_finite(tensor: torch.Tensor) -> bool:
    """No element is NaN or infinite; waits for the device."""
    return not tensor.is_floating_point() or bool(torch.isfinite(dense(tensor)).all())


def _free(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


def _overriding(totals: list[tuple[int, torch.Tensor]]):
    def prehook(gradients):
        changed = list(gradients)
        for place, total in totals:
            changed[place] = total
        return tuple(changed)

    return prehook


@contextlib.contextmanager
def _exchanged(places: list[Registered], others: dict[int, torch.Tensor]):
    """Inside the block these modules have other tensors in the place of their own, found by the identity of those."""
    try:
        for _, registry, key, tensor in places:
            registry[key] = others[id(tensor)]
        yield
    finally:
        for _, registry, key, tensor in places:
            registry[key] = tensor


@contextlib.contextmanager
def _collected_later():
    """No finalizer of the script's runs among what belongs to a replay; and looking for unreachable objects several
    times in an audit costs a hundredth of it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _without_gradients(parameters: list[torch.nn.Parameter]):
    """A module that keeps references to its parameters elsewhere must not reach the real ones in a replay."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def _own_cast_cache():
    """Casts of aliases must not stay in autocast's cache after the replay."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


@contextlib.contextmanager
def _traced(module: torch.nn.Module, trace: list):
    """Notes a fingerprint of what every submodule gets and gives, in order."""
    handles = []

    def note(text: str, value: Any) -> None:
        for pair in values_table("", [tensor for tensor in tensors_of(value) if tensor.numel()]).values():
            trace.append((text, pair))

    for name, part in module.named_modules():
        if not name:
            continue

        def before(part, args, kwargs, name=name):
            note(f"what {name} is given", (args, kwargs))

        def after(part, args, output, name=name):
            note(f"the output of {name}", output)

        handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(part.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
