"""Where DDP is held on to: its construction, its forward, its comm hook.

The user's comm hook goes into a cell behind our single registration. Ours is registered at the first training forward
that is not inside join(), and its default reduction has the bits of DDP's own: `mul_(1/world)`, and `div_` where a
gradient already lies in its bucket, as the reducer does it.
"""

from __future__ import annotations

import functools
import weakref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from sdcrun.shim import boot, gate
from sdcrun.shim.checks import divide, nonfinite
from sdcrun.shim.replay import compiled
from sdcrun.shim.replay.state import replaying

_originals: dict[str, object] = {}


class Cell:
    """Stands between the reducer and the user's comm hook of one DDP module."""

    def __init__(self, ddp) -> None:
        self.ddp = weakref.ref(ddp)
        self.guard = None
        self.user: tuple | None = None
        self.reducer: int | None = None
        self.storages: dict[int, int] = {}
        self.active_ranks = None

    def registered_with(self, reducer) -> bool:
        """Whether our hook sits in this reducer (a DDP module makes a new one when its process group is replaced)."""
        return self.reducer == id(reducer)


cells: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_with_views: list[Cell] = []


def cell_of(ddp) -> Cell:
    """The module's cell, made at first use (DDP.__init__ itself registers hooks in some modes)."""
    cell = cells.get(ddp)
    if cell is None:
        cells[ddp] = cell = Cell(ddp)
    return cell


