"""What the doctor makes of what it is told: the probes are played here, tests/integration has the real ones."""

from __future__ import annotations

import json
import sys

import pytest
from eventmaker import Job, comparison

from sdcrun import cli
from sdcrun.report import build
from sdcrun.runner import doctor, trial

MACHINE = {
    "shim": True, "python": "3.11.7", "interpreter": "/usr/bin/python3", "torch": "2.13.0", "cuda": None,
    "distributed": True, "gloo": True, "nccl": False, "threads": 1, "cpu": "AVX2",
    "fp1": {"engine": "torch", "tensors": 5, "problem": None}, "devices": [{"name": "CPU AVX2", "same": "default"}],
}  # fmt: skip
MEETING = {"sum": 2000.0, "seconds": 0.5}


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Returns a function that makes an interpreter which answers probes with what it is given."""

    def make(machine=None, meeting=None, text=None):
        answers = {"machine": {**MACHINE, **(machine or {})}, "meet": meeting or MEETING}
        program = tmp_path / "python"
        said = f"print({({name: json.dumps(value) for name, value in answers.items()})!r}[sys.argv[3]])"
        program.write_text(f"#!{sys.executable}\nimport sys\n{text or said}\n")
        program.chmod(0o755)
        return {"PYTHON_EXEC": str(program)}

    monkeypatch.chdir(tmp_path)
    return make


def examined(environ, directory="."):
    rows = []
    code = doctor.examine(str(directory), environ, rows.append)
    return code, {(row.level, row.about): row.text for row in rows}


def test_a_good_machine(python, tmp_path):
    code, rows = examined(python(), tmp_path / "sdcrun_jobs")
    assert code == 0 and {level for level, _ in rows} <= {"ok", "note"}
    assert [about for _, about in rows] == ["shim", "torch", "replay", "fingerprint", "gloo", "gpu", "record"]
    assert not (tmp_path / "sdcrun_jobs").exists()


@pytest.mark.parametrize(
    ("machine", "code", "level", "about", "said"),
    [
        ({"shim": False}, 2, "FAIL", "shim", "NOT seen"),
        ({"gloo": False}, 2, "FAIL", "torch", "nothing can be guarded"),
        ({"devices": [{"name": "G", "same": "strict"}]}, 0, "ok", "replay", "with deterministic kernels"),
        ({"devices": [{"name": "G", "same": "no"}]}, 1, "LESS", "replay", "narrowed or declined"),
        ({"devices": [{"name": "G", "same": "no", "problem": "Oh"}]}, 1, "LESS", "replay", "G: Oh;"),
        ({"fp1": {"engine": "torch", "tensors": 5, "problem": "2 of 5"}}, 2, "FAIL", "fingerprint", "torch: 2 of 5"),
        ({"fp1": {"engine": "torch", "tensors": 0, "problem": None}}, 0, "note", "fingerprint", "numpy"),
    ],
)
def test_what_is_missing_is_named(python, machine, code, level, about, said):
    found, rows = examined(python(machine))
    assert found == code and said in rows[level, about]


def test_an_interpreter_that_fails_is_named(python):
    code, rows = examined(python(text="sys.exit('ImportError: no torch here')"))
    assert code == 2 and rows["FAIL", "interpreter"].endswith("ImportError: no torch here")
    code, rows = examined({"PYTHON_EXEC": "/no/such/python"})
    assert code == 2 and rows["FAIL", "interpreter"] == "/no/such/python: No such file or directory"


def test_processes_that_cannot_talk(python):
    text = f"print('{json.dumps(MACHINE)}') if sys.argv[3] == 'machine' else sys.exit('no route')"
    code, rows = examined(python(text=text))
    assert code == 2 and "no route; name the interface in GLOO_SOCKET_IFNAME" in rows["FAIL", "gloo"]
    code, rows = examined(python(meeting={"sum": 1999.0, "seconds": 1}))
    assert code == 2 and "is wrong" in rows["FAIL", "gloo"]


def test_a_folder_that_cannot_be_written(python, monkeypatch, tmp_path):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    code, rows = examined(python(), tmp_path)
    assert code == 1 and "cannot be written (Permission denied)" in rows["LESS", "record"]


def judged(job, code=0, said="", first=3.0):
    state = build.fold(job.config, job.events)
    outcome = trial.Outcome(build.build(state), state, code, said, first, 10.0)
    return {(level, about): text for level, about, text in trial.judge(outcome)}


def trained(world=2, **hello):
    job = Job(world, audit_every=5, weights_every=5)
    job.node_up()
    job.hello(**hello)
    job.summaries(20)
    return job


def test_a_script_that_is_guarded():
    job = trained()
    job.audit(5)
    job.audit(10)
    job.end()
    rows = judged(job)
    assert rows["ok", "script"] == "20 steps on 2 ranks in 10 s, the first after 3 s"
    assert rows["ok", "guarded"] == "2 of 2 ranks, one module: 10 parameters in 2 tensors"
    assert rows["ok", "audits"] == "2 clean" and rows["ok", "votes"] == "20 done, 0 fired"
    assert {level for level, _ in rows} == {"ok"}


def test_a_script_that_is_not():
    job = Job(2)
    job.node_up()
    for rank in (0, 1):
        job.emit("unguarded", rank, {"reason": "the parameters are sharded"})
    job.end()
    assert judged(job)["FAIL", "UNGUARDED"] == "ranks 0 and 1: the parameters are sharded"


def test_one_rank_without_a_shim():
    job = trained(skip=(1,))
    rows = judged(job)
    assert "1 of 2 ranks" in rows["LESS", "guarded"] and "rank 1: never said hello" in rows["LESS", "UNGUARDED"]


def test_audits_that_say_less():
    job = trained()
    job.audit(5, scope="from the module's outputs back")
    job.audit(10, agreed=0, declined=[[-1, "out of memory"]], comparisons=[])
    assert "compared: from the module's outputs back" in judged(job)["LESS", "audits"]
    assert "declined: out of memory" in judged(job)["LESS", "audits"]
    assert judged(trained())["LESS", "audits"].startswith("none yet")


def test_a_check_that_fires_is_not_well():
    job = trained()
    job.audit(5, agreed=1, comparisons=[comparison(0, 1, "ring", False)])
    assert "ok" not in {level for level, about in judged(job) if about == "audits"}


def test_a_script_that_fails_is_quoted():
    said = "Traceback ...\n[rank1]: ValueError: no data\ntorch.x.ChildFailedError: train.py FAILED\n====\n"
    rows = judged(Job(2), code=1, said=said)
    assert rows["FAIL", "script"] == "it ended with exit code 1: [rank1]: ValueError: no data"
    assert judged(Job(2), None, first=None)["LESS", "script"].startswith("no step within 10 s")


def test_command_line(python, capsys, monkeypatch):
    for name, value in python().items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sdcrun doctor · host ") and lines[-1] == "This machine can be guarded."
    tried = []
    monkeypatch.setattr(doctor, "try_script", lambda tokens, seconds, *rest: tried.append((tokens, seconds)) or 1)
    assert cli.main(["doctor", "--seconds", "9", "--", "--nnodes", "3", "a.py", "--lr=1"]) == 1
    assert tried == [(["--nnodes", "3", "a.py", "--lr=1"], 9.0)]
    assert "This script is guarded, but not fully" in capsys.readouterr().out


@pytest.mark.parametrize(("devices", "expected"), [([], None), (["0"], ""), (["0", "1"], None)])
def test_one_gpu_is_not_shared_by_two_ranks(monkeypatch, devices, expected):
    seen = []

    def run(tokens, seconds, environ, folder):
        seen.append(environ.get("CUDA_VISIBLE_DEVICES"))
        state = build.fold(Job(2).config, [])
        return trial.Outcome(build.build(state), state, 0, "", None, 1.0)

    monkeypatch.setattr(trial, "run", run)
    monkeypatch.setattr(doctor.localnodes, "visible_devices", lambda environ: devices)
    rows = []
    doctor.try_script(["train.py"], 9.0, {}, rows.append)
    assert seen == [expected] and ("gpu" in {row.about for row in rows}) == (len(devices) == 1)
