"""What an operator asks first, each answered in a line: was it hardware, which node to take out, which checkpoint to
load. The same lines in every view. Pure."""

from __future__ import annotations

from typing import Any

from sdcrun.core import words
from sdcrun.core.types import Device
from sdcrun.report.verdict import EXPLAINED

# Something computed or held other bits than the rest, and no majority says which device it was.
UNDECIDED = ("no-majority", "two-domains", "no-arbiter", "no-agreement", "all-pairs-differ", "inside-all-reduce")
SOFTWARE = ("minority-at-start", "minority-moves", "wanders")
MAX_NAMED = 4


def answers(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(question in a word, answer) in the order of urgency."""
    return [("hardware", _hardware(report)), ("drain", _drain(report)), ("checkpoint", _checkpoint(report))]


def _real(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [suspect for suspect in report["suspects"] if not suspect["injected"]]


def _hardware(report: dict[str, Any]) -> str:
    if (report.get("selftest") or {}).get("failed"):
        return "Cannot be told: the self-test failed."
    confirmed = [s for s in _real(report) if s["verdict"] == "confirmed"]
    if confirmed:
        return f"Yes: {_named(confirmed)} gave other results than the other devices, at more than one step."
    struck = [s for s in _real(report) if s["strikes"]]
    if struck:
        return f"Likely: {_named(struck)} gave another result than the other devices, once."
    found = [row for row in report["findings"] if not row["injected"]]
    rules = {row["rule"] for row in found if row["verdict"] not in EXPLAINED}
    if rules & set(UNDECIDED):
        return "Possible: devices gave different results, and nobody can say which of them is wrong."
    if "checkpoint-damaged" in rules:
        return "Possible: a file came back other than it was saved; look at storage and memory first."
    if "checkpoint-withheld" in rules:
        return "Possible: a save was not what the ranks agree on; a script that changes it on purpose looks the same."
    if rules & set(SOFTWARE):
        return "Unlikely: this looks like code that treats ranks differently, or kernels that are not deterministic."
    reproduced = [row["step"] for row in found if row["verdict"] == "not-hardware"]
    same = f"another device got the same values from the same micro-batch (step {min(reproduced, default=0)})."
    if rules:
        why = "values that are not finite come from data, learning rate or code more often"
        return f"Very unlikely: {same}" if reproduced else f"Unlikely: {why}."
    if reproduced:
        return f"No: {same}"
    if not report["guarded_ranks"]:
        return "Cannot be told: nothing was guarded."
    if report["suspects"] or report["findings"] and not found:
        return "No: what was found was put there by --inject-fault."
    return "No sign of it."


def _named(suspects: list[dict[str, Any]]) -> str:
    said = [f"rank {s['rank']} on {words.device(Device(**s['device']))}" for s in suspects[:MAX_NAMED]]
    return "; ".join(said) + (f" and {len(suspects) - MAX_NAMED} more" if len(suspects) > MAX_NAMED else "")


def _drain(report: dict[str, Any]) -> str:
    confirmed = [s for s in _real(report) if s["verdict"] == "confirmed"]
    struck = [s for s in _real(report) if s["strikes"]]
    if confirmed:
        return f"{_nodes(confirmed)}. Lines to paste: {words.lines_to_paste(report['job_id'])}"
    if struck:
        return f"Nothing yet. Watch {_nodes(struck)}: a second finding confirms it."
    return "Nothing."


def _nodes(suspects: list[dict[str, Any]]) -> str:
    """Nodes as the scheduler calls them, where known, with the ranks whose devices are meant."""
    nodes: dict[str, list[dict[str, Any]]] = {}
    for suspect in suspects:
        known = suspect["names"]
        node = known["slurm_node"] or known["kubernetes_node"] or suspect["device"]["host"]
        nodes.setdefault(words.clean(node, 80), []).append(suspect)
    said = []
    for node, found in list(nodes.items())[:MAX_NAMED]:
        by = next((f", approved by {words.clean(s['approved_by'], 60)}" for s in found if s["approved_by"]), "")
        said.append(f"{node} ({words.ranks({s['rank'] for s in found})}{by})")
    return "; ".join(said) + (f" and {len(nodes) - MAX_NAMED} more" if len(nodes) > MAX_NAMED else "")


def _checkpoint(report: dict[str, Any]) -> str:
    rows = report["checkpoints"]
    if not rows:
        return "None is on record."
    safe = report["blast_radius"]["newest_safe_checkpoint"]
    at = max((i for i, row in enumerate(rows) if row["path"] == safe and row["state"] == "verified"), default=None)
    later = rows if at is None else rows[at + 1 :]
    states = [row["state"] for row in later]
    others = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    if at is None:
        return f"None is known to be safe ({others})."
    step = "" if rows[at]["step"] is None else f", of step {rows[at]['step']}"
    return f"Newest safe one: {words.clean(safe, 300)}{step}." + (f" Later ones: {others}." if others else "")
