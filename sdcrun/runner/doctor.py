"""`sdcrun doctor`: can this machine, and this script, be guarded, and how far. One line per question."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sdcrun import config as configuration
from sdcrun.core.types import Config
from sdcrun.runner import environment, inventory, localnodes

PROBE_SECONDS = 120.0
LEAST_FREE = 1 << 30
GOOD, NOTE, LESS, BAD = "ok", "note", "LESS", "FAIL"
CODES = {GOOD: 0, NOTE: 0, LESS: 1, BAD: 2}


@dataclass(frozen=True)
class Answer:
    """One line: `level` is GOOD, NOTE (good to know), LESS (guards less than it could) or BAD (cannot be guarded)."""

    level: str
    about: str
    text: str


def examine(directory: str, environ: Mapping[str, str], show: Callable[[Answer], None]) -> int:
    """Ask everything about this machine; each answer goes to `show` as soon as it is there. Returns the exit code:
    0 all is well, 1 something limits what can be guarded, 2 nothing can be guarded."""
    worst = 0
    for question in (_machine, _meeting, _gpus, _folder):
        for answer in question(directory, environ):
            worst = max(worst, CODES[answer.level])
            show(answer)
    return worst


def _machine(directory: str, environ: Mapping[str, str]) -> list[Answer]:
    """The interpreter that torchrun would start ranks with, with the shim on its path."""
    python = environ.get("PYTHON_EXEC") or sys.executable
    values = environment.guarded(environ, Config(job_id="doctor"), "", inventory.host_name())
    values |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    found, problem = _probe(python, ["machine"], values)
    if found is None:
        return [Answer(BAD, "interpreter", f"{python}: {problem}")]
    shim = "the shim is seen" if found["shim"] else "the shim is NOT seen: ranks would be UNGUARDED"
    rows = [Answer(GOOD if found["shim"] else BAD, "shim", f"{shim} by {found['interpreter']} ({found['python']})")]
    parts = [name for name in ("gloo", "nccl") if found[name]]
    whole = found["distributed"] and found["gloo"]
    backends = ", ".join(parts) if whole else "without torch.distributed and gloo nothing can be guarded"
    text = f"{found['torch']}, CUDA {found['cuda'] or 'none'}, {backends}"
    rows.append(Answer(GOOD if whole else BAD, "torch", text))
    for device in found["devices"]:
        fp1 = device.get("fp1") or found["fp1"]
        rows.append(_same(device))
        rows.append(_fingerprints(fp1, device["name"]))
    return rows


def _same(device: Mapping[str, Any]) -> Answer:
    name = device["name"]
    if device["same"] == "default":
        return Answer(GOOD, "replay", f"{name}: a step computed twice gives the same bits")
    if device["same"] == "strict":
        return Answer(GOOD, "replay", f"{name}: the same bits with deterministic kernels, which audits switch on")
    why = device.get("problem") or "other bits even with deterministic kernels"
    return Answer(LESS, "replay", f"{name}: {why}; replay audits would be narrowed or declined")


def _fingerprints(found: Mapping[str, Any], name: str) -> Answer:
    if found["problem"]:
        return Answer(BAD, "fingerprint", f"{name}, {found['engine']}: {found['problem']}")
    if not found["tensors"]:
        return Answer(NOTE, "fingerprint", f"{name}: not compared with its definition, which needs numpy")
    return Answer(GOOD, "fingerprint", f"{name}: {found['engine']} agrees with the definition")


def _meeting(directory: str, environ: Mapping[str, str]) -> list[Answer]:
    """Two processes on this machine, as two ranks would meet."""
    port = localnodes.HeldPort()
    python, children = environ.get("PYTHON_EXEC") or sys.executable, []
    try:
        for rank in (0, 1):
            children.append(_start(python, ["meet", str(rank), str(port.number)], _with_package(environ)))
        answers = [_answer(child) for child in children]
    except OSError as error:
        return [Answer(BAD, "gloo", f"{python}: {error.strerror or error}")]
    finally:
        port.close()
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    problems = [problem for found, problem in answers if found is None]
    if problems:
        hint = "name the interface in GLOO_SOCKET_IFNAME (lo for one machine)"
        return [Answer(BAD, "gloo", f"two processes here cannot talk: {problems[0]}; {hint}")]
    if any(found["sum"] != 2000.0 for found, _ in answers):
        return [Answer(BAD, "gloo", f"a sum over two processes is wrong: {answers}")]
    seconds = max(found["seconds"] for found, _ in answers)
    return [Answer(GOOD, "gloo", f"two processes met at a store on 127.0.0.1:{port.number} and summed ({seconds} s)")]


def _gpus(directory: str, environ: Mapping[str, str]) -> list[Answer]:
    rows, driver = inventory.gpus()
    if rows:
        serials = sum(1 for row in rows if row["serial"])
        text = f"NVML sees {len(rows)} ({rows[0]['model']}), driver {driver}, {serials} with a serial number"
        return [Answer(GOOD, "gpu", text)]
    if localnodes.visible_devices({}):
        text = "GPUs are here but NVML is not: reports would lack serial numbers (pip install nvidia-ml-py)"
        return [Answer(NOTE, "gpu", text)]
    return [Answer(NOTE, "gpu", "none here; ranks compute on the CPU")]


def _folder(directory: str, environ: Mapping[str, str]) -> list[Answer]:
    existing = directory
    while not os.path.isdir(existing) and os.path.dirname(existing) != existing:
        existing = os.path.dirname(existing)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
            file.flush()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        text = f"{directory} cannot be written ({error.strerror or error}): no record, no report"
        return [Answer(LESS, "record", text)]
    level = GOOD if free >= LEAST_FREE else LESS
    return [Answer(level, "record", f"{directory} can be written, {free / 2**30:.0f} GiB free")]


# -- children ----------------------------------------------------------------------------------------------------------


def _with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a probe without the shim: it finds this installation all the same."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join([*paths, root])}


def _start(python: str, arguments: list[str], environ: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [python, "-m", "sdcrun.shim.probe", *arguments],
        env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _answer(child: subprocess.Popen) -> tuple[dict[str, Any] | None, str]:
    """(what a probe answered, why it did not)."""
    try:
        out, err = child.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return None, f"no answer within {PROBE_SECONDS:.0f} s"
    try:
        return json.loads(out.strip().splitlines()[-1]), ""
    except (ValueError, IndexError):
        lines = [line for line in err.strip().splitlines() if line.strip()]
        return None, (lines[-1] if lines else f"it ended with exit code {child.returncode} and said nothing")[:300]


def _probe(python: str, arguments: list[str], environ: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
    try:
        child = _start(python, arguments, environ)
    except OSError as error:
        return None, str(error.strerror or error)
    return _answer(child)


# -- a script ----------------------------------------------------------------------------------------------------------


def try_script(tokens: list[str], seconds: float, environ: Mapping[str, str], show: Callable[[Answer], None]) -> int:
    """Run a script under sdcrun on two ranks, audits on, until it ends, has made some steps or `seconds` are over; say
    how far it is guarded. Returns the exit code as `examine` does."""
    from sdcrun.runner import trial

    if len(localnodes.visible_devices(environ)) == 1:
        show(Answer(NOTE, "gpu", "one GPU cannot be two devices: the script is tried on the CPU"))
        environ = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="sdcrun_doctor_") as folder:
        outcome = trial.run(tokens, seconds, environ, folder)
        worst = 0
        for level, about, text in trial.judge(outcome):
            show(Answer(level, about, text))
            worst = max(worst, CODES[level])
    return worst


def directory_of(given: str | None) -> str:
    """The folder of job folders that would be used."""
    return configuration.absolute(given or os.environ.get("SDCRUN_DIR") or configuration.DEFAULT_DIR)

