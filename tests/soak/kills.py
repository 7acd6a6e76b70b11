"""Kills one process of a training at random, over and over, and looks at what is left of the job.

    python tests/soak/kills.py ROUNDS [--state FILE] [--keep FOLDER]

Each round is a training of three nodes: one `sdcrun --nnodes 3`, or (every third round, where the kernel lets network
namespaces be made) three sdcrun on hosts of their own. The round's number is its seed: it says which process gets
SIGKILL (controller, sdcrun, an agent, a rank, the one that keeps a copy of the record) and when. Then nothing may run
on or hang, no file be half written, no event be lost or doubled, and the exit code be what torchrun's would be. The
state file makes a run resumable. Exit code 1 when a round failed; its folder is kept in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path

import psutil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

import hostkit  # noqa: E402
from launchkit import PYTHON, Launch  # noqa: E402

from sdcrun.core.codec import decode_event, whole_lines  # noqa: E402
from sdcrun.report import store  # noqa: E402

LOOP = HERE.parent / "integration" / "loops" / "paced.py"
NODES = range(3)
STEPS, AUDIT_EVERY = 60, 5
# torchrun itself waits 300 s at the end for an agent that has vanished.
PATIENCE = 400.0
VICTIMS = ("controller", "rank", "agent", "sdcrun")
# What torchrun's own end is: of its agents the one that is killed ends with 137, the others, like one whose rank is
# killed, with 1. Once the ranks are done a kill may come too late to change anything.
CODES = {"controller": {0}, "follower": {0}, "rank": {0, 1}, "agent": {0, 1, 137}, "sdcrun": {0, 1, -9, 137}}


class OneHost:
    """`sdcrun --nnodes 3`, every other time with a restart of the ranks to spare."""

    victims = VICTIMS

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folders = [folder]
        self.restarts = chance.randrange(2)
        script = f"import runpy\nsys.argv = ['', '{STEPS}', '0.05']\nrunpy.run_path({str(LOOP)!r}, run_name='__main__')"
        options = ("--nnodes", "3", "--max-restarts", str(self.restarts), "--sdc-audit-every", str(AUDIT_EVERY))
        self.launch = Launch(
            folder, script, *options,
            # Otherwise torch may connect restarted ranks to what earlier ones left in the agents' store.
            environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )  # fmt: skip

    def jobs(self) -> list[Path]:
        return [self.launch.job]

    def processes(self) -> list[psutil.Process]:
        return self.launch.processes()

    def codes(self) -> list[int | None]:
        return [self.launch.process.poll()]

    def told(self) -> str:
        return self.launch.err.read_text(errors="replace")

    def end(self) -> None:
        self.launch.kill()


class ThreeHosts:
    """One sdcrun on each of three hosts with addresses, temporary folders and file systems of their own."""

    victims = (*VICTIMS, "follower")
    restarts = 0

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.lab = hostkit.Lab(folder, 3)
        self.folders = [node.folder for node in self.lab.nodes]
        self.started = []
        for index, node in enumerate(self.lab.nodes):
            place = f"is_host={int(index == 2)},last_call_timeout=3,join_timeout=60"
            rendezvous = ("--rdzv-endpoint", f"{self.lab.nodes[2].address}:29400", "--rdzv-id", "job")
            self.started.append(
                node.sdcrun(
                    "--sdc-job", "job", "--sdc-audit-every", str(AUDIT_EVERY), "--nnodes", "3",
                    "--rdzv-backend", "c10d", *rendezvous, "--rdzv-conf", place, str(LOOP), str(STEPS), "0.1",
                )
            )  # fmt: skip

    def jobs(self) -> list[Path]:
        return [node.job for node in self.lab.nodes]

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if _environ(p).get("HOST_MARK") == self.lab.name and _lives(p)]

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.started]

    def told(self) -> str:
        return "".join(f"--- {node.name}\n{node.err()}" for node in self.lab.nodes)

    def end(self) -> None:
        self.lab.end()


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def role(process: psutil.Process, keeper: str) -> str:
    """What a process of the job is; `keeper` is the temporary folder of the host on which rank 0 runs."""
    try:
        words = process.cmdline()
        parent = process.parent()
        if words[1:3] == ["-m", "sdcrun.cli"]:
            return "sdcrun"
        if words[1].endswith("start.py") and words[2] == "torchrun":
            return "agent"
        if words[1].endswith("start.py") and words[2] == "controller":
            return "controller" if _environ(process).get("TMPDIR") in ("", keeper) else "follower"
        if "RANK" in _environ(process) and parent and role(parent, keeper) == "agent":
            return "rank"
    except (psutil.Error, IndexError):
        pass
    return ""


def until(condition, seconds: float, what: str):
    """Wait for `condition()` to be true; AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def steps_of(job, rank: int) -> int:
    """Steps that a rank has made, those of several attempts together."""
    return sum(file.read_text().count("\n") for folder in job.folders for file in folder.glob(f"steps.*.{rank}"))


