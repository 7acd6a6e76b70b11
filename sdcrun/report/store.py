"""The job folder: the append-only record of events, views that are replaced whole, and how jobs are found.

Nothing else writes into the folder, save the clients' spool files and the runtime file with the secret (both
user-only).
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdcrun.core.codec import MAX_LINE, CodecError, decode_event, encode_event
from sdcrun.core.types import Event

EVENTS = "events.jsonl"
COPY = "events.copy.jsonl"
JOB = "job.json"
DEFAULT_ROOT = "sdcrun_jobs"
APPROVALS = "approvals"
LOCK_SECONDS = 1.0


class JobError(ValueError):
    """A job folder that cannot be found or read. The text is one clear line."""


class EventLog:
    """events.jsonl of one job, for its only writer. Opened by the first append: made if need be, a torn last line cut
    off.

    A batch of lines is one write; a kill leaves at most one torn line at the end, which the next writer cuts off.
    """

    def __init__(self, job_dir: str | os.PathLike[str]) -> None:
        self.path = Path(job_dir) / EVENTS
        self._fd = -1

    def append(self, event: Event) -> None:
        """Add one event; raises OSError when it is not completely in the file (then nothing of it is)."""
        self.append_lines(encode_event(event))

    def append_lines(self, lines: bytes) -> None:
        """Add encoded lines, each with its newline, in one write; raises OSError, then nothing of them is in the file.
        """
        if self._fd < 0:
            self._open()
        written = os.write(self._fd, lines)
        if written != len(lines):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _open(self) -> None:
        os.makedirs(self.path.parent, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if _torn(fd) and _only_writer(fd) and _torn(fd):
                os.ftruncate(fd, _end_of_last_line(fd, os.fstat(fd).st_size))
            _lock(fd, fcntl.LOCK_SH)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return _end_of_last_line(fd, size) != size


def _only_writer(fd: int) -> bool:
    """Whether nobody else has the log open to write: what looks like a torn line may be one that is being written."""
    until = time.monotonic() + LOCK_SECONDS
    while not _lock(fd, fcntl.LOCK_EX):
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True


def _lock(fd: int, kind: int) -> bool:
    """Take or change this file's lock without waiting. Where the file system has no locks nothing speaks against it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _end_of_last_line(fd: int, size: int) -> int:
    """Offset just behind the last newline of a file of `size` bytes."""
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


@dataclass
class Reading:
    """What was wrong with a record while it was read: `torn` last line, `unreadable` lines, `duplicates` dropped,
    events `recovered` from spool files that no controller had taken in."""

    torn: bool = False
    unreadable: int = 0
    duplicates: int = 0
    recovered: int = 0
    events: int = 0


@dataclass
class Seen:
    """Which (attempt, source, session, seq) have been read, kept small for sequences without holes."""

    _upto: dict[tuple[int, str, str], int] = field(default_factory=dict)
    _beyond: dict[tuple[int, str, str], set[int]] = field(default_factory=dict)

    def add(self, event: Event) -> bool:
        """Whether the event is new; remembers it."""
        key = event.attempt, event.source, event.session
        upto = self._upto.get(key, 0)
        beyond = self._beyond.get(key)
        if event.seq <= upto or beyond and event.seq in beyond:
            return False
        if event.seq != upto + 1:
            self._beyond.setdefault(key, set()).add(event.seq)
            return True
        upto += 1
        while beyond and upto + 1 in beyond:
            upto += 1
            beyond.discard(upto)
        self._upto[key] = upto
        return True


def read_events(job_dir: str | os.PathLike[str], reading: Reading | None = None) -> Iterator[Event]:
    """Events of a job in the order of the record, each once, then those left in spool files by clients that were
    killed.

    Between the two come approvals that the controller has not put on record yet. Lines that cannot be read are counted
    in `reading` and left out. Raises JobError when there is no record at all.
    """
    reading = reading if reading is not None else Reading()
    seen = Seen()
    path = Path(job_dir) / EVENTS
    elsewhere = kept_elsewhere(job_dir)
    if elsewhere is not None:
        raise JobError(f"{job_dir}: {elsewhere}")
    if not path.is_file() and not list(_spools(job_dir)):
        raise JobError(f"{job_dir}: not a job folder (it has no {EVENTS})")
    if path.is_file():
        for event in _read_lines(path, reading, torn_matters=True):
            if seen.add(event):
                reading.events += 1
                yield event
            else:
                reading.duplicates += 1
    for left in (*approvals(job_dir), *_spools(job_dir)):
        for event in _read_lines(left, Reading(), torn_matters=False):
            if seen.add(event):
                reading.events += 1
                reading.recovered += event.kind != "approved"
                yield event


