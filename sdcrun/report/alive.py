"""Who still works on a job: what its folder says of its supervisors, and which of them live on this host."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Crew:
    """Supervisors of a job without an end on record, in words ("pid 7 on gpu-0"): those that `work` on this host, those
    that are `gone` from it, and those `elsewhere` (also in another container of this host), of which nobody here can
    tell."""

    work: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


def crew(folder: str | os.PathLike[str], state: Any, host: str) -> Crew:
    """The supervisors that the record's `state` and the runtime files in `folder` know, as seen from `host`."""
    own = pid_namespace()
    known = {f"node:{name}:{pid}": own for name, pid in _runtime_files(folder, "*")}
    known |= {node["source"]: node.get("pid_namespace", own) for node in state.roster.nodes}
    found: dict[str, list[str]] = {"work": [], "gone": [], "elsewhere": []}
    for source, namespace in sorted(known.items()):
        name, _, pid = source.removeprefix("node:").rpartition(":")
        if source not in state.ends:
            where = "elsewhere" if name != host or namespace != own else "work" if _is_sdcrun(pid) else "gone"
            found[where].append(f"pid {pid} on {name}")
    return Crew(**{where: tuple(names) for where, names in found.items()})


def pid_namespace() -> str | None:
    """Which numbering of processes this one sees: containers of one pod share a host's name, not always this."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def running(folder: str | os.PathLike[str], host: str) -> int | None:
    """Pid of the supervisor on this host that works in a job folder right now, None when there is none."""
    return next((int(pid) for _, pid in _runtime_files(folder, glob.escape(host)) if _is_sdcrun(pid)), None)


def _runtime_files(folder: str | os.PathLike[str], hosts: str) -> list[tuple[str, str]]:
    """(host, pid) of each supervisor whose file with the controller's address is there: it lives, or was killed."""
    paths = glob.glob(os.path.join(glob.escape(os.fspath(folder)), f"controller-{hosts}-*.json"))
    stems = [os.path.basename(path).removeprefix("controller-").removesuffix(".json") for path in paths]
    places = [stem.rpartition("-")[::2] for stem in stems]
    return [(name, pid) for name, pid in places if pid.isdigit()]


def _is_sdcrun(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as arguments:
            # The number may have gone to another process since.
            return b"sdcrun" in arguments.read()
    except OSError:
        return False
