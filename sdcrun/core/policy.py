"""The policy: what the job does about its findings. Pure: findings and settings in, actions out."""

from __future__ import annotations

from dataclasses import replace

from sdcrun.core import words
from sdcrun.core.ledger import ACCUSING, CaseKey, Entry, as_of, confirmed_at, signature
from sdcrun.core.state import State, StopOrder
from sdcrun.core.types import Action, ExitCode, Finding, Verdict

ASK_AGAIN_AFTER = 10
FULL_BLOCKS, ONE_BY_ONE = 3, 10
QUIET = (Verdict.AMP_OVERFLOW, Verdict.CLEAN_AFTER_TRIAGE)


def decide(state: State, keys: list[CaseKey]) -> list[Action]:
    """Actions that follow from cases whose findings are new or others now: an order to stop, once."""
    actions: list[Action] = []
    for key in keys:
        for entry in state.ledger.entries.get(key, ()):
            if state.stop is None and not state.config.campaign:
                state.stop = _stop_for(state, key, entry.finding)
                actions += stop_actions(state.stop)
    return actions


def stop_actions(order: StopOrder | None) -> list[Action]:
    """What is said and done when a stop has just been ordered; nothing without an order. Said first: a controller that
    dies in between leaves nobody without a reason."""
    return [] if order is None else [*say(stop_text(order), "alarm"), stop_action(order)]


def say(text: str, level: str) -> list[Action]:
    """One "say" for each line of `text`: whoever prints them needs to know nothing about blocks."""
    return [Action("say", {"text": line, "level": level}) for line in text.splitlines()]


def stop_action(order: StopOrder) -> Action:
    """The action that ends the job."""
    return Action("stop", {"code": order.code, "why": order.why})


def stop_text(order: StopOrder) -> str:
    """One line on why the job is stopped and with which exit code."""
    meaning = "a device is confirmed, requeue without it" if order.code == ExitCode.CONFIRMED else "a person must look"
    return f"Stopping the job with exit code {order.code} ({meaning}): {order.why}"


def _stop_for(state: State, key: CaseKey, finding: Finding) -> StopOrder | None:
    """The order that one finding gives, or None."""
    config = state.config
    strikes = state.ledger.strikes(state.device_key)
    mine = {state.device_key(finding.attempt, rank): rank for rank in finding.ranks}
    counts = {device: len(strikes.get(device, ())) for device in mine}
    confirmed = finding.verdict is Verdict.CONFIRMED or any(confirmed_at(strikes.get(d, [])) for d in mine)
    code = ExitCode.CONFIRMED if confirmed else ExitCode.UNCLEAR
    where = f"step {finding.step}, {words.CHECK_TITLES[finding.check]}"
    struck = [device for device, number in counts.items() if number >= config.max_strikes]
    if struck:
        return StopOrder(
            code, f"{words.count(counts[struck[0]], 'strike')} against {words.clean(struck[0])} (max_strikes)"
        )
    if key.of_vote:
        action = state.votes[key.attempt, key.group, key.table].cases[key.step].action
        if finding.rule == "no-majority" and key.table != "buffers" and config.on_weight_fault != "report":
            return StopOrder(ExitCode.UNCLEAR, f"the replicas differ and no version has a majority ({where})")
        if action == "stopped" or config.on_weight_fault == "stop":
            return StopOrder(code, f"on_weight_fault is stop ({where})")
    elif finding.verdict not in QUIET and config.on_fault == "stop":
        return StopOrder(code, f"on_fault is stop ({where})")
    if (
        finding.verdict in ACCUSING
        and config.on_suspect == "stop"
        and (finding.strike or not audits(state, finding.attempt))
    ):
        return StopOrder(code, f"on_suspect is stop ({where})")
    row = _skipped_in_a_row(state, key)
    if row >= config.max_skipped:
        why = f"{words.count(row, 'step')} in a row were skipped (max_skipped)"
        return StopOrder(ExitCode.CONFIRMED if any(map(confirmed_at, strikes.values())) else ExitCode.UNCLEAR, why)
    return None


