"""What a forward writes and prints is written once; what others write meanwhile, and compilers, is written."""

import io
import logging
import sys
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
