"""The report as Prometheus text, for the node exporter's textfile collector or a push: base units, no time stamps.

Device and host are labels of the suspect gauge alone, so that the number of series does not grow with the job. The
job's name is the label `job_id`: `job` is what a Prometheus server calls the target that it scrapes.
"""

from __future__ import annotations

from typing import Any

from sdcrun import __version__
from sdcrun.core import words
from sdcrun.core.types import CHECKS
from sdcrun.report.verdict import unexplained

STATUSES = ("running", "finished", "failed", "stopped")
VERDICTS = ("clean-after-triage", "suspect", "confirmed", "inconclusive", "not-hardware", "amp-overflow")
STATES = ("verified", "provisional", "unverified", "withheld", "tainted")


def render(report: dict[str, Any]) -> str:
    """Prometheus exposition text; every family with HELP and TYPE."""
    lines: list[str] = []
    job = {"job_id": words.clean(report["job_id"])}

    def family(name: str, kind: str, text: str, rows: list[tuple[dict[str, str], float]]) -> None:
        lines.append(f"# HELP sdcrun_{name} {text}")
        lines.append(f"# TYPE sdcrun_{name} {kind}")
        for labels, value in rows:
            shown = ",".join(f'{key}="{_label(text)}"' for key, text in {**job, **labels}.items())
            lines.append(f"sdcrun_{name}{{{shown}}} {value!r}")

    family("build_info", "gauge", "Version of sdcrun that wrote this.", [({"version": __version__}, 1)])
    family("job_status", "gauge", "1 for the status that the job is in.",
           [({"status": status}, int(status == report["status"])) for status in STATUSES])  # fmt: skip
    if report["exit_code"] is not None:
        family("job_exit_code", "gauge", "Exit code of the job, once it has ended.", [({}, report["exit_code"])])
    family("ranks", "gauge", "Ranks of the job.", [({}, report["world_size"])])
    family("guarded_ranks", "gauge", "Ranks that are guarded.", [({}, report["guarded_ranks"])])
    family("unguarded_ranks", "gauge", "Ranks that are not guarded.",
           [({}, len({row["rank"] for row in report["unguarded"]}))])  # fmt: skip
    steps = report["steps"]
    family("steps_total", "counter", "Guarded steps by outcome.",
           [({"outcome": key}, steps[key]) for key in ("committed", "skipped")])  # fmt: skip
    checks = report["checks"]
    family("checks_total", "counter", "Runs of each check.", [({"check": c}, checks[c]["run"]) for c in CHECKS])
    family("checks_fired_total", "counter", "Runs of each check that saw something.",
           [({"check": c}, checks[c]["fired"]) for c in CHECKS])  # fmt: skip
    family("check_seconds_total", "counter", "Seconds a rank spent in each check, mean over ranks.",
           [({"check": c}, checks[c]["seconds"]) for c in CHECKS])  # fmt: skip
    if report["overhead"]["percent_of_step_time"] is not None:
        family("overhead_ratio", "gauge", "Time spent in checks as part of all training time.",
               [({}, round(report["overhead"]["percent_of_step_time"] / 100, 6))])  # fmt: skip
    found = {(check, verdict): 0 for check in CHECKS for verdict in VERDICTS}
    for finding in report["findings"]:
        found[finding["check"], finding["verdict"]] += 1
    # A gauge: a finding that is looked at again, or confirmed, moves from one verdict to another.
    family("findings", "gauge", "Findings by check and verdict, as they stand.",
           [({"check": c, "verdict": v}, n) for (c, v), n in found.items()])  # fmt: skip
    family("unexplained", "gauge", "1 when a finding is explained by neither triage nor an injected fault.",
           [({}, int(unexplained(report)))])  # fmt: skip
    family("suspect_strikes", "gauge", "Strikes of each suspect device.", [
        ({"host": words.clean(s["device"]["host"]), "device": words.clean(s["device"]["uuid"]),
          "verdict": s["verdict"], "injected": str(s["injected"]).lower()}, s["strikes"])
        for s in report["suspects"]])  # fmt: skip
    saved = [row["state"] for row in report["checkpoints"]]
    family("checkpoints", "gauge", "Checkpoints by state.", [({"state": s}, saved.count(s)) for s in STATES])
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
