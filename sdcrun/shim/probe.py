"""What `sdcrun doctor` asks of a Python like that of a rank: `python -m sdcrun.shim.probe machine|meet`, an answer as
one line of JSON on stdout.

`machine`: is the shim in this process, which torch is it, does FP1 give the bits of its definition, do devices give
the same bits twice. `meet RANK PORT`: two processes find each other and sum a tensor over gloo.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

MEET_SECONDS = 30.0


def machine() -> dict[str, Any]:
    """Everything about this interpreter, its torch and its devices."""
    import torch

    runtime = sys.modules.get("sdcrun.shim.runtime")
    answer: dict[str, Any] = {
        "shim": runtime is not None and runtime.CURRENT is not None,
        "python": sys.version.split()[0],
        "interpreter": sys.executable,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "distributed": torch.distributed.is_available(),
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "fp1": fp1(torch.device("cpu")),
        "devices": [{"name": f"CPU {torch.backends.cpu.get_cpu_capability()}", **twice(torch.device("cpu"))}],
    }
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        found = {"name": f"cuda:{index} {torch.cuda.get_device_name(index)}", **twice(device), "fp1": fp1(device)}
        answer["devices"].append(found)
    return answer


def fp1(device: Any) -> dict[str, Any]:
    """{engine, problem}: whether fingerprints on a device have the bits that numpy makes of the definition."""
    import torch

    from sdcrun.shim.fingerprint import fingerprints, implementation

    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(70_001, generator=generator),
        torch.randn(37, 19, generator=generator).t(),
        torch.randn(4099, generator=generator).bfloat16()[1:],
        torch.arange(5, dtype=torch.uint8),
        torch.tensor(float("nan"), dtype=torch.float64),
    ]
    found = fingerprints([tensor.to(device) for tensor in tensors]).tolist()
    answer: dict[str, Any] = {"engine": implementation(device), "tensors": len(tensors), "problem": None}
    try:
        from sdcrun.shim.fingerprint.reference import fingerprint

        expected = [list(fingerprint(tensor)) for tensor in tensors]
    except ImportError:
        return answer | {"tensors": 0}
    wrong = sum(one != other for one, other in zip(found, expected))
    return answer | {"problem": f"{wrong} of {len(tensors)} fingerprints are wrong" if wrong else None}


def twice(device: Any) -> dict[str, Any]:
    """{same: "default" | "strict" | "no"}: a small training step of convolution, attention, normalisation and embedding
    computed twice on a device: equal bits by default, with deterministic kernels, or not at all."""
    import torch

    from sdcrun.shim.replay.determinism import strict_kernels

    try:
        if _gradients(torch, device) == _gradients(torch, device):
            return {"same": "default"}
        with strict_kernels():
            return {"same": "strict" if _gradients(torch, device) == _gradients(torch, device) else "no"}
    except Exception as error:
        return {"same": "no", "problem": f"{type(error).__name__}: {error}"[:300]}


def _gradients(torch: Any, device: Any) -> list[list[int]]:
    """Fingerprints of the gradients of one step, always the same one."""
    from torch import nn

    from sdcrun.shim.fingerprint import fingerprints

    torch.manual_seed(7)
    words = nn.Embedding(64, 64).to(device)
    layers = nn.ModuleList([nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64), nn.Linear(64, 192)]).to(device)
    ids = torch.randint(64, (8, 96), device=device)
    hidden = layers[1](layers[0](words(ids).transpose(1, 2))).transpose(1, 2)
    query, key, value = layers[2](hidden).view(8, 96, 3, 4, 16).permute(2, 0, 3, 1, 4)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    attended.square().mean().backward()
    parameters = [*words.parameters(), *layers.parameters()]
    return fingerprints([parameter.grad for parameter in parameters]).tolist()


def meet(rank: int, port: int) -> dict[str, Any]:
    """Be one of two ranks whose store is on 127.0.0.1:`port`; {sum, seconds}. Raises what torch raises."""
    import torch
    import torch.distributed as dist

    started, limit = time.monotonic(), timedelta(seconds=MEET_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    answer = {"sum": tensor.sum().item(), "seconds": round(time.monotonic() - started, 2)}
    # The store is rank 0's: it stays until the other one has said, as its last word to the store, that it is done.
    store.wait(["done"], limit) if rank == 0 else store.set("done", b"1")
    return answer


def main(arguments: list[str]) -> None:
    """Answer on stdout. The process ends at once: freeing a gloo group at exit can deadlock."""
    answer = machine() if arguments[0] == "machine" else meet(int(arguments[1]), int(arguments[2]))
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
