"""The GPT example with another length of its sequences.

    torchrun … sized.py CONTEXT [train_gpt.py's arguments]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_gpt  # noqa: E402

train_gpt.SIZES["sized"] = dict(context=int(sys.argv[1]), layers=2, heads=4, width=128)
sys.argv = [sys.argv[0], "--size", "sized", *sys.argv[2:]]
train_gpt.main()
