"""Checkpoints of a job and the states they go through. Pure.

    provisional   the tensors are what the ranks agree on; no audit has been held since
    verified      and the audit of that step, or the first one after it, was clean
    unverified    nobody could say, or the first audit after it was not clean
    withheld      the tensors are not what the ranks agree on: the file was not written
    tainted       a device was confirmed later whose last clean audit lies before the save

A rank says provisional, unverified or withheld when it saves; the rest follows from what is known since. `transitions`
turns each such change into an event, so that the record holds every one of them; `now` works it out afresh.
"""

from __future__ import annotations

import os.path
from typing import Any

from sdcrun.core import words
from sdcrun.core.attribute import CLEAN, MISMATCH, WEIGHTS_DIFFER
from sdcrun.core.ledger import CaseKey, Entry, confirmed_at
from sdcrun.core.roster import Group, rank_of
from sdcrun.core.state import State, file_findings
from sdcrun.core.types import Action, Event, Finding, Verdict

PROVISIONAL, VERIFIED, UNVERIFIED, WITHHELD, TAINTED = "provisional", "verified", "unverified", "withheld", "tainted"
STATES = (PROVISIONAL, VERIFIED, UNVERIFIED, WITHHELD, TAINTED)
GOOD = (VERIFIED, PROVISIONAL)
STIRRING = ("checkpoint", "audit", "vote", "word", "nonfinite", "check_off")
MAX_WRONG = 8
Place = tuple[int, int]
Strikes = dict[str, list[Place]]


# -- what is said -------------------------------------------------------------------------------------------------


def observe(state: State, event: Event) -> None:
    """A `checkpoint` event: a rank has saved or moved a file, or the controller has said that its state is another."""
    data = event.data
    path, said = str(data["path"]), str(data["state"])
    if said not in STATES:
        raise ValueError("no state of a checkpoint")
    step = data.get("step")
    entry = {
        "path": path, "step": None if step is None else int(step), "state": said,
        "reason": str(data.get("reason") or ""), "attempt": event.attempt, "id": str(data.get("id") or path),
        "rank": rank_of(event.source), "dissent": bool(data.get("dissent")),
    }  # fmt: skip
    if entry["rank"] is None:
        known = state.checkpoints.get(path)
        if known is not None and known["id"] == entry["id"]:
            known.update(state=said, reason=entry["reason"])
        return
    state.checkpoints.pop(str(data.get("was")), None)
    state.checkpoints.pop(path, None)
    state.checkpoints[path] = entry
    if entry["dissent"] and data.get("was") is None and data.get("copied") is None:
        _file(state, event, path, _withheld(entry, data))


def observe_loaded(state: State, event: Event) -> None:
    """A `loaded` event: what was read from a checkpoint is not what was saved there."""
    path, wrong = str(event.data["path"]), _wrong(event.data)
    count = int(event.data.get("count") or len(wrong))
    text = (
        f"Checkpoint {words.clean(path, 300)} was loaded and is not what was saved: "
        f"{words.count(count, 'tensor')} differ{'s' if count == 1 else ''}{_named(wrong)}. The file, or the way from "
        "it, is damaged."
    )
    _file(state, event, path, Finding(
        event.attempt, int(event.data["step"]), "weights", Verdict.INCONCLUSIVE, "checkpoint-damaged", text,
        evidence=tuple(_evidence(event, row, "load") for row in wrong),
    ))  # fmt: skip


def _withheld(entry: dict[str, Any], data: dict[str, Any]) -> Finding:
    """The finding of a save whose tensors differ from what the ranks agree on. It accuses nobody: only a vote in band
    can, since scripts put other weights in for a save on purpose."""
    text = f"Checkpoint {words.clean(entry['path'], 300)}: {words.clean(entry['reason'], 600)}."
    event = Event("checkpoint", "", entry["attempt"], 0, 0.0, {**data, "step": entry["step"] or 0})
    return Finding(
        entry["attempt"], entry["step"] or 0, "weights", Verdict.INCONCLUSIVE, "checkpoint-withheld", text,
        evidence=tuple(_evidence(event, row, "save") for row in _wrong(data)),
    )  # fmt: skip


def _file(state: State, event: Event, path: str, finding: Finding) -> None:
    rank = rank_of(event.source)
    key = CaseKey(event.attempt, finding.step, "weights", Group((rank or 0,)), f"checkpoint {path}")
    if finding.rule != "checkpoint-withheld":
        done = "Nothing was changed: the script goes on with what it loaded."
    elif not os.path.isabs(path):
        done = "The script has the bytes; a file that it opens after this and writes them to is withheld."
    elif event.data.get("older") is False:
        done = "The contents are in the file named; the file that the script had opened, and so emptied, is removed."
    else:
        done = "The contents are in the file named; an older file of that name is as it was."
    file_findings(state, key, [Entry(finding, done)])


def _wrong(data: dict[str, Any]) -> list[dict[str, Any]]:
    rows = data.get("differing") or []
    return [row for row in rows if isinstance(row, dict)][:MAX_WRONG]


def _named(rows: list[dict[str, Any]]) -> str:
    said = [f"{words.clean(row.get('tensor'), 80)} {words.clean(row.get('text') or '', 160)}" for row in rows[:3]]
    return f" ({'; '.join(text.strip() for text in said)})" if said else ""


