"""A client's backlog and spool, and what both ends note about silence."""

import os
import threading

import pytest

from sdcrun.core.codec import decode_event, whole_lines
from sdcrun.runner.outages import GATHER_FOR, LOST_AFTER, SPOOL_AFTER, Absences, Outages
from sdcrun.wire.backlog import REPAIR_SPOOL_EVERY, Backlog
from sdcrun.wire.blindness import BLIND_AFTER, Blindness
from sdcrun.wire.runtime import checked_address, read_runtime, write_runtime
from sdcrun.wire.spool import Spool


@pytest.fixture
def warned():
    return []


@pytest.fixture
def backlog(tmp_path, warned):
    return Backlog("rank:0", "s", Spool(str(tmp_path / "spool" / "x.jsonl")), warned.append, limit=3000)


def spooled(backlog):
    with open(backlog.spool.path, "rb") as file:
        return [decode_event(line).data["n"] for line in whole_lines(file.read())]


def sent(backlog):
    return [decode_event(line) for line in whole_lines(backlog.next_batch(1 << 20))]


def test_events_are_numbered_per_attempt_and_spooled_when_put(backlog):
    for n, attempt in enumerate([0, 0, 1, 0]):
        backlog.put("k", {"n": n}, attempt)
    assert spooled(backlog) == [0, 1, 2, 3]
    assert [(event.attempt, event.seq) for event in sent(backlog)] == [(0, 1), (0, 2), (1, 1), (0, 3)]
    assert sent(backlog) == []
    backlog.acknowledge(0, 3)
    assert not backlog.empty, "the event of attempt 1 is still owed"
    backlog.acknowledge(1, 1)
    assert backlog.empty and spooled(backlog) == []


def test_after_a_reconnect_everything_unacknowledged_is_sent_again_in_order(backlog):
    for n in range(6):
        backlog.put("k", {"n": n}, 0)
    assert len(whole_lines(backlog.next_batch(1))) == 1
    assert len(whole_lines(backlog.next_batch(300))) >= 2
    backlog.rewind({0: 2})
    assert [event.data["n"] for event in sent(backlog)] == [2, 3, 4, 5]
    backlog.rewind({})
    assert [event.data["n"] for event in sent(backlog)] == [2, 3, 4, 5], "what was acknowledged once stays so"
    backlog.rewind({0: 6})
    assert backlog.empty


def test_memory_is_bounded_and_the_loss_is_said(backlog):
    for n in range(100):
        backlog.put("k", {"n": n}, 0)
    kept = sent(backlog)
    assert 10 < len(kept) < 40 and backlog.dropped == 100 - len(kept)
    lost = backlog.dropped
    backlog.acknowledge(0, len(kept))
    backlog.drain()
    (said,) = sent(backlog)
    assert said.kind == "limit" and said.data["text"].startswith(f"{lost} events") and said.seq == len(kept) + 1


def test_only_the_newest_summary_is_sent_and_one_at_a_time(backlog):
    backlog.put_summary({"n": 1}, 0)
    backlog.put_summary({"n": 2}, 0)
    assert not backlog.empty
    assert backlog.promote_summary(10.0, now=0.0) is None
    assert [event.data["n"] for event in sent(backlog)] == [2] and spooled(backlog) == [2]
    backlog.put_summary({"n": 3}, 0)
    assert backlog.promote_summary(10.0, now=100.0) is None and sent(backlog) == [], "the last one is not acknowledged"
    backlog.acknowledge(0, 1)
    assert backlog.promote_summary(10.0, now=5.0) == 10.0 and sent(backlog) == []
    backlog.promote_summary(10.0, now=10.0)
    assert [event.data["n"] for event in sent(backlog)] == [3]


def test_summary_is_what_it_was_when_handed_over(backlog):
    data = {"n": {"a": 1}}
    backlog.put_summary(data, 0)
    data["n"]["a"] = 2
    backlog.promote_summary(0.0, now=0.0)
    assert sent(backlog)[0].data == {"n": {"a": 1}}


def test_broken_spool_is_said_once_and_made_good_later(backlog, tmp_path, warned):
    (tmp_path / "spool").write_text("a file where the folder should be")
    for n in range(5):
        backlog.put("k", {"n": n}, 0)
    assert len(warned) == 1 and "kept in memory" in warned[0]
    backlog.repair_spool(now=1.0)
    assert backlog.spool.error is not None
    (tmp_path / "spool").unlink()
    backlog.repair_spool(now=2.0)
    assert backlog.spool.error is not None, "not tried all the time"
    backlog.repair_spool(now=1.0 + REPAIR_SPOOL_EVERY)
    assert backlog.spool.error is None and spooled(backlog) == [0, 1, 2, 3, 4]
    backlog.put("k", {"n": 5}, 0)
    assert spooled(backlog) == [0, 1, 2, 3, 4, 5] and len(warned) == 1


def test_spool_of_a_full_disk_keeps_whole_lines_only(tmp_path, monkeypatch):
    spool = Spool(str(tmp_path / "x.jsonl"))
    spool.append(b"first\n")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    spool.append(b"second\n")
    monkeypatch.undo()
    assert spool.error is not None
    spool.append(b"third\n")
    assert (tmp_path / "x.jsonl").read_bytes() == b"first\n"
    spool.rewrite([b"second\n", b"third\n"])
    assert spool.error is None and (tmp_path / "x.jsonl").read_bytes() == b"second\nthird\n"