def reach(job, chance: random.Random) -> str:
    """Wait for a moment of the job drawn by `chance`; returns its name."""
    moment = chance.choice(("launch", "ranks", "training", "training", "end"))
    over = lambda: None not in job.codes()  # noqa: E731
    if moment == "ranks":
        until(lambda: over() or any(role(p, "") == "rank" for p in job.processes()), PATIENCE, "no ranks")
    elif moment == "training":
        step = chance.randrange(1, STEPS)
        until(lambda: over() or steps_of(job, 0) >= step, PATIENCE, "no steps")
        moment = f"step {step}"
    elif moment == "end":
        until(lambda: over() or steps_of(job, 0) >= STEPS, PATIENCE, "the training does not end")
    time.sleep(chance.uniform(0.0, 0.2 if moment.startswith("step") else 3.0))
    return moment


def kill(job, victim: str, chance: random.Random) -> bool:
    """SIGKILL to a process of that kind; False when there is none any more."""
    # Ranks are numbered by address, so that rank 0's host is the first one.
    keeper = str(job.folders[0] / "tmp") if len(job.folders) > 1 else job.launch.environ["TMPDIR"]
    found = until(
        lambda: [p for p in job.processes() if role(p, keeper) == victim] or None not in job.codes(), 30, f"no {victim}"
    )
    if found is True:
        return False
    os.kill(chance.choice(sorted(process.pid for process in found)), signal.SIGKILL)
    return True


def ended(job, victim: str) -> list[int]:
    """Exit codes; nothing may hang or be left running."""
    until(lambda: None not in job.codes(), PATIENCE, "sdcrun hangs")
    until(lambda: not job.processes(), 30, f"left running: {[p.cmdline() for p in job.processes()]}")
    codes = job.codes()
    assert set(codes) <= CODES[victim], f"exit codes {codes}"
    assert any(codes) or all(steps_of(job, rank) >= STEPS for rank in NODES), f"{codes}, and the training is not done"
    if victim == "rank" and job.restarts:
        assert codes == [0], f"{codes}, with a restart to spare"
    return codes


def files_whole(folder: Path) -> None:
    """No temporary and no half file in a job folder, and nothing but whole lines on the record."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        assert not path.name.startswith(".") and not path.name.endswith((".new", ".part")), f"left: {path.name}"
        content = path.read_bytes()
        if path.suffix == ".json":
            json.loads(content)
        elif path.suffix == ".jsonl":
            for line in whole_lines(content):
                decode_event(line)
            assert content.endswith(b"\n") or not content, f"half a line in {path}"


def events_whole(job) -> None:
    """On each record every client's events are once, in order, without a hole; what the ranks said is somewhere."""
    audits, off = defaultdict(set), {}
    for folder in (folder for folder in job.jobs() if folder.exists()):
        streams = defaultdict(list)
        if (folder / "events.jsonl").exists():
            for line in (folder / "events.jsonl").read_bytes().splitlines():
                event = decode_event(line)
                streams[event.source, event.session, event.attempt].append(event.seq)
        for stream, seqs in streams.items():
            assert seqs == list(range(1, len(seqs) + 1)), f"{stream}: {seqs}"
        try:
            for event in store.read_events(folder):
                assert event.kind != "gap", event.data
                if event.kind == "audit":
                    audits[event.source].add(event.data["step"])
                elif event.kind == "check_off":
                    # A peer was killed in the middle of this step.
                    off[event.source] = event.data["step"]
        except store.JobError:
            continue
    for rank in NODES if not job.restarts else ():
        # With a restart nobody can tell which attempt a step was of.
        due = set(range(0, min(steps_of(job, rank), off.get(f"rank:{rank}", STEPS)), AUDIT_EVERY))
        lost = sorted(due - audits[f"rank:{rank}"])
        assert not lost, f"what rank {rank} said of the audits of steps {lost} is lost"


