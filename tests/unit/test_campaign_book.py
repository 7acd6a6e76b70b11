"""The record of a campaign: it goes on where it stopped, belongs to one campaign and to one process at a time."""

import json

import pytest

from sdcrun.errors import UsageError
from sdcrun.runner.campaigns import command
from sdcrun.runner.campaigns.book import FILE, Book, set_aside

HEAD = {"command": ["train.py"], "rules": {"horizon": 2}}


def test_what_was_appended_is_there_again(tmp_path):
    book = Book(tmp_path, HEAD)
    book.append("reference", {"slots": [1]})
    book.append("cell", {"key": "a", "outcome": "named"})
    book.append("cell", {"key": "a", "outcome": "missed"})
    book.close()
    again = Book(tmp_path, HEAD)
    assert again.reference["slots"] == [1] and again.cells["a"]["outcome"] == "missed"
    again.close()


def test_a_line_cut_off_by_a_kill_costs_that_line_alone(tmp_path):
    book = Book(tmp_path, HEAD)
    book.append("cell", {"key": "a"})
    book.close()
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"what": "cell", "key": "b"')
    book = Book(tmp_path, HEAD)
    assert set(book.cells) == {"a"}
    book.append("cell", {"key": "c"})
    book.close()
    book = Book(tmp_path, HEAD)
    assert set(book.cells) == {"a", "c"}
    book.close()
    lines = (tmp_path / FILE).read_bytes().splitlines()
    assert json.loads(lines[-1])["key"] == "c"


def test_another_campaign_in_the_folder_is_refused_and_says_what_differs(tmp_path):
    Book(tmp_path, HEAD).close()
    with pytest.raises(UsageError, match="another rules: .*--fresh"):
        Book(tmp_path, {**HEAD, "rules": {"horizon": 3}})


def test_one_process_at_a_time(tmp_path):
    book = Book(tmp_path, HEAD)
    with pytest.raises(UsageError, match="in use"):
        Book(tmp_path, HEAD)
    book.close()
    Book(tmp_path, HEAD).close()


def test_starting_over_keeps_what_was(tmp_path):
    folder = tmp_path / "campaign-x"
    for _ in range(2):
        Book(folder, HEAD).close()
        set_aside(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["campaign-x.1", "campaign-x.2"]


@pytest.mark.parametrize(("tokens", "part"), [
    (["--sdc-audit-every", "5", "t.py"], "settings of sdcrun are in the file"),
    (["--inject-fault", "gradient", "t.py"], "settings of sdcrun are in the file"),
    (["--max-restarts", "2", "t.py"], "leave it out"),
    (["--nnodes", "2", "--rdzv-endpoint", "other:29500", "t.py"], "one machine"),
    (["nosuch.py"], "no such script"),
    ([], "no script given"),
])  # fmt: skip
def test_a_launch_that_cannot_be_is_refused_before_anything_starts(tmp_path, monkeypatch, tokens, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    with pytest.raises(UsageError, match=part):
        command.check(tokens)
    command.check(["--nnodes", "3", "t.py", "--lr", "3"])


def test_names_of_folders():
    assert command.name_of("configs/my faults.yaml") == "campaign-my-faults"