def audits(state: State, attempt: int) -> bool:
    """Whether replay audits are on in `attempt`."""
    on = state.config.audit_every > 0 or state.config.budget is not None
    return on and "replay" not in state.roster.attempt(attempt).checks_off


def _skipped_in_a_row(state: State, key: CaseKey) -> int:
    """Length of the run of skipped steps that holds this case's step; counted no further than max_skipped each way."""
    steps = state.skips.get((key.attempt, key.group), set())
    if key.step not in steps:
        return 0
    first = last = key.step
    while first - 1 in steps and last - first < state.config.max_skipped:
        first -= 1
    while last + 1 in steps and last - first < state.config.max_skipped:
        last += 1
    return last - first + 1


def ask_for_audit(state: State, key: CaseKey) -> list[Action]:
    """An audit soon, where a finding leaves open whether hardware is to blame; not more than one in ten steps."""
    entries = state.ledger.entries.get(key, ())
    unclear = any(
        not e.finding.strike and e.finding.verdict in (Verdict.SUSPECT, Verdict.INCONCLUSIVE) for e in entries
    )
    last = state.asked.get(key.attempt)
    if not unclear or not audits(state, key.attempt) or last is not None and key.step < last + ASK_AGAIN_AFTER:
        return []
    state.asked[key.attempt] = key.step
    why = f"to clear up the finding at step {key.step} ({words.CHECK_TITLES[key.check]})"
    return [Action("command", {"what": "audit", "why": why, "code": None})]


def speak(state: State, key: CaseKey) -> list[Action]:
    """What people are told about a case: the whole block the first times, one line when the same thing happens again,
    and ever more rarely when it goes on and on; the record has each."""
    said = []
    strikes = state.ledger.strikes(state.device_key)
    for entry in state.ledger.entries.get(key, ()):
        finding = against_devices(state, entry.finding, strikes)
        once = (key, signature(finding))
        if once in state.said:
            continue
        state.said[once] = True
        kind = (finding.check, finding.rule, finding.ranks, finding.verdict)
        state.said[kind] = state.said.get(kind, 0) + 1
        level = "alarm" if finding.verdict in ACCUSING else "info" if finding.verdict in QUIET else "warning"
        number = state.said[kind]
        if number > ONE_BY_ONE and number % 10 ** (len(str(number)) - 1):
            continue
        short = finding.verdict in QUIET or number > FULL_BLOCKS
        text = one_line(finding, number) if short else block(state, replace(entry, finding=finding))
        said += say(text, level)
    return said


def against_devices(state: State, finding: Finding, strikes: dict[str, list[tuple[int, int]]]) -> Finding:
    """`finding` with the verdict it has in the light of all strikes: confirmed when it confirms each device it accuses.
    """
    confirmed = [confirmed_at(strikes.get(state.device_key(finding.attempt, rank), [])) for rank in finding.ranks]
    return as_of(finding, max(confirmed)) if confirmed and None not in confirmed else finding


def block(state: State, entry: Entry) -> str:
    """The block of words for one entry."""
    finding, attempt = entry.finding, state.roster.attempt(entry.finding.attempt)
    devices = {rank: attempt.device(rank) for rank in finding.ranks}
    return words.block(finding, devices, entry.done, state.config.job_id)


def one_line(finding: Finding, number: int = 0) -> str:
    """One line for a finding that has been explained before, `number` times with this one."""
    who = f" · {words.ranks(finding.ranks)}" if finding.ranks else ""
    check = words.CHECK_TITLES[finding.check]
    again = f" · {number:,} times so far, from now on said now and then" if number >= ONE_BY_ONE else ""
    return f"{finding.verdict.value} at step {finding.step} · {check}{who} (rule: {finding.rule}){again}"
