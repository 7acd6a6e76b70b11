"""The report's answer in one or two sentences, for every view. Pure."""

from __future__ import annotations

from typing import Any

from sdcrun.core import words
from sdcrun.core.smoke import BLAMELESS

EXPLAINED = ("clean-after-triage", "amp-overflow", "not-hardware")
CHECKPOINTS = {
    "checkpoint-damaged": "loaded damaged: stop, and load another one (sdcrun checkpoints).",
    "checkpoint-withheld": "withheld, not being what the ranks agree on (sdcrun checkpoints).",
}
GOOD, WATCH, BAD = "good", "watch", "bad"
LEVEL_STYLES = {GOOD: "bold green", WATCH: "bold yellow", BAD: "bold red"}


def unexplained(report: dict[str, Any]) -> bool:
    """Whether a report holds a finding that neither an injected fault nor triage explains, or a fault that went wrong.
    """
    if (report.get("selftest") or {}).get("failed"):
        return True
    open_findings = any(f["verdict"] not in EXPLAINED and not f["injected"] for f in report["findings"])
    return open_findings or any(row["problem"] for row in report["injected"])


def headline(report: dict[str, Any]) -> tuple[str, str]:
    """(level, text): "good", "watch" or "bad", and what a reader must know first."""
    level, text = _finding_text(report)
    missing = len({row["rank"] for row in report["unguarded"]})
    if missing and report["guarded_ranks"]:
        level = WATCH if level == GOOD else level
        text += (
            f" {words.count(missing, 'rank')} of {report['world_size']} {'was' if missing == 1 else 'were'} UNGUARDED."
        )
    return level, text


def _finding_text(report: dict[str, Any]) -> tuple[str, str]:
    broken = (report.get("selftest") or {}).get("failed")
    if broken:
        return BAD, (f"The self-test failed on {words.ranks({row['rank'] for row in broken})} ({broken[0]['check']}: "
                     f"{words.clean(broken[0]['text'], 200)}): its checks cannot be relied on.")  # fmt: skip
    suspects = [s for s in report["suspects"] if not s["injected"]]
    confirmed = [s for s in suspects if s["verdict"] == "confirmed"]
    if confirmed:
        return BAD, f"Confirmed: {_devices(confirmed)} computed wrongly more than once. Take it out of service."
    wrong = [row for row in report["injected"] if row["problem"]]
    if wrong and report["status"] == "running":
        still = f"{words.count(len(wrong), 'injected fault')} of {len(report['injected'])}"
        return WATCH, f"Under way: {still} not yet caught as it should be ({words.clean(wrong[0]['spec'], 80)})."
    if wrong:
        return BAD, (f"The smoke run failed: {words.count(len(wrong), 'fault')} of {len(report['injected'])} "
                     f"went wrong ({words.clean(wrong[0]['spec'], 80)}: {wrong[0]['problem']}).")  # fmt: skip
    strikes = [s for s in suspects if s["strikes"]]
    if strikes:
        return BAD, f"Suspect: {_devices(strikes)}. One finding so far; a second, independent one confirms it."
    if any(f["rule"] == "no-majority" for f in report["findings"] if not f["injected"]):
        return BAD, "The replicas differ and no version has a majority: do not trust the weights of this run."
    left = [f for f in report["findings"] if f["verdict"] not in EXPLAINED and not f["injected"]]
    for rule, what in CHECKPOINTS.items():
        found = {f["text"] for f in left if f["rule"] == rule}  # all ranks that load one file say the same
        if found:
            return BAD, f"{words.count(len(found), 'checkpoint')} {what}"
    if left:
        steps = words.count(len({(f["attempt"], f["step"]) for f in left}), "step")
        named = [s for s in suspects if not s["strikes"]]
        who = f"{_devices(named)} alone, without a strike" if named else "no device is accused"
        return (
            WATCH,
            f"Something was wrong in {steps} ({who}); data, learning rate and code are more likely than hardware.",
        )
    if report["injected"]:
        return GOOD, _smoke_text(report)
    if report["findings"]:
        return GOOD, "No sign of bad hardware; what was found has another explanation."
    if not report["guarded_ranks"]:
        why = next((f" ({words.clean(row['reason'], 200)})" for row in report["unguarded"]), "")
        return WATCH, f"Nothing was guarded, all ranks are UNGUARDED{why}: this report says nothing about the hardware."
    return GOOD, f"No corruption was found in {words.count(report['steps']['seen'], 'step')}."


