"""The command `sdcrun`: the first token decides whether a sub-command runs or a script is launched.

No torch is imported on the way to a launch, and typer only for sub-commands: neither click nor typer can tell a
script's options from torchrun's, so a launch is taken apart by `sdcrun.args`.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
from collections.abc import Sequence

from sdcrun import __version__
from sdcrun.errors import UsageError

SUBCOMMANDS = ("report", "watch", "jobs", "checkpoints", "verify", "doctor", "campaign", "approve")
WORDS = ("run", *SUBCOMMANDS)
INTERRUPTED = 130

HELP = """\
usage: sdcrun [OPTIONS] [torchrun's options] SCRIPT [ARGUMENTS]
torchrun that notices silent data corruption; nothing in the script changes.
  --sdc-audit-every N         steps between replay audits (100; 0: off)
  --sdc-weights-every N       steps between weight votes (10; 0: off)
  --sdc-budget PERCENT        overhead allowed; chooses both intervals
  --sdc-on-fault skip|stop          --sdc-on-weight-fault repair|stop|report
  --sdc-on-suspect report|stop      --sdc-on-bad-checkpoint withhold|raise
  --sdc-max-strikes N (3)           --sdc-max-skipped N (20): then stop
  --sdc-job ID  --sdc-dir DIR (of job folders)  --sdc-config FILE (YAML)
  --sdc-quiet  --sdc-off (plain torchrun)  --sdc-selftest
  --sdc-controller HOST:PORT  --inject-fault SPEC (help: what there is)
Each is a variable, too: SDCRUN_AUDIT_EVERY=10. The rest: torchrun --help
commands, each with --help (JOB: an id, a folder; left out: the newest)
  report [JOB]         what was found       watch [JOB]   follow it
  checkpoints [JOB]    which one is safe    verify FILE   is it what was saved?
  approve JOB DEVICE --by NAME  on record   jobs          all of them
  doctor [-- SCRIPT]   can it be guarded?   run SCRIPT    named like a command
  campaign FILE -- LAUNCH       many faults on your own job, and a table
examples: sdcrun --nnodes 4 train.py --lr 0.1      four nodes on this machine
  sdcrun --nnodes 3 --inject-fault weight:rank=1,step=5,bit=30 train.py
exit codes: torchrun's own | 2 usage | 86 stopped, a device is confirmed bad
  87 stopped, culprit unclear | 88 an injected fault was missed
shell completion: sdcrun --install-completion [bash|zsh|fish]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `sdcrun` with `argv` (default: the process's); returns the exit code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # Where a terminal has no "·", it shows "?"; that is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return dispatch(tokens)
    except UsageError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, a pager) has gone; what it did not read is not missed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def dispatch(tokens: list[str]) -> int:
    """Sub-command or launch, by the first token alone. Raises UsageError."""
    first = tokens[0] if tokens else ""
    if os.environ.get("_SDCRUN_COMPLETE") or first in ("--show-completion", "--install-completion"):
        from sdcrun import completion

        asked = os.environ.get(completion.VARIABLE)
        return completion.answer(tokens, WORDS) if asked else completion.command(tokens, os.environ)
    if first in ("--help", "-h") or tokens == ["help"] and not os.path.exists("help"):
        print(HELP)
        return 0
    if first == "--version":
        print(f"sdcrun {__version__}")
        return 0
    from sdcrun import config

    for line in config.unknown_variables(os.environ):
        complain(line, "warning")
    if first in SUBCOMMANDS:
        if os.path.isfile(first):
            complain(f"to launch the file {first} that is here: sdcrun run {first}", "note")
        return _subcommand(tokens)
    return launch(tokens[1:] if first == "run" else tokens, tokens)


def launch(tokens: list[str], typed: list[str]) -> int:
    """Take a command line apart and run it. `typed` is the whole of it, for the record. Raises UsageError."""
    from sdcrun import args, config, optiontable
    from sdcrun.runner import plan, supervise

    table = optiontable.read()
    line = args.split(tokens, table)
    if line.help:
        print(HELP)
        return 0
    if "help" in line.own.get("inject_fault", ()):
        from sdcrun.core import faultspec

        print(faultspec.help_text())
        return 0
    settings = config.load(line.own, os.environ)
    if line.script and [line.script] == typed[:1] and not os.path.exists(line.script):
        near = difflib.get_close_matches(line.script, WORDS, n=1)
        if near:
            raise UsageError(f"no such script or sub-command: {line.script} (did you mean sdcrun {near[0]}?)")
    return supervise.run(plan.make(line, table, os.environ), settings, ["sdcrun", *typed], os.environ)


def complain(text: str, kind: str = "error") -> None:
    """One line on stderr."""
    print(f"[sdcrun] {kind}: {text}", file=sys.stderr)


def _subcommand(tokens: list[str]) -> int:
    from sdcrun import subcommands

    return subcommands.run(tokens)


if __name__ == "__main__":
    sys.exit(main())
