"""The file's side of a save: whole or not at all, sidecars that go where their files go, saves cut off by a kill."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdcrun.shim.checkpoints import files
from sdcrun.shim.checkpoints.files import read_sidecar, sidecar_of, write_sidecar, write_whole
from sdcrun.shim.checkpoints.followers import Followers


def put(content):
    def writer(path):
        Path(path).write_bytes(content)
        return "result"

    return writer


def described(path):
    return {"id": "1", "size": os.path.getsize(path), "name": os.path.basename(path)}


@pytest.fixture
def followers():
    moved, said = [], []
    one = Followers(lambda source, goal, kept: moved.append((source, goal)), said.append)
    one.moves, one.said = moved, said
    yield one
    one.undo()


def test_a_file_is_written_under_its_own_name_with_a_sidecar_and_nothing_is_left(tmp_path):
    result, problem = write_whole(str(tmp_path / "model.pt"), "0", put(b"new"), described)
    assert (result, problem) == ("result", None)
    assert (tmp_path / "model.pt").read_bytes() == b"new"
    assert read_sidecar(str(tmp_path / "model.pt")) == {"id": "1", "size": 3, "name": "model.pt"}
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.pt.sdc.json"]


def test_mode_and_symbolic_links_stay(tmp_path):
    target = tmp_path / "target.pt"
    target.write_bytes(b"old")
    target.chmod(0o640)
    (tmp_path / "link.pt").symlink_to(target)
    write_whole(str(tmp_path / "link.pt"), "0", put(b"new"), described)
    assert target.read_bytes() == b"new" and target.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link.pt").is_symlink() and read_sidecar(str(tmp_path / "link.pt"))["size"] == 3


def test_a_hard_link_is_written_in_place_as_without_sdcrun(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"old")
    os.link(tmp_path / "a.pt", tmp_path / "b.pt")
    write_whole(str(tmp_path / "a.pt"), "0", put(b"new"), described)
    assert (tmp_path / "b.pt").read_bytes() == b"new"


def test_a_writer_that_fails_leaves_the_old_file_and_raises_its_own_error(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"old")
    write_sidecar(str(tmp_path / "model.pt"), {"id": "0"})

    def full(path):
        Path(path).write_bytes(b"ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(str(tmp_path / "model.pt"), "0", full, described)
    assert (tmp_path / "model.pt").read_bytes() == b"old" and read_sidecar(str(tmp_path / "model.pt")) == {"id": "0"}
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.pt.sdc.json"]


@pytest.mark.parametrize(("free", "in_place"), [(50_000, True), (10_000, False), (10_000_000, False)])
def test_a_disk_with_room_for_one_copy_is_used_as_an_ordinary_save_would(tmp_path, monkeypatch, free, in_place):
    (tmp_path / "model.pt").write_bytes(b"o" * 150_000)
    monkeypatch.setattr(files, "free", lambda folder: free)

    def writer(path):
        if path != str(tmp_path / "model.pt"):
            raise RuntimeError("unexpected pos 64 vs 0")
        Path(path).write_bytes(b"n" * 100_000)

    if in_place:
        write_whole(str(tmp_path / "model.pt"), "0", writer, described, size=100_000)
        assert read_sidecar(str(tmp_path / "model.pt"))["size"] == 100_000
    else:
        with pytest.raises(RuntimeError):
            write_whole(str(tmp_path / "model.pt"), "0", writer, described, size=100_000)
        assert (tmp_path / "model.pt").read_bytes() == b"o" * 150_000
    assert (tmp_path / "model.pt").read_bytes()[:1] == (b"n" if in_place else b"o")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_without_a_folder_the_writer_s_own_error_comes_out(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(str(tmp_path / "absent" / "model.pt"), "0", put(b"new"), described)


def test_contents_that_are_withheld_leave_the_file_alone(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"old")
    write_sidecar(str(tmp_path / "model.pt"), {"id": "0"})
    write_whole(str(tmp_path / "model.pt"), "0", put(b"bad"), described, files.WITHHELD)
    assert (tmp_path / "model.pt").read_bytes() == b"old" and read_sidecar(str(tmp_path / "model.pt")) == {"id": "0"}
    assert (tmp_path / "model.pt.withheld").read_bytes() == b"bad"
    assert read_sidecar(str(tmp_path / "model.pt.withheld"))["name"] == "model.pt"


def test_a_sidecar_that_cannot_be_made_costs_the_save_nothing(tmp_path):
    def broken(path):
        raise ValueError("no")

    result, problem = write_whole(str(tmp_path / "model.pt"), "0", put(b"new"), broken)
    assert result == "result" and problem == "no" and (tmp_path / "model.pt").read_bytes() == b"new"
    assert write_sidecar(str(tmp_path / "absent" / "x"), {}) is not None


def test_ranks_that_save_one_name_at_once_leave_a_file_and_its_own_sidecar(tmp_path):
    def save(rank):
        for turn in range(20):
            content = bytes([rank]) * (100 * rank + turn)
            write_whole(str(tmp_path / "model.pt"), str(rank), put(content), described)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in (1, 2, 3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert read_sidecar(str(tmp_path / "model.pt"))["size"] == (tmp_path / "model.pt").stat().st_size
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.pt.sdc.json"]


SLOW = """
import sys
from sdcrun.shim.checkpoints.files import write_whole

