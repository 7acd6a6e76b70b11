"""A load: what differs from the sidecar is said, and a file that something else has written since is not accused."""

import os
from types import SimpleNamespace

import pytest
import torch

from sdcrun.shim.checkpoints import files
from sdcrun.shim.checkpoints.contents import leaves
from sdcrun.shim.checkpoints.loads import loaded, sidecar_table
from sdcrun.shim.checkpoints.tables import Saved


class Rank:
    def __init__(self):
        self.events, self.limits, self.groups = [], [], {}

    def emit(self, kind, data):
        self.events.append((kind, data))

    def limit(self, text):
        self.limits.append(text)


def contents(seed, steps=0):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(40, 30, generator=generator) for name in "abcd"}
    state["frozen"] = torch.ones(7)
    for name in "abcd"[:steps]:
        state[name] += 1
    return {"model": state}


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "x.pt")
    torch.save(contents(0), path)
    table = sidecar_table(Saved(leaves(contents(0))), {})
    files.write_sidecar(path, {"id": "1", "table": table, "written": files.written(path)})
    return path


def load(path):
    rank = Rank()
    loaded(rank, torch.load(path), path)
    return rank


def damage(path, count, times=None):
    """Overwrites the first bytes of each of the first `count` tensors with others."""
    data, status = bytearray(open(path, "rb").read()), os.stat(path)
    for name in "abcd"[:count]:
        at = data.index(bytes(contents(0)["model"][name].untyped_storage())[:64])
        data[at : at + 64] = os.urandom(64)
    with open(path, "r+b") as file:
        file.write(data)
    if times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_what_was_saved_is_no_event(path):
    rank = load(path)
    assert not rank.events and not rank.limits


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("times", [True, False])
def test_damage_is_said_however_much_there_is(path, count, times):
    damage(path, count, times)
    ((kind, data),) = load(path).events
    assert kind == "loaded" and data["count"] == count and data["path"] == path


def test_a_file_written_anew_by_something_else_is_not_accused(path):
    torch.save(contents(1), path)
    rank = load(path)
    assert not rank.events and "written anew since its sidecar" in rank.limits[0]


def test_a_file_brought_from_elsewhere_is_what_it_was(path, tmp_path):
    data = open(path, "rb").read()
    os.remove(path)
    with open(path, "wb") as file:
        file.write(data)
    rank = load(path)
    assert not rank.events and not rank.limits


def test_one_flipped_bit_is_named_whenever_the_file_was_written(path):
    state = contents(0)
    state["model"]["b"].view(-1).view(torch.int32)[11] ^= 1 << 19
    torch.save(state, path)
    ((_, data),) = load(path).events
    assert data["differing"][0] == {"tensor": "model/b", "bits": [19], "index": 11,
                                    "text": data["differing"][0]["text"]}  # fmt: skip


def test_without_a_sidecar_or_with_a_broken_one_nothing_is_said(path):
    open(files.sidecar_of(path), "w").write("{")
    assert not load(path).events
    os.remove(files.sidecar_of(path))
    assert not load(path).events


def test_a_link_to_a_checkpoint_has_its_sidecar(path, tmp_path):
    (tmp_path / "latest.pt").symlink_to("x.pt")
    damage(path, 1)
    assert load(str(tmp_path / "latest.pt")).events


def test_tensors_of_other_names_or_shapes_are_none_of_its_business(path):
    rank = Rank()
    loaded(rank, {"model": {"a": torch.zeros(2), "z": torch.zeros(40, 30)}, "more": SimpleNamespace()}, path)
    assert not rank.events
