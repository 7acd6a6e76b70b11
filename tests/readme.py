"""Runs the commands of README.md and puts what they print into it.

    python tests/readme.py                 rewrite the blocks
    python tests/readme.py --coverage      the coverage table too (minutes)
    python tests/readme.py --bench FILE    the table of costs, from a bench.json
    python tests/readme.py --check         compare only; exit code 1 where a block is out of date

A block stands between `<!-- output: COMMAND -->` (or `table:`, `coverage:`, `bench:`) and `<!-- end -->`. Commands run
one after another in one scratch folder that has the repository's `examples`, `configs` and `Makefile`, so that one can
use what an earlier one has left. Names that belong to a machine are replaced by made-up ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- (output|table|coverage|bench): (.*?) -->\n)(.*?)(<!-- end -->)", re.S)
FENCE = re.compile(r"(<!-- cluster only -->\n)?```sh\n(.*?)```", re.S)
LIMIT = 3000
HOST, JOB = "laptop", "20260105-093000-laptop"

# What differs from run to run and from machine to machine.
VARYING = [
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME"),
    (r"(?<![\w/.-])[\w./-]*/(?=sdcrun_jobs|build|examples|gpt\.pt|bin/|python|report)", ""),
    (r"\bpython[\d.]*\b", "python"),
    (r"CPU [A-Z0-9]+\b", "CPU"),
    (r"0x[0-9a-f]+", "HEX"),
    (r"\d+ (GiB|ms/step)", r"N \1"),
    (r"\d+ steps on 2 ranks in \d+ s, the first after \d+ s", "N steps on 2 ranks"),
    (r"\d+(,\d+)* done, 0 fired", "N done, 0 fired"),
    (r"\b\d+ clean\b", "N clean"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"-?\d+\.\d+(\.\d+)*(e-?\d+)?(\+\w+)?", "N"),
]


class Scratch:
    """The folder in which commands run, like a newcomer's clone: `sdcrun` is on PATH and torch has one thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("examples", "configs", "Makefile", "pyproject.toml", "tests"):
            (folder / name).symlink_to(ROOT / name)
        binary = Path(sys.executable).parent
        (folder / ".venv").symlink_to(binary.parent)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SDCRUN_", "PET_", "SLURM_"))}
        for name in ("RANK", "WORLD_SIZE", "CI", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
            kept.pop(name, None)
        self.environ = kept | {"PATH": f"{binary}:{kept['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}

    def run(self, command: str) -> tuple[int, str]:
        """(exit code, everything printed). `make` does not look after the environment here: it is there."""
        tokens = shlex.split(command)
        if tokens[0] == "make":
            tokens[1:1] = ["-o", ".venv/.stamp"]
        child = subprocess.run(
            tokens, cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
        )  # fmt: skip
        return child.returncode, self.anonymous(child.stdout)

    def anonymous(self, text: str) -> str:
        """`text` with made-up names for this machine and its folders."""
        host = socket.gethostname()
        text = text.replace(f"{self.folder}/", "").replace(f"{ROOT}/", "").replace(str(self.folder), ".")
        text = re.sub(rf"\d{{8}}-\d{{6}}-{re.escape(host.partition('.')[0])}(-\d+)?", JOB, text)
        text = re.sub(r"\bhost " + re.escape(host) + r"\b", f"host {HOST}", text)
        # Lines that are said now and then are there or not as the machine is slow or fast.
        status = re.compile(r"\[sdcrun\] (.* [\d?]+/[\d?]+ guarded( ·.*)?|\d+ of \d+ cells; .*)$")
        return "\n".join(line.rstrip() for line in text.splitlines() if not status.match(line)) + "\n"


def options_table() -> str:
    """Every own option, with its variable, its key in a settings file, and its default."""
    sys.path.insert(0, str(ROOT))
    from sdcrun.args import OWN_OPTIONS
    from sdcrun.config import FILE_KEYS
    from sdcrun.core.types import Config

    defaults = {field.name: field.default for field in dataclasses.fields(Config)} | {"dir": "sdcrun_jobs"}
    lines = ["| option | variable | key | default | |", "|---|---|---|---|---|"]
    named = set()
    for option in OWN_OPTIONS:
        named.add(option.setting)
        shown = f"`{option.name}{'' if option.metavar is None else ' ' + option.metavar}`".replace("|", "\\|")
        key = f"`{option.setting}`" if option.setting in FILE_KEYS else ""
        default = defaults.get(option.setting)
        text = "" if default in (None, "", ()) else "off" if default is False else str(default)
        lines.append(f"| {shown} | `{option.variable}` | {key} | {text} | {option.help} |")
    for key in FILE_KEYS:
        if key not in named:
            lines.append(f"| | | `{key}` | {defaults.get(key, '')} | see configs/sdcrun.yaml |")
    return "\n".join(lines) + "\n"


def live_status() -> str:
    """The line that shows where a job stands, of a made-up job."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/unit")]
    from eventmaker import Job

    from sdcrun.core import decide
    from sdcrun.report.follow import Progress

    job = Job(4)
    job.node_up()
    job.hello()
    job.summaries(1200)
    job.summaries(1240)
    job.vote(1199, {"head.weight": [2]})
    progress = Progress(job.config)
    for event in job.events:
        decide.fold(progress.state, event)
        progress.take(event, 0.0)
    return f"```text\n[sdcrun] {progress.line(0.0).plain}\n```\n"


TABLES = {"options": options_table, "the live status": live_status}


def costs(path: str) -> str:
    """The table of costs from what `make bench` has left."""
    command = [sys.executable, str(ROOT / "tests/bench/run.py"), "--table", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def produced(kind: str, command: str, scratch: Scratch) -> str:
    """The content of a block."""
    if kind == "table":
        return TABLES[command]()
    code, text = scratch.run(command)
    # A campaign in which something was missed is a table all the same.
    if code and not (kind == "coverage" and code == 88):
        raise SystemExit(f"{command}: exit code {code}\n{text}")
    return f"```console\n$ {command}\n{text.strip(chr(10))}\n```\n"


def plain(text: str) -> tuple[list[str], list[str]]:
    """What must be equal of a block: sdcrun's words and the others', each in order, without what varies. Lines that
    were wrapped are joined, since where they are wrapped depends on what varies."""
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    ours = [line for line in text.splitlines() if line.startswith("[sdcrun]")]
    others = [line for line in text.splitlines() if not line.startswith("[sdcrun]")]
    return " ".join(ours).split(), " ".join(others).split()


def rewrite(text: str, scratch: Scratch, wanted: Callable[[str, str], bool]) -> str:
    """`text` with new content in each block for which `wanted(kind, command)`."""

    def fresh(match: re.Match[str]) -> str:
        head, kind, command, content, end = match.groups()
        if wanted(kind, command):
            print(f"{kind}: {command}", file=sys.stderr, flush=True)
            content = produced(kind, command, scratch)
        return head + content + end

    return BLOCK.sub(fresh, text)


def changes(content: str, now: str) -> str:
    """What is no longer so in a block, as a diff of words; empty when it still says what its command says `now`."""
    found = []
    for one, other in zip(plain(content), plain(now)):
        found += list(difflib.unified_diff(one, other, "README.md", "now", n=3, lineterm=""))[:60]
    return "\n".join(found)


def differences(text: str, scratch: Scratch) -> list[str]:
    """What is out of date: a few lines for each block that says something else than its command does now."""
    found = []
    for _, kind, command, content, _ in BLOCK.findall(text):
        if kind in ("output", "table") and (changed := changes(content, produced(kind, command, scratch))):
            found.append(f"{command}:\n{changed}")
    return found


def fenced_commands(text: str) -> list[tuple[bool, str]]:
    """(cluster only, command) for every command line in ```sh fences."""
    rows = []
    for match in FENCE.finditer(text):
        for line in match[2].splitlines():
            if line.strip() and not line.startswith("#"):
                rows.append((bool(match[1]), line.strip()))
    return rows


def inline_code(text: str) -> list[str]:
    """What stands between backticks in sentences and tables."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S))


def links(text: str) -> list[str]:
    """Targets of links, those to other sites left out."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--coverage", action="store_true", help="the coverage table too")
    parser.add_argument("--bench", metavar="FILE", help="put the table of a bench.json in")
    parser.add_argument("--only", default="", help="only blocks whose command has this text")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="readme_") as folder:
        scratch, text = Scratch(Path(folder)), README.read_text()
        if asked.check:
            found = differences(text, scratch)
            print("\n\n".join(found))
            return int(bool(found))
        kinds = {"output", "table"} | ({"coverage"} if asked.coverage else set())
        new = rewrite(text, scratch, lambda kind, command: kind in kinds and asked.only in command)
        if asked.bench:
            table = costs(asked.bench)
            new = BLOCK.sub(lambda match: match[1] + (table if match[2] == "bench" else match[4]) + match[5], new)
        README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
