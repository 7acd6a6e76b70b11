"""How far a fault may have spread: the last clean audit of each device, checkpoints since, the newest safe one. Pure.
"""

from __future__ import annotations

from typing import Any

from sdcrun.core.ledger import confirmed_at
from sdcrun.core.state import State

GOOD = ("verified", "provisional")


def _confirmed(state: State, strikes: dict[str, list[tuple[int, int]]]) -> dict[str, tuple[int, int] | None]:
    """Confirmed device -> (attempt, step) of its last clean audit before its first strike; None where there is none."""
    return {
        device: _last_clean_before(state, device, found[0])
        for device, found in strikes.items()
        if confirmed_at(found) is not None
    }


def _last_clean_before(state: State, device: str, first: tuple[int, int]) -> tuple[int, int] | None:
    """(attempt, step) of the last audit before `first` that cleared `device`, over attempts."""
    for number in sorted((n for n in state.roster.attempts if n <= first[0]), reverse=True):
        attempt = state.roster.attempts[number]
        cleared = state.replays.last_clean(number, first[1] if number == first[0] else None)
        steps = [step for rank, step in cleared.items() if attempt.device(rank).key == device]
        if steps:
            return number, max(steps)
    return None


def checkpoint_rows(state: State, strikes: dict[str, list[tuple[int, int]]]) -> list[dict[str, Any]]:
    """Checkpoints in the order they were saved, in the state they are in now: one that was good is tainted once a
    device is confirmed whose last clean audit lies before the save."""
    confirmed = _confirmed(state, strikes)
    rows = []
    for saved in state.checkpoints.values():
        row = {key: saved[key] for key in ("path", "step", "state", "reason")}
        if saved["state"] in GOOD:
            for device, clean in confirmed.items():
                place = (saved["attempt"], saved["step"] if saved["step"] is not None else 1 << 60)
                if clean is None or place > clean:
                    row["state"] = "tainted"
                    row["reason"] = f"{device} was confirmed later; its last clean audit lies before this save"
                    break
        rows.append(row)
    return rows


def blast_radius(state: State, suspects: list[dict[str, Any]], checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
    """{first_unverified_step, last_clean_audit {device: step}, newest_safe_checkpoint}.

    The first unverified step is the one after the last clean audit of the suspect that was clean the shortest (0: never
    clean); None without suspects. Steps are those of the newest attempt in which they mean something.
    """
    attempt = state.roster.last
    cleared = state.replays.last_clean(attempt.number) if attempt else {}
    last_clean = {attempt.device(rank).key: step for rank, step in sorted(cleared.items())} if attempt else {}
    firsts = []
    for suspect in suspects:
        device = f"{suspect['device']['host']}/{suspect['device']['uuid']}"
        found = _first_accusation(state, device)
        clean = _last_clean_before(state, device, found) if found else None
        firsts.append(clean[1] + 1 if clean and found and clean[0] == found[0] else 0)
    safe = [row["path"] for row in checkpoints if row["state"] == "verified"]
    return {
        "first_unverified_step": min(firsts) if firsts else None,
        "last_clean_audit": last_clean,
        "newest_safe_checkpoint": safe[-1] if safe else None,
    }


def _first_accusation(state: State, device: str) -> tuple[int, int] | None:
    found = [
        (entry.finding.attempt, entry.finding.step)
        for entries in state.ledger.entries.values()
        for entry in entries
        if any(state.device_key(entry.finding.attempt, rank) == device for rank in entry.finding.ranks)
    ]
    return min(found, default=None)
