"""`sdcrun --nnodes 4 train.py` without a rendezvous: four real torchrun agents on this machine, one per node."""

from __future__ import annotations

import argparse
import glob
import re
import socket
from collections.abc import Mapping

from sdcrun.errors import UsageError

_PLACE = {"node_rank", "master_addr", "master_port"}


def wanted(max_nodes: int, options: argparse.Namespace, given: set[str], environ: Mapping[str, str]) -> bool:
    """Whether nothing says how the nodes would find each other, so that torchrun would wait for ever.

    `given` are the attributes that options or PET_* variables set. Under Slurm with several tasks or nodes every task
    is a node of its own.
    """
    if max_nodes < 2 or getattr(options, "standalone", False) or options.rdzv_endpoint or given & _PLACE:
        return False
    free = "rdzv_backend" not in given or options.rdzv_backend == "c10d"
    return free and not slurm_gives_nodes(environ)


def slurm_gives_nodes(environ: Mapping[str, str]) -> bool:
    """Whether Slurm started several tasks, or has several nodes for this job."""
    names = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES")
    counts = [environ.get(name, "") for name in names]
    return "SLURM_JOB_ID" in environ and any(count.isdigit() and int(count) > 1 for count in counts)


class HeldPort:
    """A free port on 127.0.0.1, bound but not listening, so that nobody else is given it before an agent listens there.

    That works because both sides set SO_REUSEADDR and only one of them listens.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def rendezvous(port: int, job_id: str, options: argparse.Namespace, given: frozenset[str]) -> dict[str, str]:
    """PET_* values that let the local agents meet at `port`; what the user said about them stays."""
    values = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}"}
    if "rdzv_id" not in given or options.rdzv_id == "none":
        values["PET_RDZV_ID"] = job_id
    return values


def split_devices(nodes: int, nproc: int | None, environ: Mapping[str, str]) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES of each local node, so that every node has devices of its own; None without GPUs.

    Raises UsageError when there are fewer GPUs than the ranks need: two nodes sharing a GPU would be one device.
    """
    devices = visible_devices(environ)
    if not devices:
        return None
    each = len(devices) // nodes
    if each < (nproc or 1):
        raise UsageError(
            f"{nodes} local nodes with {nproc or 1} rank(s) each need {nodes * (nproc or 1)} GPUs, {len(devices)} "
            "can be seen; ask for fewer, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    return [",".join(devices[node * each : (node + 1) * each]) for node in range(nodes)]


def visible_devices(environ: Mapping[str, str]) -> list[str]:
    """Names of the GPUs that a process here would see: CUDA_VISIBLE_DEVICES up to its first invalid entry, else one
    index per NVIDIA device file."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        files = [name for name in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", name)]
        return [str(index) for index in range(len(files))]
    devices: list[str] = []
    for entry in text.split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", entry.strip()):
            break
        devices.append(entry.strip())
    return devices
