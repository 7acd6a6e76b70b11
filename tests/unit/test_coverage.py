"""What becomes of a campaign's cells, from the events of a launch that many cells shared, and the table of them."""

import json

import pytest
from eventmaker import Job

from sdcrun.core import baselines, coverage, matrix
from sdcrun.core.coverage import Segment
from sdcrun.report import coverage as report
from sdcrun.report.render import coverage_html, coverage_text

WARMUP, HORIZON = 10, 4


def plan(*entries):
    return matrix.read({"faults": list(entries), "warmup": WARMUP, "horizon": HORIZON})


def judge(job, cell, slot):
    first = WARMUP + slot * HORIZON
    return coverage.judge(cell, slot, first, first + HORIZON - 1, job.config, job.events)


@pytest.fixture
def job():
    job = Job(world=3)
    job.node_up()
    job.hello()
    return job


WEIGHT = {"site": "weight", "rank": 1, "bit": 30}


def test_caught_and_named_missed_and_unfired(job):
    cells = plan(WEIGHT, {**WEIGHT, "bit": 29}, {**WEIGHT, "tensor": "nosuch"}).cells
    job.inject(10, rank=1, spec=0)
    job.vote(11, {"w": [1]})
    job.inject(14, rank=1, spec=1)
    job.emit("limit", 1, {"text": "--inject-fault x never fired: no tensor is named 'nosuch'", "check": None,
                          "unfired": 2})  # fmt: skip
    named, missed, unfired = (judge(job, cell, slot) for slot, cell in enumerate(cells))
    assert (named["outcome"], named["caught_by"], named["after_steps"], named["accused"]) == (
        "named", "weights", 1, [1])  # fmt: skip
    assert missed["outcome"] == "missed" and missed["fired"] == 1
    assert unfired["outcome"] == "unfired" and "nosuch" in unfired["reason"]
    assert named["hits"][0]["rank"] == 1 and named["traceless"] is False


def test_a_cell_hears_nothing_of_its_neighbours(job):
    """The same rank is wrong in every cell: alone each is a first strike, and a finding belongs to one cell."""
    cells = plan(*({**WEIGHT, "bit": bit} for bit in (1, 2, 3))).cells
    for slot in (0, 2):
        job.inject(WARMUP + slot * HORIZON, rank=1, spec=slot)
        job.vote(WARMUP + slot * HORIZON, {"w": [1]})
    job.inject(WARMUP + HORIZON, rank=1, spec=1)
    assert [judge(job, cell, slot)["outcome"] for slot, cell in enumerate(cells)] == ["named", "missed", "named"]


def test_another_rank_accused_is_not_right(job):
    cell = plan(WEIGHT).cells[0]
    job.inject(10, rank=1)
    job.vote(10, {"w": [2]})
    result = judge(job, cell, 0)
    assert result["outcome"] in ("wrong", "missed") and result["accused"] == [2]


def test_by_design_unseen_and_unchanged(job):
    cells = plan({"site": "allreduce", "bit": 3}, {"site": "weight", "rank": 1, "kind": "zero"}).cells
    for rank in range(3):
        job.inject(10, rank=rank, spec=0, site="allreduce")
    job.inject(14, rank=1, spec=1, before=0.0, after=0.0)
    unseen, unchanged = (judge(job, cell, slot) for slot, cell in enumerate(cells))
    assert unseen["outcome"] == "unseen" and "same wrong sum" in unseen["reason"]
    assert unchanged["outcome"] == "unchanged" and unchanged["traceless"]


def segment_events(job, slot, losses, norms, state="s", restored=None, ranks=(0, 1, 2)):
    for rank in ranks:
        job.emit("segment", rank, {"slot": slot, "group": [0, 1, 2], "rank": rank, "losses": losses[rank],
                                   "norms": norms[rank], "restored": restored if rank == 1 else None,
                                   "state": f"{state}{rank}"})  # fmt: skip


def test_segments_need_every_rank_and_one_rank_s_doubt_is_enough(job):
    segment_events(job, -1, [[3.0], [6.0], [9.0]], [[1.0], [2.0], ["nan"]])
    segment_events(job, 0, [[1.0], [1.0], [1.0]], [[1.0], [1.0], [1.0]], restored="other bits")
    segment_events(job, 1, [[1.0], [1.0], [1.0]], [[1.0], [1.0], [1.0]], ranks=(0, 2))
    found = coverage.segments(job.events)
    assert sorted(found) == [-1, 0]
    assert found[-1].losses == (6.0,) and found[-1].norms[0][1] == 2.0 and str(found[-1].norms[0][2]) == "nan"
    assert found[0].restored == "other bits" and found[0].states == ("s0", "s1", "s2")
    assert Segment.from_json(json.loads(json.dumps(found[0].to_json()))) == found[0]


def detectors():
    return baselines.learn([[1.0, 1.1, 1.25]], [5.0 - 0.1 * step + 0.01 * (-1) ** step for step in range(20)])


