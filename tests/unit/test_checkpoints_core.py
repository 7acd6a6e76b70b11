"""States of checkpoints, and when the next save is foreseen."""

import pytest
from eventmaker import Job, comparison
from hypothesis import given
from hypothesis import strategies as st

from sdcrun.core import checkpoints, decide, saves
from sdcrun.core.state import State


def saved(job, step, state="provisional", rank=0, path=None, **more):
    data = {"path": path or f"/c/{step}.pt", "step": step, "state": state, "reason": "weights equal the vote",
            "id": f"id{step}"}  # fmt: skip
    job.emit("checkpoint", rank, {**data, **more})


def states(job):
    state = decide.initial(job.config)
    for event in job.events:
        decide.fold(state, event)
    rows = checkpoints.rows(state, state.ledger.strikes(state.device_key))
    return {row["path"]: row["state"] for row in rows}, rows, state


def actions(job):
    state, found = decide.initial(job.config), []
    for event in job.events:
        state, more = decide.apply(state, event)
        found += more
    return found


def test_a_clean_audit_of_the_same_or_a_later_step_verifies():
    for audited, expected in ((4, "provisional"), (5, "verified"), (9, "verified")):
        job = Job()
        job.hello()
        job.audit(audited)
        saved(job, 5)
        assert states(job)[0] == {"/c/5.pt": expected}


def test_the_first_audit_after_the_save_counts_alone():
    job = Job()
    job.hello()
    saved(job, 5)
    job.audit(6, agreed=2, comparisons=[comparison(1, 2, "ring", False), comparison(1, 3, "arbiter", True)])
    job.audit(7)
    found, rows, _ = states(job)
    assert found == {"/c/5.pt": "unverified"} and "audit of step 6 was not clean" in rows[0]["reason"]


def test_an_audit_of_another_attempt_says_nothing():
    job = Job()
    job.hello()
    saved(job, 5)
    job.hello(attempt=1)
    job.audit(6, attempt=1)
    assert states(job)[0] == {"/c/5.pt": "provisional"}


def test_what_nobody_vouched_for_stays_so():
    job = Job()
    job.hello()
    saved(job, 5, "unverified")
    saved(job, 6, "withheld", path="/c/6.pt.withheld")
    job.audit(7)
    assert states(job)[0] == {"/c/5.pt": "unverified", "/c/6.pt.withheld": "withheld"}


def test_a_device_confirmed_later_taints_what_was_saved_since_its_last_clean_audit():
    job = Job()
    job.hello()
    saved(job, 2)
    job.audit(3)
    saved(job, 8)
    job.audit(9)
    job.vote(10, {"w": [1]})
    saved(job, 20)
    job.vote(30, {"w": [1]})
    found, rows, _ = states(job)
    assert found == {"/c/2.pt": "verified", "/c/8.pt": "verified", "/c/20.pt": "tainted"}
    assert checkpoints.newest_safe(rows) == "/c/8.pt"


def test_every_transition_is_an_event_once_and_the_sidecar_s_rank_is_told():
    job = Job()
    job.hello()
    saved(job, 5, rank=2)
    job.audit(6)
    job.audit(7)
    done = [a for a in actions(job) if a.kind in ("record", "reply")]
    assert [a.kind for a in done] == ["record", "reply"]
    assert done[0].data["kind"] == "checkpoint" and done[0].data["data"]["state"] == "verified"
    assert done[1].data["to"] == "rank:2" and done[1].data["checkpoint"]["id"] == "id5"
    assert done[1].data["checkpoint"]["last_clean_audit"], "per device"


def test_the_record_with_the_transition_folds_to_the_same_state():
    job = Job()
    job.hello()
    saved(job, 5)
    job.audit(6)
    before = states(job)[0]
    for action in actions(job):
        if action.kind == "record":
            job.emit(action.data["kind"], "controller", action.data["data"])
    assert states(job)[0] == before == {"/c/5.pt": "verified"}


def test_a_transition_of_an_earlier_save_under_the_same_name_is_not_the_new_one_s():
    job = Job()
    job.hello()
    saved(job, 5, path="/c/last.pt")
    saved(job, 8, path="/c/last.pt")
    late = {"path": "/c/last.pt", "step": 5, "id": "id5", "state": "tainted", "reason": ""}
    job.emit("checkpoint", "controller", late)
    assert states(job)[0] == {"/c/last.pt": "provisional"}


def test_a_moved_file_has_one_row():
    job = Job()
    job.hello()
    saved(job, 5, path="/c/x.tmp")
    saved(job, 5, path="/c/x.pt", was="/c/x.tmp")
    assert states(job)[0] == {"/c/x.pt": "provisional"}


def test_a_copied_file_has_a_row_of_its_own_and_one_finding():
    job = Job()
    job.hello()
    saved(job, 5, path="/c/x.pt")
    saved(job, 5, path="/c/best.pt", copied="/c/x.pt")
    saved(job, 6, "withheld", path="/c/y.pt.withheld", dissent=True, differing=WRONG)
    saved(job, 6, "withheld", path="/c/z.pt.withheld", dissent=True, differing=WRONG, copied="/c/y.pt.withheld")
    found, _, state = states(job)
    assert found == {"/c/x.pt": "provisional", "/c/best.pt": "provisional", "/c/y.pt.withheld": "withheld",
                     "/c/z.pt.withheld": "withheld"}  # fmt: skip
    assert len(state.ledger.ordered()) == 1


