"""What a forward writes and prints is written once; what others write meanwhile, and compilers, is written."""

import bz2
import codecs
import contextvars
import csv
import functools
import gzip
import io
import logging
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from replaykit import Solo, data
from torch import nn

from sdcrun.shim.replay.muted import keeps_files, muted
from sdcrun.shim.replay.state import replay_scope

LOG = None
FILES = {}
OPTIONS = SimpleNamespace(log=None)
FOLDER = Path()
logger = logging.getLogger("of the script")


class Writes(nn.Module):
    """Writes in every way that it can in its forward."""

    log = None

    def __init__(self):
        super().__init__()
        self.a, self.mine = nn.Linear(6, 3), None

    def forward(self, x):
        y = self.a(x)
        print("global", file=LOG)
        FILES["one"].write("entry\n")
        OPTIONS.log.writelines(["option\n"])
        self.mine.write("attribute\n")
        Writes.log.write("class\n")
        sys.stdout.write("printed\n")
        logger.warning("logged")
        with open(FOLDER / "opened", "a") as file:
            file.write("opened\n")
        with (FOLDER / "path").open("ab") as file:
            file.write(b"path\n")
        np.save(FOLDER / "array.npy", y.detach().numpy())
        torch.save(y.detach(), FOLDER / "tensor.pt")
        stream = io.BytesIO()
        torch.save(y.detach(), stream)
        return y * torch.load(io.BytesIO(stream.getvalue())).abs().sum()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "FOLDER", tmp_path)
    return tmp_path


def test_everything_is_written_once(folder, monkeypatch, capsys, saving_patched):
    net = Writes()
    files = [open(folder / name, "w") for name in ("global", "entry", "option", "attribute", "class")]
    monkeypatch.setitem(globals(), "LOG", files[0])
    FILES["one"], OPTIONS.log, net.mine, Writes.log = files[1:]
    handler = logging.FileHandler(folder / "logged")
    logger.addHandler(handler)
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
    saved = {name: (folder / name).read_bytes() for name in ("array.npy", "tensor.pt")}
    parcel = solo.parcel()
    with torch.no_grad():
        net.a.weight.add_(1.0)  # What is written twice is written with other contents.
    expected, result = solo.again()
    assert expected != result.table and result.losses
    assert [LOG, FILES["one"], OPTIONS.log, net.mine, Writes.log] == files
    logger.removeHandler(handler)
    handler.close()
    for file in files:
        file.close()
        assert Path(file.name).read_text() == f"{Path(file.name).name}\n"
    assert capsys.readouterr().out == "printed\n"
    for name in ("opened", "path", "logged"):
        assert (folder / name).read_text() == f"{name}\n"
    assert saved == {name: (folder / name).read_bytes() for name in saved}
    assert parcel.expected == expected


FIRST, SECOND = (None, None), [None]
ROWS = DICTS = CODED = TEMPORARY = SAY = MAPPED = None


def say(text, file=None):
    file.write(text)


