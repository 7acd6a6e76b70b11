"""The job folder: the record survives kills and full disks, views are replaced whole, jobs are found."""

import os

import pytest
from eventmaker import Job

from sdcrun.core.codec import encode_event
from sdcrun.report import store


def events():
    job = Job()
    job.hello()
    return job.events


def test_a_torn_last_line_is_cut_off_by_the_next_writer(tmp_path):
    made = events()
    log = store.EventLog(tmp_path)
    for event in made[:3]:
        log.append(event)
    log.close()
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(encode_event(made[3])[:-5])
    log = store.EventLog(tmp_path)
    log.append(made[4])
    log.close()
    reading = store.Reading()
    assert list(store.read_events(tmp_path, reading)) == [*made[:3], made[4]]
    assert reading == store.Reading(events=4)


@pytest.mark.parametrize("content", [b"x" * 200_000, b"", b"\n"])
def test_whatever_was_there_a_new_line_stands_alone(tmp_path, content):
    (tmp_path / "events.jsonl").write_bytes(content)
    log = store.EventLog(tmp_path)
    log.append(events()[0])
    log.close()
    assert list(store.read_events(tmp_path)) == events()[:1]


def test_nothing_is_opened_before_the_first_append(tmp_path):
    log = store.EventLog(tmp_path / "job")
    assert not (tmp_path / "job").exists()
    log.append(events()[0])
    assert (tmp_path / "job" / "events.jsonl").is_file()
    log.close()


def test_a_full_disk_leaves_whole_lines_only(tmp_path, monkeypatch):
    made = events()
    log = store.EventLog(tmp_path)
    log.append(made[0])
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    with pytest.raises(OSError):
        log.append(made[1])
    monkeypatch.undo()
    log.append(made[2])
    log.close()
    assert list(store.read_events(tmp_path)) == [made[0], made[2]]


def test_unreadable_lines_are_counted_and_passed_over(tmp_path):
    made = [encode_event(e) for e in events()]
    middle = [b"garbage\n", b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"v": 2}\n', b"y" * (3 << 20) + b"\n"]
    lines = [made[0], *middle[:2], made[1], *middle[2:], made[2], made[3][:-4]]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    reading = store.Reading()
    assert list(store.read_events(tmp_path, reading)) == events()[:3]
    assert reading == store.Reading(torn=True, unreadable=5, events=3)


def test_spooled_events_are_recovered_and_duplicates_dropped(tmp_path):
    made = events()
    log = store.EventLog(tmp_path)
    for event in [*made[:4], made[1]]:
        log.append(event)
    log.close()
    (tmp_path / "spool").mkdir()
    spooled = [encode_event(e) for e in made[2:7]] + [encode_event(made[7])[:9]]
    (tmp_path / "spool" / "rank:1.s1.jsonl").write_bytes(b"".join(spooled))
    reading = store.Reading()
    found = list(store.read_events(tmp_path, reading))
    assert found == made[:7] and (reading.duplicates, reading.recovered, reading.torn) == (1, 3, False)


def test_seen_keeps_only_what_it_must():
    seen, made = store.Seen(), events()
    first = made[0]
    order = [1, 2, 5, 4, 3, 6]
    for seq in order:
        assert seen.add(store.Event(first.kind, first.source, 0, seq, 0.0, {}, "s"))
    assert not any(seen.add(store.Event(first.kind, first.source, 0, seq, 0.0, {}, "s")) for seq in order)
    assert not any(seen._beyond.values())


def test_replace_file_leaves_old_or_new_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "view"
    store.replace_file(path, "old")

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError):
        store.replace_file(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["view"]
    store.replace_file(path, "new \ud800", mode=0o600)
    assert path.read_bytes() == b"new \\ud800" and path.stat().st_mode & 0o777 == 0o600


def test_finding_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SDCRUN_DIR", raising=False)
    for number, name in enumerate(("alpha", "beta")):
        store.write_job(tmp_path / "sdcrun_jobs" / name, {"job_id": name, "created_at": float(number)})
    assert store.find_job(None).name == "beta"
    assert store.find_job("alpha") == store.find_job("sdcrun_jobs/alpha")
    with pytest.raises(store.JobError, match="did you mean alpha"):
        store.find_job("alpa")
    with pytest.raises(store.JobError, match="not a job folder"):
        store.find_job(str(tmp_path))
    monkeypatch.setenv("SDCRUN_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(store.JobError, match="no jobs in"):
        store.find_job(None)


def test_a_line_that_another_writer_is_writing_is_not_cut_off(tmp_path, monkeypatch):
    """`sdcrun approve` on a running job: half a line of the controller's may be all that can be seen of it."""
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.05)
    controller, person = store.EventLog(tmp_path), store.EventLog(tmp_path)
    controller.append_lines(b"")
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b"half a li")
    person.append_lines(b"")
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b"ne\n")
    person.append_lines(b"approved\n")
    assert (tmp_path / "events.jsonl").read_bytes() == b"half a line\napproved\n"
    controller.close(), person.close()
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b"half a li")
    store.EventLog(tmp_path).append_lines(b"")
    assert (tmp_path / "events.jsonl").read_bytes() == b"half a line\napproved\n"
