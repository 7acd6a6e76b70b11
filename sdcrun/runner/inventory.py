"""Identity of this host and its devices, for the record: names that an operator can act on. Imports no torch."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from typing import Any

from sdcrun import __version__
from sdcrun.report import alive


def host_name() -> str:
    """The name under which this host is accused: what the machine calls itself."""
    return socket.gethostname() or "unknown-host"


def host_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Names and state of this host; None for what nobody here knows."""
    return {
        "host": host_name(),
        "slurm_node": environ.get("SLURMD_NODENAME"),
        "kubernetes_node": environ.get("NODE_NAME") or environ.get("K8S_NODE_NAME"),
        "pod": environ.get("POD_NAME") or (environ.get("HOSTNAME") if "KUBERNETES_SERVICE_HOST" in environ else None),
        "boot_id": _first_line("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": alive.pid_namespace(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what runs here, read from metadata."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    return {"sdcrun": __version__, "torch": torch, "python": platform.python_version(), "driver": None}


def gpus() -> tuple[list[dict[str, Any]], str | None]:
    """([{index, uuid, pci, model, serial}], driver version) by NVML; ([], None) where it or its binding is missing."""
    try:
        import pynvml
    except ImportError:
        return [], None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], None
    rows: list[dict[str, Any]] = []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            rows.append(
                {
                    "index": index,
                    "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
                    "pci": _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                    "model": _text(pynvml.nvmlDeviceGetName(handle)),
                    "serial": _asked(pynvml, pynvml.nvmlDeviceGetSerial, handle),
                }
            )
    except pynvml.NVMLError:
        return rows, None
    finally:
        pynvml.nvmlShutdown()
    return rows, driver


def _asked(pynvml: Any, function: Any, handle: Any) -> str | None:
    """Consumer boards have no serial number; NVML says so with an error."""
    try:
        return _text(function(handle))
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _first_line(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().strip() or None
    except OSError:
        return None


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None
