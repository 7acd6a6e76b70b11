"""Files that a script opens itself: the old one stays until the new one is whole; bad bytes from memory stay out."""

import builtins
import errno
import inspect
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sdcrun.shim.checkpoints import files, opened
from sdcrun.shim.checkpoints.files import read_sidecar, sidecar_of, write_sidecar
from sdcrun.shim.checkpoints.followers import Followers
from sdcrun.shim.checkpoints.opened import Held, Opened


@pytest.fixture
def watch():
    """A wrapped `open`."""
    followers = Followers(lambda *moved: None, lambda text: None)
    one = Opened(followers, lambda: "0")
    one.install()
    yield one
    one.undo()
    followers.undo()


@pytest.fixture
def place(tmp_path, watch):
    """A checkpoint from earlier."""
    (tmp_path / "x.pt").write_bytes(b"old")
    write_sidecar(str(tmp_path / "x.pt"), {"id": "0"})
    return tmp_path


def names(folder):
    return sorted(os.listdir(folder))


def test_the_old_file_stays_until_the_new_one_is_closed(place):
    path = place / "x.pt"
    path.chmod(0o640)
    for way in (lambda: open(path, "wb"), lambda: path.open("wb"), lambda: open(str(path), mode="wb")):
        with way() as file:
            assert isinstance(file, io.BufferedWriter) and os.fspath(file.name) == str(path) and file.mode == "wb"
            file.write(b"new")
            file.flush()
            os.fsync(file.fileno())
            assert path.read_bytes() == b"old"
        assert path.read_bytes() == b"new" and names(place) == ["x.pt"], "a sidecar of the old contents may not stay"
        assert path.stat().st_mode & 0o777 == 0o640
        path.write_bytes(b"old")
        write_sidecar(str(path), {"id": "0"})


def test_one_save_into_it_has_its_sidecar_two_have_none(place):
    settled = []
    for saves in (1, 2):
        with open(place / "x.pt", "wb") as file:
            file.write(b"new")
            file.saves, file.describe = saves, lambda path: {"size": os.path.getsize(path)}
            file.settled = settled.append
        assert read_sidecar(str(place / "x.pt")) == ({"size": 3} if saves == 1 else None)
    assert settled == [None, None]


@pytest.mark.parametrize("fate", ["withheld", "failed"])
def test_what_is_withheld_or_failed_leaves_the_old_file_and_its_sidecar(place, fate):
    with open(place / "x.pt", "wb") as file:
        file.write(b"half")
        setattr(file, fate, True)
    assert (place / "x.pt").read_bytes() == b"old" and names(place) == ["x.pt", "x.pt.sdc.json"]
    assert read_sidecar(str(place / "x.pt")) == {"id": "0"}


def test_a_full_disk_is_the_script_s_own_error_and_leaves_the_old_file(place, monkeypatch):
    file = open(place / "x.pt", "wb")
    file.write(b"new")
    os.close(file.fileno())
    with pytest.raises(OSError) as error:
        file.close()
    assert error.value.errno == errno.EBADF
    assert (place / "x.pt").read_bytes() == b"old" and names(place) == ["x.pt", "x.pt.sdc.json"]
    monkeypatch.setattr(files, "free", lambda folder: 10)
    with open(place / "x.pt", "wb") as file:
        assert not isinstance(file, Held), "a disk without room for both is used as an ordinary save would"


def test_other_files_are_opened_as_ever(place):
    (place / "x.txt").write_text("x")
    os.link(place / "x.pt", place / "hard.pt")
    write_sidecar(str(place / "hard.pt"), {"id": "1"})
    kinds = [("x.pt", "rb"), ("x.pt", "r+b"), ("x.pt", "ab"), ("hard.pt", "wb"), ("new.pt", "wb"), ("x.txt", "w")]
    for name, mode in kinds:
        with open(place / name, mode) as file:
            assert not isinstance(file, Held), (name, mode)
    with pytest.raises(FileNotFoundError):
        open(place / "none" / "x.pt", "wb")


def test_a_file_that_is_never_closed_is_there_all_the_same(place, watch):
    open(place / "x.pt", "wb").write(b"new")
    assert (place / "x.pt").read_bytes() == b"new"
    write_sidecar(str(place / "x.pt"), {"id": "0"})
    kept = open(place / "x.pt", "wb")
    kept.write(b"newer")
    watch._at_exit()
    assert kept.closed and (place / "x.pt").read_bytes() == b"newer" and names(place) == ["x.pt"]


def test_open_looks_as_it_did(place, watch):
    class Own:
        opener = open

    assert builtins.open is io.open and open.__name__ == "open" and "closefd" in inspect.signature(open).parameters
    assert pickle.loads(pickle.dumps(open)) is open
    with Own().opener(place / "x.pt", "rb") as file:
        assert file.read() == b"old"
    watch.undo()
    assert inspect.isbuiltin(open) and builtins.open is io.open


def written(path, contents, way):
    if way == "write":
        with open(path, "wb") as file:
            file.write(contents)
    elif way == "path":
        Path(path).write_bytes(contents)
    elif way == "pieces":
        with open(path, "wb") as file:
            shutil.copyfileobj(io.BytesIO(contents), file, 7)
    elif way == "temporary":
        with open(f"{path}.tmp", "wb") as file:
            file.write(contents)
        os.replace(f"{path}.tmp", path)


@pytest.mark.parametrize("way", ["write", "path", "pieces", "temporary"])
@pytest.mark.parametrize("older", [True, False])
def test_bad_bytes_from_memory_are_withheld_from_the_file_that_they_are_written_to(place, watch, way, older):
    found, path = [], place / "y.pt"
    if older:
        path.write_bytes(b"older")
    bad = bytes(range(256)) * 40
    watch.saved_in_memory(memoryview(bad), lambda *said: found.append(said))
    written(path, bad, way)
    assert path.read_bytes() == b"older" if older else not path.exists()
    assert (place / "y.pt.withheld").read_bytes() == bad and len(found) == 1
    for number in range(3):
        written(path, b"good" * number, way)
        assert path.read_bytes() == b"good" * number
    assert len(found) == 1 and "y.pt.withheld" in names(place)


def test_a_bad_save_at_the_head_of_a_file_and_one_of_many_are_found(place, watch):
    found = []
    for number in range(opened.KEPT_IN_MEMORY + 1):
        watch.saved_in_memory(memoryview(b"%d" % number * 50), lambda *said: found.append(said))
    written(place / "y.pt", b"0" * 50, "write")
    assert not found, "only the last few are remembered"
    written(place / "z.pt", b"5" * 50 + b"more", "write")
    assert len(found) == 1 and not (place / "z.pt").exists()


KILLED = """
import os, signal, sys
from sdcrun.shim.checkpoints.followers import Followers
from sdcrun.shim.checkpoints.opened import Opened
Opened(Followers(print, print), lambda: "0").install()
file = open(sys.argv[1], "wb")
file.write(b"half" * 10000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_before_it_is_closed_leaves_the_old_file_and_the_next_one_clears_up(place):
    process = subprocess.run([sys.executable, "-c", KILLED, str(place / "x.pt")])
    assert process.returncode == -signal.SIGKILL
    assert (place / "x.pt").read_bytes() == b"old" and os.path.exists(sidecar_of(str(place / "x.pt")))
    with open(place / "x.pt", "wb") as file:
        file.write(b"new")
    assert names(place) == ["x.pt"] and (place / "x.pt").read_bytes() == b"new"
