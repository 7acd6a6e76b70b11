"""The exit code of a run: torchrun's own, unless the policy stopped the job or injected faults say otherwise. Pure."""

from __future__ import annotations

from sdcrun.core.smoke import problems
from sdcrun.core.state import State
from sdcrun.core.types import ExitCode


def exit_code(state: State, torchrun_code: int) -> int:
    """Exit code of a job after torchrun ended with `torchrun_code`.

    A stop by policy gives 86 or 87, whatever torchrun made of the signal; else a script that failed by itself keeps
    torchrun's own code; else 0. With --inject-fault a stop by policy counts as handled: 0 when every fault that fired
    was caught and exactly the right devices were named, else 88.
    """
    if state.config.faults and (state.stop is not None or torchrun_code == 0):
        return ExitCode.INJECTION_FAILED if problems(state) else 0
    return state.stop.code if state.stop is not None else torchrun_code


def status(state: State) -> str:
    """What `report.json` calls the job: running, finished, failed or stopped."""
    if not state.ends:
        return "running"
    if state.stop is not None:
        return "stopped"
    codes = [end["exit_code"] for end in state.ends.values()]
    said = {end["status"] for end in state.ends.values()}
    if "stopped" in said:
        return "stopped"
    if "failed" in said or any(code not in (0, ExitCode.INJECTION_FAILED) for code in codes):
        return "failed"
    return "finished"
