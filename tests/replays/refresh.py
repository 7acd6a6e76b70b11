"""Takes the record of a real job in as a test, or works out anew what is expected of those here.

    python tests/replays/refresh.py NAME JOB_FOLDER      copy events.jsonl and job.json, without paths of the machine
    python tests/replays/refresh.py                      write every expected.json again; look at the difference in git

Each folder here holds the events that a real run of a small script on three local nodes sent; expected.json is the
report that they must give.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sdcrun.report import command, store

HERE = Path(__file__).parent
SCRUBBED = {"interpreter": "python", "boot_id": None, "kernel": None, "cpu": None, "job_dir": ""}


def scrubbed(value):
    """`value` without what tells of the machine that it came from."""
    if isinstance(value, dict):
        return {key: SCRUBBED[key] if key in SCRUBBED else scrubbed(entry) for key, entry in value.items()}
    return [scrubbed(entry) for entry in value] if isinstance(value, list) else value


def take(name: str, folder: Path) -> None:
    """Copy the record of `folder` to HERE/name."""
    target = HERE / name
    target.mkdir(exist_ok=True)
    lines = (folder / store.EVENTS).read_text().splitlines()
    text = "".join(json.dumps(scrubbed(json.loads(line)), separators=(",", ":")) + "\n" for line in lines)
    (target / store.EVENTS).write_text(text)
    (target / store.JOB).write_text(json.dumps(scrubbed(store.read_job(folder)), indent=1) + "\n")


def expect(folder: Path) -> None:
    """Write the report of a folder as what is expected."""
    (folder / "expected.json").write_text(json.dumps(command.load(folder)[0], indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        take(sys.argv[1], Path(sys.argv[2]))
    for path in sorted(HERE.glob(f"*/{store.EVENTS}")):
        expect(path.parent)
