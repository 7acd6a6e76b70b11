"""A real sdcrun on a real terminal: the script's output is whole, the status is there while it runs and gone after."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import struct
import sys
import termios
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from screen import Screen  # noqa: E402

pytestmark = pytest.mark.slow

ROWS, COLUMNS = 30, 110
COMMAND = [sys.executable, "-m", "sdcrun.cli", "--sdc-job", "job", "--nproc-per-node", "2", "script.py"]
SCRIPT = """
import os, time

rank = int(os.environ["RANK"])
# Until the status has been there.
while not os.path.exists("seen"):
    if rank == 0:
        print("\\rbar", end="", flush=True)
    time.sleep(0.1)
if rank == 0:
    print(flush=True)
    for line in range(60):
        print("line", line)
    print("a partial line", end="", flush=True)
    time.sleep(0.3)
    print(" and its end")
    print("the last partial line", end="", flush=True)
"""


def on_terminal(command, folder, environ, watch=lambda output: None):
    """(exit code, all output) of a command that is the foreground job of a terminal of its own. `watch` sees the output
    so far as it grows."""
    pid, leader = pty.fork()
    if pid == 0:
        try:
            os.chdir(folder)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            os.execve(command[0], command, environ)
        finally:
            os._exit(127)
    output = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:
            break
        if not data:
            break
        output += data
        watch(output.decode("utf-8", "replace"))
    os.close(leader)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output.decode("utf-8", "replace")


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SDCRUN_", "PET_"))}
    kept.pop("CI", None)
    return {**kept, "TERM": "xterm", "OMP_NUM_THREADS": "1"}


def test_output_is_whole_and_the_status_goes(tmp_path, environ):
    def watch(output):
        if "waiting for the first step · 0/2 guarded" in output:
            (tmp_path / "seen").touch()

    code, output = on_terminal(COMMAND, tmp_path, environ, watch)
    assert code == 0, output
    screen = Screen(ROWS, COLUMNS)
    screen.feed(output)
    lines = screen.lines()
    assert "/2 guarded" not in "\n".join(lines) and (screen.top, screen.bottom) == (0, ROWS - 1)
    at = lines.index("a partial line and its end")
    assert lines[:at] == [f"line {number}" for number in range(60 - at, 60)]
    assert lines[at + 1] == "the last partial line"
    assert lines[at + 2].startswith("[sdcrun] ") and any("Nothing was guarded" in line for line in lines[at:])


def test_the_terminal_is_whole_after_sdcrun_was_killed(tmp_path, environ):
    """By what no process can handle; the shell that started it is there still."""
    (tmp_path / "script.py").write_text("import time\ntime.sleep(600)\n")
    taken, given = "\x1b[1;29r", "\x1b[r\x1b[30;1H\x1b[2K"
    killed = []

    def watch(output):
        if "0/2 guarded" in output and not killed:
            killed.append(int((tmp_path / "pid").read_text()))
            os.kill(killed[0], signal.SIGKILL)
        if given in output:
            (tmp_path / "free").touch()

    # A terminal goes with the shell in front of it.
    shell = f"{shlex.join(COMMAND)} & echo $! > pid; wait $!; until [ -e free ]; do sleep 0.1; done"
    _, output = on_terminal(["/bin/sh", "-c", shell], tmp_path, environ, watch)
    assert output.rindex(given) > output.rindex(taken)
    screen = Screen(ROWS, COLUMNS)
    screen.feed(output)
    assert (screen.top, screen.bottom) == (0, ROWS - 1) and "guarded" not in screen.lines()[-1]
