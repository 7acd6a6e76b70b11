"""`sdcrun verify`: files read as streams, without running anything from them, against their sidecars."""

import os
import pickle
import random
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun.shim import fingerprint
from sdcrun.shim.checkpoints import files, reader
from sdcrun.shim.checkpoints.contents import leaves
from sdcrun.shim.checkpoints.keeper import sidecar_table
from sdcrun.shim.checkpoints.locate import locate, locate_in_tensor
from sdcrun.shim.checkpoints.tables import Saved
from sdcrun.shim.checkpoints.verify import GOOD, UNKNOWN, WRONG, main, verify


class Holder:
    """A class of the script's own, with tensors in its attributes."""

    def __init__(self):
        self.inner = {"w": torch.arange(7.0)}


def contents():
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 40)).sum().backward()
    optimizer.step()
    return {
        "model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "names": ["a", 2],
        "transposed": torch.randn(5, 6).t(), "expanded": torch.randn(1, 6).expand(4, 6), "empty": torch.zeros(0, 3),
        "gaps": torch.randn(9, 8)[:, ::2], "half": torch.randn(11).bfloat16(), "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64), "tied": [net[0].weight, net[0].weight],
        "parameter": torch.nn.Parameter(torch.randn(3)), "ordered": OrderedDict(a=torch.ones(2)),
    }  # fmt: skip


def with_sidecar(path, value, state="verified", format="torch", frame=True):
    saved = Saved(leaves(value))
    sidecar = {"id": "1", "state": state, "reason": "because", "format": format, "table": sidecar_table(saved, {}),
               "last_clean_audit": {}}  # fmt: skip
    if frame:
        sidecar["frame"] = reader.read(str(path)).frame()
    assert files.write_sidecar(str(path), sidecar) is None
    return saved


def test_names_and_fingerprints_in_the_file_are_those_of_what_was_saved(tmp_path):
    value = contents()
    torch.save(value, tmp_path / "x.pt")
    saved = with_sidecar(tmp_path / "x.pt", value)
    reading = reader.read(str(tmp_path / "x.pt"))
    assert set(reading.tensors) == set(saved.rows) and not reading.strange
    assert {name: stored.fingerprint() for name, stored in reading.tensors.items()} == saved.rows
    assert verify(str(tmp_path / "x.pt"))[0] == GOOD


def test_a_whole_module_and_an_object_of_the_script_s_own(tmp_path):
    value = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)), Holder()]
    torch.save(value, tmp_path / "x.pt")
    with_sidecar(tmp_path / "x.pt", value)
    code, lines = verify(str(tmp_path / "x.pt"))
    assert code == GOOD, lines


@pytest.mark.parametrize(("state", "code"), [("verified", GOOD), ("provisional", GOOD), ("unverified", UNKNOWN),
                                             ("withheld", WRONG), ("tainted", WRONG)])  # fmt: skip
def test_the_state_in_the_sidecar_counts_when_the_bytes_are_right(tmp_path, state, code):
    torch.save({"w": torch.ones(4)}, tmp_path / "x.pt")
    with_sidecar(tmp_path / "x.pt", {"w": torch.ones(4)}, state)
    found, lines = verify(str(tmp_path / "x.pt"))
    assert found == code and "because" in lines[0]


def test_one_flipped_bit_is_named_by_tensor_word_and_bit(tmp_path):
    value = {"a": torch.randn(300_000), "b": {"c": torch.randn(10, 10).t()}}
    torch.save(value, tmp_path / "x.pt")
    with_sidecar(tmp_path / "x.pt", value)
    stored = reader.read(str(tmp_path / "x.pt")).tensors
    for name, word, bit in (("a", 250_123, 30), ("a", 0, 0), ("b/c", 57, 23)):
        data = bytearray((tmp_path / "x.pt").read_bytes())
        data[stored[name].start + 4 * word + bit // 8] ^= 1 << bit % 8
        (tmp_path / "y.pt").write_bytes(data)
        (tmp_path / "y.pt.sdc.json").write_bytes((tmp_path / "x.pt.sdc.json").read_bytes())
        code, lines = verify(str(tmp_path / "y.pt"))
        assert code == WRONG and f"{name}: word {word} (element {word}), bit {bit} flipped" in lines[1], lines


def test_no_byte_of_a_file_can_change_unseen(tmp_path):
    value = {"w": torch.randn(50), "view": torch.randn(100)[10:20], "lr": 0.1}
    torch.save(value, tmp_path / "x.pt")
    with_sidecar(tmp_path / "x.pt", value)
    whole = (tmp_path / "x.pt").read_bytes()
    for position in random.Random(0).sample(range(len(whole)), 150):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        (tmp_path / "x.pt").write_bytes(data)
        assert verify(str(tmp_path / "x.pt"))[0] != GOOD, position
    for cut in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "x.pt").write_bytes(whole[:cut])
        assert verify(str(tmp_path / "x.pt"))[0] == WRONG, cut
    (tmp_path / "x.pt").write_bytes(whole + b"\0")
    assert verify(str(tmp_path / "x.pt"))[0] == WRONG


def test_without_a_sidecar_or_a_file_nobody_can_tell(tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / "x.pt")
    assert verify(str(tmp_path / "x.pt"))[0] == UNKNOWN and verify(str(tmp_path / "y.pt"))[0] == UNKNOWN
    (tmp_path / "x.pt.sdc.json").write_text("{")
    assert verify(str(tmp_path / "x.pt"))[0] == UNKNOWN
    torch.save({"w": torch.ones(4)}, tmp_path / "z.pt", _use_new_zipfile_serialization=False)
    with_sidecar(tmp_path / "z.pt", {"w": torch.ones(4)}, frame=False)
    assert verify(str(tmp_path / "z.pt"))[0] == UNKNOWN


