"""Name and folder of a job. One folder holds one record; an earlier record of that name is moved aside, never mixed."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

from sdcrun.config import JOB_ID


@dataclass(frozen=True)
class Folder:
    """Where a job's files go. `path` is None when nothing can be written there (`problem` says why); `logs` is then a
    temporary folder that the supervisor removes. `moved` is where an earlier record of the same name went."""

    path: str | None
    logs: str
    problem: str | None = None
    moved: str | None = None

    @property
    def temporary_logs(self) -> bool:
        """Whether `logs` is to be removed at the end."""
        return self.path is None

    def close(self, alone: bool) -> None:
        """Remove what must not stay behind; `alone`: also torchrun's folders in which nothing was written."""
        if self.temporary_logs:
            shutil.rmtree(self.logs, ignore_errors=True)
        elif alone:
            for folder, _, _ in os.walk(self.logs, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    continue


def job_id(asked: str | None, options: argparse.Namespace, environ: Mapping[str, str], host: str) -> tuple[str, bool]:
    """(the job's name, whether other nodes arrive at the same one).

    In this order: --sdc-job, the Slurm job (with its step and restart), the JobSet, the rendezvous id if there is one,
    else time and host. Characters that a folder's name should not have become "-".
    """
    if asked:
        return asked, True
    if environ.get("SLURM_JOB_ID"):
        step, restart = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
        name = f"slurm-{environ['SLURM_JOB_ID']}" + (f".{step}" if step.isdigit() else "")
        return _clean(name + (f"-r{restart}" if restart not in ("", "0") else "")), True
    if environ.get("JOBSET_NAME"):
        restart = environ.get("JOBSET_RESTART_ATTEMPT", "0")
        return _clean(environ["JOBSET_NAME"] + (f"-r{restart}" if restart not in ("", "0") else "")), True
    if options.rdzv_id not in ("", "none"):
        return _clean(options.rdzv_id), True
    return _clean(f"{time.strftime('%Y%m%d-%H%M%S')}-{host.partition('.')[0]}"), False


def _clean(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100]
    return name if JOB_ID.fullmatch(name) else f"job-{name}".rstrip("-")[:100]


def prepare(directory: str, name: str, alone: bool, shared_name: bool) -> tuple[str, Folder]:
    """Make the folder of job `name` in `directory`; returns (the name used, the folder).

    `alone`: this supervisor is the job's only one, so that what lies there under the same name is of an earlier run and
    is moved aside. A name made of time and host (`shared_name` False) gets a number instead. Never raises OSError.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        if not shared_name:
            name = _fresh(directory, name)
        path = os.path.join(directory, name)
        moved = _move_aside(path) if alone and shared_name else None
        os.makedirs(os.path.join(path, "logs"), exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0")
            probe.flush()
        return name, Folder(path, os.path.join(path, "logs"), moved=moved)
    except OSError as error:
        where = os.path.join(directory, name)
        return name, without(f"{where} cannot be written ({error.strerror or error})")


def without(problem: str | None) -> Folder:
    """A launch that keeps no record: only a temporary folder for torchrun's own files."""
    try:
        return Folder(None, tempfile.mkdtemp(prefix="sdcrun_logs_"), problem)
    except OSError as error:
        return Folder(None, "", problem or f"no temporary folder can be made ({error.strerror or error})")


def _fresh(directory: str, name: str) -> str:
    for number in range(1, 1000):
        candidate = name if number == 1 else f"{name}-{number}"
        try:
            os.mkdir(os.path.join(directory, candidate))
            return candidate
        except FileExistsError:
            continue
    raise OSError(0, "a thousand folders of that name")


def _move_aside(path: str) -> str | None:
    """Rename a folder that holds a record to `path`.N, N one above the highest there is; returns the new path."""
    if not os.path.exists(os.path.join(path, "events.jsonl")) and not os.path.exists(os.path.join(path, "job.json")):
        return None
    pattern = re.compile(re.escape(os.path.basename(path)) + r"\.(\d+)")
    taken = [int(m[1]) for m in map(pattern.fullmatch, os.listdir(os.path.dirname(path) or ".")) if m]
    aside = f"{path}.{max(taken, default=0) + 1}"
    os.rename(path, aside)
    return aside