class Roundabout(nn.Module):
    """Writes into files that it holds in other things, or opens by other ways."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        y = self.a(x)
        for file in (*FIRST, *SECOND):
            file.write("entry\n")
        ROWS.writerow(["entry"])
        DICTS.writerow({"a": "entry"})
        self.rows.writerows([["entry"]])
        CODED.write("entry\n")
        TEMPORARY.write("entry\n")
        SAY("entry")
        say("entry\n")
        MAPPED[:] += 1
        for module in (gzip, bz2):
            with module.open(FOLDER / f"{module.__name__}", "at") as file:
                file.write("entry\n")
        np.savez(FOLDER / "arrays.npz", y=y.detach().numpy())
        y.detach().numpy().tofile(FOLDER / "raw")
        with open(FOLDER / "both", "w+") as file:
            file.write("3")
            file.seek(0)
            return y * float(file.read())


def test_files_that_are_held_by_other_things(folder, monkeypatch, saving_patched):
    names = ["one", "two", "three", "rows", "dicts", "self", "said", "default"]
    files = {name: open(folder / name, "w", newline="", buffering=1) for name in names}
    TEMPORARY = tempfile.NamedTemporaryFile("w", dir=folder, delete=False, buffering=1)
    held = {
        "FIRST": (files["one"], files["two"]), "SECOND": [files["three"]], "ROWS": csv.writer(files["rows"]),
        "DICTS": csv.DictWriter(files["dicts"], ["a"]), "CODED": codecs.open(folder / "coded", "w", "utf8"),
        "TEMPORARY": TEMPORARY, "SAY": functools.partial(print, file=files["said"], end="\n"),
        "MAPPED": np.memmap(folder / "mapped", dtype="int8", mode="w+", shape=(6,)),
    }  # fmt: skip
    held["TEMPORARY"].write("")
    for name, value in held.items():
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(say, "__defaults__", (files["default"],))
    net = Roundabout()
    net.rows = csv.writer(files["self"])
    with Solo(net) as solo:
        solo(data()[0]).sum().backward()
    held["MAPPED"].flush()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    expected, result = solo.again()
    assert expected == result.table and "loss" in expected
    assert all(globals()[name] is value for name, value in held.items())
    assert say.__defaults__ == (files["default"],) and SECOND == [files["three"]]
    held["CODED"].close()
    held["MAPPED"].flush()
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.pop("coded") == b"entry\n" and before.pop("coded") in (b"", b"entry\n")
    assert after == before and b"entry" in after["two"] and after["mapped"] == bytes([1] * 6)


REFUSED = {
    "makes a folder": lambda: os.makedirs(FOLDER / "a" / "b"),
    "removes": lambda: os.remove(FOLDER / "there"),
    "removes by its path": lambda: (FOLDER / "there").unlink(),
    "renames": lambda: os.replace(FOLDER / "there", FOLDER / "elsewhere"),
    "opens": lambda: os.open(FOLDER / "there", os.O_WRONLY | os.O_APPEND),
    "writes": lambda: os.write(DESCRIPTOR, b"more"),
    "starts a process": lambda: subprocess.run(["touch", str(FOLDER / "new")], check=True),
    "starts a shell": lambda: os.system(f"touch {FOLDER / 'new'}"),
    "opens a database": lambda: sqlite3.connect(FOLDER / "new"),
}
DESCRIPTOR = 0


@pytest.mark.parametrize("what", REFUSED)
def test_other_changes_of_files_are_refused(what, folder, monkeypatch):
    (folder / "there").write_text("content")
    descriptor = os.open(folder / "there", os.O_WRONLY)
    monkeypatch.setitem(globals(), "DESCRIPTOR", descriptor)
    with replay_scope(), muted(), pytest.raises(OSError, match="a replay does not"):
        REFUSED[what]()
    os.close(descriptor)
    assert [path.name for path in folder.iterdir()] == ["there"] and (folder / "there").read_text() == "content"
    before = vars(os).copy()
    with replay_scope(), muted():
        os.makedirs(folder, exist_ok=True)
        with os.fdopen(os.open(folder / "there", os.O_RDONLY)) as file:
            assert file.read() == "content"
    assert vars(os) == before


TEMPERATURE = contextvars.ContextVar("temperature", default=1.0)


class InContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        TEMPERATURE.set(TEMPERATURE.get() * 2)
        return self.a(x) * TEMPERATURE.get()


def test_a_context_is_that_of_the_forward_and_stays_as_it_is():
    token = TEMPERATURE.set(0.3)
    with Solo(InContext()) as solo:
        solo(data()[0]).sum().backward()
    TEMPERATURE.reset(token)
    expected, result = solo.again()
    assert expected == result.table and TEMPERATURE.get() == 1.0


@pytest.fixture
def saving_patched(tmp_path):
    from sdcrun.shim.patches import saving

    saving.install(SimpleNamespace(keeper=None, active=False, groups=[]))
    yield
    saving.undo()


def test_other_threads_write_while_a_replay_runs(folder, saving_patched, capsys):
    def elsewhere():
        print("printed")
        logger.warning("logged")
        (folder / "file").write_text("written")
        torch.save(torch.ones(1), folder / "tensor.pt")

    handler = logging.FileHandler(folder / "log")
    logger.addHandler(handler)
    with replay_scope(), muted():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    logger.removeHandler(handler)
    handler.close()
    assert capsys.readouterr().out == "printed\n"
    assert (folder / "log").read_text() == "logged\n" and (folder / "file").read_text() == "written"
    assert torch.load(folder / "tensor.pt") == torch.ones(1)


def test_reading_is_as_ever_and_writing_into_what_is_there_is_refused(folder):
    (folder / "file").write_text("content")
    with replay_scope(), muted():
        assert (folder / "file").read_text() == open(folder / "file").read() == "content"
        with pytest.raises(OSError, match="a replay does not write"):
            open(folder / "file", "r+")
    assert (folder / "file").read_text() == "content"


def test_a_compiler_writes_its_files_in_a_replay_too():
    names = {"__name__": "torch._inductor.codecache", "keeps_files": keeps_files}
    with replay_scope():
        assert keeps_files() is True
        assert eval("(lambda: keeps_files())()", names) is False
    assert keeps_files() is False


@pytest.mark.parametrize("what", ["sys.stdout", "builtins.open", "io.open", "logging.Logger.handle"])
def test_everything_is_as_it_was_behind_a_replay(what):
    def current():
        import builtins

        return eval(what, {"sys": sys, "builtins": builtins, "io": io, "logging": logging})

    before = current()
    with pytest.raises(RuntimeError), replay_scope(), muted():
        assert current() is not before
        raise RuntimeError
    assert current() is before