def test_a_fault_that_left_the_clean_run_s_bits_is_masked_not_missed(job):
    cell = plan(WEIGHT).cells[0]
    job.inject(10, rank=1)
    result = judge(job, cell, 0)
    clean = Segment((3.0,), ((1.0, 1.1, 1.2),), None, ("a", "b", "c"))
    other = Segment((3.0,), ((1.0, 1.1, 1.2),), None, ("a", "X", "c"))
    unknown = Segment((3.0,), ((1.0, 1.1, 1.2),))
    assert coverage.compare(result, clean, clean, detectors())["outcome"] == "masked"
    assert coverage.compare(result, other, clean, detectors())["outcome"] == "missed"
    assert coverage.compare(result, unknown, unknown, detectors())["outcome"] == "missed"


def test_the_common_detectors_get_credit_only_for_what_the_clean_run_does_not_raise(job):
    cell = plan(WEIGHT).cells[0]
    job.inject(10, rank=1)
    result = judge(job, cell, 0)
    calm = Segment((3.0, 2.9), ((1.0, 1.1, 1.2), (1.0, 1.1, 1.2)))
    loud = Segment((3.0, 99.0), ((1.0, 1.1, 1.2), (1.0, 80.0, 1.1)))
    found = coverage.compare(result, loud, calm, detectors())
    assert found["norm_alarm"] and found["norm_named"] and found["loss_alarm"]
    assert found["loss"] == 99.0 and found["clean_loss"] == 2.9 and found["worst_loss_gap"] == pytest.approx(96.1)
    found = coverage.compare(result, loud, loud, detectors())
    assert not found["norm_alarm"] and not found["loss_alarm"]
    assert coverage.false_alarms([calm, loud], detectors()) == {"steps": 4, "norm": 1, "loss": 1}


def table(job):
    """A campaign with something of everything."""
    made = plan({**WEIGHT, "bit": [1, 2, 3, 4, 5]}, {"site": "allreduce", "bit": 3},
                {"site": "weight", "rank": 1, "tensor": "<script>[red]\x1b[31m"})  # fmt: skip
    for slot in (0, 1):
        job.inject(WARMUP + slot * HORIZON, rank=1, spec=slot)
        job.vote(WARMUP + slot * HORIZON, {"w": [1]})
    job.inject(WARMUP + 2 * HORIZON, rank=1, spec=2)
    job.inject(WARMUP + 5 * HORIZON, rank=0, spec=5, site="allreduce")
    cells = {cell.key: judge(job, cell, slot) for slot, cell in enumerate(made.cells)}
    crashed = made.cells[3]
    cells[crashed.key] = coverage.crashed(crashed, 22, 25, "exit code 1")
    del cells[made.cells[4].key]
    segment = Segment((3.0, 2.9), ((1.0, 1.1, 1.2), (1.0, 1.1, 1.2))).to_json()
    warmup = Segment(tuple(5.0 - 0.1 * s + 0.01 * (-1) ** s for s in range(20)), ((1.0, 1.1, 1.25),) * 20).to_json()
    reference = {"world_size": 3, "nodes": 3, "restore": True, "findings": 0, "steps": 30, "warmup": warmup,
                 "slots": [segment] * 7, "off": {}, "limits": []}  # fmt: skip
    return report.build("campaign-x", made, ["train.py"], reference, cells)


def test_the_table_counts_everything_once(job):
    data = table(job)
    assert data["cells"] == 7 and data["done"] == 6 and sum(data["outcomes"].values()) == 6
    assert data["sdcrun"] | {"fired": 5, "caught": 2, "named": 2, "missed": 1, "unseen": 1} == data["sdcrun"]
    assert {row["outcome"] for row in data["misses"]} == {"missed", "unseen", "crashed"}
    assert [row["outcome"] for row in data["nothing"]] == ["unfired"]
    assert data["bits"][0]["outcomes"] == {"1": "named", "2": "named", "3": "missed", "4": "crashed"}
    level, text = report.headline(data)
    assert level == "bad" and "1 missed" in text and "1 of 7 cells have no result yet" in text


def test_the_views_show_misses_and_nothing_can_style_or_script_them(job):
    data = json.loads(json.dumps(table(job)))
    text, page = coverage_text.render(data), coverage_html.render(data)
    assert "  sdcrun       CM##" in text and max(map(len, text.splitlines())) <= 100
    assert text.count("missed") > 2 and "same wrong sum" in text and "\x1b" not in text
    assert "<script>" not in page and "\x1b" not in page and "same wrong sum" in page
    assert page.index("Not caught, or not named") < page.index("All cells")


def test_no_result_yet_is_a_table_too():
    data = report.build("campaign-x", plan(WEIGHT), ["train.py"], None, {})
    assert report.headline(data) == ("watch", "No cell has a result yet.")
    assert "0 of 1 cell" in coverage_text.render(data) and "0 of 1 cells" in coverage_html.render(data)


def test_bits_that_share_a_fate_share_a_row():
    assert coverage_text._runs([0, 1, 2, 3, 7, 9, 10]) == "0-3 7 9-10" and coverage_text._runs([]) == ""