def kept_elsewhere(job_dir: str | os.PathLike[str]) -> str | None:
    """In words, where the record of a job is that runs here and whose ranks have chosen another host's controller; None
    when it is in this folder, or nobody knows."""
    folder = Path(job_dir)
    if (folder / EVENTS).exists():
        return None
    for chosen in sorted(folder.glob("controller-*.json.job")):
        try:
            host = json.loads(chosen.read_bytes())["host"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return f"the record of this job is kept on {host}; use sdcrun there"
    if (folder / COPY).exists():
        return f"here is only a copy of the record ({COPY}); use sdcrun on the host that keeps it"
    return None


def hand_over(job_dir: str | os.PathLike[str], event: Event) -> None:
    """Leave an event of somebody else's for the controller of a running job, which puts it on record. Raises OSError.

    It is not appended to the record: two hosts that append to one file on NFS overwrite each other.
    """
    folder = Path(job_dir) / APPROVALS
    folder.mkdir(exist_ok=True)
    replace_file(folder / f"{event.session}.jsonl", encode_event(event))


def approvals(job_dir: str | os.PathLike[str]) -> list[Path]:
    """What has been handed over, ever."""
    try:
        names = os.listdir(Path(job_dir) / APPROVALS)
    except OSError:
        return []
    return [Path(job_dir) / APPROVALS / name for name in sorted(names) if name.endswith(".jsonl")]


def _spools(job_dir: str | os.PathLike[str]) -> Iterator[Path]:
    folder = Path(job_dir) / "spool"
    if folder.is_dir():
        yield from sorted(folder.glob("*.jsonl"))


def _read_lines(path: Path, reading: Reading, torn_matters: bool) -> Iterator[Event]:
    try:
        file = open(path, "rb")
    except OSError as error:
        if torn_matters:
            raise JobError(f"{path}: {error.strerror}") from None
        return
    with file:
        while line := file.readline(MAX_LINE + 1):
            if not line.endswith(b"\n"):
                if len(line) <= MAX_LINE:
                    reading.torn = True
                    return
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE + 1)
                reading.unreadable += 1
                continue
            try:
                yield decode_event(line)
            except CodecError:
                reading.unreadable += 1


def replace_file(path: str | os.PathLike[str], content: bytes | str, mode: int = 0o644) -> None:
    """Replace a file whole: readers see the old or the new content, never a half. Raises OSError."""
    path = Path(path)
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def write_job(job_dir: str | os.PathLike[str], values: dict[str, Any]) -> None:
    """Write job.json: what is known before the first event (job_id, config, command, created_at, versions). OSError."""
    os.makedirs(job_dir, exist_ok=True)
    replace_file(Path(job_dir) / JOB, json.dumps(values, indent=2) + "\n")


def read_job(job_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in job.json; empty when it is missing or broken (the record alone makes a report)."""
    try:
        values = json.loads((Path(job_dir) / JOB).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def jobs_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds job folders: as given, else SDCRUN_DIR, else ./sdcrun_jobs."""
    return Path(given or os.environ.get("SDCRUN_DIR") or DEFAULT_ROOT)


def is_job(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder looks like that of a job."""
    return any((Path(folder) / name).is_file() for name in (EVENTS, JOB))


def list_jobs(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """Job folders under the root, newest first."""
    folder = jobs_root(root)
    try:
        found = [entry for entry in folder.iterdir() if entry.is_dir() and is_job(entry)]
    except OSError:
        return []
    return sorted(found, key=lambda entry: (_touched(entry), entry.name), reverse=True)


def _touched(folder: Path) -> float:
    """When a job was created, by its job.json, else its record's last change."""
    created = read_job(folder).get("created_at")
    if isinstance(created, (int, float)):
        return float(created)
    try:
        return (folder / EVENTS).stat().st_mtime
    except OSError:
        return 0.0


def find_job(job: str | None, root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of JOB: an id under the root, a folder, or None for the newest. Raises JobError with one clear line.
    """
    folder = jobs_root(root)
    if job is None:
        jobs = list_jobs(folder)
        if not jobs:
            raise JobError(f"no jobs in {folder} (give a job folder, or --sdc-dir, or set SDCRUN_DIR)")
        return jobs[0]
    for candidate in (folder / job, Path(job)):
        if candidate.is_dir():
            if is_job(candidate):
                return candidate
            raise JobError(f"{candidate} is not a job folder (it has no {EVENTS})")
    names = [entry.name for entry in list_jobs(folder)]
    near = difflib.get_close_matches(job, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "sdcrun jobs lists them" if names else "there are none"
    raise JobError(f"no job {job!r} in {folder}; {hint}")
