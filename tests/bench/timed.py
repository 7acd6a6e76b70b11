"""Runs a training script as it is and notes the process's CPU seconds at the end of every optimizer step.

    torchrun … timed.py OUT SCRIPT [ARGUMENTS]

Writes OUT/<rank>.json: {cpu: [seconds per step], wall: [seconds per step], first: seconds since the epoch at the end
of the first step, peak: MiB}. Entry i of the lists is from the end of step i - 1's update to the end of step i's: what
follows an update (the weight vote) is in the next entry.
"""

import atexit
import json
import os
import resource
import runpy
import sys
import time

from torch.optim.optimizer import register_optimizer_step_post_hook

out, script = sys.argv[1], sys.argv[2]
ends: list[tuple[float, float]] = []
first: list[float] = []


def after_step(optimizer, args, kwargs):
    """Notes where the clocks are."""
    if not first:
        first.append(time.time())
    ends.append((time.process_time(), time.perf_counter()))


def write():
    """One file per rank."""
    steps = list(zip(ends, ends[1:]))
    content = {
        "cpu": [b[0] - a[0] for a, b in steps],
        "wall": [b[1] - a[1] for a, b in steps],
        "first": first[0] if first else None,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    with open(os.path.join(out, f"{os.environ['RANK']}.json"), "w", encoding="utf-8") as file:
        json.dump(content, file)


register_optimizer_step_post_hook(after_step)
atexit.register(write)
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(os.path.abspath(script))
runpy.run_path(script, run_name="__main__")