def report_of(folder: Path) -> dict:
    """The report that `sdcrun report` makes of a job folder."""
    command = [PYTHON, "-m", "sdcrun.cli", "report", str(folder), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def unharmed(job) -> None:
    """The training did not notice, and one record has all of it."""
    assert [steps_of(job, rank) for rank in NODES] == [STEPS] * 3
    kept = [folder for folder in job.jobs() if (folder / "events.jsonl").exists()]
    assert len(kept) == 1, kept
    report = json.loads((kept[0] / "report.json").read_text())
    assert (report["status"], report["guarded_ranks"], report["findings"]) == ("finished", 3, []), report
    assert report["steps"] == {"seen": STEPS, "committed": STEPS, "skipped": 0}, report["steps"]
    assert not (kept[0] / "spool").exists()
    assert not [event.data for event in store.read_events(kept[0]) if event.kind == "check_off"]


def play(number: int, folder: Path) -> dict:
    """One round; {round, layout, victim, moment, codes, wrong: text or None, ...}."""
    chance = random.Random(number)
    kind = ThreeHosts if number % 3 == 2 and hostkit.why_not() is None else OneHost
    victim = chance.choice(kind.victims)
    began = time.monotonic()
    job = kind(folder, chance)
    row = {"round": number, "layout": kind.__name__, "restarts": job.restarts, "victim": victim, "wrong": None}
    try:
        row["moment"] = reach(job, chance)
        row["killed"] = kill(job, victim, chance)
        row["codes"] = ended(job, victim)
        left = [path.name for folder in job.folders for path in folder.glob("tmp*/*")]
        assert not [name for name in left if not name.startswith("torchinductor_")], left
        for path in filter(Path.exists, job.jobs()):
            files_whole(path)
            report_of(path) if (path / "events.jsonl").exists() else None
        events_whole(job)
        if victim in ("controller", "follower"):
            unharmed(job)
    except Exception as error:
        row["wrong"] = f"{type(error).__name__}: {error}"
        (folder / "told").write_text(traceback.format_exc() + job.told())
    finally:
        job.end()
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int)
    parser.add_argument("--state", type=Path, default=Path("build/kills.json"))
    parser.add_argument("--keep", type=Path, default=Path("build/kills"))
    options = parser.parse_args()
    rows = json.loads(options.state.read_text()) if options.state.exists() else []
    options.state.parent.mkdir(parents=True, exist_ok=True)
    while len(rows) < options.rounds:
        folder = Path(tempfile.mkdtemp(prefix="kills-"))
        rows.append(play(len(rows), folder))
        print(json.dumps(rows[-1]), flush=True)
        if rows[-1]["wrong"]:
            shutil.copytree(folder, options.keep / str(rows[-1]["round"]), dirs_exist_ok=True)
        shutil.rmtree(folder)
        temporary = options.state.with_suffix(".part")
        temporary.write_text(json.dumps(rows, indent=1))
        temporary.replace(options.state)
    wrong = [row for row in rows if row["wrong"]]
    print(f"{len(rows)} rounds, {sum(row.get('killed', False) for row in rows)} kills, {len(wrong)} went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
