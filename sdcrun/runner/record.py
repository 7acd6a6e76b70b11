"""What the supervisor reads from and adds to the job's record once nobody else writes it."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from sdcrun.core import exitcode
from sdcrun.core.types import Config, Event
from sdcrun.report import build, store
from sdcrun.runner import inventory


@dataclass(frozen=True)
class Conclusion:
    """How a job ended: the exit code of sdcrun, and the word for it (finished, failed or stopped)."""

    code: int
    status: str


def begin(config: Config, command: list[str], alone: bool) -> None:
    """Write job.json. Of several supervisors on one file system the first one writes it. Raises OSError."""
    if alone or not store.read_job(config.job_dir):
        values = {"job_id": config.job_id, "config": config.to_json(), "command": command, "created_at": time.time()}
        store.write_job(config.job_dir, values | {"versions": inventory.versions()})


def conclude(config: Config, torchrun_code: int, stop: dict[str, Any] | None) -> Conclusion:
    """The end of a job whose agents ended with `torchrun_code`, by its record; without a readable one by `stop`, the
    controller's order to stop, if there was one."""
    try:
        state = build.fold(config, store.read_events(config.job_dir))
    except store.JobError:
        code = torchrun_code if stop is None else int(stop.get("code") or 87)
        return Conclusion(code, "stopped" if stop else "failed" if code else "finished")
    code = exitcode.exit_code(state, torchrun_code)
    return Conclusion(code, "stopped" if state.stop is not None else "failed" if torchrun_code else "finished")


def close(config: Config, torchrun_code: int, stop: dict[str, Any] | None, said: Conclusion, source: str) -> Conclusion:
    """The conclusion from the complete record. What was still on its way when `said` was put on record as `job_end` of
    `source` may have changed it: then it is put on record again. Raises OSError."""
    last = conclude(config, torchrun_code, stop)
    if last != said:
        data = {"exit_code": last.code, "status": last.status}
        log = store.EventLog(config.job_dir)
        log.append(Event("job_end", source, 0, 1, time.time(), data, secrets.token_hex(8)))
        log.close()
    return last


def views(config: Config, last: Conclusion) -> list[str]:
    """Write the views of the record; returns the closing lines for the user."""
    from sdcrun.report import command

    return command.closing(config, last.code)
