"""One load: is what came out of a file what was saved into it? And the table in the sidecar, by which that is told."""

from __future__ import annotations

import os
import zipfile
from typing import Any

from sdcrun.shim.checkpoints import files
from sdcrun.shim.checkpoints.contents import leaves
from sdcrun.shim.checkpoints.locate import locate_in_tensor
from sdcrun.shim.checkpoints.tables import Saved

MASK = (1 << 64) - 1


def loaded(runtime, contents: Any, path: str) -> None:
    """Compares what was loaded from `path` with its sidecar; a difference is said at once.

    A file that something else has written since, a plain torchrun say, has other contents all over and is no finding.
    """
    sidecar = files.read_sidecar(path)
    table = sidecar.get("table") if sidecar is not None else None
    if not isinstance(table, dict):
        return
    found = [leaf for leaf in leaves(contents) if leaf.name in table]
    saved, differing, compared = Saved(found), [], 0
    for name, row in saved.rows.items():
        entry = table[name]
        dtype, shape, _, _ = saved.metas[name]
        if dtype.removeprefix("torch.") != entry.get("dtype") or list(shape) != entry.get("shape"):
            continue
        compared += 1
        expected = entry.get("fingerprint")
        if expected == hexadecimal(row):
            continue
        word = locate_in_tensor(saved.leaves[name].tensor, (int(expected[:16], 16), int(expected[16:], 16)))
        itemsize = saved.leaves[name].tensor.element_size()
        differing.append({
            "tensor": name, "text": word.text(itemsize) if word else None, "bits": word.bits if word else [],
            "index": word.index * 4 // itemsize if word else None,
        })  # fmt: skip
    if not differing:
        return
    place = os.path.abspath(path)
    # The tensors that no step changes are equal in every save.
    all_over = 4 * len(differing) > compared and not any(row["text"] for row in differing)
    if all_over and sidecar.get("written") != files.written(path) and _whole(path):
        runtime.limit(f"{place} was loaded and could not be checked: it has been written anew since its sidecar")
        return
    step = max((group.step for group in runtime.groups.values()), default=0)
    runtime.emit(
        "loaded", {"path": place, "step": step, "id": sidecar.get("id"), "differing": differing[:16],
                   "count": len(differing)},
    )  # fmt: skip


def _whole(path: str) -> bool:
    """Whether a file is at one with itself: an archive of torch.save holds a checksum of each tensor."""
    try:
        return not zipfile.is_zipfile(path) or zipfile.ZipFile(path).testzip() is None
    except Exception:  # zipfile raises whatever it trips over
        return False


def hexadecimal(row: tuple[int, int]) -> str:
    """A fingerprint as 32 hexadecimal digits."""
    return f"{row[0] & MASK:016x}{row[1] & MASK:016x}"


def sidecar_table(saved: Saved, voted: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Name in the file -> {dtype, shape, bytes, fingerprint, voted?} of every tensor of a save; `voted` maps names to
    those in the ranks' tables."""
    table = {}
    for name, row in saved.rows.items():
        dtype, shape, _, nbytes = saved.metas[name]
        table[name] = {
            "dtype": dtype.removeprefix("torch."), "shape": list(shape) if isinstance(shape, tuple) else [],
            "bytes": nbytes, "fingerprint": hexadecimal(row),
            **({"voted": voted[name]} if name in voted else {}),
        }  # fmt: skip
    return table