@pytest.mark.parametrize(("path", "more", "done"), [
    ("/c/x.pt.withheld", {}, "an older file of that name is as it was"),
    ("/c/x.pt.withheld", {"older": False}, "had opened, and so emptied, is removed"),
    ("(in memory, save 1)", {}, "a file that it opens after this and writes them to is withheld"),
])  # fmt: skip
def test_what_was_done_about_a_bad_save_is_said_as_it_is(path, more, done):
    job = Job()
    job.hello()
    saved(job, 5, "withheld", path=path, dissent=True, **more)
    (entry,) = states(job)[2].ledger.ordered()
    assert done in entry.done


def test_bytes_from_memory_that_reach_a_file_are_withheld_there_and_no_second_finding():
    job = Job()
    job.hello()
    saved(job, 5, "unverified", path="(in memory, save 1)", dissent=True, differing=WRONG)
    saved(job, 5, "withheld", path="/c/x.pt.withheld", dissent=True, differing=WRONG, was="(in memory, save 1)")
    found, _, state = states(job)
    assert found == {"/c/x.pt.withheld": "withheld"} and len(state.ledger.ordered()) == 1


WRONG = [{"tensor": "w", "name": "w", "text": "word 7 (element 7), bit 3 flipped", "bits": [3], "index": 7}]


def test_dissent_is_a_finding_that_accuses_nobody_and_stops_nothing():
    job = Job(on_suspect="stop", on_weight_fault="stop", max_strikes=1)
    job.hello()
    saved(job, 5, "withheld", path="/c/5.pt.withheld", dissent=True, differing=WRONG)
    state = states(job)[2]
    (entry,) = state.ledger.ordered()
    assert entry.finding.rule == "checkpoint-withheld" and not entry.finding.ranks and not entry.finding.strike
    assert "/c/5.pt.withheld" in entry.finding.text and entry.finding.evidence[0]["bits"] == [3]
    assert not [a for a in actions(job) if a.kind == "stop"]
    assert [a for a in actions(job) if a.kind == "say"]


def test_an_injected_fault_explains_the_dissent():
    job = Job(faults=("checkpoint:step=5",))
    job.hello()
    job.inject(5, 0, site="checkpoint")
    saved(job, 5, "withheld", path="/c/5.pt.withheld", dissent=True, differing=WRONG)
    (entry,) = states(job)[2].ledger.ordered()
    assert entry.finding.injected
    job.inject(6, 0, site="checkpoint")
    assert states(job)[2].ledger.ordered()[0].finding.injected


def test_a_damaged_load_is_a_finding_with_the_file_s_name():
    job = Job()
    job.hello()
    job.emit("loaded", 1, {"path": "/c/5.pt", "step": 0, "id": "x", "differing": WRONG, "count": 1})
    (entry,) = states(job)[2].ledger.ordered()
    assert entry.finding.rule == "checkpoint-damaged" and "/c/5.pt" in entry.finding.text
    assert "bit 3 flipped" in entry.finding.text


def test_a_rank_s_last_table_goes_to_the_first_of_its_group():
    job = Job()
    job.hello()
    job.emit("left", 2, {"group": "k", "first": 0, "rank": 2, "version": 7, "digests": {}, "rows": {}})
    (told,) = [a for a in actions(job) if a.kind == "reply"]
    assert told.data["to"] == "rank:0" and told.data["left"]["version"] == 7


@pytest.mark.parametrize("data", [
    {}, {"path": "x", "state": "splendid", "step": 1}, {"path": "x", "state": "verified", "step": "soon"},
    {"path": "x", "state": "withheld", "step": None, "dissent": True, "differing": "no"},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["checkpoint", "loaded", "left"])
def test_malformed_statements_are_counted_or_ignored(kind, data):
    job = Job()
    job.hello()
    job.emit(kind, 0, data)
    assert isinstance(states(job)[2], State)
    actions(job)


@pytest.mark.parametrize(("steps", "expected"), [
    ([], None), ([9], None), ([9, 19], 29), ([10, 20], 30), ([4, 9, 14], 19), ([3, 50], None), ([3, 50, 97], 144),
    ([1, 2, 3], None), ([0, 5], 10), ([9, 19, 24], None),
])  # fmt: skip
def test_the_next_save(steps, expected):
    assert saves.next_save(steps) == expected
    if expected is not None:
        assert saves.wanted(expected - 1, steps) == "audit" and saves.wanted(expected, steps) == "vote"
        assert saves.wanted(expected - 2, steps) is None and saves.wanted(expected + 1, steps) is None


@given(st.integers(4, 10_000), st.integers(0, 10_000), st.integers(3, 8))
def test_regular_saves_are_foreseen(gap, first, count):
    assert saves.next_save([first + gap * i for i in range(count)]) == first + gap * count
