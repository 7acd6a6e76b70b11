"""The report as one page: self-contained, without script and network, light and dark, for a screen of any width and
print.

Everything is escaped by the template; drawings are made of numbers.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from sdcrun.core import words
from sdcrun.core.state import State
from sdcrun.core.types import Device
from sdcrun.report import picture
from sdcrun.report.answers import answers
from sdcrun.report.verdict import caught_by, counts, failed, headline, how_sure, named, outcome, spread

# Up to so many nodes a rank is so many pixels wide: all of a large job is to be seen at once.
CELLS = ((picture.NO_LABELS_ABOVE, 20), (512, 12), (1 << 60, 6))
MAX_BLOCKS = 40
MAX_ROWS = 1500
MAX_SUSPECTS = 100
MAX_EVIDENCE = 6


def render(report: dict[str, Any], state: State) -> str:
    """The page as HTML text, under 5 MB whatever the size of the job."""
    level, text = headline(report)
    nodes = picture.nodes(report, state)
    return _template().render(
        report=report,
        level=level,
        headline=text,
        answers=answers(report),
        counts=counts(report),
        spread=spread(report),
        failed=failed(report),
        nodes=[_drawn(node) for node in nodes],
        labels=len(nodes) <= picture.NO_LABELS_ABOVE,
        cell=next(size for most, size in CELLS if len(nodes) <= most),
        time=picture.timeline(report, state),
        suspects=[_suspect(suspect) for suspect in report["suspects"][:MAX_SUSPECTS]],
        unguarded=_unguarded(report),
        injected=[{**row, "caught": caught_by(row), "named": named(row), "outcome": outcome(row)}
                  for row in report["injected"]],
        blocks=_blocks(report),
        rows=report["findings"][:MAX_ROWS],
        clean_audits=_clean_audits(report),
        check_names=words.CHECK_NAMES,
        max_overhead=max([percent or 0 for percent in report["overhead"]["by_check"].values()], default=0),
    )


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    env = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True,
                             undefined=jinja2.StrictUndefined)  # fmt: skip
    env.filters["safe_name"] = words.clean
    env.filters["number"] = words.number
    env.filters["thousands"] = lambda value: f"{value:,}"
    return env.get_template("page.html.j2")


def _drawn(node: dict[str, Any]) -> dict[str, Any]:
    """A node with the ranks that are simply clean as one path (a cell each), the others as cells of their own."""
    clean = [at for at, rank in enumerate(node["ranks"]) if rank["kind"] == "clean"]
    others = [{"at": at, **rank} for at, rank in enumerate(node["ranks"]) if rank["kind"] != "clean"]
    return {
        "label": node["label"], "size": len(node["ranks"]), "others": others,
        "first": node["ranks"][0]["rank"], "last": node["ranks"][-1]["rank"],
        "path": "".join(f"M{12 * at} 0h10v10h-10z" for at in clean),
    }  # fmt: skip


def _suspect(suspect: dict[str, Any]) -> dict[str, Any]:
    evidence = [{**row, "picture": picture.bits(row)} for row in suspect["evidence"][:MAX_EVIDENCE]]
    who = words.device(Device(**suspect["device"]))
    more = max(0, len(suspect["evidence"]) - MAX_EVIDENCE)
    return {**suspect, "who": who, "sure": how_sure(suspect), "evidence": evidence, "more": more}


def _unguarded(report: dict[str, Any]) -> list[dict[str, str]]:
    reasons: dict[str, set[int]] = {}
    for row in report["unguarded"]:
        reasons.setdefault(row["reason"], set()).add(row["rank"])
    return [
        {"ranks": words.ranks(ranks), "reason": words.clean(reason, 400)}
        for reason, ranks in list(reasons.items())[:50]
    ]


def _blocks(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The gravest findings in their words, in the order of steps."""
    found = list({finding["text"]: finding for finding in report["findings"]}.values())
    grave = sorted(
        range(len(found)), key=lambda i: (found[i]["injected"], -picture.GRAVITY.index(found[i]["verdict"]), i)
    )
    return [{**found[i], **_lines(found[i]["text"])} for i in sorted(grave[:MAX_BLOCKS])]


def _lines(block: str) -> dict[str, Any]:
    """The first line of a block, and (name, text) of the others."""
    head, *rest = block.split("\n")
    return {"head": head, "lines": [line.strip().partition(" ")[::2] for line in rest]}


def _clean_audits(report: dict[str, Any]) -> str:
    """The last clean audits in a line."""
    steps = sorted(report["blast_radius"]["last_clean_audit"].values())
    if not steps:
        return "none"
    devices = words.count(len(steps), "device")
    return f"step {steps[0]} ({devices})" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]} ({devices})"
