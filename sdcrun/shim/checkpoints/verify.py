"""`python -m sdcrun.shim.checkpoints.verify FILE...`: is each file still what was saved, and was that right?

Exit code 0: every tensor has the fingerprint in the sidecar, and the ranks agreed on it; 1: not so; 2: cannot tell.
Reads each file once, in pieces, and runs no code from it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sdcrun.shim.checkpoints import files, reader
from sdcrun.shim.checkpoints.locate import locate

GOOD, WRONG, UNKNOWN = 0, 1, 2
MAX_NAMED = 20
MASK = (1 << 64) - 1


def verify(path: str) -> tuple[int, list[str]]:
    """(exit code, lines for a person) of one checkpoint: a file, or a folder of torch.distributed.checkpoint."""
    if not os.path.exists(path):
        return UNKNOWN, [f"{path}: no such file"]
    sidecar = files.read_sidecar(path)
    if sidecar is None or not isinstance(sidecar.get("table"), dict):
        missing = os.path.basename(files.sidecar_of(path))
        return UNKNOWN, [f"{path}: cannot tell: there is no {missing} that can be read"]
    try:
        reading = reader.read(path)
        code, lines = _compare(path, sidecar, reading)
    except reader.Damaged as error:
        return WRONG, [f"{path}: NOT what was saved: {error}"]
    except (NotImplementedError, MemoryError) as error:
        return UNKNOWN, [f"{path}: cannot tell: {error}"]
    except OSError as error:
        return UNKNOWN, [f"{path}: cannot tell: {error.strerror or error}"]
    return (code, lines) if code != GOOD else _judged(path, sidecar)


def _compare(path: str, sidecar: dict[str, Any], reading: reader.Reading) -> tuple[int, list[str]]:
    wrong: list[str] = []
    missing: list[str] = []
    unknown = [f"{name} is not read" for name in sidecar.get("unreadable") or ()]
    folder = sidecar.get("format") == "dcp"
    for name, entry in sidecar["table"].items():
        place = name.replace("/", ".") if folder else name
        stored = reading.tensors.get(place)
        if stored is None:
            (unknown if place in reading.opaque else missing).append(f"{name} is not in the file, or in another form")
        elif stored.dtype != entry["dtype"] or list(stored.shape) != entry["shape"]:
            wrong.append(f"{name} is {stored.dtype} {list(stored.shape)}, not {entry['dtype']} {entry['shape']}")
        else:
            first, second = stored.fingerprint()
            if f"{first & MASK:016x}{second & MASK:016x}" != entry["fingerprint"]:
                expected = int(entry["fingerprint"][:16], 16), int(entry["fingerprint"][16:], 16)
                word = locate(stored.pieces, expected)
                width = reader.itemsize(stored.dtype)
                wrong.append(f"{name}: {word.text(width) if word else 'more than one word differs'}")
    (unknown if reading.strange else wrong).extend(missing)
    if not wrong and sidecar.get("frame") and sidecar["frame"] != reading.frame():
        wrong.append("bytes that belong to no tensor differ (the archive's structure, plain values or headers)")
    if wrong:
        return WRONG, [f"{path}: NOT what was saved", *_some(wrong)]
    if unknown:
        return UNKNOWN, [f"{path}: cannot tell", *_some(unknown)]
    return GOOD, []


def _some(lines: list[str]) -> list[str]:
    shown = [f"  {line}" for line in lines[:MAX_NAMED]]
    return shown + ([f"  and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else [])


def _judged(path: str, sidecar: dict[str, Any]) -> tuple[int, list[str]]:
    state, reason = sidecar.get("state"), sidecar.get("reason") or "no reason given"
    count = len(sidecar["table"])
    if state in ("verified", "provisional"):
        return GOOD, [f"{path}: {state}, {count} tensors are those that were saved: {reason}"]
    if state == "unverified":
        return UNKNOWN, [f"{path}: cannot tell: the {count} tensors are those that were saved, but {reason}"]
    return WRONG, [f"{path}: {state}: {reason}"]


def main(paths: list[str]) -> int:
    """Verifies each path and prints what was found; the worst code of all, 1 before 2 before 0."""
    codes = set()
    for path in paths:
        code, lines = verify(path)
        codes.add(code)
        print("\n".join(lines), flush=True)
    return WRONG if WRONG in codes else UNKNOWN if UNKNOWN in codes or not paths else GOOD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
