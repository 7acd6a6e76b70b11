"""What a launch will start, checked before anything is started: torchrun's values, the script, local nodes."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from sdcrun import optiontable
from sdcrun.args import CommandLine
from sdcrun.errors import UsageError
from sdcrun.runner import localnodes, registered

_REDIRECTS = re.compile(r"[0-3]|(\d+:[0-3],)*\d+:[0-3]")
_NPROC_WORDS = ("auto", "cpu", "gpu", "xpu")


@dataclass(frozen=True)
class Plan:
    """A launch on this host.

    `torchrun` are the option tokens as typed, `options` what torchrun's parser makes of them, `given` the attributes
    that tokens or PET_* variables set. `nproc` is None where torchrun counts devices. `local_nodes` is 1 for a launch
    of one agent (torchrun's own way), else the number of agents to start on this host.
    """

    torchrun: tuple[str, ...]
    script: str
    script_args: tuple[str, ...]
    options: argparse.Namespace
    given: frozenset[str]
    min_nodes: int
    max_nodes: int
    nproc: int | None
    local_nodes: int = 1

    @property
    def nodes(self) -> int | None:
        """Nodes of the whole job where that is known before the start."""
        return self.max_nodes if self.min_nodes == self.max_nodes else None

    @property
    def world_size(self) -> int | None:
        """Ranks of the whole job where that is known before the start."""
        return self.nproc * self.nodes if self.nproc is not None and self.nodes is not None else None

    @property
    def domains(self) -> int | None:
        """Failure domains of the whole job where that is known: the nodes from three on, else the devices."""
        return self.nodes if self.nodes is not None and self.nodes >= 3 else self.world_size


def make(line: CommandLine, table: tuple[optiontable.Option, ...], environ: Mapping[str, str]) -> Plan:
    """The plan of a command line. Raises UsageError for what torchrun would reject or never come back from."""
    options = optiontable.namespace(table, line.torchrun, environ)
    given = optiontable.given(table, line.torchrun, environ)
    min_nodes, max_nodes = _nodes(options.nnodes)
    _check_values(options)
    registered.check(options)
    nproc = _nproc(options.nproc_per_node)
    if line.script is None:
        raise UsageError("no script given; usage: sdcrun [options] SCRIPT [arguments] (sdcrun --help)")
    _check_script(line.script, options, environ)
    if getattr(options, "standalone", False) and min_nodes > 1:
        raise UsageError(f"--standalone (one node) and --nnodes {options.nnodes} contradict each other")
    _check_place(options, max_nodes)
    _check_log_dir(options)
    if nproc is None:
        _check_accelerator(options.nproc_per_node, environ)
    local = max_nodes if localnodes.wanted(max_nodes, options, given, environ) else 1
    return Plan(
        tuple(line.torchrun),
        line.script,
        tuple(line.script_args),
        options,
        frozenset(given),
        min_nodes,
        max_nodes,
        nproc,
        local,
    )


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", str(text))
    if not match:
        raise UsageError(f"--nnodes {text}: must be N or MIN:MAX")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {text}: needs 0 < MIN <= MAX")
    return low, high


def _nproc(text: str) -> int | None:
    try:
        count = int(text)
    except ValueError:
        if text in _NPROC_WORDS or _other_backends():
            return None
        near = difflib.get_close_matches(text, _NPROC_WORDS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"--nproc-per-node {text}: must be a number or one of {', '.join(_NPROC_WORDS)}{hint}")
    if count < 1:
        raise UsageError(f"--nproc-per-node {text}: must be 1 or more")
    return count


def _other_backends() -> bool:
    """Whether a backend is installed that is no part of torch; it may bring a word of its own."""
    from importlib.metadata import entry_points

    return bool(entry_points(group="torch.backends"))


def _check_values(options: argparse.Namespace) -> None:
    """Values whose mistakes torchrun answers with a traceback."""
    for name in ("max_restarts", "shutdown_timeout"):
        value = getattr(options, name, None)
        if value is not None and value < 0:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be 0 or more")
    for name in ("redirects", "tee"):
        value = getattr(options, name, "0")
        if not _REDIRECTS.fullmatch(value):
            raise UsageError(f"--{name} {value}: must be 0 to 3, or local ranks with such a number (0:1,1:2)")
    ranks = getattr(options, "local_ranks_filter", "")
    if ranks and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", ranks):
        raise UsageError(f"--local-ranks-filter {ranks}: must be numbers with commas")
    for pair in getattr(options, "rdzv_conf", "").strip().split(","):
        key, _, value = pair.partition("=")
        if pair and not (key.strip() and value.strip()) or (not pair and options.rdzv_conf.strip()):
            raise UsageError(f"--rdzv-conf {options.rdzv_conf}: must be KEY=VALUE,KEY=VALUE")
    if getattr(options, "module", False) and getattr(options, "no_python", False):
        raise UsageError("--module and --no-python contradict each other")


def _check_place(options: argparse.Namespace, max_nodes: int) -> None:
    """Where the nodes meet, for torch's own two ways (others may spell an endpoint as they like)."""
    if options.rdzv_backend not in ("static", "c10d") or getattr(options, "standalone", False):
        return
    endpoint = options.rdzv_endpoint.strip()
    if endpoint and not _is_endpoint(endpoint):
        raise UsageError(f"--rdzv-endpoint {endpoint}: must be HOST or HOST:PORT")
    port = options.master_port
    if port is not None and not 0 <= port < 1 << 16:
        raise UsageError(f"--master-port {port}: must be 0 to 65535")
    if options.rdzv_backend == "static" and max_nodes > 1 and not 0 <= options.node_rank < max_nodes:
        raise UsageError(f"--node-rank {options.node_rank} and --nnodes {options.nnodes} contradict each other")


def _is_endpoint(text: str) -> bool:
    """As torch reads it: what follows the last colon is the port, brackets hold an IPv6 address."""
    host, *port = [text] if text[0] == "[" and text[-1] == "]" else text.rsplit(":", 1)
    host = host[1:-1] if len(host) > 1 and host[0] == "[" and host[-1] == "]" else host
    if port and not (re.fullmatch(r"[0-9]+", port[0]) and int(port[0]) < 1 << 16):
        return False
    return re.fullmatch(r"[\w.:-]+", host) is not None


def _check_log_dir(options: argparse.Namespace) -> None:
    """torch's own log specs make the folder, or one inside it."""
    asked = getattr(options, "log_dir", None)
    if not asked or asked == os.devnull or getattr(options, "logs_specs", None) not in (None, "default"):
        return
    place = os.path.abspath(asked)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise UsageError(f"--log-dir {asked}: {'it' if place == os.path.abspath(asked) else place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--log-dir {asked}: nothing can be written in {place}")


def _check_accelerator(word: str, environ: Mapping[str, str]) -> None:
    """The word for a kind of device that this torch or this environment has none of, where that is certain without
    asking a driver."""
    kinds = {"gpu": ("cuda", "hip"), "xpu": ("xpu",)}.get(word, ())
    if not kinds:
        return
    torch = os.path.dirname(os.path.dirname(optiontable.source_path()))
    try:
        with open(os.path.join(torch, "version.py"), encoding="utf-8") as file:
            built = file.read()
    except OSError:
        return
    why = ""
    if all(re.search(rf"^{kind}\b.*=\s*None\s*$", built, re.MULTILINE) for kind in kinds):
        why = "the torch installed here is built without"
    elif word == "gpu" and "CUDA_VISIBLE_DEVICES" in environ and not localnodes.visible_devices(environ):
        why = f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']} leaves none"
    if why:
        raise UsageError(f"--nproc-per-node {word}: there is none, {why} (a number, cpu or auto works)")


def _check_script(script: str, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """The script must be there. What only another interpreter can know (PYTHON_EXEC) is left to it."""
    if getattr(options, "run_path", False):
        exists, kind = os.path.exists(script), "script"
    elif getattr(options, "no_python", False):
        exists, kind = shutil.which(script) is not None, "program"
    elif getattr(options, "module", False):
        exists, kind = environ.get("PYTHON_EXEC") is not None or _module_exists(script), "module"
        if exists and script.endswith(".py") and os.path.exists(script):
            raise UsageError(f"-m takes the name of a module: {script.removesuffix('.py').replace(os.sep, '.')}")
    else:
        exists, kind = os.path.exists(script), "script"
        if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
            raise UsageError(f"{script} is a folder without a __main__.py")
    if not exists:
        raise UsageError(f"no such {kind}: {script}{_near_file(script)}")


def _module_exists(name: str) -> bool:
    top = name.partition(".")[0]
    saved = sys.path[:]
    try:
        sys.path.insert(0, os.getcwd())
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path[:] = saved


def _near_file(script: str) -> str:
    try:
        names = os.listdir(os.path.dirname(script) or ".")
    except OSError:
        return ""
    near = difflib.get_close_matches(os.path.basename(script), names, n=1, cutoff=0.7)
    return f" (did you mean {os.path.join(os.path.dirname(script), near[0])}?)" if near else ""
