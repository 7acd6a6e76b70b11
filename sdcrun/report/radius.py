"""How far a fault may have spread: the last clean audit of each device, the newest safe checkpoint. Pure."""

from __future__ import annotations

from typing import Any

from sdcrun.core.checkpoints import last_clean_before, newest_safe
from sdcrun.core.state import State


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
        clean = last_clean_before(state, device, found) if found else None
        firsts.append(clean[1] + 1 if clean and found and clean[0] == found[0] else 0)
    return {
        "first_unverified_step": min(firsts) if firsts else None,
        "last_clean_audit": last_clean,
        "newest_safe_checkpoint": newest_safe(checkpoints),
    }


def _first_accusation(state: State, device: str) -> tuple[int, int] | None:
    found = [
        (entry.finding.attempt, entry.finding.step)
        for entries in state.ledger.entries.values()
        for entry in entries
        if any(state.device_key(entry.finding.attempt, rank) == device for rank in entry.finding.ranks)
    ]
    return min(found, default=None)
