"""Which of dynamo's callbacks a module's forward runs under: a replay needs the same one to use the same graphs."""

from __future__ import annotations

from typing import Any

import torch

try:
    from torch._C._dynamo.eval_frame import set_eval_frame
except ImportError:
    set_eval_frame = None

noted: Any = None


def _note() -> None:
    global noted
    if set_eval_frame is not None:
        noted = set_eval_frame(None)
        set_eval_frame(noted)


# Must be called from a frame that dynamo skips, and be such a frame itself: inside a disabled function the callback
# that is in force outside cannot be seen any more.
note = torch._disable_dynamo(_note, recursive=False)