def test_put_from_many_threads_numbers_each_once(tmp_path):
    backlog = Backlog("rank:0", "s", Spool(str(tmp_path / "x.jsonl")), print)
    threads = [threading.Thread(target=lambda: [backlog.put("k", {"n": 0}, 0) for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.seq for event in sent(backlog)] == list(range(1, 1601))
    assert len(spooled(backlog)) == 1600


def test_retired_spool_is_gone_unless_something_is_owed(backlog):
    backlog.put("k", {"n": 0}, 0)
    backlog.retire()
    assert spooled(backlog) == [0]
    backlog.rewind({0: 1})
    backlog.retire()
    assert not os.path.exists(backlog.spool.path)
    backlog.put("k", {"n": 1}, 0)
    assert spooled(backlog) == [1], "an event after the end is there for the controller to take in"


def test_blindness_within_a_connection_counts_from_the_unanswered_word():
    blindness = Blindness()
    blindness.began(0.0, 1000.0)
    assert blindness.heard(1.0, 1001.0) is None
    assert blindness.heard(500.0, 1500.0) is None, "nothing was owed"
    blindness.spoke(600.0, 1600.0)
    blindness.spoke(605.0, 1605.0)
    assert blindness.quiet(607.0) == 0.0
    blind = blindness.heard(600.0 + BLIND_AFTER, 1600.0 + BLIND_AFTER)
    assert (blind["since"], blind["until"]) == (1600.0, 1600.0 + BLIND_AFTER)
    blindness.spoke(700.0, 1700.0)
    assert blindness.heard(700.0 + BLIND_AFTER / 2, 1705.0) is None
    assert blindness.quiet(700.0 + BLIND_AFTER / 2 + 3) == 3


def test_blindness_is_told_again_when_the_peer_died_right_after_hearing_of_it():
    blindness = Blindness()
    blindness.began(0.0, 1000.0)
    blindness.spoke(1.0, 1001.0)
    told = blindness.heard(20.0, 1020.0)
    blindness.lost(21.0, 1021.0)
    assert blindness.reconnected(22.0, 1022.0) == told
    blindness.lost(23.0, 1023.0)
    later = blindness.reconnected(40.0, 1040.0)
    assert (later["since"], later["until"]) == (told["since"], 1040.0), "one statement for both"
    blindness.heard(40.1, 1040.1)
    blindness.lost(60.0, 1060.0)
    assert blindness.reconnected(61.0, 1061.0) is None, "long on record"


def test_blindness_without_a_connection():
    blindness = Blindness()
    assert blindness.reconnected(0.0, 1000.0) is None
    blindness.began(0.0, 1000.0)
    assert blindness.reconnected(BLIND_AFTER / 2, 1004.0) is None
    assert blindness.reconnected(50.0, 1050.0)["since"] == 1000.0
    blindness.heard(50.0, 1050.0)
    blindness.lost(60.0, 1060.0)
    assert blindness.reconnected(61.0, 1061.0) is None
    blindness.lost(70.0, 1070.0)
    assert blindness.reconnected(90.0, 1090.0)["since"] == 1070.0, "a quiet connection that stood was not blind"
    blindness.heard(90.0, 1090.0)
    blindness.spoke(100.0, 1100.0)
    blindness.lost(120.0, 1120.0)
    assert blindness.reconnected(121.0, 1121.0)["since"] == 1100.0


def test_many_outages_of_one_cause_are_one_statement():
    outages = Outages()
    for rank in range(20):
        outages.add(rank * 0.01, f"rank:{rank}", 100.0 + rank, 200.0 + rank, "no connection")
    outages.add(0.5, "controller", 150.0, 160.0, "paused")
    assert outages.due(1.0) == []
    first, second = outages.due(0.5 + GATHER_FOR)
    assert (first["since"], first["until"], first["count"], len(first["sources"])) == (100.0, 219.0, 20, 8)
    assert second["sources"] == ["controller"] and outages.due(1e9) == []
    outages.add(0.0, "rank:1", 5.0, None, "gone")
    outages.add(0.0, "rank:2", 4.0, 9.0, "gone")
    assert outages.due(0.0) == []
    assert outages.due(0.0, everything=True)[0]["until"] is None


def test_absences_are_acted_upon_once():
    absences = Absences()
    absences.left("rank:0", "a", 0.0, 1000.0)
    absences.left("rank:1", "b", 1.0, 1001.0)
    assert absences.spools_due(SPOOL_AFTER - 0.1) == []
    assert absences.spools_due(SPOOL_AFTER) == [("rank:0", "a")]
    assert absences.spools_due(SPOOL_AFTER + 1) == [("rank:1", "b")]
    assert absences.lost(LOST_AFTER) == [("rank:0", 1000.0)] and absences.lost(LOST_AFTER) == []
    assert absences.came("rank:0", "c") == ["a"] and absences.came("rank:0", "c") == []
    assert absences.came("rank:1", "b") == []
    assert absences.lost(1e9) == []


def test_runtime_file(tmp_path):
    path = str(tmp_path / "runtime.json")
    assert read_runtime(path) is None
    write_runtime(path, "h", 80, "s" * 64)
    assert read_runtime(path) == {"host": "h", "port": 80, "secret": "s" * 64}
    assert os.listdir(tmp_path) == ["runtime.json"]
    os.symlink(path, tmp_path / "link")
    assert read_runtime(str(tmp_path / "link")) is None
    for broken in (None, [], {"host": "h", "port": 80}, {"host": "", "port": 80, "secret": "s" * 64}):
        assert checked_address(broken) is None
    for change in ({"port": 0}, {"port": "80"}, {"port": True}, {"secret": "short"}, {"host": 3}):
        assert checked_address({"host": "h", "port": 80, "secret": "s" * 64, **change}) is None
