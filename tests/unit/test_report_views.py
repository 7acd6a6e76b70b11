"""JUnit and Prometheus views: well formed whatever the names, and they say what the report says."""

import re
from xml.etree import ElementTree as tree

import pytest
from eventmaker import Job
from test_report import healthy, hostile, report_of, sick

from sdcrun.report.render import junit, prometheus

SAMPLE = re.compile(r'sdcrun_[a-z_]+\{(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+\} -?[0-9.e+-]+')


def suite_of(job):
    return tree.fromstring(junit.render(report_of(job))).find("testsuite")


def test_one_case_a_rank_and_running_check():
    suite = suite_of(healthy())
    names = {(case.get("classname"), case.get("name")) for case in suite.findall("testcase")}
    assert names == {(f"sdcrun.{check}", f"rank {rank}") for check in ("nonfinite", "weights") for rank in range(4)}
    assert (suite.get("tests"), suite.get("failures")) == ("8", "0")


def test_a_suspect_fails_its_rank_and_a_finding_without_one_a_case_of_its_own():
    job = Job()
    job.hello(skip=(3,))
    job.vote(3, {"w": [2]})
    job.nonfinite(5, {0: ["w"], 1: ["w"]}, silent=(3,))
    job.end(0)
    suite = suite_of(job)
    failed = {(c.get("classname"), c.get("name")) for c in suite.findall("testcase") if c.find("failure") is not None}
    assert failed == {("sdcrun.weights", "rank 2"), ("sdcrun.nonfinite", "step 5 of attempt 0")}
    assert suite.get("failures") == "2" and suite.get("skipped") == "1"
    assert "GPU-0002" in suite.find("testcase/failure").text


def test_with_injected_faults_one_case_a_fault():
    job = Job(faults=("weight:rank=2,step=3", "weight:rank=1,step=5", "allreduce:step=6,bit=3"))
    job.hello()
    job.inject(3, 2)
    job.vote(3, {"w": [2]})
    job.inject(5, 1, spec=1)
    for rank in range(4):
        job.inject(6, rank, spec=2, site="allreduce")
    job.vote(9, {"b": [0]})
    suite = suite_of(job)
    cases = {c.get("name"): [child.tag for child in c] for c in suite.findall("testcase")}
    assert cases == {
        "weight:rank=2,step=3": ["system-out"],
        "weight:rank=1,step=5": ["failure"],
        "allreduce:step=6,bit=3": ["skipped"],
        "step 9 of attempt 0": ["failure"],
    }


def test_many_ranks_stay_a_small_file():
    job = Job(world=16384)
    job.hello()
    job.vote(3, {"w": [9999]})
    text = junit.render(report_of(job))
    assert len(text) < 1_000_000 and 'name="rank 9999"' in text


@pytest.mark.parametrize("job", [healthy(), sick(), hostile(), Job()], ids=["healthy", "sick", "hostile", "empty"])
def test_views_are_well_formed(job):
    report = report_of(job)
    tree.fromstring(junit.render(report))
    families = {}
    for line in prometheus.render(report).splitlines():
        if line.startswith("#"):
            _, keyword, name, rest = line.split(" ", 3)
            families.setdefault(name, []).append((keyword, rest))
        else:
            assert SAMPLE.fullmatch(line), line
            assert line.partition("{")[0] in families
    assert all([k for k, _ in found] == ["HELP", "TYPE"] for found in families.values())
    assert all(found[1][1] == "counter" for name, found in families.items() if name.endswith("_total"))


def test_prometheus_says_what_the_report_says():
    text = prometheus.render(report_of(sick()))
    for line in (
        'sdcrun_guarded_ranks{job_id="job"} 3',
        'sdcrun_unguarded_ranks{job_id="job"} 1',
        'sdcrun_suspect_strikes{job_id="job",host="gpu-1",device="GPU-0001",verdict="confirmed",injected="false"} 2',
        'sdcrun_checkpoints{job_id="job",state="tainted"} 1',
        'sdcrun_unexplained{job_id="job"} 1',
        'sdcrun_steps_total{job_id="job",outcome="skipped"} 2',
        'sdcrun_findings{job_id="job",check="weights",verdict="confirmed"} 1',
    ):
        assert line in text.splitlines(), line
