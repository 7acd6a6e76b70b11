"""Runs idioms one after another on all ranks, first plainly and then under audit; each rank prints one JSON line each.

{"idiom", "rank", "same": final state, losses and random states equal bit for bit, "error", "mismatches", "reasons",
 "off", "gathered", "audits": [the events' data]}
"""

import json
import os
import random
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "loops"), str(HERE.parents[2])]

import idioms  # noqa: E402
import record  # noqa: E402
import stage  # noqa: E402


def state_of(function, rank):
    torch.manual_seed(5)
    random.seed(rank)
    np.random.seed(rank)
    losses, modules, optimizers = function(rank)
    state = [[dict(m.named_parameters()), dict(m.named_buffers())] for m in modules]
    gradients = [[p.grad.to_dense() if p.grad is not None else None for p in m.parameters()] for m in modules]
    hooks = [p._backward_hooks is None for m in modules for p in m.parameters()]
    return record.sha([losses, state, [o.state_dict() for o in optimizers], gradients, record.rng_states(), hooks])


def main() -> None:
    here = stage.start()
    for name in sys.argv[1:]:
        function, _ = idioms.IDIOMS[name]
        line = {"idiom": name, "rank": here.rank, "error": None, "same": False}
        try:
            here.fresh(auditing=False)
            torch._dynamo.reset() if name in idioms.COMPILED else None
            plain = state_of(function, here.rank)
            here.fresh(auditing=True)
            torch._dynamo.reset() if name in idioms.COMPILED else None
            line["same"] = plain == state_of(function, here.rank)
        except Exception:
            line["error"] = traceback.format_exc()[-1500:]
        line["mismatches"] = sum(outcome.mismatch for outcome in here.outcomes)
        line["audits"] = [outcome.event for outcome in here.outcomes]
        line["reasons"] = sorted(set(here.reasons))
        line["gathered"] = here.gathered
        line["off"] = here.auditor.off if here.auditor is not None else None
        sys.stdout.flush()
        os.write(1, (json.dumps(line) + "\n").encode())
        torch.distributed.barrier()
    os._exit(0)


main()
