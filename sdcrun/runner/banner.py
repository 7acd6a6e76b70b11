"""What is said before the ranks start: the job, its place, its checks, where the settings came from."""

from __future__ import annotations

import os
import shlex

from sdcrun.config import Settings
from sdcrun.core.types import Config
from sdcrun.runner.jobfolder import Folder
from sdcrun.runner.plan import Plan


def banner(plan: Plan, settings: Settings, config: Config, folder: Folder, unseen: list[str]) -> str:
    """A few lines for the start of a launch."""
    lines = [f"job {config.job_id}: {_place(plan)}, {shlex.join([plan.script, *plan.script_args])[:200]}"]
    if config.off:
        return f"{lines[0]}\noff: plain torchrun, nothing is checked"
    lines.append(f"checks: {checks(config)}")
    record = f"record: {_short(folder.path)}" if folder.path else "no record"
    lines.append(f"settings: {settings.origin()}; {record}")
    if folder.moved:
        lines.append(f"an earlier record of this name is now {_short(folder.moved)}")
    lines += settings.notes
    lines += unseen
    return "\n".join(lines)


def _place(plan: Plan) -> str:
    ranks = f"{plan.nproc or plan.options.nproc_per_node} rank{'' if plan.nproc == 1 else 's'}"
    if plan.local_nodes > 1:
        return f"{plan.local_nodes} nodes on this machine (no rendezvous was given), {ranks} each"
    if plan.max_nodes > 1:
        nodes = str(plan.max_nodes) if plan.min_nodes == plan.max_nodes else f"{plan.min_nodes} to {plan.max_nodes}"
        return f"one of {nodes} nodes, {ranks} here"
    return ranks


def checks(config: Config) -> str:
    """The checks of a run and what follows from them, in one line."""
    if config.budget is not None:
        often = f"audits and weight votes within {config.budget:g} % of the step time"
    else:
        audit = f"replay audit every {_steps(config.audit_every)}" if config.audit_every else "no replay audits"
        votes = f"weight vote every {_steps(config.weights_every)}" if config.weights_every else "no weight votes"
        often = f"{audit}, {votes}"
    policy = f"on a fault {config.on_fault}, on wrong weights {config.on_weight_fault}"
    return f"non-finite gradients every step, {often}; {policy}"


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


def _short(path: str) -> str:
    near = os.path.relpath(path)
    return path if near.startswith("..") else near
