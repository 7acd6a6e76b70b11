"""A short run of somebody's script under sdcrun, and what its record says about how far the script is guarded."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sdcrun.core import decide, words
from sdcrun.core.types import Config
from sdcrun.report import build
from sdcrun.report.follow import Follower

JOB = "trial"
TICK = 0.25
ENOUGH_STEPS = 30
ENOUGH_AUDITS = 4
GRACE = 20.0
TAIL = 4000
OPTIONS = ("--sdc-audit-every", "5", "--sdc-weights-every", "5", "--sdc-job", JOB, "--sdc-quiet")


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: the report and the state it is made of, torchrun's exit code (None: it was ended before the
    script was), the last of what was printed, the seconds to the first step (None: there was none) and in all."""

    report: dict[str, Any]
    state: Any
    code: int | None
    said: str
    first_step: float | None
    seconds: float


def run(tokens: list[str], seconds: float, environ: Mapping[str, str], folder: str) -> Outcome:
    """Run `tokens` (torchrun options, script, arguments; two ranks unless they say otherwise) for at most `seconds`,
    with its record in `folder`."""
    values = {name: value for name, value in environ.items() if not name.startswith("SDCRUN_")}
    values.setdefault("OMP_NUM_THREADS", "1")
    argv = [sys.executable, "-m", "sdcrun.cli", *OPTIONS, "--sdc-dir", folder, "--nproc-per-node", "2", *tokens]
    state = decide.initial(Config(job_id=JOB, audit_every=5, weights_every=5))
    started, first_step, code = time.monotonic(), None, None
    follower = Follower(os.path.join(folder, JOB))
    with open(os.path.join(folder, "output"), "w+b") as output:
        child = subprocess.Popen(
            argv, env=values, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while (code := child.poll()) is None and time.monotonic() - started < seconds:
                time.sleep(TICK)
                _read(follower, state)
                seen = max((a.last_step + 1 for a in state.roster.attempts.values()), default=0)
                counted = max(_summed(state), default=0)
                first_step = time.monotonic() - started if seen + counted and first_step is None else first_step
                if counted >= ENOUGH_STEPS and len(state.replays.audits) >= ENOUGH_AUDITS:
                    break
            _end(child)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        _read(follower, state)
        decide.finish(state)
        output.seek(max(0, output.tell() - TAIL)) if output.seek(0, os.SEEK_END) else None
        said = output.read().decode("utf-8", "replace")
    return Outcome(build.build(state), state, code, said, first_step, time.monotonic() - started)


def _read(follower: Follower, state: Any) -> None:
    while events := follower.read():
        for event in events:
            decide.fold(state, event)


def _summed(state: Any) -> list[int]:
    attempts = state.roster.attempts.values()
    return [summary["steps"].get("seen", 0) for attempt in attempts for summary in attempt.summaries.values()]


def _end(child: subprocess.Popen) -> None:
    """End a trial that has shown enough as a person would: SIGTERM, which sdcrun passes on."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            return


def judge(outcome: Outcome) -> Iterator[tuple[str, str, str]]:
    """(level, about, text) rows on how far the script is guarded; levels as in `doctor.Answer`."""
    report, attempt = outcome.report, outcome.state.roster.last
    steps, world = report["steps"]["seen"], report["world_size"]
    if outcome.code not in (None, 0):
        yield "FAIL", "script", f"it ended with exit code {outcome.code}: {words.clean(_last_words(outcome.said), 300)}"
    elif not steps and outcome.code is None:
        yield "LESS", "script", f"no step within {outcome.seconds:.0f} s; give it longer with --seconds"
    else:
        when = "" if outcome.first_step is None else f", the first after {outcome.first_step:.0f} s"
        where = f"{words.count(steps, 'step')} on {words.count(world, 'rank')}"
        yield "ok", "script", f"{where} in {outcome.seconds:.0f} s{when}"
    if report["guarded_ranks"] and attempt is not None:
        level = "ok" if report["guarded_ranks"] == world else "LESS"
        yield level, "guarded", f"{report['guarded_ranks']} of {words.count(world, 'rank')}, {_modules(attempt)}"
    reasons: dict[str, list[int]] = {}
    for row in report["unguarded"]:
        reasons.setdefault(row["reason"], []).append(row["rank"])
    for reason, ranks in reasons.items():
        yield ("FAIL" if not report["guarded_ranks"] else "LESS"), "UNGUARDED", f"{words.ranks(ranks)}: {reason}"
    if report["guarded_ranks"]:
        yield from _checks(outcome)
    for text in attempt.limits if attempt is not None else ():
        yield "note", "limit", words.clean(text, 400)


def _last_words(said: str) -> str:
    """The line of an output that says most about why a script failed: its last exception, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return ([line for line in errors if "ChildFailedError" not in line] or errors or lines or [""])[-1]


def _modules(attempt: Any) -> str:
    modules = attempt.modules[min(attempt.modules)]
    rows = [
        f"{words.clean(module.get('name') or 'one module', 60)}: {module.get('parameters', 0):,} parameters in "
        f"{words.count(module.get('tensors', 0), 'tensor')}"
        for module in modules
    ]
    return "; ".join(rows[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")


def _checks(outcome: Outcome) -> Iterator[tuple[str, str, str]]:
    checks, cases = outcome.report["checks"], outcome.state.replays.audits.values()
    for check, name in (("nonfinite", "non-finite"), ("replay", "audits"), ("weights", "votes")):
        row = checks[check]
        kinds: dict[str, int] = {}
        for case in cases if check == "replay" else ():
            kinds[case.kind] = kinds.get(case.kind, 0) + 1
        if row["off_reason"]:
            yield "LESS", name, f"off: {words.clean(row['off_reason'], 300)}"
        elif check == "replay" and not kinds:
            yield "LESS", name, "none yet: the script made too few steps in this time"
        elif check == "replay":
            said = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
            declined = {reason for case in cases for _, reason in case.audit.declined}
            level = "ok" if set(kinds) == {"clean"} and not declined else "LESS"
            narrow = {f"compared: {case.audit.scope}" for case in cases if case.audit.scope != "all"}
            more = sorted({f"declined: {reason}" for reason in declined} | narrow)
            yield level, name, said + (f" ({words.clean('; '.join(more), 400)})" if more else "")
        else:
            yield ("ok" if not row["fired"] else "LESS"), name, f"{row['run']:,} done, {row['fired']:,} fired"
