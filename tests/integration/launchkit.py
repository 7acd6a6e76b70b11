"""Starts the real sdcrun on small scripts, each in a folder of its own, and looks for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil

PYTHON = sys.executable
PATIENCE = 240.0
PRELUDE = """
import os, signal, subprocess, sys, time
RANK = int(os.environ["RANK"])
def note(name, text=""):
    with open(f"{name}.{RANK}", "a") as file:
        file.write(text + "\\n")
def wait_for_end():
    note("up", str(os.getpid()))
    while True:
        time.sleep(0.05)
"""


class Launch:
    """One `sdcrun` in `folder`, whose processes are known by a variable that all of them inherit."""

    def __init__(self, folder: Path, script: str, *options: str, environ: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.temporary = folder / f"tmp-{self.mark}"
        self.temporary.mkdir()
        (folder / "script.py").write_text(PRELUDE + textwrap.dedent(script))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SDCRUN_", "PET_"))}
        self.environ = kept | {"LAUNCH_MARK": self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        self.environ |= environ or {}
        self.out, self.err = self.folder / f"out-{self.mark}", self.folder / f"err-{self.mark}"
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "sdcrun.cli", "--sdc-job", "job", *options, "script.py"],
                cwd=folder,
                env=self.environ,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def job(self) -> Path:
        """The job's folder."""
        return self.folder / "sdcrun_jobs" / "job"

    def says(self) -> list[str]:
        """sdcrun's own lines on stderr."""
        lines = self.err.read_text(errors="replace").splitlines()
        return [line.removeprefix("[sdcrun] ") for line in lines if line.startswith("[sdcrun] ")]

    def until(self, condition, what: str):
        """Wait for `condition()` to give something true; returns it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}\n{self.err.read_text(errors='replace')[-4000:]}"
            time.sleep(0.02)
        return found

    def up(self, ranks: int = 2) -> list[int]:
        """Wait until so many ranks are at work; returns their pids by rank."""
        names = [self.folder / f"up.{rank}" for rank in range(ranks)]
        self.until(lambda: all(name.exists() and name.read_text() for name in names), "the ranks do not come up")
        return [int(name.read_text()) for name in names]

    def agents(self) -> list[int]:
        """Pids of torchrun's agents."""
        return [p.pid for p in self.started("torchrun")]

    def controllers(self) -> list[psutil.Process]:
        """The controller's process, if there is one just now."""
        return self.started("controller")

    def started(self, role: str) -> list[psutil.Process]:
        """What sdcrun itself has started in that role."""
        found = []
        for process in self.processes():
            # One that ends while it is looked at is none.
            with contextlib.suppress(psutil.Error):
                if role in process.cmdline()[1:3] and process.ppid() == self.process.pid:
                    found.append(process)
        return found

    def processes(self) -> list[psutil.Process]:
        """Everything alive that this launch has started, sdcrun itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("LAUNCH_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end(self) -> int:
        """Wait for the end of sdcrun; returns its exit code. Nothing may be left of it."""
        self.until(lambda: self.process.poll() is not None, "sdcrun does not end")
        code = self.process.returncode
        self.nothing_left()
        return code

    def nothing_left(self) -> None:
        """No process and no temporary file."""
        self.until(lambda: not self.processes(), f"still there: {[p.cmdline() for p in self.processes()]}")
        # torch's compiler makes its cache, one per user, whenever it is imported.
        left = [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        assert not left, left
        assert not list(self.job.glob(f"controller-*-{self.process.pid}.json*"))

    def kill(self) -> None:
        """End whatever a failed test has left."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait(10)
