"""How fast fingerprints are, as ratios to reading the same memory in the same run.

    python tests/bench/bench_fingerprint.py [--full] [--json FILE]

CPU figures are CPU time of the calling thread (wall time says little on a busy host), each measured in turn with its
yardstick; the ratio is that of the medians, the spread the quartiles of the single ratios. `read` is `tensor.sum()` of
the same tensors, torch's fastest way through memory. With a CUDA device the kernel is measured too, in wall time with
the device at rest before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

from sdcrun.shim import fingerprint as fp
from sdcrun.shim.fingerprint import torch_ops
from sdcrun.shim.fingerprint.layout import span
from sdcrun.shim.fingerprint.quiet import quiet


def gpt(layers: int, width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Parameter shapes of a GPT-2-like model."""
    block = [(width,)] * 2 + [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,)] * 2 + [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (1024, width), *block * layers, (width,), (width,)]


def in_turn(one: Callable, two: Callable, repeats: int, clock: Callable[[], float]) -> dict:
    """Run two things alternately: medians in ms, their ratio, quartiles of the ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    one(), two()
    for _ in range(repeats):
        for run, kept in zip((one, two), times):
            start = clock()
            run()
            kept.append(clock() - start)
    ratios = sorted(a / b for a, b in zip(*times))
    low, _, high = statistics.quantiles(ratios, n=4)
    medians = [statistics.median(kept) for kept in times]
    return {
        "ms": round(1e3 * medians[0], 3),
        "yardstick_ms": round(1e3 * medians[1], 3),
        "ratio": round(medians[0] / medians[1], 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }


def cpu_figures(full: bool) -> list[dict]:
    """Fingerprints of whole models, of many tensors, of one; CPU time of this thread, the yardstick on one thread
    too."""
    torch.set_num_threads(1)
    repeats = 9 if full else 5
    figures = []

    def measure(name: str, tensors: list[torch.Tensor], times: int, run: Callable | None = None) -> None:
        found = in_turn(
            run or (lambda: fp.fingerprints(tensors)), lambda: [t.sum() for t in tensors], times, time.thread_time
        )
        size = sum(t.nbytes for t in tensors)
        found["bandwidth_fraction"] = round(1 / found["ratio"], 3)
        figures.append({"name": name, "tensors": len(tensors), "mib": round(size / 2**20, 1), **found})

    widths = [("GPT, 1 M parameters", gpt(4, 128, 1000)), ("GPT, 10 M", gpt(6, 320, 8000))]
    widths += [("GPT-2, 124 M", gpt(12, 768, 50257))] if full else [("GPT, 40 M", gpt(8, 512, 20000))]
    for name, shapes in widths:
        measure(name, [torch.randn(shape) for shape in shapes], repeats)
    ten = [torch.randn(shape) for shape in widths[1][1]]
    measure("GPT, 10 M, without a C compiler", ten, repeats, lambda: by_operations(ten))
    if full:
        measure("GPT, 953 M", [torch.randn(shape) for shape in gpt(48, 1264, 50257)], 3)
    measure("one tensor, bf16, 16 M elements", [torch.randn(16 << 20).bfloat16()], repeats)
    measure("one tensor, bf16, odd offset", [torch.randn((16 << 20) + 1).bfloat16()[1:]], repeats)
    for count in (10, 100, 1000, 10_000) if full else (10, 1000):
        measure(f"{count} tensors of 256 words", [torch.randn(256) for _ in range(count)], 5 * repeats)
    tensors = [torch.randn(256) for _ in range(300)]

    def one_by_one() -> None:
        collector = fp.Collector()
        for tensor in tensors:
            collector.add(tensor)
        collector.table()

    measure("300 tensors of 256 words, one by one", tensors, 5 * repeats, one_by_one)
    return figures


def by_operations(tensors: list[torch.Tensor]) -> torch.Tensor:
    """What `fingerprints` does where sdcrun was installed without a C compiler."""
    with quiet():
        sums = torch_ops.Sums(torch.device("cpu"))
        sums.add([span(tensor) for tensor in tensors], list(range(len(tensors))))
        result = torch.zeros(len(tensors), 2, dtype=torch.int64)
        sums.add_to(result)
    return result


def cuda_figures(full: bool) -> list[dict]:
    """953 M elements on the GPU, fp32 and bf16: ms, and the fraction of the bandwidth with which `sum()` reads them."""
    shapes = gpt(48, 1264, 50257) if full or torch.cuda.mem_get_info()[0] > 8 << 30 else gpt(12, 768, 50257)
    return [cuda_figure(shapes, dtype) for dtype in (torch.float32, torch.bfloat16)]


def cuda_figure(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> dict:
    tensors = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
    words = torch.cat([t.view(-1) for t in tensors])

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    found = in_turn(lambda: fp.fingerprints(tensors), lambda: words.sum(), 20, clock)
    return {
        "name": f"{words.numel() / 1e6:.0f} M, {dtype}, {fp.implementation(words.device)}",
        "tensors": len(tensors),
        "mib": round(words.nbytes / 2**20, 1),
        "gb_per_second": round(words.nbytes / found["ms"] / 1e6, 1),
        "bandwidth_fraction": round(1 / found["ratio"], 3),
        **found,
    }


def machine() -> dict:
    """What the figures were measured on."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "fingerprints": fp.implementation(torch.device("cpu")),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def run(full: bool = False) -> dict:
    """All figures: {machine, figures: [{name, tensors, mib, ms, yardstick_ms, ratio, quartiles, …}]}."""
    figures = cpu_figures(full)
    if torch.cuda.is_available():
        figures += cuda_figures(full)
    return {"bench": "fingerprint", "machine": machine(), "figures": figures}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    result = run(options.full)
    print(json.dumps(result["machine"]))
    print(f"{'':44} {'tensors':>8} {'MiB':>8} {'ms':>10} {'read ms':>9} {'ratio':>7}  quartiles")
    for each in result["figures"]:
        low, high = each["quartiles"]
        print(
            f"{each['name']:44} {each['tensors']:8} {each['mib']:8} {each['ms']:10} {each['yardstick_ms']:9} "
            f"{each['ratio']:7}  {low}–{high}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
