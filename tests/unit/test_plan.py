"""What a launch will start, and what is refused before anything has been started."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sdcrun import args, optiontable
from sdcrun.config import Settings, with_job
from sdcrun.core.types import Config
from sdcrun.errors import UsageError
from sdcrun.report import alive
from sdcrun.runner import banner, environment, jobfolder, localnodes, plan

TABLE = optiontable.read()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "pkg").mkdir()
    return tmp_path


def made(typed, environ=None):
    return plan.make(args.split(typed.split(), TABLE), TABLE, environ or {})


@pytest.mark.parametrize(
    ("typed", "nodes", "nproc", "local"),
    [
        ("train.py", (1, 1), 1, 1),
        ("--nproc-per-node auto train.py", (1, 1), None, 1),
        ("--nnodes 4 train.py", (4, 4), 1, 4),
        ("--nnodes 2:4 --nproc-per-node 2 train.py", (2, 4), 2, 4),
        ("--nnodes 4 --rdzv-backend c10d train.py", (4, 4), 1, 4),
        ("--nnodes 4 --rdzv-id x train.py", (4, 4), 1, 4),
        ("--nnodes 4 --rdzv-backend c10d --rdzv-endpoint h:1 train.py", (4, 4), 1, 1),
        ("--nnodes 4 --rdzv-backend static train.py", (4, 4), 1, 1),
        ("--nnodes 4 --rdzv-backend etcd train.py", (4, 4), 1, 1),
        ("--nnodes 4 --node-rank 0 train.py", (4, 4), 1, 1),
        ("--nnodes 4 --master-addr h train.py", (4, 4), 1, 1),
        ("--nnodes 4 --master-port 1 train.py", (4, 4), 1, 1),
        ("--nnodes 1:4 --standalone train.py", (1, 4), 1, 1),
    ],
)
def test_local_nodes_only_without_a_rendezvous(typed, nodes, nproc, local):
    got = made(typed)
    assert ((got.min_nodes, got.max_nodes), got.nproc, got.local_nodes) == (nodes, nproc, local)


@pytest.mark.parametrize(
    ("environ", "local"),
    [
        ({"PET_NNODES": "3"}, 3),
        ({"PET_NNODES": "3", "PET_NODE_RANK": "0"}, 1),
        ({"PET_NNODES": "3", "PET_MASTER_ADDR": "h"}, 1),
        ({"PET_NNODES": "3", "PET_RDZV_ENDPOINT": "h:1"}, 1),
        ({"PET_NNODES": "3", "PET_RDZV_ENDPOINT": ""}, 3),
        ({"PET_NNODES": "3", "SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}, 1),
        ({"PET_NNODES": "3", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "3"}, 1),
        ({"PET_NNODES": "3", "SLURM_JOB_ID": "1", "SLURM_NNODES": "1"}, 3),
    ],
)
def test_variables_can_give_the_rendezvous(environ, local):
    assert made("train.py", environ).local_nodes == local


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("trian.py", "no such script: trian.py (did you mean train.py?)"),
        ("pkg", "pkg is a folder without a __main__.py"),
        ("-m no_such_module_here.x", "no such module: no_such_module_here.x"),
        ("--no-python no-such-program", "no such program: no-such-program"),
        ("--sdc-quiet", "no script given"),
        ("--nnodes x train.py", "--nnodes x: must be N or MIN:MAX"),
        ("--nnodes 0 train.py", "--nnodes 0: needs 0 < MIN <= MAX"),
        ("--nnodes 3:2 train.py", "--nnodes 3:2: needs 0 < MIN <= MAX"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node 0: must be 1 or more"),
        ("--nproc-per-node gpus train.py", "--nproc-per-node gpus: must be a number or one of auto, cpu, gpu, xpu"),
        ("--max-restarts x train.py", "torchrun: argument --max-restarts/--max_restarts: invalid int value: 'x'"),
        ("--max-restarts=-1 train.py", "--max-restarts -1: must be 0 or more"),
        ("--start-method x train.py", "torchrun: argument --start-method/--start_method: invalid choice: 'x'"),
        ("--nnodes", "torchrun: argument --nnodes: expected one argument"),
        ("-r 5 train.py", "--redirects 5: must be 0 to 3"),
        ("--tee 0:5 train.py", "--tee 0:5: must be 0 to 3"),
        ("--local-ranks-filter a train.py", "--local-ranks-filter a: must be numbers"),
        ("--rdzv-conf a train.py", "--rdzv-conf a: must be KEY=VALUE"),
        ("--rdzv-conf a=1,,b=2 train.py", "--rdzv-conf a=1,,b=2: must be KEY=VALUE"),
        ("-m --no-python train.py", "--module and --no-python contradict each other"),
        ("--standalone --nnodes 2 train.py", "--standalone (one node) and --nnodes 2 contradict each other"),
        ("--nnodes 2 --node-rank 2 train.py", "--node-rank 2 and --nnodes 2 contradict each other"),
        ("--nnodes 2 --rdzv-endpoint h:x train.py", "--rdzv-endpoint h:x: must be HOST or HOST:PORT"),
        ("--rdzv-backend c10d --rdzv-endpoint h:1:y train.py", "--rdzv-endpoint h:1:y: must be HOST or HOST:PORT"),
        ("--rdzv-backend c10d --rdzv-endpoint h:65536 train.py", "--rdzv-endpoint h:65536: must be HOST"),
        ("--rdzv-backend c10d --rdzv-endpoint http://h:1 train.py", "--rdzv-endpoint http://h:1: must be HOST"),
        ("--master-port 65536 train.py", "--master-port 65536: must be 0 to 65535"),
        ("--rdzv-backend c10 train.py",
         "--rdzv-backend c10: must be one of c10d, etcd, etcd-v2, static (did you mean c10d?)"),
        ("--event-log-handler nul train.py",
         "--event-log-handler nul: must be one of console, dynamic_rendezvous, null (did you mean null?)"),
        ("--numa-binding nod train.py",
         "--numa-binding nod: must be one of core-complex, exclusive, node, socket (did you mean node?)"),
        ("--logs-specs x train.py", "--logs-specs x: must be one of default"),
        ("-m train.py", "-m takes the name of a module: train"),
    ],
)
def test_refused_in_one_line(typed, said):
    with pytest.raises(UsageError) as error:
        made(typed)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_folder_for_logs_that_cannot_be(folder, monkeypatch):
    (folder / "file").write_text("")
    (folder / "loop").symlink_to("nowhere/x")
    for asked, said in (("file", "it is not a folder"), ("file/a/b", f"{folder}/file is not a folder"),
                        ("loop", "it is not a folder")):  # fmt: skip
        for typed, environ in ((f"--log-dir {asked} train.py", {}), ("train.py", {"PET_LOG_DIR": asked})):
            with pytest.raises(UsageError) as error:
                made(typed, environ)
            assert str(error.value) == f"--log-dir {asked}: {said}"
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(folder))
    with pytest.raises(UsageError, match=f"--log-dir a/b: nothing can be written in {folder}$"):
        made("--log-dir a/b train.py")
    (folder / "mine").mkdir()
    for typed in ("--log-dir mine/a", "--log-dir /dev/null", ""):
        assert made(f"{typed} train.py").script == "train.py"
    assert not (folder / "mine" / "a").exists()


BUILT = {"cpu": "cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = None\n",
         "cuda": "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
         "rocm": "cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n", "strange": ""}  # fmt: skip


@pytest.mark.parametrize(
    ("built", "word", "visible", "why"),
    [
        ("cpu", "gpu", None, "the torch installed here is built without"),
        ("cpu", "xpu", None, "the torch installed here is built without"),
        ("cuda", "gpu", "", "CUDA_VISIBLE_DEVICES= leaves none"),
        ("rocm", "gpu", "-1", "CUDA_VISIBLE_DEVICES=-1 leaves none"),
        ("cuda", "gpu", None, None),
        ("cuda", "gpu", "0", None),
        ("cuda", "xpu", None, None),
        ("strange", "gpu", None, None),
        ("cpu", "auto", "", None),
        ("cpu", "cpu", "", None),
    ],
)
def test_devices_that_are_certainly_not_there(folder, monkeypatch, built, word, visible, why):
    torch = folder / "site-packages" / "torch"
    (torch / "distributed").mkdir(parents=True)
    (torch / "version.py").write_text(BUILT[built])
    monkeypatch.setattr(optiontable, "source_path", lambda: str(torch / "distributed" / "run.py"))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if why is None:
        assert made(f"--nproc-per-node {word} train.py", environ).nproc is None
        return
    with pytest.raises(UsageError) as error:
        made(f"--nproc-per-node {word} train.py", environ)
    assert str(error.value) == f"--nproc-per-node {word}: there is none, {why} (a number, cpu or auto works)"


@pytest.mark.parametrize(
    "typed",
    [
        "--rdzv-backend static --rdzv-endpoint h:1",
        "--rdzv-backend c10d --rdzv-endpoint [::1]:29400",
        "--rdzv-backend c10d --rdzv-endpoint [fe80::1]",
        "--rdzv-backend c10d --rdzv-endpoint node_0.example-1.org",
        "--rdzv-backend etcd --rdzv-endpoint http://h:2379/v2",
        "--nnodes 2 --standalone --nnodes 1:2 --node-rank 7",
        "--rdzv-backend c10d --rdzv-endpoint h --nnodes 2 --node-rank 7",
        "--node-rank 7",
        "--numa-binding node --event-log-handler console",
    ],
)
def test_what_torchrun_takes_is_not_refused(typed):
    assert made(f"{typed} train.py").script == "train.py"


def test_words_of_plug_ins_are_taken(folder, monkeypatch):
    """Torch finds them as entry points; where its own words cannot be read from its source it alone decides."""
    package = folder / "site" / "plug-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: plug\nVersion: 1.0\n")
    points = "[torchrun.handlers]\nzeus = json:loads\n[torchrun.logs_specs]\nmy = json:x\n"
    (package / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(folder / "site"))
    assert made("--rdzv-backend zeus --rdzv-endpoint /a/b --logs-specs my train.py").options.rdzv_backend == "zeus"
    with pytest.raises(UsageError, match="must be one of c10d, etcd, etcd-v2, static, zeus"):
        made("--rdzv-backend zues train.py")
    monkeypatch.setattr(optiontable, "source_path", lambda: str(folder / "torch" / "distributed" / "run.py"))
    assert made("--rdzv-backend unheard-of train.py").script == "train.py"


def test_modules_and_programs_are_found(folder):
    (folder / "mod.py").write_text("pass\n")
    assert made("-m mod.sub").script == "mod.sub"
    assert made("-m json.tool").script == "json.tool"
    assert made("--no-python sh").script == "sh"
    assert made("-m elsewhere", {"PYTHON_EXEC": "/other/python"}).script == "elsewhere"


def test_world_and_domains():
    assert (made("--nnodes 2 --nproc-per-node 2 train.py").world_size, made("--nnodes 2 train.py").domains) == (4, 2)
    assert made("--nnodes 3 --nproc-per-node 2 train.py").domains == 3
    assert made("--nnodes 1:3 train.py").world_size is None


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,2, 3"}, ["0", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,3"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab12,MIG-x/1/0"}, ["GPU-ab12", "MIG-x/1/0"]),
    ],
)
def test_visible_devices(environ, devices):
    assert localnodes.visible_devices(environ) == devices


def test_local_nodes_share_no_gpu():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}
    assert localnodes.split_devices(2, 2, environ) == ["0,1", "2,3"]
    assert localnodes.split_devices(2, None, environ) == ["0,1", "2,3"]
    assert localnodes.split_devices(2, 1, {"CUDA_VISIBLE_DEVICES": ""}) is None
    with pytest.raises(UsageError, match=r"3 local nodes with 2 rank\(s\) each need 6 GPUs, 5 can be seen"):
        localnodes.split_devices(3, 2, environ)


def test_held_port_can_be_listened_on_and_is_given_to_nobody_else():
    import socket

    held = localnodes.HeldPort()
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", held.number))
    with socket.socket() as agent:
        agent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        agent.bind(("", held.number))
        agent.listen()
        socket.create_connection(("127.0.0.1", held.number), 5).close()
    held.close()


def test_rendezvous_keeps_the_users_id():
    got = made("--nnodes 2 train.py")
    assert localnodes.rendezvous(5, "job", got.options, got.given) == {
        "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "127.0.0.1:5", "PET_RDZV_ID": "job"
    }  # fmt: skip
    got = made("--nnodes 2 --rdzv-id mine train.py")
    assert "PET_RDZV_ID" not in localnodes.rendezvous(5, "job", got.options, got.given)


@pytest.mark.parametrize(
    ("asked", "typed", "environ", "name", "shared"),
    [
        ("mine", "train.py", {"SLURM_JOB_ID": "7"}, "mine", True),
        (None, "train.py", {"SLURM_JOB_ID": "7"}, "slurm-7", True),
        (None, "train.py", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}, "slurm-7.0-r2",
         True),
        (None, "train.py", {"JOBSET_NAME": "js", "JOBSET_RESTART_ATTEMPT": "0"}, "js", True),
        (None, "--rdzv-id a/b train.py", {}, "a-b", True),
        (None, "--rdzv-id / train.py", {}, "job", True),
    ],
)
def test_job_names(asked, typed, environ, name, shared):
    assert jobfolder.job_id(asked, made(typed, environ).options, environ, "host") == (name, shared)


def test_job_name_of_time_and_host():
    name, shared = jobfolder.job_id(None, made("train.py").options, {}, "host.example")
    assert name.endswith("-host") and not shared


def test_folders_are_never_mixed(folder):
    root = str(folder / "jobs")
    assert [jobfolder.prepare(root, "t", True, False)[0] for _ in range(3)] == ["t", "t-2", "t-3"]
    name, first = jobfolder.prepare(root, "mine", True, True)
    assert (name, first.moved) == ("mine", None)
    for number in (1, 2):
        (folder / "jobs" / "mine" / "events.jsonl").write_text(f"{number}\n")
        _, again = jobfolder.prepare(root, "mine", True, True)
        assert again.moved == os.path.join(root, f"mine.{number}")
        assert not os.path.exists(os.path.join(again.path, "events.jsonl"))
    assert (folder / "jobs" / "mine.1" / "events.jsonl").read_text() == "1\n"


def test_job_that_is_running_is_noticed(folder):
    import subprocess
    import sys

    path = folder / "jobs" / "mine"
    path.mkdir(parents=True)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # sdcrun"])
    try:
        (path / f"controller-h-{sleeper.pid}.json").write_text("{}")
        while not Path(f"/proc/{sleeper.pid}/cmdline").read_bytes():
            # The arguments appear a moment after the parent goes on.
            time.sleep(0.01)
        assert alive.running(str(path), "h") == sleeper.pid
        assert alive.running(str(path), "other-host") is None
    finally:
        sleeper.kill()
        sleeper.wait()
    assert alive.running(str(path), "h") is None


def test_several_supervisors_of_one_job_share_its_folder(folder):
    root = str(folder / "jobs")
    jobfolder.prepare(root, "mine", False, True)
    (folder / "jobs" / "mine" / "events.jsonl").write_text("1\n")
    _, again = jobfolder.prepare(root, "mine", False, True)
    assert again.moved is None and os.path.exists(os.path.join(again.path, "events.jsonl"))


def test_unwritable_folder_is_a_problem_not_an_error(folder):
    (folder / "file").write_text("")
    name, where = jobfolder.prepare(str(folder / "file" / "jobs"), "mine", True, True)
    assert where.path is None and "cannot be written" in where.problem
    assert os.path.isdir(where.logs)
    where.close(True)
    assert not os.path.exists(where.logs)


def test_only_empty_log_folders_are_removed(folder):
    _, where = jobfolder.prepare(str(folder / "jobs"), "mine", True, True)
    os.makedirs(os.path.join(where.logs, "a", "b"))
    os.makedirs(os.path.join(where.logs, "c"))
    (folder / "jobs" / "mine" / "logs" / "c" / "stdout.log").write_text("x")
    where.close(True)
    assert sorted(os.listdir(where.logs)) == ["c"]


def test_environment_of_agents():
    config = with_job(Config(), "j", "/d")
    outer = {"PYTHONPATH": f"/a:{environment.SITE}::/b", "HOME": "/h", "SDCRUN_OWNER": "1", "SDCRUN_SECRET": "s"}
    values = environment.guarded(outer, config, "/r", "host")
    assert values["PYTHONPATH"] == f"{environment.SITE}:/a:/b"
    assert "SDCRUN_OWNER" not in values and "SDCRUN_SECRET" not in values
    changed = {name for name in values if values[name] != outer.get(name)}
    added = {"SDCRUN_RUN", "SDCRUN_CONFIG", "SDCRUN_RUNTIME", "SDCRUN_HOST", "CUBLAS_WORKSPACE_CONFIG"}
    assert changed == {"PYTHONPATH", *added}
    assert os.path.isfile(os.path.join(environment.SITE, "sitecustomize.py"))
    chosen = environment.guarded({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, config, "/r", "host")
    assert (chosen["CUBLAS_WORKSPACE_CONFIG"], chosen["PYTHONPATH"]) == (":16:8", environment.SITE)
    assert environment.of_node(values, 2, ["0", "1", "2"])["CUDA_VISIBLE_DEVICES"] == "2"
    assert environment.of_node(values, 2, None)["SDCRUN_LOCAL_NODE"] == "2"
    assert environment.of_node({"A": "b"}, 2, None) == {"A": "b"}


def test_banner_says_place_checks_and_origin():
    got = made("--nnodes 3 train.py --lr 1")
    config = with_job(Config(weights_every=0), "j", "/d/j")
    text = banner.banner(got, Settings(config), config, jobfolder.Folder("/d/j", "/d/j/logs"), ["x is unseen"])
    assert "job j: 3 nodes on this machine (no rendezvous was given), 1 rank each, train.py --lr 1" in text
    assert "replay audit every 100 steps, no weight votes" in text
    assert "settings: defaults; record: /d/j" in text and text.endswith("x is unseen")