def _evidence(event: Event, row: dict[str, Any], phase: str) -> dict[str, Any]:
    return {
        "step": int(event.data["step"]), "check": "weights", "phase": phase, "tensor": str(row.get("tensor")),
        "dtype": row.get("dtype"), "shape": row.get("shape"), "expected": row.get("expected"),
        "observed": row.get("observed"), "index": row.get("index"), "bits": list(row.get("bits") or [])[:64],
        "peers_agreeing": [], "replays": [], "rank": None,
    }  # fmt: skip


# -- what follows -------------------------------------------------------------------------------------------------


def now(state: State, entry: dict[str, Any], confirmed: dict[str, Place | None]) -> tuple[str, str]:
    """(state, reason) of a checkpoint in the light of all that is known. `confirmed`: see `confirmed_devices`."""
    if entry["state"] not in GOOD:
        return entry["state"], entry["reason"]
    place = entry["attempt"], entry["step"] if entry["step"] is not None else 1 << 60
    for device, clean in confirmed.items():
        if clean is None or place > clean:
            known = "none" if clean is None else f"that of step {clean[1]}"
            return TAINTED, f"{device} is confirmed bad; its last clean audit before it was first accused: {known}"
    if entry["state"] == VERIFIED:
        return VERIFIED, entry["reason"]
    following = _first_audit(state, *place)
    if following is None:
        off = state.roster.attempt(entry["attempt"]).checks_off.get("replay")
        none = state.config.budget is None and not state.config.audit_every
        wait = "replay audits are off" if none else f"no more audits: {off}" if off else "not audited yet"
        return PROVISIONAL, _with(entry["reason"], wait)
    step, clean = following
    if clean:
        return VERIFIED, _with(entry["reason"], f"the audit of step {step} is clean")
    return UNVERIFIED, _with(entry["reason"], f"but the audit of step {step} was not clean")


def _with(reason: str, more: str) -> str:
    return f"{reason}; {more}" if reason and more not in reason else reason or more


def _first_audit(state: State, attempt: int, step: int) -> Place | None:
    """(step, 1 if clean) of the first audit from `step` on that could tell."""
    best: Place | None = None
    for (number, group), steps in state.replays.order.items():
        if number != attempt:
            continue
        for audited in steps:
            kind = state.replays.audits[CaseKey(attempt, audited, "replay", group)].kind
            if audited >= step and kind in (CLEAN, MISMATCH, WEIGHTS_DIFFER):
                found = audited, int(kind == CLEAN)
                best = found if best is None else min(best, found)
                break
    return best


def confirmed_devices(state: State, strikes: Strikes) -> dict[str, Place | None]:
    """Confirmed device -> (attempt, step) of its last clean audit before its first strike; None where there is none."""
    return {
        device: last_clean_before(state, device, found[0])
        for device, found in strikes.items()
        if confirmed_at(found) is not None
    }


def last_clean_before(state: State, device: str, first: Place) -> Place | None:
    """(attempt, step) of the last audit before `first` that cleared `device`, over attempts."""
    for number in sorted((n for n in state.roster.attempts if n <= first[0]), reverse=True):
        attempt = state.roster.attempts[number]
        cleared = state.replays.last_clean(number, first[1] if number == first[0] else None)
        steps = [step for rank, step in cleared.items() if attempt.device(rank).key == device]
        if steps:
            return number, max(steps)
    return None


def rows(state: State, strikes: Strikes) -> list[dict[str, Any]]:
    """{path, step, state, reason} of all checkpoints in the order they were saved, in the state they are in now."""
    confirmed = confirmed_devices(state, strikes)
    found = []
    for entry in state.checkpoints.values():
        where, reason = now(state, entry, confirmed)
        found.append({"path": entry["path"], "step": entry["step"], "state": where, "reason": reason})
    return found


def newest_safe(found: list[dict[str, Any]]) -> str | None:
    """Path of the newest verified checkpoint of `rows`."""
    return next((row["path"] for row in reversed(found) if row["state"] == VERIFIED), None)


def transitions(state: State) -> list[Action]:
    """Events for the record, and words to the ranks that keep the sidecars, for each checkpoint whose state is another
    now. Changes the entries."""
    strikes = state.ledger.strikes(state.device_key)
    confirmed = confirmed_devices(state, strikes)
    actions: list[Action] = []
    for path, entry in state.checkpoints.items():
        if entry["state"] not in GOOD or entry["state"] == VERIFIED and not confirmed:
            continue
        where, reason = now(state, entry, confirmed)
        if where == entry["state"]:
            continue
        entry.update(state=where, reason=reason)
        said = {"path": path, "step": entry["step"], "id": entry["id"], "state": where, "reason": reason}
        actions.append(Action("record", {"kind": "checkpoint", "data": said}))
        told = {**said, "last_clean_audit": audited_devices(state, entry["attempt"])}
        actions.append(Action("reply", {"to": f"rank:{entry['rank']}", "checkpoint": told}))
    return actions


def audited_devices(state: State, attempt: int) -> dict[str, int]:
    """Device -> the last step of an attempt in which an audit cleared it."""
    roster = state.roster.attempt(attempt)
    return {roster.device(rank).key: step for rank, step in sorted(state.replays.last_clean(attempt).items())}


def pass_on(event: Event) -> list[Action]:
    """A rank's last table goes to the first rank of its group, which saves last in most scripts."""
    data = event.data
    try:
        return [Action("reply", {"to": f"rank:{int(data['first'])}", "left": dict(data)})]
    except (KeyError, TypeError, ValueError):
        return []
