"""Which of dynamo's callbacks a module's forward runs under: a replay needs the same one to use the same graphs."""

from __future__ import annotations

import sys
from typing import Any

import torch

try:
    from torch._C._dynamo.eval_frame import set_eval_frame
except ImportError:
    set_eval_frame = None

_ENTRY = ("eval_frame.py", "compile_wrapper")

noted: Any = None


def _note() -> None:
    global noted
    if set_eval_frame is not None:
        noted = set_eval_frame(None)
        set_eval_frame(noted)


def inside() -> bool:
    """Whether a compiled function is being run further up. Dynamo puts the thread's dispatch keys back when that
    returns, so a dispatch mode must neither be laid nor taken off inside: torch would look for one that is gone."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == _ENTRY[1] and code.co_filename.endswith(_ENTRY[0]):
            return True
        frame = frame.f_back
    return False


# Must be called from a frame that dynamo skips, and be such a frame itself: inside a disabled function the callback
# that is in force outside cannot be seen any more.
note = torch._disable_dynamo(_note, recursive=False)
