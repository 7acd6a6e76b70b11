"""What a run could not have seen, in words for its report. Pure."""

from __future__ import annotations

from typing import Any

from sdcrun.core import words
from sdcrun.core.roster import Attempt, domain_count
from sdcrun.core.state import State

BY_DESIGN = (
    "By design not seen: the same wrong sum delivered to every rank inside an all-reduce; wrong input data; a defect "
    "that all devices of one model share."
)


def limits(state: State, attempt: Attempt | None, unguarded: list[dict[str, Any]], status: str) -> list[str]:
    """One text for each thing that this run could not have seen, the gravest first."""
    found = _blindness(state, unguarded, status)
    found += _intervals(state, attempt)
    found += _size(attempt)
    for one in state.roster.attempts.values():
        found += [words.clean(text, 400) for text in one.limits if words.clean(text, 400) not in found]
    return [*dict.fromkeys(found), BY_DESIGN]


def _blindness(state: State, unguarded: list[dict[str, Any]], status: str) -> list[str]:
    found = []
    reasons: dict[str, list[int]] = {}
    for row in unguarded:
        reasons.setdefault(row["reason"], []).append(row["rank"])
    for reason, ranks in reasons.items():
        found.append(f"UNGUARDED: {words.ranks(set(ranks))}: {words.clean(reason, 400)}.")
    if status == "running":
        found.append("No end is on record: the job still runs, or everything was killed at once.")
    for blind in state.blind:
        until = words.moment(blind.get("until")) or "the end"
        found.append(
            f"The controller was blind for {_who(blind)} from {words.moment(blind.get('since')) or '?'} to {until}: "
            f"{words.clean(blind.get('reason'), 400)}."
        )
    if state.gaps:
        found.append(
            f"{words.count(len(state.gaps), 'gap')} in the events: something that ranks said was lost "
            f"(first: {words.clean(state.gaps[0].get('source'))})."
        )
    if state.malformed:
        kinds = ", ".join(
            f"{words.count(number, words.clean(kind))}" for kind, number in sorted(state.malformed.items())
        )
        found.append(f"Events that could not be understood: {kinds}.")
    return found


def _who(blind: dict[str, Any]) -> str:
    """Those it did not hear; itself stands for all."""
    sources = [source for source in blind.get("sources") or [] if source != "controller"]
    more = (blind.get("count") or 0) - len(blind.get("sources") or [])
    return (words.names(sources, 8) + (f" and {more} more" if more > 0 else "")) if sources else "all"


def _intervals(state: State, attempt: Attempt | None) -> list[str]:
    config, off = state.config, attempt.checks_off if attempt else {}
    if config.budget is not None:
        return [
            f"Intervals follow a budget of {config.budget:g} % of step time: a fault between two audits that leaves no "
            "lasting trace is not seen."
        ]
    found = []
    if "replay" in off:
        found.append(
            f"The replay audit was off: {words.clean(off['replay'], 400)}. Finite wrong gradients were not looked for."
        )
    elif config.audit_every == 0:
        found.append("The replay audit was switched off: finite wrong gradients were not looked for.")
    elif config.audit_every > 1:
        found.append(f"Audits every {config.audit_every} steps: a transient fault in a step between two is not seen.")
    if "weights" in off:
        found.append(f"The weight vote was off: {words.clean(off['weights'], 400)}. Replicas were not compared.")
    elif config.weights_every == 0:
        found.append("The weight vote was switched off: replicas were not compared.")
    elif config.weights_every > 1:
        found.append(f"Weight votes every {config.weights_every} steps: wrong weights are in use until the next vote.")
    if "nonfinite" in off:
        found.append(f"Check 1 was off: {words.clean(off['nonfinite'], 400)}.")
    return found


def _size(attempt: Attempt | None) -> list[str]:
    if attempt is None or not attempt.places:
        return []
    groups = attempt.groups or {tuple(sorted(attempt.places))}
    domains = min(domain_count(attempt, group) for group in groups)
    replicas = min(len(group) for group in groups)
    found = []
    if domains == 1:
        found.append("One failure domain: there is no second device to compute a micro-batch again.")
    elif domains == 2:
        found.append("Two failure domains: a difference is seen, but nobody can say which of the two is wrong.")
    if replicas == 2:
        found.append("Two replicas: a weight vote sees a difference, but neither side has a majority.")
    elif replicas == 1:
        found.append("One replica: there is nothing to compare weights with.")
    return found
