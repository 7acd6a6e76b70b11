"""Hosts of their own on one machine: network, process, mount and host name namespaces, joined by a switch.

Each host has an address, a name that all others can resolve, a folder that the others do not look into, and a cable
that can be cut. Needs root and iproute2; `why_not` says what is missing.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

PATIENCE = 180.0
# Private addresses that no other network here is likely to use.
NETWORK = "10.213.77"
START = """
hostname "$1" && mount --bind "$2" /etc/hosts && cd "$3" || exit 99
test -z "$4" || mount --bind "$4" "$5" || exit 98
shift 5
"$@"
exit $?
"""


@functools.cache
def why_not() -> str | None:
    """Why hosts cannot be made here, None when they can."""
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("unshare"):
        return "no network namespaces: needs Linux with iproute2 and util-linux"
    name = f"sdc{uuid.uuid4().hex[:6]}"
    commands = (
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "add", "b0", "type", "bridge"],
        ["ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"],
    )
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return f"no network namespaces: {done.stderr.strip() or done.returncode}"
        return None
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Host:
    """One host. What is started on it shares its names and dies with it."""

    def __init__(self, lab: Lab, index: int) -> None:
        self.lab, self.name, self.address = lab, f"node{index}", f"{NETWORK}.{index + 1}"
        self.space, self.port = f"{lab.name}n{index}", f"p{index}"
        self.folder = lab.folder / self.name
        self.folder.mkdir()
        self.started: list[subprocess.Popen] = []
        self.replaced = ("", "")
        _ip("netns", "add", self.space)
        _ip("-n", lab.switch, "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        _ip("-n", lab.switch, "link", "set", self.port, "master", "b0", "up")
        _ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.space, "link", "set", device, "up")

    def replace(self, path: Path, content: str) -> None:
        """What is started here from now on sees `content` in the file at `path`."""
        own = self.folder / path.name
        own.write_text(content)
        self.replaced = (str(own), str(path))

    def run(self, *command: str, **environ: str) -> subprocess.Popen:
        """Start a command in the host's folder, its output in the files out and err there."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SDCRUN_", "PET_", "SLURM_", "TORCHELASTIC"))}
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        own = {"OMP_NUM_THREADS": "1", "HOST_MARK": self.lab.name, "TMPDIR": str(temporary)}
        spaces = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        front = ["ip", "netns", "exec", self.space, *spaces, "sh", "-c", START, "host", self.name]
        with open(self.folder / "out", "ab") as out, open(self.folder / "err", "ab") as err:
            process = subprocess.Popen(
                [*front, str(self.lab.hosts), str(self.folder), *self.replaced, *command],
                env={**kept, **own, **environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def sdcrun(self, *arguments: str, **environ: str) -> subprocess.Popen:
        """Start sdcrun here."""
        return self.run(sys.executable, "-m", "sdcrun.cli", *arguments, **environ)

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self.lab.switch, "link", "set", self.port, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", self.lab.switch, "link", "set", self.port, "up")

    def block(self, port: int) -> None:
        """Drop what this host sends to TCP port `port` of others; all else passes."""
        _ip("-n", self.space, "rule", "add", "ipproto", "tcp", "dport", str(port), "blackhole")

    def unblock(self, port: int) -> None:
        """Let everything pass again."""
        _ip("-n", self.space, "rule", "del", "ipproto", "tcp", "dport", str(port), "blackhole")

    def lose(self) -> None:
        """The host is gone: every process, and once the system has closed what they had open, the cable."""
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()
        pids = ["ip", "netns", "pids", self.space]
        self.lab.wait(lambda: not subprocess.run(pids, capture_output=True, check=True).stdout, "cannot be killed")
        time.sleep(0.5)
        self.cut()

    @property
    def job(self) -> Path:
        """The folder of the only job on this host."""
        return self.folder / "sdcrun_jobs" / "job"

    def says(self) -> list[str]:
        """sdcrun's own lines."""
        lines = (self.folder / "err").read_text(errors="replace").splitlines()
        return [line.removeprefix("[sdcrun] ") for line in lines if line.startswith("[sdcrun] ")]

    def err(self) -> str:
        """The end of what was said on stderr."""
        return (self.folder / "err").read_text(errors="replace")[-6000:]


class Lab:
    """`count` hosts on one switch, made and removed whole."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.name = folder, f"sdc{uuid.uuid4().hex[:6]}"
        self.switch = f"{self.name}s"
        self.hosts = folder / "hosts"
        self.hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{NETWORK}.{n + 1} node{n}\n" for n in range(count))
        )
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "b0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "b0", "up")
        self.nodes = [Host(self, index) for index in range(count)]

    def wait(self, condition, what: str):
        """Wait for `condition()` to give something true; returns it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            if time.monotonic() >= deadline:
                raise AssertionError(what + "".join(f"\n--- {node.name}\n{node.err()}" for node in self.nodes))
            time.sleep(0.05)
        return found

    def end(self) -> None:
        """Kill everything on the hosts, then remove them."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOST_MARK") == self.name:
                    process.kill()
            except psutil.Error:
                continue
        for node in self.nodes:
            for process in node.started:
                process.wait(20)
        for space in [*(node.space for node in self.nodes), self.switch]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
