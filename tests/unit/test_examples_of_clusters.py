"""The examples for clusters in configs/: well-formed, and their command lines are what sdcrun takes."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from sdcrun import args, config, optiontable
from sdcrun.runner import inventory, jobfolder, plan

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TABLE = optiontable.read()


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def planned(argv, environ):
    assert argv[0] == "sdcrun"
    line = args.split(argv[1:], TABLE)
    return plan.make(line, TABLE, environ), config.load(line.own, environ)


SLURM = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_SUBMIT_DIR": "/home/me"}


def batch(tmp_path, code):
    """Runs the batch script where Slurm's commands and sdcrun only note how they were called; (exit code, calls)."""
    tools = tmp_path / "tools"
    tools.mkdir()
    log = tmp_path / "calls"
    for name, does in {"srun": f"exit {code}", "scontrol": "printf 'n1\\nn2\\nn3\\nn4\\n'", "sdcrun": ""}.items():
        (tools / name).write_text(f'#!/bin/bash\nprintf "%q " {name} "$@" >> {log}; echo >> {log}\n{does}\n')
        (tools / name).chmod(0o755)
    environ = {**os.environ, **SLURM, "PATH": f"{tools}:{os.environ['PATH']}"}
    child = subprocess.run(["bash", str(CONFIGS / "slurm.sbatch")], env=environ, capture_output=True, text=True)
    assert child.stderr == ""
    return child.returncode, [shlex.split(line) for line in log.read_text().splitlines()]


def test_slurm(tmp_path):
    subprocess.run(["bash", "-n", str(CONFIGS / "slurm.sbatch")], check=True)
    code, calls = batch(tmp_path, 0)
    assert code == 0 and [call[0] for call in calls] == ["scontrol", "srun"]
    argv = calls[1]
    made, _ = planned(argv[argv.index("sdcrun") :], SLURM)
    assert (made.local_nodes, made.max_nodes, made.nproc, made.script) == (1, 4, 8, "train.py")
    assert made.options.rdzv_endpoint == "n1:29500" and made.script_args == ("--snapshot", "snapshot.pt")
    assert jobfolder.job_id(None, made.options, SLURM, "n1") == ("slurm-77", True)


@pytest.mark.parametrize("code", [86, 87])
def test_slurm_prints_what_to_do_about_a_bad_device(tmp_path, code):
    found, calls = batch(tmp_path, code)
    assert found == code and calls[-1] == ["sdcrun", "report", "--commands", "slurm"]


def environment(container, names):
    """Variables of a container as its node would see them; `names` are what the cluster fills in by field."""
    given = {}
    for row in container["env"]:
        given[row["name"]] = row["value"] if "value" in row else names[row["valueFrom"]["fieldRef"]["fieldPath"]]
    assert all(isinstance(value, str) for value in given.values())
    return given


FIELDS = {
    "spec.nodeName": "node-7",
    "metadata.name": "train-node-0-2",
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "2",
    "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "train",
    "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "1",
}


def test_pytorchjob():
    job = yaml.safe_load((CONFIGS / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 3)
    for replica in replicas.values():
        container = replica["template"]["spec"]["containers"][0]
        assert container["name"] == "pytorch"
        # What the operator adds.
        environ = environment(container, FIELDS) | {
            "PET_NNODES": "4", "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"], "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "train-master-0", "PET_MASTER_PORT": "23456",
        }  # fmt: skip
        made, settings = planned(container["command"], environ)
        assert (made.local_nodes, made.max_nodes, made.nproc) == (1, 4, 8)
        assert made.options.master_addr == "train-master-0" and settings.directory == "/data/sdcrun_jobs"
        assert inventory.host_facts(environ)["kubernetes_node"] == "node-7"
        assert inventory.host_facts(environ)["pod"] == "train-node-0-2"


def test_jobset():
    spec = yaml.safe_load((CONFIGS / "jobset.yaml").read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    environ = environment(container, FIELDS)
    made, settings = planned(container["command"], environ)
    assert (made.local_nodes, made.max_nodes, made.nproc) == (1, 4, 8) and job["completions"] == 4
    assert made.options.node_rank == 2 and settings.directory == "/data/sdcrun_jobs"
    assert jobfolder.job_id(None, made.options, environ, "h") == ("train-r1", True)
    rule = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert rule["values"] == [86, 87] and rule["containerName"] == container["name"]
    # Kubernetes takes a pod failure policy only with pods that are not restarted in place.
    assert pod["restartPolicy"] == "Never" and spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