def writer(path):
    with open(path, "wb") as file:
        file.write(b"n" * 50_000)
        file.flush()
        sys.stdout.write("half\\n"); sys.stdout.flush()
        sys.stdin.readline()
        file.write(b"n" * 50_000)

write_whole(sys.argv[1], "0", writer, lambda path: {})
"""


def test_a_kill_in_the_middle_leaves_the_old_file_and_the_next_save_clears_up(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"old")
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path / "model.pt")], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close(), process.stdout.close()
    assert (tmp_path / "model.pt").read_bytes() == b"old"
    write_whole(str(tmp_path / "model.pt"), "0", put(b"new"), described)
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.pt.sdc.json"]


def test_what_killed_saves_of_other_jobs_have_left_is_removed_once_it_is_old(tmp_path):
    ages = {".model.pt.sdcrun-0-old": 7200, ".model.pt.sdcrun-1-now": 0, ".other.pt.sdcrun-0-old": 7200}
    for name, age in ages.items():
        room = tmp_path / name
        room.mkdir()
        (room / "model.pt").write_bytes(b"half")
        for path in (room / "model.pt", room):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    slow = tmp_path / ".model.pt.sdcrun-2-slow"
    slow.mkdir()
    (slow / "model.pt").write_bytes(b"still being written")
    os.utime(slow, (0, 0))
    write_whole(str(tmp_path / "model.pt"), "0-new", put(b"new"), described)
    left = [name for name in os.listdir(tmp_path) if ".sdcrun-" in name]
    assert sorted(left) == [".model.pt.sdcrun-1-now", ".model.pt.sdcrun-2-slow", ".other.pt.sdcrun-0-old"]


def test_sidecars_follow_their_files(tmp_path, followers):
    path = str(tmp_path / "x.tmp")
    write_whole(path, "0", put(b"new"), described)
    followers.saved(path, False)
    os.replace(path, tmp_path / "x.pt")
    assert read_sidecar(str(tmp_path / "x.pt"))["size"] == 3 and not os.path.exists(sidecar_of(path))
    shutil.copy(tmp_path / "x.pt", tmp_path / "best.pt")
    os.link(tmp_path / "x.pt", tmp_path / "linked.pt")
    os.remove(tmp_path / "x.pt")
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "best.pt.sdc.json", "linked.pt", "linked.pt.sdc.json"]
    assert followers.moves == [(path, str(tmp_path / "x.pt")), (str(tmp_path / "x.pt"), str(tmp_path / "best.pt")),
                               (str(tmp_path / "x.pt"), str(tmp_path / "linked.pt"))]  # fmt: skip


def test_a_renamed_folder_keeps_them(tmp_path, followers):
    (tmp_path / "tmp-1").mkdir()
    path = str(tmp_path / "tmp-1" / "x.pt")
    write_whole(path, "0", put(b"new"), described)
    followers.saved(path, False)
    os.rename(tmp_path / "tmp-1", tmp_path / "checkpoint-1")
    shutil.move(tmp_path / "checkpoint-1" / "x.pt", tmp_path / "y.pt")
    assert read_sidecar(str(tmp_path / "y.pt"))["size"] == 3


@pytest.mark.parametrize("opened", [False, True])
def test_a_withheld_temporary_file_does_not_replace_a_whole_one(tmp_path, followers, opened):
    (tmp_path / "x.pt").write_bytes(b"old")
    path = str(tmp_path / "x.tmp")
    if opened:
        Path(path).touch()
    write_whole(path, "0", put(b"bad"), described, files.WITHHELD)
    followers.saved(path, True)
    os.replace(path, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["x.pt", "x.pt.withheld", "x.pt.withheld.sdc.json"]


def test_what_a_script_does_with_a_file_that_was_withheld_does_not_end_it(tmp_path, followers):
    path = str(tmp_path / "x.pt")
    write_whole(path, "0", put(b"bad"), described, files.WITHHELD)
    followers.saved(path, True)
    shutil.copy(path, tmp_path / "best.pt")
    assert not (tmp_path / "best.pt").exists() and (tmp_path / "best.pt.withheld").read_bytes() == b"bad"
    os.remove(path)
    with pytest.raises(FileNotFoundError):
        os.remove(path)


def test_what_a_script_asks_about_a_file_that_was_withheld_does_not_end_it(tmp_path, followers):
    path = str(tmp_path / "x.tmp")
    write_whole(path, "0", put(b"bad"), described, files.WITHHELD)
    followers.saved(path, True)
    os.chmod(path, 0o644)
    assert os.path.getsize(path) == 3
    os.replace(path, tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError):
        os.chmod(path, 0o644)


def saved(folder, followers, name, withheld=False):
    path = str(folder / name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, "0", put(name.encode()), described, files.WITHHELD if withheld else "")
    followers.saved(path, withheld)


def test_a_rotation_does_not_take_the_last_good_checkpoint(tmp_path, followers):
    saved(tmp_path, followers, "1.pt")
    saved(tmp_path, followers, "2.pt")
    os.remove(tmp_path / "1.pt")
    saved(tmp_path, followers, "3.pt", withheld=True)
    (tmp_path / "2.pt").unlink()
    saved(tmp_path, followers, "4.pt", withheld=True)
    os.remove(tmp_path / "3.pt")
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["2.pt"] and "2.pt is not removed yet" in followers.said[0]
    saved(tmp_path, followers, "5.pt")
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["5.pt"] and not (tmp_path / "2.pt.sdc.json").exists()


def test_a_rotation_of_folders_does_not_take_it_either(tmp_path, followers):
    saved(tmp_path, followers, "step-1.tmp/x.pt")
    os.rename(tmp_path / "step-1.tmp", tmp_path / "step-1")
    saved(tmp_path, followers, "step-2/x.pt", withheld=True)
    shutil.rmtree(tmp_path / "step-1")
    assert (tmp_path / "step-1" / "x.pt").exists()
    saved(tmp_path, followers, "step-3/x.pt")
    assert not (tmp_path / "step-1").exists() and (tmp_path / "step-3" / "x.pt").exists()
    shutil.rmtree(tmp_path / "step-3")
    assert not (tmp_path / "step-3").exists()


def test_a_file_put_off_that_is_saved_anew_stays(tmp_path, followers):
    saved(tmp_path, followers, "x.pt")
    saved(tmp_path, followers, "y.pt", withheld=True)
    os.remove(tmp_path / "x.pt")
    saved(tmp_path, followers, "x.pt")
    assert (tmp_path / "x.pt").exists()


def test_functions_that_pathlib_keeps_are_wrapped_as_well(tmp_path, monkeypatch, followers):
    """As in Python 3.10."""
    accessor = SimpleNamespace(replace=os.replace, unlink=os.unlink, chmod=os.chmod)
    monkeypatch.setattr(pathlib, "_normal_accessor", accessor, raising=False)
    saved(tmp_path, followers, "x.tmp", withheld=True)
    accessor.replace(tmp_path / "x.tmp", tmp_path / "x.pt")
    accessor.unlink(tmp_path / "x.pt")
    followers.undo()
    assert accessor.replace.__module__ == "posix"


def test_arguments_by_name_and_errors_are_those_of_the_functions_themselves(tmp_path, followers):
    saved(tmp_path, followers, "x.pt")
    os.rename(src=tmp_path / "x.pt", dst=tmp_path / "y.pt")
    shutil.copyfile(src=str(tmp_path / "y.pt"), dst=tmp_path / "z.pt")
    os.chmod(path=tmp_path / "z.pt", mode=0o600)
    assert os.path.getsize(filename=tmp_path / "z.pt") == 4
    os.remove(path=tmp_path / "y.pt")
    assert sorted(os.listdir(tmp_path)) == ["z.pt", "z.pt.sdc.json"]
    for call in (os.remove, os.rename, lambda: os.rename("a"), shutil.copy, os.chmod, os.path.getsize):
        with pytest.raises(TypeError):
            call()
    shutil.rmtree(path=tmp_path)
    assert not tmp_path.exists()


def test_other_files_are_none_of_its_business(tmp_path, followers):
    followers.saved(str(tmp_path / "x.pt"), False)
    (tmp_path / "a").write_text("a")
    os.rename(tmp_path / "a", tmp_path / "b")
    shutil.copy(tmp_path / "b", tmp_path / "c")
    folder = os.open(tmp_path, os.O_RDONLY)
    os.unlink("b", dir_fd=folder)
    os.close(folder)
    with pytest.raises(FileNotFoundError):
        os.remove(tmp_path / "b")
    assert os.listdir(tmp_path) == ["c"] and followers.moves == []
    followers.undo()
    assert os.remove.__module__ == "posix" and not hasattr(os.remove, "__wrapped__")
