"""One rank alone cannot take its part in an audit: all others hear of it, nobody hangs, nobody skips."""

import pytest
from test_replay_faults import findings, run

ENDING = {
    "alone-compares": "another rank could not take its part",
    "alone-weighs": "another rank could not take its part",
    "alone-ships": "",
}


@pytest.fixture(scope="module")
def lines():
    return run("alone-packs", *ENDING)


@pytest.mark.parametrize("case", ["alone-packs", *ENDING])
def test_the_job_goes_on_as_if_there_had_been_no_audit(case, lines):
    line = lines[case]
    assert line["lockstep"] and line["trace_free"]
    assert findings(line) == ([], []) and not any(line["mismatches"] + line["votes"])


@pytest.mark.parametrize("case", ENDING)
def test_audits_end_on_all_ranks_and_each_says_why(case, lines):
    line = lines[case]
    assert [event["step"] for event in line["events"]] == [1], "step 2 was not audited and no step after it"
    assert all(line["offs"]), line["offs"]
    assert ENDING[case] in line["offs"][0] and ENDING[case] in line["offs"][2]
    assert "no room" in line["offs"][1] or not ENDING[case]


def test_a_micro_batch_that_cannot_be_packed_is_declined_and_the_others_are_compared(lines):
    line = lines["alone-packs"]
    assert not any(line["offs"])
    _, second, third = line["events"]
    assert [(rank, "no room" in why) for rank, why in second["declined"]] == [(1, True)]
    assert {comparison["owner"] for comparison in second["comparisons"]} <= {0, 2}
    assert third["agreed"] == 3
