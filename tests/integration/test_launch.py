"""The supervisor with real agents: exit codes, what scripts see, and that nothing is left behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import psutil
import pytest
from launchkit import PYTHON, Launch

TWO = ("--nproc-per-node", "2")


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(script, *options, **more):
        started.append(Launch(tmp_path, script, *options, **more))
        return started[0]

    yield start
    for one in started:
        one.kill()


SEEN = """
import json
note("env", json.dumps(dict(os.environ)))
# One write: torchrun's workers are not buffered; print would write line and end apart, another rank's between.
sys.stdout.write(f"rank {RANK} " + " ".join(sys.argv[1:]) + "\\n")
"""
OF_A_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PYTHONPATH"}


def events(run):
    """The events on record."""
    try:
        lines = (run.job / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def test_success_and_what_the_script_sees(launch, tmp_path):
    daemon = "note('daemon', str(subprocess.Popen(['sleep', '100'], start_new_session=True).pid))"
    run = launch(f"{SEEN}\n{daemon}", *TWO, environ={"PYTHONPATH": "/x"})
    assert run.process.wait(120) == 0
    for rank in range(2):
        # A process that has made a session of its own is meant to live on, as it does under torchrun.
        psutil.Process(int((run.folder / f"daemon.{rank}").read_text())).kill()
    run.nothing_left()
    assert sorted(run.out.read_text().split("\n")) == ["", "rank 0 ", "rank 1 "]
    with_sdcrun = json.loads((run.folder / "env.1").read_text())
    assert {"events.jsonl", "job.json", "report.json", "report.txt"} <= set(os.listdir(run.job))
    assert json.loads((run.job / "job.json").read_text())["command"][0] == "sdcrun"
    on_record = events(run)
    assert "node_up" in [event["kind"] for event in on_record]
    assert (on_record[-1]["kind"], on_record[-1]["data"]) == ("job_end", {"exit_code": 0, "status": "finished"})
    assert json.loads((run.job / "report.json").read_text())["status"] == "finished"
    says = run.says()
    assert says[0].startswith("job job: 2 ranks, script.py") and any("sdcrun report job" in line for line in says)

    (tmp_path / "env.1").unlink()
    plain = [PYTHON, "-m", "torch.distributed.run", *TWO, "script.py"]
    # No pipe: the daemons hold it open.
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(plain, cwd=tmp_path, env=run.environ, stdout=nowhere, stderr=nowhere, check=True)
    for rank in range(2):
        psutil.Process(int((run.folder / f"daemon.{rank}").read_text().split()[-1])).kill()
    without = json.loads((run.folder / "env.1").read_text())
    assert with_sdcrun["PYTHONPATH"].endswith(":/x")
    ours = {name for name in with_sdcrun if name.startswith("SDCRUN_")} | {"CUBLAS_WORKSPACE_CONFIG"}
    assert {n: v for n, v in with_sdcrun.items() if n not in OF_A_RUN | ours} == {
        n: v for n, v in without.items() if n not in OF_A_RUN
    }


def test_killed_rank_and_the_children_it_leaves(launch):
    run = launch("subprocess.Popen(['sleep', '1000'])\nwait_for_end()", *TWO)
    os.kill(run.up()[1], signal.SIGKILL)
    assert run.end() == 1
    assert any("killed by SIGKILL" in line for line in run.says())


def test_killed_agent(launch):
    run = launch("subprocess.Popen(['sleep', '1000'])\nwait_for_end()", *TWO)
    run.up()
    os.kill(run.agents()[0], signal.SIGKILL)
    assert run.end() == 128 + signal.SIGKILL


def test_killed_sdcrun(launch):
    run = launch("wait_for_end()", *TWO)
    run.up()
    run.process.kill()
    run.process.wait()
    run.until(lambda: not run.processes(), "orphans")
    for command in ("watch", "report"):
        said = subprocess.run([PYTHON, "-m", "sdcrun.cli", command, str(run.job)], capture_output=True, text=True)
        assert f"sdcrun (pid {run.process.pid} on " in said.stdout, said.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signal_reaches_each_rank_once(launch, number):
    script = f"""
        def caught(number, frame):
            note("caught", str(number))
        signal.signal({int(number)}, caught)
        note("up", str(os.getpid()))
        while not os.path.exists(f"caught.{{RANK}}"):
            time.sleep(0.02)
        time.sleep(0.5)
        """
    run = launch(script, *TWO)
    run.up()
    run.process.send_signal(number)
    assert run.end() == 1
    for rank in range(2):
        assert (run.folder / f"caught.{rank}").read_text().split() == [str(int(number))]
    # One line instead of torchrun's traceback, under which all else would be lost.
    assert "Traceback" not in run.err.read_text() and f"got signal: {int(number)}" in run.err.read_text()
    assert not any("first rank that failed" in line for line in run.says())


def test_second_interrupt_shortens_the_wait(launch):
    script = "signal.signal(signal.SIGINT, lambda *_: note('caught'))\nwait_for_end()"
    run = launch(script, *TWO, "--shutdown-timeout", "3000")
    run.up()
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: all((run.folder / f"caught.{rank}").exists() for rank in range(2)), "no signal")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 1
    assert [(run.folder / f"caught.{rank}").read_text() for rank in range(2)] == ["\n", "\n"]


def test_named_user_signal_is_passed_on(launch):
    script = "signal.signal(signal.SIGUSR1, lambda *_: (note('caught'), sys.exit(3)))\nwait_for_end()"
    run = launch(script, *TWO, "--signals-to-handle", "SIGTERM,SIGUSR1")
    run.up()
    run.process.send_signal(signal.SIGUSR1)
    assert run.end() == 1
    assert (run.folder / "caught.0").read_text() == "\n"


def test_order_to_stop_ends_the_job(launch):
    script = """
        from sdcrun.core.types import Config
        from sdcrun.wire.link import Link
        from sdcrun.wire.runtime import runtime_address
        import json
        config = Config.from_json(json.loads(os.environ["SDCRUN_CONFIG"]))
        link = Link(config, f"rank:{RANK}", runtime_address(os.environ["SDCRUN_RUNTIME"]))
        for step in range(3):
            bad = {"tensor": "w", "elements": 1, "nan": 1, "inf": 0, "numel": 4}
            link.emit("nonfinite", {"step": step, "group": [0, 1], "amp": False, "skipped": True, "local": [bad],
                                    "reduced": [bad]})
        wait_for_end()
        """
    run = launch(script, *TWO, "--sdc-max-skipped", "2")
    assert run.end() == 87
    assert [line[:38] for line in run.says() if "the job" in line] == ["Stopping the job with exit code 87 (a "]
    assert json.loads((run.job / "report.json").read_text())["status"] == "stopped"


def test_no_place_for_a_record_is_one_warning(launch, tmp_path):
    (tmp_path / "file").write_text("")
    run = launch("print('trained')", "--sdc-dir", str(tmp_path / "file" / "jobs"))
    assert run.end() == 0
    assert run.out.read_text() == "trained\n"
    assert [line for line in run.says() if "warning" in line] == [
        f"warning: no record of this run: {tmp_path}/file/jobs/job cannot be written (Not a directory); "
        "training and its checks go on"
    ]


def test_control_plane_faults_and_signals_that_mean_nothing(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = Launch(tmp_path, "wait_for_end()", *TWO)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        run.up()
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGUSR1)
        run.until(lambda: any("SIGUSR1 ignored" in line for line in run.says()), "not said")
        _kill_controller(run)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 1
        assert not any("SIGHUP" in line for line in run.says())
    finally:
        run.kill()


def _kill_controller(run):
    """It comes back at the same port with the same secret, and takes up the record."""

    path = run.until(lambda: list(run.job.glob("controller-*.json")), "no controller")[0]
    before = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    run.until(lambda: events(run), "nothing on record")
    first = run.controllers()[0]
    first.kill()
    run.until(lambda: [p for p in run.controllers() if p.pid != first.pid], "no new controller")
    run.until(lambda: len(_starts(run)) > 1, "the new controller is not used")
    assert _starts(run) == [False, True]
    assert json.loads(path.read_text()) == before


def _starts(run):
    return [event["data"]["restarted"] for event in events(run) if event["kind"] == "started"]


def test_off_is_plain_torchrun(launch):
    run = launch(SEEN, "--sdc-off")
    assert run.end() == 0
    seen = json.loads((run.folder / "env.0").read_text())
    assert {name for name in seen if name.startswith("SDCRUN_")} <= {"SDCRUN_AGENT"}
    assert "PYTHONPATH" not in seen and not run.job.exists()


def test_three_nodes_on_this_machine_of_which_one_fails(launch):
    run = launch(f"{SEEN}\nsys.exit(3 if RANK == 1 else 0)", "--nnodes", "3")
    assert run.end() == 1
    seen = [json.loads((run.folder / f"env.{rank}").read_text()) for rank in range(3)]
    assert sorted(one["SDCRUN_LOCAL_NODE"] for one in seen) == ["0", "1", "2"]
    assert {(one["WORLD_SIZE"], one["LOCAL_RANK"]) for one in seen} == {("3", "0")}
    assert not any(name.startswith("PET_") for one in seen for name in one)
    assert "3 nodes on this machine" in run.says()[0]
    assert any(line.startswith("first rank that failed: 1 (local rank 0, pid ") for line in run.says())
    lost = {e["data"]["rank"]: e["data"]["exit"] for e in events(run) if e["kind"] == "worker_lost"}
    assert lost[1] == 3


@pytest.mark.slow
def test_attempt_that_the_others_do_not_need_any_more(launch):
    """torchrun alone waits for it for five minutes, and ends with 1."""
    script = """
        if RANK == 2:
            while not all(os.path.exists(f"done.{rank}") for rank in range(2)):
                time.sleep(0.02)
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        note("done")
        """
    run = launch(script, "--nnodes", "3", "--max-restarts", "1")
    assert run.end() == 1
    assert any("the others cannot go on without it" in line for line in run.says())


def test_signal_before_there_are_ranks(launch):
    run = launch("wait_for_end()", *TWO)
    run.until(lambda: run.agents(), "no agent")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() in (1, 128 + signal.SIGTERM)


def test_what_torchrun_stumbles_over_before_any_rank_is_said_in_one_line_first(launch):
    """Here a value that only its rendezvous looks at; what is certain beforehand is an error of the command line."""
    run = launch("pass", "--rdzv-conf", "join_timeout=soon", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    assert run.end() == 1
    err = run.err.read_text()
    said = [line for line in run.says() if line.startswith("torchrun cannot start: ")]
    assert len(said) == 1 and err.index(said[0]) < err.index("Traceback"), err
