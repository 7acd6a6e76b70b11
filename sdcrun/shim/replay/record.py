"""Recording one window of training until the backward that will be audited.

Before a backward runs, the recorder decides how it can be replayed: whole, from the gradients of the modules' outputs,
or not at all. The last is said with its reason; a backward that would differ falsely is never offered for a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sdcrun.shim.microbatch import Autocast, Random, dumps, tensors_of
from sdcrun.shim.replay import modulestate, scriptstate
from sdcrun.shim.replay.case import Case, Token
from sdcrun.shim.replay.castcache import CastCache
from sdcrun.shim.replay.collect import GradientTable, weights_digests, weights_rows
from sdcrun.shim.replay.collectives import collective_counts, has_own_functions
from sdcrun.shim.replay.fallback import Output, through_outputs
from sdcrun.shim.replay.hooks import HookWatch
from sdcrun.shim.replay.irrevocable import Contents
from sdcrun.shim.replay.kernels import Kernels
from sdcrun.shim.replay.local import Local
from sdcrun.shim.replay.ownrank import rank_here
from sdcrun.shim.replay.program import FALLBACK, FULL, Backward, Call, Entry, Program, Ref, prune
from sdcrun.shim.replay.scriptvalues import ScriptValues
from sdcrun.shim.replay.tape import Tape, version_of
from sdcrun.shim.replay.tree import Tree


def _made_from(entry: Entry, made: set[Ref]) -> bool:
    """Everything that the entry uses is made by the program, or comes from outside."""
    return all(ref[0] != "v" or ref in made for ref in entry.uses)


class Recorder:
    """Records the forwards of `guards` (all modules of a group) and stops after its `pick`-th backward (from 0) that
    reaches their parameters; `case` is then the recorded backward, or `declined` says why there is none.

    `before`: the recorder of the window before, whose forwards this one's backward may still need (a GAN's generator
    runs before the discriminator's update); it must not be used any more. `onwards`: forwards behind the picked
    backward are recorded as well, for the recorder of the window after.
    """

    def __init__(self, guards: list, pick: int, before: Recorder | None = None, onwards: bool = False) -> None:
        self.guards, self.pick, self.onwards = list(guards), pick, onwards
        self.case: Case | None = None
        self._earlier: list[Case] = []
        self.declined: str | None = None
        self.done = False
        self.backwards = 0
        self.weights: dict[str, list[int]] | None = None
        self._rows: torch.Tensor | None = None
        self.local: dict[str, Local] = {}
        self._casts = CastCache()
        self._watches: dict[int, HookWatch] = {}
        self._outputs: list[Output] = []
        self._hooks: list = []
        self._compared: list[torch.Tensor] = []
        self._tokens: dict[int, Token] = {}
        # Calls with inputs that the script has cut off the graph: the same calls on what the program computes.
        self._linked: dict[int, Call] = {}
        self.tape = Tape()
        for place in range(len(guards)):
            self._know(place)
        if before is not None and before.guards == guards:
            self._adopt(before)
        self._inherited = len(self.tape.entries)
        self._in_forward = False
        self._backward_inside = ""

    def _know(self, place: int) -> None:
        for name, _, _, parameter in Tree(self.guards[place].module).registered("_parameters"):
            self.tape.know(parameter, ("p", place, name))

    def _adopt(self, before: Recorder) -> None:
        entries: list[Entry] = []
        made: set[Ref] = set()
        for entry in before.tape.entries[before._inherited :]:
            # What is computed from values of a still earlier window is not to be had any more.
            if _made_from(entry, made):
                entries.append(entry)
                made.update(entry.outs)
        self.tape.adopt(before.tape, entries)
        self._outputs = [output for output in before._outputs if output.ref in made]
        for entry in entries:
            linked = before._linked.get(id(entry))
            if linked is not None and _made_from(linked, made):
                self._linked[id(entry)] = linked
            for call in (entry, linked):
                if id(call) in before._tokens:
                    self._tokens[id(call)] = before._tokens[id(call)]
        self.local.update(before.local)
        self._casts.epoch = before._casts.epoch + 1

    # -- forward ------------------------------------------------------------------------------------------------

    def before_forward(self, guard: Any, inputs: tuple, kwargs: dict, random: Random) -> Token | None:
        """The forward of a guard's module begins with these arguments and random states."""
        if self.done:
            return None
        if guard not in self.guards:
            self.guards.append(guard)
            self._know(len(self.guards) - 1)
        place = self.guards.index(guard)
        self.tape.stop()
        self.tape.forget_values()
        self._in_forward = True
        module, tree = guard.module, Tree(guard.module)
        call = Call(guard=place, random=random.shipped(), autocast=Autocast.now(), kernels=Kernels.now())
        local = self.local[guard.name] = Local.of(module)
        token = Token(call, ScriptValues(scriptstate.reach([tree], [local.forward]), tree))
        call.script = token.script.then
        call.epoch = self._casts.look(module)
        try:
            call.blob, call.uses = self._inputs((inputs, kwargs), token)
        except Exception as error:
            self.tape.hard.append(f"the inputs cannot be shipped: {type(error).__name__}: {error}"[:160])
        for name, _, _, buffer in tree.registered("_buffers"):
            call.buffers[name] = self._frozen(buffer, call)
        call.attributes, held, token.opaque = modulestate.state_before(tree)
        for key, tensor in held.items():
            if tensor.grad_fn is None:
                call.held[key] = self._frozen(tensor, call)
        token.collectives = collective_counts()
        token.versions = list(map(version_of, tree.parameters()))
        token.untrained = Contents(tree.parameters())
        call.compiled = local.compiled
        if not call.compiled and not hasattr(module, "_orig_mod"):
            watch = self._watches.get(place)
            if watch is None:
                watch = self._watches[place] = HookWatch(tree)
            watch.shown = token.shown.append
            call.acting = watch.acting
        return token

    def _inputs(self, value: Any, token: Token) -> tuple[bytes, list[Ref]]:
        """Arguments of a call. A tensor without gradient enters by value, whatever its history; `token` gets them as
        the program computes them, where it does."""
        uses: list[Ref] = []
        computed: list[Ref] = []

        def refer(tensor: torch.Tensor) -> Ref:
            known = self.tape.known(tensor)
            cut = known is None or (known[0] == "v" and not tensor.requires_grad)
            uses.append(self.tape.by_value(tensor) if cut else known)
            computed.append(known or uses[-1])
            return uses[-1]

        blob = dumps(value, refer)
        if computed != uses:
            following = iter(computed)
            token.linked = dumps(value, lambda _: next(following)), computed
        return blob, uses

    def _frozen(self, tensor: torch.Tensor, call: Call) -> Ref:
        known = self.tape.known(tensor)
        ref = known if known is not None and known[0] == "x" else self.tape.by_value(tensor)
        call.uses.append(ref)
        return ref

    def after_forward(self, token: Token, output: Any) -> None:
        """The module has returned `output`."""
        call, tape = token.call, self.tape
        self._in_forward = False
        tree = Tree(self.guards[call.guard].module)
        watch = self._watches.get(call.guard)
        if watch is not None:
            watch.shown = None
        if collective_counts() != token.collectives:
            tape.hard.append("collective operations inside the module's forward")
        before = token.opaque
        changed = sorted(
            ".".join(filter(None, key))
            for key, digest in modulestate.opaque_digests(tree).items() if before.get(key) != digest
        )  # fmt: skip
        if changed:
            tape.hard.append(f"the forward changes {changed[0]}, which cannot be shipped")
        if (name := token.script.changed()) is not None:
            tape.hard.append(f"the forward changes {name} of the script, which would not be put back")
        self._tokens[id(call)] = token
        if list(map(version_of, tree.parameters())) != token.versions or token.untrained.changed():
            tape.hard.append("the forward changes its own parameters in place")
        outputs = tensors_of(output)
        call.outs = [tape.make(tensor) for tensor in outputs]
        for tensor in (*modulestate.by_products(tree), *token.shown):
            call.outs.append(tape.make(tensor, weak=True))
        token.shown.clear()
        for tensor, ref in zip(outputs, call.outs):
            if tensor.grad_fn is not None:
                self._outputs.append(Output.of(ref, tensor))
        tape.entries.append(call)
        if token.linked is not None:
            blob, computed = token.linked
            linked = replace(call, blob=blob, uses=[*computed, *call.uses[len(computed) :]])
            self._linked[id(call)], self._tokens[id(linked)] = linked, token

    def left_ddp(self, token: Token, output: Any) -> None:
        """DDP has returned; its output may hold other tensors than the module's. From here on the script's own
        operators are recorded."""
        for tensor, ref in zip(tensors_of(output), token.call.outs):
            self.tape.same(tensor, ref)
        self.tape.start()

    # -- backward -----------------------------------------------------------------------------------------------

    def around_backward(self, run: Callable, tensors: Any, grad_tensors: Any, options: dict) -> Any:
        """Runs a backward; if it is a candidate, remembers how to do it again and what came out. Raises only what the
        backward raises."""
        self.tape.stop()
        if self._in_forward:
            self._backward_inside = "the backward runs inside the module's forward (manual optimization, say)"
        if self.done or not any(isinstance(entry, Call) for entry in self.tape.entries):
            return run(tensors, grad_tensors, options)
        if self.backwards > self.pick:
            result = run(tensors, grad_tensors, options)
            self.tape.start()
            return result
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        table = GradientTable()
        try:
            prepared = self._prepare(roots, grad_tensors, options)
            for guard in self.guards:
                for name, parameter in guard.parameters.items():
                    if parameter.requires_grad:
                        table.watch(f"{guard.name}:{name}", parameter)
        except Exception as error:
            table.drop()
            prepared = f"the backward cannot be recorded: {type(error).__name__}: {error}"[:160]
        try:
            result = run(tensors, grad_tensors, options)
        finally:
            table.drop()
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
        try:
            self._recorded(prepared, roots, table)
        except Exception as error:
            self.case, self.declined = None, f"a backward cannot be read: {type(error).__name__}: {error}"[:160]
        self._compared.clear()
        if not self.done:
            self.tape.start()
        return result

    def _prepare(self, roots: list[torch.Tensor], grad_tensors: Any, options: dict) -> Program | str:
        """The program of this backward, or why it cannot have one."""
        tape = self.tape
        if tape.hard:
            return tape.hard[0]
        if options.get("inputs") is not None:
            return "backward(inputs=...) for some leaves only"
        given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) or grad_tensors is None else list(grad_tensors)
        given += [None] * (len(roots) - len(given))
        backward = Backward(kernels=Kernels.now(), create_graph=bool(options.get("create_graph")))
        why = tape.soft[0] if tape.soft else ""
        if not why and any(tape.known(root) is None for root in roots):
            why = "the loss was computed in a way that was not seen (compiled, or another thread)"
        if not why:
            backward.blob, backward.uses = tape.pickled(given)
            backward.roots = [tape.known(root) for root in roots]
            # What the script has cut off the graph is computed as well where it can be: it is this device's work too.
            kept, hindrance = self._whole([self._linked.get(id(entry), entry) for entry in tape.entries], backward)
            if self._linked and (hindrance or self._stale(kept)):
                kept, hindrance = self._whole(tape.entries, backward)
            if not hindrance:
                return self._stale(kept) or self._program(roots, [*kept, backward], FULL, "")
            why = hindrance
        return self._fallback(roots, Backward(kernels=backward.kernels, create_graph=backward.create_graph), why)

    def _whole(self, entries: list[Entry], backward: Backward) -> tuple[list[Entry], str]:
        """What the backward's roots depend on, and why that cannot be computed again ("" if it can)."""
        tape = self.tape
        kept = prune(entries, [*backward.roots, *backward.uses], tape.alias)
        used = [ref for entry in (*kept, backward) for ref in (*entry.uses, *entry.outs)]
        own = [ref for entry in (*kept, backward) if not isinstance(entry, Call) for ref in entry.uses]
        obstacles = [entry.obstacle for entry in kept if entry.obstacle]
        if obstacles:
            return kept, obstacles[0]
        if any(ref[0] == "x" and tape.externals[ref].loose for ref in own):
            return kept, "the loss uses a tensor from outside that hangs on a graph of its own"
        if tape.hooked([*used, *backward.roots]):
            return kept, "the script has put a hook on an output or on the loss"
        return kept, ""

    def _fallback(self, roots: list[torch.Tensor], backward: Backward, why: str) -> Program | str:
        found = through_outputs(self.tape, self._outputs, roots)
        if isinstance(found, str):
            return f"{why}; and {found}"
        kept, leading = found
        for output in leading:
            self._hooks.append(output.node.register_prehook(self._seeing(backward, output)))
            if output.intact:
                backward.outputs.append(output.ref)
                self._compared.append(output.tensor)
        return self._stale(kept) or self._program(roots, [*kept, backward], FALLBACK, why)

    def _stale(self, entries: list[Entry]) -> str | None:
        for entry in entries:
            if isinstance(entry, Call):
                now = list(map(version_of, Tree(self.guards[entry.guard].module).parameters()))
                if now != self._tokens[id(entry)].versions:
                    return "the weights were changed between a forward and its backward"
        return None

    def _seeing(self, backward: Backward, output: Output) -> Callable:
        def prehook(gradients):
            gradient = gradients[output.place]
            if gradient is not None:
                backward.given.append((output.ref, self.tape.by_value(gradient.detach())))

        return prehook

    def _program(self, roots: list[torch.Tensor], entries: list[Entry], kind: str, why: str) -> Program:
        covered = sorted({entry.guard for entry in entries if isinstance(entry, Call)})
        names = [guard.name for guard in self.guards]
        own = has_own_functions(roots)
        return Program(
            entries, {}, names, covered, kind, why, position=self.backwards, own_functions=own, rank=rank_here()
        )  # fmt: skip

    def _recorded(self, prepared: Program | str, roots: list, table: GradientTable) -> None:
        if not isinstance(prepared, str):
            table.values(*(("loss", roots) if prepared.kind == FULL else ("output", self._compared)))
        gradients = table.take()
        if not gradients and not isinstance(prepared, str):
            return
        self.backwards += 1
        self._earlier += [self.case] if self.case is not None else []
        if table.altered:
            prepared = f"the gradient of {table.altered[0]} was changed in place during the backward"
        if isinstance(prepared, str):
            self.case, self.declined = None, prepared
        else:
            case = Case(prepared, [float(root.detach().sum()) for root in roots])
            case.expected.update(table.others)
            covered = {self.guards[place].name for place in prepared.guards}
            case.uncovered = sorted({name.partition(":")[0] for name in gradients} - covered)
            for name, pair in gradients.items():
                if name.partition(":")[0] in covered:
                    case.expected[name] = pair
                    case.details[name] = table.details[name]
            case.finite = table.finite() and all(math.isfinite(loss) for loss in case.losses)
            # Each time: a window may end before the backward that was picked.
            case.weights = weights_rows(self.guards)
            self.case, self.declined = case, None
        if self.backwards > self.pick and not self.onwards:
            self.finish()

    # -- end ----------------------------------------------------------------------------------------------------

    def pack(self) -> str | None:
        """Turns the recorded backward's tensors into bytes; returns why there is nothing to audit, or None. Where the
        picked backward cannot be computed again, the last one before it that can be takes its place."""
        self.finish()
        picked, reasons = self.case, []
        if picked is not None and picked.program.externals:
            return None
        # Not by versions: a script may perturb the weights and put them back, as SAM does.
        if picked is not None or self._earlier:
            self._rows = weights_rows(self.guards)
            self.weights = weights_digests(self.guards, self._rows)
        for case in [*self._earlier, picked][::-1]:
            self.case = case
            reasons.append(self._pack())
            if reasons[-1] is None:
                return None
        self.case = picked
        return reasons[0]

    def _pack(self) -> str | None:
        if self.case is None:
            hard = self.tape.hard[0] if self.tape.hard else None
            return self.declined or self._backward_inside or hard or "no backward of a guarded forward was seen"
        program = self.case.program
        if not torch.equal(self._rows, self.case.weights):
            return "the weights were changed between the recorded backward and the update"
        program.window = max(self.backwards, 1)
        for entry in program.entries:
            if isinstance(entry, Call):
                entry.moved = self._tokens[id(entry)].script.moved()
        used = {ref for entry in program.entries for ref in entry.uses if ref[0] == "x"}
        backward = program.entries[-1]
        used.update(gradient for _, gradient in backward.given)
        if not all(self.tape.externals[ref].intact for ref in used):
            return "a large tensor of the micro-batch was changed in place after its use"
        try:
            program.externals = {ref: self.tape.externals[ref].packed() for ref in used}
        except Exception as error:
            return f"a tensor of the micro-batch cannot be shipped: {type(error).__name__}: {error}"[:160]
        return None

    def fail(self, reason: str) -> None:
        """Nothing of this window can be audited."""
        self.tape.hard.insert(0, reason)
        self.case, self.declined = None, reason
        self._earlier.clear()
        self.finish()

    def finish(self) -> None:
        """Stops recording; hooks of the script are as they were."""
        self.done = True
        self.tape.stop()
        for watch in self._watches.values():
            watch.stop()
        self._watches.clear()

    def close(self) -> bool:
        """Drops everything. False while our mode cannot be taken off yet (call again later)."""
        self.finish()
        ended = self.tape.stop()
        self.case = None
        self._earlier.clear()
        self._outputs.clear()
        self._tokens.clear()
        self._linked.clear()
        self._casts = CastCache()
        self.local.clear()
        self.tape.clear()
        return ended
