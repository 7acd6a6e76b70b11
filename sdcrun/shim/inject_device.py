"""Which device a fault belongs to. Ranks move on a restart, a defect does not.

At a job's first attempt every device writes down the rank and node it had, in `<job folder>/faults/`, one file each.
Later attempts read it back: a fault tied to a device fires wherever the device of that first rank now works, and not on
the device that now has its rank. A device reads and writes only its own file: nodes need not share the folder.
"""

from __future__ import annotations

import hashlib
import json
import os


def home_of(job_dir: str, device: str, attempt: int, rank: int, node: int) -> tuple[int, int] | None:
    """(rank, node) that `device` (its key) had at the job's first attempt; None if it was not there then.

    Attempt 0 writes the file. Without a job folder, or where it cannot be written, the place of now counts.
    """
    if not job_dir:
        return rank, node
    name = hashlib.blake2b(device.encode(), digest_size=12).hexdigest()
    path = os.path.join(job_dir, "faults", f"{name}.json")
    if attempt == 0:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
                json.dump({"device": device, "rank": rank, "node": node}, file)
            os.replace(f"{path}.{os.getpid()}", path)
        except OSError:
            pass
        return rank, node
    try:
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
        return int(known["rank"]), int(known["node"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError):
        return rank, node
