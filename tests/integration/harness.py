"""Runs a training script under plain torchrun or under sdcrun, with a time limit and no process left behind.

Both ways use the interpreter that runs the tests; `sdcrun` is `python -m sdcrun.cli`, so nothing needs to be on PATH.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOOPS = Path(__file__).parent / "loops"
EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SDCRUN = [sys.executable, "-m", "sdcrun.cli"]
MARK = "LAUNCHED_BY_TEST"


@dataclass
class Outcome:
    """What one launch did. `lines` are the JSON lines of `loops/record.py` by (loop, rank), `report` is report.json."""

    command: list[str]
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    leftovers: list[str]
    job: Path | None = None
    report: dict[str, Any] | None = None
    lines: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    @property
    def findings(self) -> list[dict[str, Any]]:
        return self.report["findings"] if self.report else []

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The job's recorded events, all or those of one kind."""
        with open(self.job / "events.jsonl") as file:
            events = [json.loads(line) for line in file]
        return [event for event in events if kind in (None, event["kind"])]

    def tail(self, characters: int = 3000) -> str:
        """What a failed assertion should show."""
        return f"{' '.join(self.command)}\nexit {self.exit_code}\n{self.stderr[-characters:]}"


def processes_marked(mark: str) -> dict[int, str]:
    """Process ids and command lines of living processes whose environment holds `mark`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() not in (folder / "environ").read_bytes():
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(folder.name)] = command
        except OSError:
            continue
    return found


def _end_all(mark: str, patience: float) -> list[str]:
    """Kill what still lives `patience` seconds on, and return the command lines of those."""
    deadline = time.monotonic() + patience
    while (alive := processes_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in alive:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return sorted(alive.values())


def environment(folder: Path, mark: str, extra: dict[str, str] | None) -> dict[str, str]:
    """The tests' environment without sdcrun's and torchrun's own variables, one thread, temporary files in `folder`."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SDCRUN", "PET_", "TORCHELASTIC", "SLURM_"))}
    return kept | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), MARK: mark} | (extra or {})


def launch(
    folder: Path,
    script: Path,
    *arguments: str,
    ranks: int = 3,
    sdcrun: tuple[str, ...] | list[str] | None = None,
    options: tuple[str, ...] | list[str] = (),
    env: dict[str, str] | None = None,
    timeout: float = 400.0,
) -> Outcome:
    """Run `script` on `ranks` ranks in `folder`; under sdcrun with those own options when `sdcrun` is not None.

    `options` are torchrun's. Past `timeout` seconds everything is killed and AssertionError says what was printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    place = [*options] if options else ["--standalone", "--nproc-per-node", str(ranks)]
    front = TORCHRUN if sdcrun is None else [*SDCRUN, "--sdc-dir", str(folder / "jobs"), *sdcrun]
    command = [*front, *place, str(script), *arguments]
    started = time.monotonic()
    with open(folder / "stdout", "w+") as out, open(folder / "stderr", "w+") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder, mark, env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        leftovers = _end_all(mark, 0.0 if code is None else 20.0)
        process.wait()
        out.seek(0), err.seek(0)
        outcome = Outcome(command, code, out.read(), err.read(), time.monotonic() - started, leftovers)
    if code is None:
        raise AssertionError(f"still running after {timeout} s\n{outcome.stdout[-1000:]}\n{outcome.tail()}")
    for line in outcome.stdout.splitlines():
        if line.startswith('{"loop"'):
            record = json.loads(line)
            outcome.lines[record["loop"], record["rank"]] = record
    if sdcrun is not None:
        jobs = sorted((folder / "jobs").glob("*/"), key=lambda path: path.stat().st_mtime)
        outcome.job = jobs[-1] if jobs else None
        if outcome.job is not None and (outcome.job / "report.json").exists():
            outcome.report = json.loads((outcome.job / "report.json").read_text())
    return outcome


def differences(plain: Outcome, other: Outcome, skip: tuple[str, ...] = ()) -> list[str]:
    """What differs between the lines of two launches, one text for each loop, rank and field."""
    found = []
    for key in sorted(plain.lines.keys() | other.lines.keys()):
        ours, theirs = plain.lines.get(key), other.lines.get(key)
        if ours is None or theirs is None:
            found.append(f"{key}: only in {'the second' if ours is None else 'the first'}")
            continue
        for name in ours:
            if name in skip or ours[name] == theirs[name]:
                continue
            unequal = [i for i, pair in enumerate(zip(ours[name], theirs[name], strict=False)) if pair[0] != pair[1]]
            found.append(f"{key}: {name}" + (f" from entry {unequal[0]} on" if name == "losses" and unequal else ""))
    return found
