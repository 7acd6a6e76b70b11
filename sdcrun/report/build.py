"""Events -> the report, as data. Pure: the same events give the same report, in the controller and long afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sdcrun.core import checkpoints, decide, policy, selftests, words
from sdcrun.core.exitcode import status
from sdcrun.core.ledger import ACCUSING, Entry, as_of, confirmed_at
from sdcrun.core.roster import Attempt
from sdcrun.core.smoke import fault_rows
from sdcrun.core.state import State
from sdcrun.core.types import CHECKS, PARTS, REPORT_SCHEMA, Config, Device, Event, Finding, Verdict
from sdcrun.report.limits import limits
from sdcrun.report.radius import blast_radius

MAX_EVIDENCE = 32
MAX_LOST = 64
ORDER = {Verdict.CONFIRMED: 0, Verdict.SUSPECT: 1}


def fold(config: Config, events: Iterable[Event]) -> State:
    """The state that the events leave, with nothing left open."""
    state = decide.initial(config)
    for event in events:
        decide.fold(state, event)
    decide.finish(state)
    return state


def build(state: State, job: dict[str, Any] | None = None, notes: Iterable[str] = ()) -> dict[str, Any]:
    """The report as JSON values, by schema 1 (report/schema.json). `job` is job.json's content, `notes` are more
    limits."""
    job, attempt = job or {}, state.roster.last
    strikes = state.ledger.strikes(state.device_key)
    suspects = _suspects(state, strikes)
    saved = checkpoints.rows(state, strikes)
    unguarded = state.roster.unguarded(attempt, ended=bool(state.ends))
    where = status(state)
    return {
        "schema_version": REPORT_SCHEMA,
        "job_id": str(state.config.job_id or job.get("job_id") or ""),
        "status": where,
        "exit_code": _exit_code(state),
        "stopped_because": words.clean(state.stop.why, 400) if state.stop is not None else None,
        "started_at": words.moment(state.first_time if state.first_time is not None else job.get("created_at")),
        "ended_at": words.moment(max(end["time"] for end in state.ends.values())) if state.ends else None,
        "attempts": len([a for a in state.roster.attempts.values() if a.places]),
        "command": _command(state, job),
        "versions": _versions(state, attempt, job),
        "world_size": state.roster.expected_world(attempt),
        "nnodes": _nnodes(state, attempt),
        "guarded_ranks": len(set(attempt.modules) - set(attempt.unguarded)) if attempt else 0,
        "unguarded": unguarded,
        "steps": _steps(state),
        "checks": _checks(state, attempt),
        "overhead": _overhead(state),
        "findings": _finding_rows(state, strikes),
        "suspects": suspects,
        "lost": _lost(state),
        "injected": [
            {
                "spec": row.spec,
                "fired": row.fired,
                "step": row.step,
                "rank": row.rank,
                "caught_by": row.caught_by,
                "after_steps": row.after_steps,
                "named_right": row.named_right,
                "by_design_unseen": row.by_design_unseen,
                "problem": row.problem,
            }
            for row in fault_rows(state)
        ],
        "checkpoints": saved,
        "blast_radius": blast_radius(state, suspects, saved),
        "selftest": selftests.summary(state),
        "limits": [*limits(state, attempt, unguarded, where), *notes],
    }


def _exit_code(state: State) -> int | None:
    """The job's exit code of all that its supervisors said: sdcrun's own codes first, then any failure, then 0."""
    codes = [end["exit_code"] for end in state.ends.values() if end["exit_code"] is not None]
    return min(codes, key=lambda code: (code not in (86, 87, 88), code == 0, code)) if codes else None


def _lost(state: State) -> list[dict[str, Any]]:
    """Ranks that failed, in the order in which they did, as their supervisors said."""

    def when(row: dict[str, Any]) -> float:
        return row["at"] if isinstance(row.get("at"), (int, float)) else row["time"]

    def number(value: Any) -> int | None:
        return value if type(value) is int else None

    return [
        {"rank": number(row.get("rank")), "node": number(row.get("node")), "exit": number(row.get("exit")),
         "text": words.clean(row.get("text") or "")}
        for row in sorted(state.lost, key=when)[:MAX_LOST]
    ]  # fmt: skip


def _command(state: State, job: dict[str, Any]) -> list[str]:
    for source in [*state.roster.nodes, job]:
        if isinstance(source.get("command"), list):
            return [str(token) for token in source["command"]]
    return []


def _versions(state: State, attempt: Attempt | None, job: dict[str, Any]) -> dict[str, str | None]:
    """Versions as the lowest rank said them, completed from supervisors and job.json."""
    places = attempt.places if attempt else {}
    sources = [places[rank].versions for rank in sorted(places)[:1]]
    sources += [s.get("versions") for s in [*state.roster.nodes, job]]
    found: dict[str, str | None] = dict.fromkeys(("sdcrun", "torch", "python", "cuda", "nccl", "driver"))
    for source in sources:
        for key in found:
            if found[key] is None and isinstance(source, dict) and source.get(key) is not None:
                found[key] = str(source[key])
    return found


def _nnodes(state: State, attempt: Attempt | None) -> int:
    seen = len({place.node for place in attempt.places.values()}) if attempt else 0
    told = [node["nnodes"] for node in state.roster.nodes if isinstance(node.get("nnodes"), int)]
    return max([seen, *told])


def _steps(state: State) -> dict[str, int]:
    """Steps over all attempts; within one, ranks go in lockstep, so the furthest rank speaks for all. Sums
    come every few seconds: steps that a later event tells of count as seen, too."""
    total = {"seen": 0, "committed": 0, "skipped": 0}
    for attempt in state.roster.attempts.values():
        rows = [s["steps"] for s in attempt.summaries.values()]
        best = {key: max((row[key] for row in rows), default=0) for key in total}
        skips = set().union(*(steps for (number, _), steps in state.skips.items() if number == attempt.number))
        best["seen"] = max(best["seen"], attempt.last_step + 1)
        best["skipped"] = max(best["skipped"], len(skips))
        for key in total:
            total[key] += best[key]
    return total


def _checks(state: State, attempt: Attempt | None) -> dict[str, dict[str, Any]]:
    """Per check: how often it ran and fired (over groups and attempts), seconds per rank (mean), and why it is off."""
    config, result = state.config, {}
    intervals = {"nonfinite": 1, "replay": config.audit_every, "weights": config.weights_every}
    for check in CHECKS:
        run = fired = seconds = 0.0
        for one in state.roster.attempts.values():
            groups: dict[str, list[dict[str, float]]] = {}
            for (_, _, group), summary in one.summaries.items():
                groups.setdefault(group, []).append(summary["checks"].get(check, {}))
            for rows in groups.values():
                run += max(row.get("run", 0) for row in rows)
                fired += max(row.get("fired", 0) for row in rows)
                seconds += sum(row.get("seconds", 0) for row in rows) / len(rows)
        cases = sum(1 for key, entries in state.ledger.entries.items() if key.check == check and entries)
        off = attempt.checks_off.get(check) if attempt else None
        if off is None and config.budget is None and intervals[check] == 0:
            off = "switched off (interval 0)"
        if off is None and attempt is not None and state.ends and not attempt.modules:
            off = "no rank is guarded"
        result[check] = {
            "run": int(run),
            "fired": max(int(fired), cases),
            "seconds": round(seconds, 6),
            "off_reason": off,
        }
    return result


def _overhead(state: State) -> dict[str, Any]:
    """Time of checks in per cent of all training time, over all ranks and attempts; None before anything was measured.

    `by_check` is the whole of it; `by_part` says where it goes, as far as the parts are counted on their own.
    A rank in several groups trains once: its longest time counts, and the sum of what its groups spent.
    """
    spent, parts, trained = dict.fromkeys(CHECKS, 0.0), dict.fromkeys(PARTS, 0.0), 0.0
    for attempt in state.roster.attempts.values():
        ranks: dict[tuple[int, str], float] = {}
        for (rank, session, _), row in attempt.summaries.items():
            ranks[rank, session] = max(row["train_seconds"], ranks.get((rank, session), 0.0))
            for check in CHECKS:
                spent[check] += row["checks"].get(check, {}).get("seconds", 0)
            for part in PARTS:
                parts[part] += row["parts"].get(part, 0.0)
        trained += sum(ranks.values())
    if trained <= 0:
        return {"percent_of_step_time": None, "by_check": dict.fromkeys(CHECKS), "by_part": dict.fromkeys(PARTS)}
    return {
        "percent_of_step_time": round(100 * sum(spent.values()) / trained, 3),
        "by_check": {check: round(100 * seconds / trained, 3) for check, seconds in spent.items()},
        "by_part": {part: round(100 * seconds / trained, 3) for part, seconds in parts.items()},
    }


def _finding_rows(state: State, strikes: dict[str, list[tuple[int, int]]]) -> list[dict[str, Any]]:
    """One row for each finding and accused device; one without a device where nobody is accused."""
    rows = []
    for entry in state.ledger.ordered():
        for rank in entry.finding.ranks or (None,):
            finding = entry.finding if rank is None else _against(state, entry.finding, rank, strikes)
            rows.append({
                "attempt": finding.attempt, "step": finding.step, "check": finding.check,
                "verdict": finding.verdict.value,
                "device": None if rank is None else state.device_key(finding.attempt, rank),
                "rank": rank, "rule": finding.rule, "strike": finding.strike, "injected": finding.injected,
                "text": policy.block(state, Entry(finding, entry.done)),
            })  # fmt: skip
    return rows


def _against(state: State, finding: Finding, rank: int, strikes: dict[str, list[tuple[int, int]]]) -> Finding:
    """`finding` as it reads against the device of one of its ranks."""
    return as_of(finding, confirmed_at(strikes.get(state.device_key(finding.attempt, rank), [])))


def _suspects(state: State, strikes: dict[str, list[tuple[int, int]]]) -> list[dict[str, Any]]:
    """One row for each device with a suspect or confirmed verdict, the surest first."""
    against: dict[str, list[tuple[Finding, int]]] = {}
    for entry in state.ledger.ordered():
        if entry.finding.verdict in ACCUSING:
            for rank in entry.finding.ranks:
                key = state.device_key(entry.finding.attempt, rank)
                against.setdefault(key, []).append((_against(state, entry.finding, rank, strikes), rank))
    rows = [_suspect(state, key, found, len(strikes.get(key, ()))) for key, found in against.items()]
    return sorted(
        rows, key=lambda row: (row["verdict"] != "confirmed", -row["strikes"], row["first_step"], row["rank"])
    )


def _suspect(state: State, key: str, found: list[tuple[Finding, int]], strikes: int) -> dict[str, Any]:
    findings = [finding for finding, _ in found]
    last, rank = found[-1]
    attempt = state.roster.attempt(last.attempt)
    place, device = attempt.places.get(rank), attempt.device(rank)
    best = min(findings, key=lambda f: (ORDER[f.verdict], not f.strike))
    kinds = {finding.persistence for finding in findings}
    evidence = [row for finding, who in found for row in finding.evidence if row.get("rank") in (who, None)]
    injected = all(finding.injected for finding in findings)
    approvals = [a["by"] for a in state.approvals if a["device"] in (key, device.uuid)]
    return {
        "device": device_row(device),
        "names": _names(state, device.host),
        "rank": rank,
        "local_rank": place.local_rank if place else None,
        "node": place.node if place else None,
        "verdict": best.verdict.value,
        "persistence": next((kind for kind in ("persistent", "transient") if kind in kinds), "unknown"),
        "strikes": strikes,
        "first_step": min((f.attempt, f.step) for f in findings)[1],
        "last_step": max((f.attempt, f.step) for f in findings)[1],
        "rule": best.rule,
        "ruled_out": list(dict.fromkeys(words.clean(text) for f in findings for text in f.ruled_out)),
        "recommended_action": words.advice(best, state.config.job_id),
        "approved_by": approvals[-1] if approvals else None,
        "injected": injected,
        "evidence": evidence[:MAX_EVIDENCE],
    }


def _names(state: State, host: str) -> dict[str, str | None]:
    """What the schedulers call the machine, as its supervisor said."""
    facts = [node for node in state.roster.nodes if node.get("host") == host]
    known = facts[-1] if facts else {}
    keys = ("slurm_node", "kubernetes_node", "pod")
    return {key: None if known.get(key) is None else str(known[key]) for key in keys}


def device_row(device: Device) -> dict[str, Any]:
    """A device as the report shows it."""
    return {"host": device.host, "uuid": device.uuid, "pci": device.pci, "model": device.model, "serial": device.serial}
