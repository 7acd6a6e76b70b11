"""Checkpoints under sdcrun: every way of saving, with the bytes of plain torchrun and what must come of each; damage
in each of them; ranks that are busy, gone or ahead when one saves; loads; kills."""

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from harness import LOOPS, SDCRUN, environment, launch

from sdcrun.shim.checkpoints.verify import verify

pytest.importorskip("safetensors")

SAVING, WAITING = LOOPS / "saving.py", LOOPS / "waiting.py"
DAMAGED = """copied live optimizer opened overwritten memory replaced named_temporary rotated last threaded tensors
             together""".split()
OLD = "copied.pt live.pt optimizer.pt replaced.pt named_temporary.pt threaded.pt tensors.safetensors".split()
UNSURE = {
    "half.pt": "float16", "ema.pt": "matches no vote", "emptied.pt": "changed on purpose",
    "swapped.pt": "swapped or loaded on purpose",
}  # fmt: skip


def digests(folder):
    """Digest of every file that the script wrote, by its path."""
    found = {}
    for file in folder.rglob("*"):
        inside = file.relative_to(folder)
        if file.is_file() and inside.parts[0] not in ("jobs", "tmp", "stdout", "stderr"):
            found[str(inside)] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def said(outcome):
    """Path (relative) -> what the rank said last about that checkpoint."""
    folder = outcome.job.parents[1]
    rows = [e["data"] for e in outcome.events("checkpoint") if e["source"].startswith("rank:")]
    return {os.path.relpath(r["path"], folder) if r["path"].startswith("/") else "memory": r for r in rows}


