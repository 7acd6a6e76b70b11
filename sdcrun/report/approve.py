"""`sdcrun approve`: a person's decision about a suspect goes on record. Nothing is executed."""

from __future__ import annotations

import difflib
import os
import secrets
import time

from sdcrun.core import words
from sdcrun.core.types import Event
from sdcrun.report import command, store
from sdcrun.report.store import JobError

MAX_NAME = 100


def approve(job: str, device: str, by: str, root: str | os.PathLike[str] | None = None) -> int:
    """Put on record that `by` has approved taking `device` of `job` out of service: "HOST/UUID", "UUID" or "rank N", as
    the report names it. Returns 0, or 2 for a job or device that is not there."""
    try:
        folder = store.find_job(job, root)
        report, _ = command.load(folder)
        key = _device(report, device)
        name = by.strip()
        if not name or len(name) > MAX_NAME:
            raise JobError(f"--by: must be the name of a person (at most {MAX_NAME} characters), got {by!r}")
        said = {"device": key, "by": name}
        event = Event("approved", "controller", 0, 1, time.time(), said, secrets.token_hex(6))
        if report["status"] == "running":
            store.hand_over(folder, event)
        else:
            log = store.EventLog(folder)
            log.append(event)
            log.close()
        command.write_views(folder)
    except (JobError, OSError) as error:
        command.complain(f"error: {words.clean(error, 1000)}")
        return command.TOOL_ERROR
    print(f"on record: {words.clean(key)} of job {words.clean(folder.name)}, approved by {words.clean(name)}")
    print(f"next: sdcrun report {words.clean(job)} --commands slurm|kubernetes|hyperpod|gcloud")
    return 0


def _device(report: dict, given: str) -> str:
    """Key of the suspect that `given` names. JobError where there is none, or more than one."""
    names: dict[str, set[str]] = {}
    for suspect in report["suspects"]:
        host, uuid = suspect["device"]["host"], suspect["device"]["uuid"]
        for name in (f"{host}/{uuid}", uuid, f"rank {suspect['rank']}", f"rank:{suspect['rank']}"):
            names.setdefault(name, set()).add(f"{host}/{uuid}")
    if not names:
        raise JobError("no device of this job is suspect; there is nothing to approve")
    if len(names.get(given, ())) > 1:
        raise JobError(f"{given} is more than one device: {', '.join(sorted(names[given]))}")
    if given not in names:
        near = difflib.get_close_matches(given, names, n=1)
        known = ", ".join(sorted(set().union(*names.values()))[:5])
        hint = f"did you mean {near[0]!r}?" if near else f"suspects are {known}"
        raise JobError(f"no suspect {given!r}; {hint}")
    return names[given].pop()