def test_another_checkpoint_under_the_name_is_seen(tmp_path):
    torch.save({"w": torch.ones(5)}, tmp_path / "x.pt")
    with_sidecar(tmp_path / "x.pt", {"w": torch.ones(4)})
    assert verify(str(tmp_path / "x.pt"))[0] == WRONG
    torch.save({"v": torch.ones(4)}, tmp_path / "x.pt")
    assert verify(str(tmp_path / "x.pt"))[0] == WRONG


class Evil:
    """Pickles to a call that leaves a trace."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_no_code_from_a_file_runs(tmp_path):
    torch.save({"w": torch.ones(4), "evil": Evil(str(tmp_path / "trace"))}, tmp_path / "x.pt")
    with_sidecar(tmp_path / "x.pt", {"w": torch.ones(4)})
    assert verify(str(tmp_path / "x.pt"))[0] == GOOD and not (tmp_path / "trace").exists()


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_rubbish_is_damaged_and_never_an_error(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        path.write_bytes(data)
        with pytest.raises((reader.Damaged, NotImplementedError)):
            reader.read(str(path))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", data)
        try:
            assert not reader.read(str(path)).tensors, "what happens to be a pickle of something holds no tensors"
        except reader.Damaged:
            pass


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    value = {"a.w": torch.randn(70_000), "b": torch.randn(3, 4).half(), "empty": torch.zeros(0)}
    path = str(tmp_path / "x.safetensors")
    safetensors.save_file(value, path, metadata={"format": "pt"})
    with_sidecar(path, value, format="safetensors")
    assert verify(path)[0] == GOOD
    data = bytearray(Path(path).read_bytes())
    data[reader.read(path).tensors["a.w"].start + 4 * 66_000] ^= 2
    Path(path).write_bytes(data)
    code, lines = verify(path)
    assert code == WRONG and "a.w: word 66000 (element 66000), bit 1 flipped" in lines[1]


def test_a_folder_of_distributed_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    net = torch.nn.Linear(30, 20)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    net(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    value = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    path = str(tmp_path / "x")
    dcp.save(value, checkpoint_id=path, no_dist=True)
    with_sidecar(path, value, format="dcp", frame=False)
    code, lines = verify(path)
    assert code == GOOD, lines
    stored = reader.read(path).tensors["model.weight"]
    data = bytearray(Path(stored.path).read_bytes())
    data[stored.start + 4 * 7] ^= 1
    Path(stored.path).write_bytes(data)
    code, lines = verify(path)
    assert code == WRONG and "model/weight: word 7 (element 7), bit 0 flipped" in lines[1]
    (tmp_path / "x" / ".metadata").unlink()
    assert verify(path)[0] == WRONG


def test_the_worst_of_several_files_is_the_exit_code_and_the_command_says_all(tmp_path, capsys):
    for name, state in (("good.pt", "verified"), ("unsure.pt", "unverified"), ("bad.pt", "tainted")):
        torch.save({"w": torch.ones(4)}, tmp_path / name)
        with_sidecar(tmp_path / name, {"w": torch.ones(4)}, state)
    good, unsure, bad = (str(tmp_path / name) for name in ("good.pt", "unsure.pt", "bad.pt"))
    assert [main([good]), main([good, unsure]), main([unsure, bad, good])] == [0, 2, 1]
    assert capsys.readouterr().out.count("good.pt") == 3
    command = [sys.executable, "-m", "sdcrun.cli", "verify", good, unsure]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2 and "unsure.pt: cannot tell" in process.stdout, process.stderr


@settings(max_examples=40)
@given(st.integers(1, 200_000), st.integers(0, 31), st.randoms(use_true_random=False))
def test_one_wrong_word_is_always_located(size, bit, rng):
    tensor = torch.randint(-(1 << 31), (1 << 31) - 1, (size,), dtype=torch.int32)
    expected = tuple(fingerprint.fingerprints([tensor])[0].tolist())
    place = rng.randrange(size)
    before = int(tensor[place]) & 0xFFFFFFFF
    tensor.view(torch.uint8)[4 * place + bit // 8] ^= 1 << bit % 8
    word = locate_in_tensor(tensor, expected)
    assert (word.index, word.expected, word.observed, word.bits) == (place, before, before ^ 1 << bit, [bit])
    assert locate_in_tensor(tensor, tuple(fingerprint.fingerprints([tensor])[0].tolist())) is None


def test_two_wrong_words_are_not_taken_for_one():
    for size in (10, 70_000, 300_000):
        tensor = torch.randn(size)
        expected = tuple(fingerprint.fingerprints([tensor])[0].tolist())
        tensor[3] += 1
        tensor[-1] -= 1
        assert locate_in_tensor(tensor, expected) is None
        assert locate_in_tensor(torch.randn(size), expected) is None


def test_a_word_in_a_cut_stream_and_in_a_half_word_at_the_end():
    data = bytes(range(256)) * 2 + b"\1\2\3"
    expected = fingerprint.fingerprint_bytes([data])
    wrong = bytearray(data)
    wrong[-1] ^= 0x80
    pieces = [bytes(wrong[i : i + 7]) for i in range(0, len(wrong), 7)]
    word = locate(lambda: iter(pieces), expected)
    assert word.index == 128 and word.bits == [23]


def test_pickles_of_the_standard_library_are_read_without_their_classes():
    from sdcrun.shim.checkpoints import inert

    value = {"a": OrderedDict(x=1), "b": {1, 2}, "c": Path("/x"), "d": Holder, "e": random.Random(1)}
    found = inert.read(pickle.dumps(value))
    assert found["a"] == {"x": 1} and found["b"] == {1, 2} and isinstance(found["c"], inert.Stand)
