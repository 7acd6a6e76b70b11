"""The real controller under the load of a large job: as many simulated ranks as the file limit allows.

    python tests/bench/bench_controller.py [--full] [--json FILE]

A thousand ranks, 16,384 with --full. They come all at once, say hello, what they guard and their counters; then, while
counters keep coming from all of them, a burst of findings; then the controller is killed and started again. Figures:
seconds until all had arrived, until the verdict of a finding was said, until all were back, the controller's memory,
and whether each event is on record once. Loopback only.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from sdcrun.core.codec import decode_event
from sdcrun.core.types import Config

CROWD = Path(__file__).with_name("crowd.py")
RANKS, FULL_RANKS = 1000, 16_384
SPARE_FILES = 256
PATIENCE = 300.0
BURST = 10  # of one kind more are said now and then only
COUNTERS = 250


class Bench:
    """One controller and one crowd in `folder`; use as a context manager."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks, self.folder = ranks, folder
        self.job, self.runtime = folder / "job", folder / "runtime.json"
        self.job.mkdir()
        config = Config(job_id="bench", job_dir=str(self.job), audit_every=0, max_strikes=10_000, max_skipped=10_000)
        self.environ = {**os.environ, "SDCRUN_CONFIG": json.dumps(config.to_json())}
        self.said: queue.Queue[tuple[float, str]] = queue.Queue()
        self.peak = 0.0
        self.emitted = 0

    def __enter__(self) -> Bench:
        self.start()
        arguments = [sys.executable, str(CROWD), str(self.runtime), str(self.ranks)]
        self.crowd = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.crowd, self.controller):
            process.kill()
            process.wait()

    def start(self) -> None:
        """Start the controller as its supervisor does."""
        arguments = ["-m", "sdcrun.runner.controller", "--runtime", str(self.runtime), "--job-dir", str(self.job)]
        self.controller = subprocess.Popen(
            [sys.executable, *arguments], env=self.environ, stderr=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, args=(self.controller.stderr,), daemon=True).start()

    def _listen(self, pipe) -> None:
        for line in pipe:
            self.said.put((time.monotonic(), line))

    def tell(self, **order) -> dict:
        """Give the crowd an order; returns where it stands."""
        self.crowd.stdin.write(json.dumps(order) + "\n")
        self.crowd.stdin.flush()
        status = json.loads(self.crowd.stdout.readline())
        self.emitted = status["emitted"]
        return status

    def until(self, condition) -> float:
        """Seconds until `condition(status)` holds."""
        began = time.monotonic()
        while not condition(self.tell(do="status")):
            if time.monotonic() - began > PATIENCE:
                raise RuntimeError(f"waited in vain: {self.tell(do='status')}")
            self.peak = max(self.peak, self.memory())
            time.sleep(0.05)
        return time.monotonic() - began

    def memory(self) -> float:
        """MiB resident in the controller at most so far."""
        try:
            status = Path(f"/proc/{self.controller.pid}/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) / 1024
        except (OSError, IndexError):
            return 0.0

    def cpu(self) -> float:
        """CPU seconds that this controller's process has used; on a busy machine the figure to compare."""
        fields = Path(f"/proc/{self.controller.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def everybody(self, kind: str, data: dict) -> None:
        """Every rank emits one event."""
        self.tell(do="events", ranks=[0, self.ranks], kind=kind, data=data)

    def arrive(self) -> float:
        """All ranks come, and say who they are and what they guard."""
        group = [[0, self.ranks]]
        device = {"host": "bench", "uuid": "rank", "pci": None, "model": "simulated", "serial": None}
        self.everybody("hello", {
            "rank": "rank", "local_rank": 0, "node": "rank", "world_size": self.ranks, "local_world_size": 1,
            "restart_count": 0, "pid": 1, "device": device, "versions": {}, "interpreter": "python", "session": "s",
        })  # fmt: skip
        modules = [{"name": "", "parameters": 10, "tensors": 2, "bytes": 40}]
        self.everybody("guarded", {"group": group, "modules": modules})
        return self.until(lambda status: status["connected"] == self.ranks and status["owed"] == 0)

    def summaries(self, seen: int, ranks: tuple[int, int]) -> None:
        """Counters of some ranks."""
        counters = {check: {"run": seen, "fired": 0, "seconds": 0.1} for check in ("nonfinite", "replay", "weights")}
        data = {
            "group": [[0, self.ranks]], "steps": {"seen": seen, "committed": seen, "skipped": 0}, "checks": counters,
            "parts": {"ballot": 0.1}, "train_seconds": 1.0, "last_audit_step": None,
        }  # fmt: skip
        self.tell(do="events", ranks=ranks, kind="summary", data=data)

    def findings(self) -> list[float]:
        """A burst of votes in which one rank each dissents, amid counters of all: seconds to each verdict. So many
        counters at once are ten times what the controller asks for in a large job, fifty a second."""
        said: dict[int, float] = {}
        began = time.monotonic()
        for number in range(BURST):
            bad, step = 1 + number * (self.ranks - 2) // BURST, 1000 + number
            row = {"step": step, "group": [[0, self.ranks]], "table": "weights", "minority": {"w": [bad]},
                   "no_majority": [], "action": "repaired", "again": "clean", "why": None}  # fmt: skip
            word = {"step": step, "table": "weights", "tensor": "w", "dtype": "float32", "shape": [4], "words": 1,
                    "index": 1, "expected": "0x1", "observed": "0x2", "expected_value": 1, "observed_value": 2,
                    "bits": [1], "peer": 0, "rank": bad}  # fmt: skip
            self.tell(do="events", ranks=[0, 1], kind="vote", data=row)
            self.tell(do="events", ranks=[bad, bad + 1], kind="vote", data=row)
            self.tell(do="events", ranks=[bad, bad + 1], kind="word", data=word)
            said[step] = time.monotonic()
            first = COUNTERS * number % self.ranks
            self.summaries(step, (first, min(first + COUNTERS, self.ranks)))
        found: dict[int, float] = {}
        while len(found) < BURST and time.monotonic() - began < PATIENCE:
            at, line = self.said.get(timeout=PATIENCE)
            for step in said:
                if f"step {step}" in line:
                    found.setdefault(step, at)
        return [max(0.0, found[step] - said[step]) for step in said]

    def come_back(self) -> float:
        """The controller is killed and started again; seconds from its start until all are back and owe nothing."""
        self.controller.send_signal(signal.SIGKILL)
        self.controller.wait()
        self.until(lambda status: status["connected"] == 0)
        self.start()
        return self.until(lambda status: status["connected"] == self.ranks and status["owed"] == 0)

    def on_record(self) -> int:
        """Events of ranks on record, each once."""
        seen = set()
        with open(self.job / "events.jsonl", "rb") as file:
            for line in file:
                event = decode_event(line)
                key = event.source, event.session, event.attempt, event.seq
                if key in seen:
                    raise RuntimeError(f"twice on record: {key}")
                seen.add(key)
        return sum(source.startswith("rank:") for source, *_ in seen)


def run(full: bool = False) -> dict:
    """All figures; those that end in cpu_s are of the controller's process, `lost` counts events not on record."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ranks = min(FULL_RANKS if full else RANKS, hard - SPARE_FILES)
    with tempfile.TemporaryDirectory(prefix="sdcrun-bench-") as folder, Bench(Path(folder), ranks) as bench:
        arrive = bench.arrive()
        arrive_cpu = bench.cpu()
        bench.summaries(10, (0, ranks))
        bench.until(lambda status: status["owed"] == 0)
        delays = sorted(bench.findings())
        bench.until(lambda status: status["owed"] == 0)
        back = bench.come_back()
        back_cpu = bench.cpu()
        peak = max(bench.peak, bench.memory())
        lost = bench.emitted - bench.on_record()
    return {
        "bench": "controller",
        "machine": {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)},
        "ranks": ranks,
        "arrive_s": round(arrive, 2),
        "arrive_cpu_s": round(arrive_cpu, 2),
        "verdict_s": {"median": round(delays[len(delays) // 2], 3), "worst": round(delays[-1], 3)},
        "back_s": round(back, 2),
        "back_cpu_s": round(back_cpu, 2),
        "memory_mib": round(peak, 1),
        "lost": lost,
    }


def main(arguments: list[str]) -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help=f"{FULL_RANKS} ranks, or as many as there may be files")
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    result = run(options.full)
    print(json.dumps(result, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