def _smoke_text(report: dict[str, Any]) -> str:
    rows = report["injected"]
    caught = sum(1 for row in rows if row["caught_by"])
    named = sum(1 for row in rows if row["named_right"] or _nobody_to_name(row))
    if caught == named == len(rows):
        what = "The injected fault was" if caught == 1 else f"All {caught} injected faults were"
        nobody = all(_nobody_to_name(row) for row in rows)
        right = "nobody was accused of it" if nobody else f"exactly the right device{'' if caught == 1 else 's'} named"
        return f"{what} caught, and {right}."
    text = f"{caught} of {words.count(len(rows), 'injected fault')} caught, the right devices named for {named}."
    unseen = sum(1 for row in rows if row["by_design_unseen"] and not row["named_right"])
    return text + (f" For {unseen} no check of this run could have done it." if unseen else "")


def _nobody_to_name(row: dict[str, Any]) -> bool:
    """Whether an injected fault was caught, and rightly nobody accused of it."""
    right = row["named_right"] or row["named_right"] is None and not row["by_design_unseen"]
    return bool(row["caught_by"] and right and row["spec"].startswith((*BLAMELESS, "checkpoint")))


def caught_by(row: dict[str, Any]) -> str:
    """The check that caught an injected fault, by its name."""
    return words.CHECK_NAMES.get(row["caught_by"], row["caught_by"]) or "nothing"


def named(row: dict[str, Any]) -> str:
    """Whether the right device was named for an injected fault."""
    return "nobody" if _nobody_to_name(row) else {True: "right", False: "WRONG", None: "-"}[row["named_right"]]


def outcome(row: dict[str, Any]) -> tuple[str, str]:
    """(what became of an injected fault in a word or two, level)."""
    if row["problem"]:
        return "FAILED", BAD
    if row["by_design_unseen"]:
        return "seen, not named" if row["caught_by"] else "unseen by design" if row["fired"] else "not reached", WATCH
    return "ok", GOOD


def how_sure(suspect: dict[str, Any]) -> str:
    """Strikes, steps, rule and persistence of a suspect in a line."""
    first, last = suspect["first_step"], suspect["last_step"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lasting = {"unknown": "not known whether it lasts"}.get(suspect["persistence"], suspect["persistence"])
    return (f"{suspect['verdict']} (rule: {suspect['rule']}), {words.count(suspect['strikes'], 'strike')}, {steps}, "
            f"{lasting}")  # fmt: skip


def _devices(suspects: list[dict[str, Any]]) -> str:
    named = [f"rank {s['rank']} ({words.clean(s['device']['host'], 60)}, {words.clean(s['device']['uuid'], 60)})"
             for s in suspects[:3]]  # fmt: skip
    more = f" and {len(suspects) - 3} more" if len(suspects) > 3 else ""
    return f"{', '.join(named)}{more}"


def failed(report: dict[str, Any]) -> str | None:
    """The first rank that failed by itself, and how; None when none did."""
    rows = report["lost"]
    if not rows:
        return None
    first = rows[0]
    who = f"node {first['node']}" if first["rank"] is None else f"rank {first['rank']}"
    about = f" ({first['text']})" if first["text"] else ""
    more = f"; {len(rows) - 1} more after it" if len(rows) > 1 else ""
    return f"first {who}{about}: {words.ended(first['exit'])}{more}"


def spread(report: dict[str, Any]) -> str | None:
    """Which steps may hold errors of the suspects; None without suspects."""
    first = report["blast_radius"]["first_unverified_step"]
    if first is None:
        return None
    if first == 0:
        return "Any step may hold errors of a suspect: no audit before it was first accused was clean."
    return (f"Steps from {first} on may hold errors of a suspect: before it was first accused, its last clean audit "
            f"was that of step {first - 1}.")  # fmt: skip


def counts(report: dict[str, Any]) -> str:
    """ "1,000 steps, 990 committed, 10 skipped"."""
    steps = report["steps"]
    return f"{words.count(steps['seen'], 'step')}, {steps['committed']:,} committed, {steps['skipped']:,} skipped"


def next_command(report: dict[str, Any]) -> str:
    """What to type next."""
    if any(s["verdict"] == "confirmed" and not s["injected"] for s in report["suspects"]):
        return words.lines_to_paste(report["job_id"])
    return words.report_command(report["job_id"])