def sdcrun(*arguments, cwd):
    return subprocess.run([*SDCRUN, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def patient(folder):
    """The option that gives the live question more time than a crowded machine can take."""
    (folder / "jobs").mkdir(exist_ok=True)
    (folder / "jobs" / "patient.yaml").write_text("checkpoint_timeout: 60.0\n")
    return ["--sdc-config", str(folder / "jobs" / "patient.yaml")]


@pytest.fixture(scope="module")
def idioms(tmp_path_factory):
    plain = launch(tmp_path_factory.mktemp("plain"), SAVING)
    folder = tmp_path_factory.mktemp("guarded")
    guarded = launch(folder, SAVING, sdcrun=["--sdc-audit-every", "7", *patient(folder)])
    return plain, guarded


def folder_of(outcome):
    return outcome.job.parents[1]


def test_every_way_of_saving_leaves_the_bytes_and_the_training_of_plain_torchrun(idioms, tmp_path_factory):
    plain, guarded = idioms
    assert plain.exit_code == guarded.exit_code == 0, guarded.tail()
    assert sorted(plain.stdout.splitlines()) == sorted(guarded.stdout.splitlines())
    folder = folder_of(guarded)
    before, after = digests(folder.parent / "plain0"), digests(folder)
    # torch.distributed.checkpoint puts a random number into its metadata; which rank is last under one name is chance.
    changed = {name for name in before if before[name] != after.get(name)} - {"together/.metadata", "everyone.pt"}
    assert before and not changed
    added = set(after) - set(before)
    assert all(name.endswith(".sdc.json") for name in added) and "others.pt.sdc.json" not in added
    assert not guarded.findings and not guarded.report["suspects"]


def test_each_save_is_in_its_state_and_says_why(idioms):
    rows = said(idioms[1])
    for name, why in UNSURE.items():
        assert rows[name]["state"] == "unverified" and why in rows[name]["reason"], name
    good = {name: row["state"] for name, row in rows.items() if name not in UNSURE}
    assert len(good) > 20 and set(good.values()) == {"provisional"}, good
    assert not any(row["dissent"] for row in rows.values())


def test_audits_verify_them_and_the_commands_know(idioms):
    folder = folder_of(idioms[1])
    listed = json.loads(sdcrun("checkpoints", str(idioms[1].job), "--format", "json", cwd=folder).stdout)
    states = {os.path.basename(row["path"]): row["state"] for row in listed["checkpoints"]}
    for name in ("path.pt", "replaced.pt", "whole.pt", "transposed.pt", "everyone.pt"):
        assert states[name] == "verified", states
    assert listed["newest_safe"] and os.path.basename(listed["newest_safe"]) not in UNSURE
    transitions = [e for e in idioms[1].events("checkpoint") if e["source"] == "controller"]
    assert {e["data"]["state"] for e in transitions} == {"verified"}
    shown = sdcrun("checkpoints", str(idioms[1].job), cwd=folder).stdout
    assert "newest safe checkpoint: " in shown and "ema.pt" in shown


def test_verify_reads_every_format_and_finds_damage_in_each(idioms):
    folder = folder_of(idioms[1])
    good = ["path.pt", "optimizer.pt", "whole.pt", "listed.pt", "tensors.safetensors", "together", "everyone.pt"]
    process = sdcrun("verify", *good, cwd=folder)
    assert process.returncode == 0, process.stdout
    assert sdcrun("verify", "path.pt", "ema.pt", cwd=folder).returncode == 2
    for name, file in (("path.pt", "path.pt"), ("tensors.safetensors",) * 2, ("together", "together/__0_0.distcp")):
        data = bytearray((folder / file).read_bytes())
        middle = len(data) // 2
        data[middle] ^= 4
        (folder / file).write_bytes(data)
        code, lines = verify(str(folder / name))
        data[middle] ^= 4
        (folder / file).write_bytes(data)
        assert code == 1 and "NOT what was saved" in lines[0], (name, lines)
    sidecar = json.loads((folder / "path.pt.sdc.json").read_text())
    assert sidecar["state"] == "verified" and sidecar["last_clean_audit"] and sidecar["job"]
    assert {part["kind"] for part in sidecar["parts"]} == {"weights", "optimizer"}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    for name in OLD:
        (folder / name).write_bytes(f"old {name}".encode())
    return launch(folder, SAVING, *DAMAGED, f"flip={','.join(DAMAGED)}", sdcrun=patient(folder))


def test_what_is_damaged_is_withheld_and_the_older_file_stays(damaged):
    assert damaged.exit_code == 0, damaged.tail()
    folder, rows = folder_of(damaged), said(damaged)
    for name in OLD:
        assert (folder / name).read_bytes() == f"old {name}".encode(), name
        assert rows[f"{name}.withheld"]["state"] == "withheld", name
        assert (folder / f"{name}.withheld").stat().st_size > 1000
    assert not (folder / "opened.pt").exists() and rows["opened.pt.withheld"]["state"] == "withheld"
    assert (folder / "overwritten.pt").read_bytes() == (folder / "overwritten.copy").read_bytes()
    assert rows["overwritten.pt.withheld"]["state"] == "withheld" and rows["overwritten.pt"]["state"] == "provisional"
    assert not (folder / "together").exists() and rows["together.withheld"]["state"] == "withheld"
    assert rows["memory"]["dissent"] and rows["memory.pt.withheld"]["state"] == "withheld"
    assert not (folder / "memory.pt").exists() and (folder / "memory.pt.withheld").stat().st_size > 1000
    assert not list(folder.glob("rotated?.pt"))
    assert (folder / "last0.pt").exists() and not (folder / "last1.pt").exists(), "the last good one was removed"


def test_the_wrong_word_and_bit_are_named_and_nobody_is_accused(damaged):
    rows = said(damaged)
    for name, tensor, word, bit in (("copied.pt", "0.weight", 5, 21), ("live.pt", "0.weight", 7, 25),
                                    ("optimizer.pt", "0.exp_avg.0.weight", 9, 22)):  # fmt: skip
        (wrong,) = rows[f"{name}.withheld"]["differing"]
        assert (wrong["tensor"], wrong["index"], wrong["bits"]) == (tensor, word, [bit]), name
    assert {f["rule"] for f in damaged.findings} == {"checkpoint-withheld"} and not damaged.report["suspects"]
    states = json.loads(sdcrun("checkpoints", str(damaged.job), "--format", "json", cwd=folder_of(damaged)).stdout)
    assert "memory.pt.withheld" in {os.path.basename(c["path"]) for c in states["checkpoints"]}
    for name in ("copied.pt.withheld", "memory.pt.withheld"):
        code, lines = verify(str(folder_of(damaged) / name))
        assert code == 1 and "0.weight" in lines[0], lines
    assert sdcrun("report", str(damaged.job), cwd=folder_of(damaged)).returncode == 1


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("waiting")
    return launch(folder, WAITING, "damaged", "ahead", sdcrun=["--sdc-audit-every", "5", *patient(folder)])


def test_a_save_is_vouched_for_whatever_the_other_ranks_do(waiting):
    assert waiting.exit_code == 0, waiting.tail()
    rows = said(waiting)
    names = "backward barrier sleep python loader broadcast slow accumulation ahead ended".split()
    assert {name: rows[f"{name}.pt"]["state"] for name in names} == dict.fromkeys(names, "provisional"), rows
    assert "what all ranks hold" in rows["ended.pt"]["reason"]


def test_a_wrong_weight_on_another_rank_withholds_and_is_named(waiting):
    row = said(waiting)["damaged.pt.withheld"]
    assert row["state"] == "withheld" and "rank 2 holds other weights" in row["reason"] and "0.weight" in row["reason"]


def test_a_damaged_file_is_found_when_it_is_loaded(waiting, tmp_path):
    folder = folder_of(waiting)
    data = (folder / "backward.pt").read_bytes()
    weight = torch.load(folder / "backward.pt")["model"]["module.0.weight"]
    at = data.index(bytes(weight.untyped_storage()))
    (folder / "backward.pt").write_bytes(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :])
    script = tmp_path / "load.py"
    script.write_text(LOADING.format(file=str(folder / "backward.pt")))
    outcome = launch(tmp_path / "run", script, sdcrun=[], ranks=2)
    (event,) = {json.dumps(e["data"]["differing"]) for e in outcome.events("loaded")}
    assert json.loads(event)[0]["tensor"] == "model/module.0.weight" and json.loads(event)[0]["bits"] == [6]
    (rule,) = {f["rule"] for f in outcome.findings}
    assert rule == "checkpoint-damaged" and "backward.pt" in outcome.findings[0]["text"]
    assert not outcome.report["suspects"]


LOADING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
contents = torch.load({file!r}, map_location="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
"""


def test_policy_raise(tmp_path):
    policy = ["--sdc-on-bad-checkpoint", "raise", *patient(tmp_path)]
    outcome = launch(tmp_path, SAVING, "copied", "flip=copied", sdcrun=policy)
    assert outcome.exit_code == 1 and "CheckpointWithheld: copied.pt was not written" in outcome.stderr
    assert (tmp_path / "copied.pt.withheld").exists() and not (tmp_path / "copied.pt").exists()


def test_an_injected_checkpoint_fault_is_caught(tmp_path):
    fault = ["--inject-fault", "checkpoint:step=1,rank=0,tensor=*weight,kind=bitflip,bit=20"]
    outcome = launch(tmp_path, SAVING, "path", "copied", "replaced", sdcrun=fault + patient(tmp_path))
    assert outcome.exit_code == 0, outcome.tail()
    (row,) = outcome.report["injected"]
    assert row["fired"] == 1 and row["caught_by"] == "checkpoint" and row["problem"] is None


KILLED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2000, 2000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    model(torch.randn(1, 2000)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"step": step, "model": model.state_dict()}, "model.pt")
        print("saved", step, flush=True)
"""


def test_killed_while_it_saves_the_file_is_whole(tmp_path):
    (tmp_path / "train.py").write_text(KILLED)
    command = [*SDCRUN, "--sdc-dir", "jobs", "--standalone", "--nproc-per-node", "2", "train.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path, "kill", None), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[-1].startswith("saved"), lines
    room = tmp_path / ".model.pt.sdcrun-0-"
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(f"{room.name}*/model.pt")) and time.monotonic() < deadline:
        time.sleep(0.001)
    pids = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_rank(p, tmp_path)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=120)
    contents = torch.load(tmp_path / "model.pt")
    assert contents["model"]["module.weight"].shape == (2000, 2000) and len(pids) == 2
    code, lines = verify(str(tmp_path / "model.pt"))
    assert code in (0, 2), lines


def _is_rank(process, folder):
    try:
        line = (process / "cmdline").read_bytes().split(b"\0")
        return line[1:] == [b"-u", b"train.py", b""] and os.readlink(process / "cwd") == str(folder)
    except OSError:
        return False
