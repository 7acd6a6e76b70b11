"""The report as JUnit XML for CI: one test case a guarded rank and check; with --inject-fault one case a fault instead.

A finding that nothing explains fails the case of the rank it accuses; one that accuses nobody fails a case of its own.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree as tree

from sdcrun.core import words
from sdcrun.report.verdict import EXPLAINED, headline

MAX_CASES = 2000
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(report: dict[str, Any]) -> str:
    """JUnit XML text. Ranks beyond `MAX_CASES` cases are counted in one case, their findings are always told."""
    suite = tree.Element("testsuite", name=_xml(f"sdcrun {words.clean(report['job_id'])}"))
    if report["started_at"]:
        suite.set("timestamp", report["started_at"].rstrip("Z"))
    for row in report["injected"]:
        _fault(suite, row)
    if not report["injected"]:
        _ranks(suite, report)
    _nobody(suite, report)
    _unguarded(suite, report)
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(1 for case in cases if case.find("failure") is not None)))
    suite.set("skipped", str(sum(1 for case in cases if case.find("skipped") is not None)))
    suite.set("errors", "0")
    tree.SubElement(suite, "system-out").text = _xml("\n".join([headline(report)[1], *report["limits"]]))
    root = tree.Element("testsuites")
    root.append(suite)
    tree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """`text` without the characters that XML 1.0 cannot hold."""
    return _NOT_XML.sub("\ufffd", text)


def _case(suite: tree.Element, kind: str, name: str) -> tree.Element:
    return tree.SubElement(suite, "testcase", classname=f"sdcrun.{kind}", name=_xml(name), time="0")


def _say(case: tree.Element, tag: str, message: str, text: str = "") -> None:
    tree.SubElement(case, tag, message=_xml(message)).text = _xml(text)


def _fault(suite: tree.Element, row: dict[str, Any]) -> None:
    case = _case(suite, "fault", words.clean(row["spec"]))
    fired = f"fired {row['fired']}×, caught by {row['caught_by'] or 'nothing'}"
    if row["after_steps"] is not None:
        fired += f" after {words.count(row['after_steps'], 'step')}"
    if row["problem"]:
        _say(case, "failure", words.clean(row["problem"], 400), fired)
    elif row["by_design_unseen"] and not row["caught_by"]:
        _say(case, "skipped", f"unseen by design: {words.clean(row['by_design_unseen'], 400)}")
    else:
        tree.SubElement(case, "system-out").text = _xml(fired)


def _open(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [f for f in report["findings"] if f["verdict"] not in EXPLAINED and not f["injected"]]


def _ranks(suite: tree.Element, report: dict[str, Any]) -> None:
    """A case for each guarded rank and each check that ran; accused ranks first."""
    against: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for finding in _open(report):
        if finding["rank"] is not None:
            against.setdefault((finding["rank"], finding["check"]), []).append(finding)
    missing = {row["rank"] for row in report["unguarded"]}
    ranks = [rank for rank in range(report["world_size"]) if rank not in missing]
    running = [check for check, row in report["checks"].items() if not row["off_reason"]]
    clean = [(rank, check) for rank in ranks for check in running if (rank, check) not in against]
    for rank, check in sorted(against):
        case = _case(suite, check, f"rank {rank}")
        found = against[rank, check]
        _say(
            case, "failure", f"{found[-1]['verdict']} ({found[-1]['rule']})", "\n\n".join(f["text"] for f in found[:20])
        )
    for rank, check in clean[:MAX_CASES]:
        _case(suite, check, f"rank {rank}")
    if len(clean) > MAX_CASES:
        _case(suite, "ranks", f"{len(clean) - MAX_CASES:,} more clean cases")


def _nobody(suite: tree.Element, report: dict[str, Any]) -> None:
    """With --inject-fault every unexplained finding, else those that accuse nobody."""
    found = [f for f in _open(report) if f["rank"] is None or report["injected"]]
    for finding in found[:MAX_CASES]:
        case = _case(suite, finding["check"], f"step {finding['step']} of attempt {finding['attempt']}")
        _say(case, "failure", f"{finding['verdict']} ({finding['rule']})", finding["text"])


def _unguarded(suite: tree.Element, report: dict[str, Any]) -> None:
    for row in report["unguarded"][:MAX_CASES]:
        _say(_case(suite, "guard", f"rank {row['rank']}"), "skipped", f"UNGUARDED: {words.clean(row['reason'], 400)}")
