"""Who this rank is (device, host, versions) and, where it cannot be guarded, why."""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist

from sdcrun.core.types import Device


def device_of(ddp) -> Device:
    """The device the module lives on: host and GPU UUID; on CPU host, local-node index and local rank."""
    host = os.environ.get("SDCRUN_HOST") or socket.gethostname()
    place = next((p.device for p in ddp.module.parameters()), torch.device("cpu"))
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        pci = None
        if hasattr(properties, "pci_bus_id"):
            pci = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return Device(host, f"GPU-{properties.uuid}", pci, properties.name)
    node, local_rank = os.environ.get("SDCRUN_LOCAL_NODE", "0"), os.environ.get("LOCAL_RANK", "0")
    return Device(host, f"cpu-n{node}-l{local_rank}", None, f"CPU {torch.backends.cpu.get_cpu_capability()}")


def compatibility() -> str:
    """What must be equal on two devices before their bits may be compared, as one text."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        parts = [properties.name, properties.multi_processor_count, torch.version.cuda]
    else:
        parts = [torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads"]
    return " / ".join(str(part) for part in (*parts, torch.__version__))


def hello(runtime, ddp) -> dict:
    """Data of the event `hello`."""
    from sdcrun.shim.runtime import versions

    env = os.environ
    device = device_of(ddp)
    return {
        "rank": runtime.rank,
        "local_rank": int(env.get("LOCAL_RANK", "0")),
        "node": int(env.get("GROUP_RANK", env.get("SDCRUN_LOCAL_NODE", "0"))),
        "world_size": dist.get_world_size(),
        "local_world_size": int(env.get("LOCAL_WORLD_SIZE", "1")),
        "restart_count": int(env.get("TORCHELASTIC_RESTART_COUNT", "0") or 0),
        "pid": os.getpid(),
        "device": {"host": device.host, "uuid": device.uuid, "pci": device.pci, "model": device.model,
                   "serial": device.serial},
        "versions": versions(),
        "interpreter": sys.executable,
        "session": runtime.session,
    }  # fmt: skip


def looks_like_rank() -> bool:
    """Whether a process that never made a DDP module is nevertheless the script of a rank (not a wrapper or a pool)."""
    if "RANK" not in os.environ:
        return False
    return dist.is_initialized() or os.environ.get("SDCRUN_AGENT") == str(os.getppid())


def why_no_ddp(optimizer) -> str:
    """The reason why nothing is guarded in a process without a DDP module."""
    if "deepspeed" in sys.modules:
        return "DeepSpeed reduces the gradients itself; only DistributedDataParallel is guarded"
    parameters = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    kinds = {type(p).__name__ for p in parameters} | {type(getattr(p, "data", p)).__name__ for p in parameters[:64]}
    if "torch.distributed.fsdp" in sys.modules and kinds & {"FlatParameter", "DTensor"} or "DTensor" in kinds:
        return "the parameters are sharded (FSDP or DTensor); only DistributedDataParallel is guarded"
    if not dist.is_available() or not dist.is_initialized():
        return "no process group was made: the ranks train on their own"
    if optimizer is None:
        return "no module was wrapped in DistributedDataParallel and no torch optimizer took a step"
    return "no module was wrapped in DistributedDataParallel: gradients are reduced in another way, or not at all"