def comm_hook(cell: Cell, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Our hook: looks at the local gradients, lets the user's hook or DDP's own reduction run, looks at the result."""
    guard = cell.guard
    watching = guard is not None and guard.window_open
    started = guard.group.clock() if watching else 0.0
    parameters, divided = None, False
    if watching:
        try:
            guard.synced = True
            injector = guard.group.runtime.injector
            if injector is not None:
                injector.gradient(guard, bucket)
                parameters = bucket.parameters()
            if guard.group.runtime.campaign is not None:
                guard.group.runtime.campaign.gradients(bucket.buffer())
            buffer = bucket.buffer()
            factor = _factor(cell, buffer) if cell.user is None else None
            finite = divide.multiplied(buffer, factor) if factor is not None else None
            divided = finite is not None
            nonfinite.local_bucket(guard, bucket, buffer, finite)
        except Exception as error:
            _failed(guard, error)
    if cell.user is not None:
        state, hook = cell.user
        if watching:
            guard.group.spend("hook", guard.group.clock() - started)
        future = hook(state, bucket)
        return future.then(functools.partial(_reduced, guard if watching else None, parameters, False))
    buffer = bucket.buffer()
    if not divided:
        _divide(cell, bucket, buffer)
    if watching:
        guard.group.spend("hook", guard.group.clock() - started)
    future = cell.ddp().process_group.allreduce([buffer]).get_future()
    return future.then(functools.partial(_reduced, guard if watching else None, parameters, True))


def _world(cell: Cell) -> int:
    """What DDP divides by."""
    ddp = cell.ddp()
    if cell.active_ranks is not None and not getattr(ddp, "_divide_by_initial_world_size", True):
        return int(cell.active_ranks.result()[0].item())
    return ddp.process_group.size()


def _factor(cell: Cell, buffer: torch.Tensor) -> float | None:
    """What a bucket is multiplied by as a whole, if that is all."""
    return None if buffer.is_sparse or cell.storages else 1.0 / _world(cell)


def _divide(cell: Cell, bucket, buffer: torch.Tensor) -> None:
    """DDP's own division with its bits: the reducer multiplies by 1/world while it copies into the bucket, and divides
    in place where the gradient was a view of the bucket already."""
    factor = _factor(cell, buffer)
    if factor is not None:
        buffer.mul_(factor)
        return
    world = _world(cell)
    if buffer.is_sparse:
        buffer.div_(world)
        return
    bucket_storage = buffer.untyped_storage().data_ptr()
    inside = {id(p) for p in bucket.parameters() if cell.storages.get(id(p)) == bucket_storage}
    if not inside:
        buffer.mul_(1.0 / world)
        return
    for parameter, gradient in nonfinite.gradients_of(bucket, buffer):
        if id(parameter) in inside:
            gradient.div_(world)
        else:
            gradient.mul_(1.0 / world)


def _reduced(guard, parameters, listed: bool, future):
    value = future.value()
    result = value[0] if listed else value
    if guard is not None:
        try:
            tensor = result[0] if isinstance(result, (list, tuple)) else result
            if guard.group.runtime.injector is not None:
                guard.group.runtime.injector.reduced(guard, tensor, parameters)
            nonfinite.reduced_bucket(guard, tensor)
        except Exception as error:
            _failed(guard, error)
    return result


def _failed(guard, error: Exception) -> None:
    boot.trace(f"in the comm hook: {error!r}")
    guard.group.ask_off(f"the comm hook failed: {error!r}"[:200])


def before_backward() -> None:
    """Notes where gradients lie before a backward: the bits of DDP's division depend on it, unless 1/world is exact."""
    for cell in _with_views:
        ddp = cell.ddp()
        if ddp is not None and cell.user is None:
            cell.storages = {
                id(p): p.grad.untyped_storage().data_ptr() for p in ddp._module_parameters if p.grad is not None
            }


def _register(ddp, cell: Cell) -> None:
    if not cell.registered_with(ddp.reducer):
        dist._register_comm_hook(ddp.reducer, cell, comm_hook)
        cell.reducer = id(ddp.reducer)
        world = ddp.process_group.size()
        if ddp.gradient_as_bucket_view and world & (world - 1) and cell not in _with_views:
            _with_views.append(cell)


def install(runtime) -> None:
    """Lays the patches; `undo()` takes them off."""
    original_helper = DDP._ddp_init_helper
    original_run = DDP._run_ddp_forward
    original_forward = DDP.forward
    original_register = DDP.register_comm_hook
    original_builtin = DDP._register_builtin_comm_hook
    original_notify = Join.notify_join_context
    _originals.update(
        _ddp_init_helper=original_helper, _run_ddp_forward=original_run, forward=original_forward,
        register_comm_hook=original_register, _register_builtin_comm_hook=original_builtin, notify=original_notify,
    )  # fmt: skip

    # Not the constructor itself: its warnings must point at the script's line, not at ours. By now it has checked the
    # module and sent the weights out, on all ranks.
    @functools.wraps(original_helper)
    def _ddp_init_helper(self, *args, **kwargs):
        original_helper(self, *args, **kwargs)
        if not runtime.active or hasattr(self, "_lazy_init_ran"):
            return  # inert, or a copy that is unpickled: not every rank does that
        try:
            runtime.claim(self)
            cell_of(self).guard = runtime.guards.get(self)
        except Exception as error:
            boot.trace(f"claim failed: {error!r}")
            runtime.unguarded(f"the guard could not be made: {error!r}"[:200])

    @functools.wraps(original_register)
    def register_comm_hook(self, state, hook):
        cell = cell_of(self)
        if not runtime.active or cell.user is not None or self.logger is None:
            return original_register(self, state, hook)
        self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        _register(self, cell)
        cell.user = (state, hook)
        if cell.guard is not None and "localSGD" in getattr(hook, "__qualname__", ""):
            cell.guard.group.keeps_replicas_apart()

    @functools.wraps(original_builtin)
    def _register_builtin_comm_hook(self, comm_hook_type):
        cell = cell_of(self)
        if not runtime.active or cell.user is not None or self.logger is None:
            return original_builtin(self, comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))
        _register(self, cell)
        cell.user = (self, _BUILTIN[comm_hook_type])

    @functools.wraps(original_notify)
    def notify_join_context(joinable):
        work = original_notify(joinable)
        if work is not None and isinstance(joinable, DDP):
            cell_of(joinable).active_ranks = work
        return work

    def opening(ddp, inputs, kwargs):
        """Before the module's forward: opens a window, registers the hook, captures. Returns what `closing` needs."""
        cell = cells.get(ddp)
        guard = cell.guard if cell is not None else None
        if guard is None or guard.group.off_reason is not None or replaying():
            return None
        if ddp._join_config.enable:
            runtime.limit("inside join() ranks stop at different steps: nothing is checked there")
            guard.window_open = False
            return None
        cell.active_ranks = None
        return gate.forward_begins(runtime, guard, ddp, inputs, kwargs, lambda: _register(ddp, cell))

    @functools.wraps(original_run)
    def _run_ddp_forward(self, *inputs, **kwargs):
        if not runtime.active or not torch.is_grad_enabled() or not self.module.training:
            return original_run(self, *inputs, **kwargs)
        compiled.note()
        token = begin(self, inputs, kwargs)
        output = original_run(self, *inputs, **kwargs)
        if token is not None:
            end(self, token, output)
        return output

    @functools.wraps(original_forward)
    def forward(self, *inputs, **kwargs):
        output = original_forward(self, *inputs, **kwargs)
        if runtime.recording:
            left(self, output)
        return output

    begin = torch._disable_dynamo(gate.quiet(opening))
    end = torch._disable_dynamo(gate.quiet(lambda ddp, token, output: gate.forward_ends(runtime, token, output)))
    left = torch._disable_dynamo(gate.quiet(lambda ddp, output: gate.forward_left(runtime, ddp, output)))
    DDP._ddp_init_helper = _ddp_init_helper
    DDP._run_ddp_forward = torch._disable_dynamo(_run_ddp_forward, recursive=False)
    DDP.forward = torch._disable_dynamo(forward, recursive=False)
    DDP.register_comm_hook = register_comm_hook
    DDP._register_builtin_comm_hook = _register_builtin_comm_hook
    Join.notify_join_context = staticmethod(notify_join_context)


def undo() -> None:
    """Restores what `install` replaced."""
    Join.notify_join_context = staticmethod(_originals.pop("notify"))
    for name, original in _originals.items():
        setattr(DDP, name, original)


def _allreduce(ddp, bucket):
    """Bits of the reducer's built-in ALLREDUCE: divides first."""
    buffer = bucket.buffer()
    buffer.div_(ddp.process_group.size())
    return ddp.process_group.allreduce([buffer]).get_future().then(lambda future: future.value()[0])


def _fp16_compress(ddp, bucket):
    """Bits of the reducer's built-in FP16_COMPRESS: halves, divides, reduces, widens into the bucket."""
    buffer = bucket.buffer()
    half = buffer.to(torch.float16).div_(ddp.process_group.size())

    def widen(future):
        buffer.copy_(future.value()[0])
        return buffer

    return ddp.process_group.allreduce([half]).get_future().then(widen)


_BUILTIN = {
    dist.BuiltinCommHookType.ALLREDUCE: _allreduce,
    dist.BuiltinCommHookType.FP16_COMPRESS: _fp16_compress,
}
