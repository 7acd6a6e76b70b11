"""The sidecars beside checkpoint files, brought up to what the record says by now."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from sdcrun.core import checkpoints
from sdcrun.core.state import State
from sdcrun.report import store

SIDECAR = ".sdc.json"


def refresh(state: State) -> None:
    """Writes the state that each checkpoint has by now into its sidecar, where that is there and still of this save."""
    strikes = state.ledger.strikes(state.device_key)
    confirmed = checkpoints.confirmed_devices(state, strikes)
    for path, entry in state.checkpoints.items():
        where, reason = checkpoints.now(state, entry, confirmed)
        write(path, entry, where, reason, checkpoints.audited_devices(state, entry["attempt"]))


def write(path: str, entry: dict[str, Any], where: str, reason: str, audited: dict[str, int]) -> None:
    """Writes what is known of one checkpoint into its sidecar, where that is there and still of this save."""
    sidecar = path.rstrip("/") + SIDECAR
    values = read(sidecar) if os.path.isabs(sidecar) or os.path.exists(sidecar) else None
    if values is None or values.get("id") != entry["id"]:
        return
    changed = {**values, "state": where, "reason": reason, "last_clean_audit": audited or values["last_clean_audit"]}
    if changed != values:
        with contextlib.suppress(OSError):
            store.replace_file(sidecar, json.dumps(changed))


def read(path: str) -> dict[str, Any] | None:
    """The object in a JSON file, or None."""
    try:
        values = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
