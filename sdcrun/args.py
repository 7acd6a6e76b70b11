"""Tells apart sdcrun's own options, torchrun's options, the script and the script's arguments, in one walk over argv.

argparse and click both get this wrong for a wrapper: they look for options behind the script's name, take the value of
an unknown option for the script, or drop a `--`. The walk needs no more than the number of values each option takes.
torchrun's tokens and the script's arguments are kept exactly as they were typed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from sdcrun.errors import UsageError
from sdcrun.optiontable import Option

_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")


@dataclass(frozen=True)
class OwnOption:
    """One option of sdcrun. `setting` is the key of configuration files; `metavar` None marks a flag."""

    name: str
    setting: str
    metavar: str | None
    help: str
    repeatable: bool = False

    @property
    def variable(self) -> str:
        """The environment variable with the same meaning."""
        return "SDCRUN_" + self.name.removeprefix("--").removeprefix("sdc-").replace("-", "_").upper()


OWN_OPTIONS = (
    OwnOption("--sdc-config", "config", "FILE", "settings in YAML"),
    OwnOption("--sdc-job", "job", "ID", "name of the job"),
    OwnOption("--sdc-dir", "dir", "DIR", "where job folders go"),
    OwnOption("--sdc-audit-every", "audit_every", "N", "steps between replay audits"),
    OwnOption("--sdc-weights-every", "weights_every", "N", "steps between weight votes"),
    OwnOption("--sdc-budget", "budget", "PERCENT", "overhead that chooses both intervals"),
    OwnOption("--sdc-on-fault", "on_fault", "skip|stop", "a step with a fault"),
    OwnOption("--sdc-on-weight-fault", "on_weight_fault", "repair|stop|report", "replicas that differ"),
    OwnOption("--sdc-on-suspect", "on_suspect", "report|stop", "a device under suspicion"),
    OwnOption("--sdc-on-bad-checkpoint", "on_bad_checkpoint", "withhold|raise", "a checkpoint that fails its check"),
    OwnOption("--sdc-max-strikes", "max_strikes", "N", "strikes of one device that stop the job"),
    OwnOption("--sdc-max-skipped", "max_skipped", "N", "skipped steps in a row that stop the job"),
    OwnOption("--sdc-controller", "controller", "HOST:PORT", "use the controller that runs there"),
    OwnOption("--sdc-selftest", "selftest", None, "test each device before training"),
    OwnOption("--sdc-quiet", "quiet", None, "only warnings and findings"),
    OwnOption("--sdc-off", "off", None, "plain torchrun"),
    OwnOption("--inject-fault", "inject_fault", "SPEC", "put a fault in, to see it found", repeatable=True),
)
_OWN_BY_NAME = {option.name: option for option in OWN_OPTIONS}


@dataclass
class CommandLine:
    """A command line taken apart. `own` maps a setting to the texts given for it ("" for a flag), in their order."""

    own: dict[str, list[str]] = field(default_factory=dict)
    torchrun: list[str] = field(default_factory=list)
    script: str | None = None
    script_args: list[str] = field(default_factory=list)
    help: bool = False


def own_option(token: str) -> OwnOption | None:
    """The option of sdcrun that `token` (without "=value") names, with dashes or underscores; None: not ours."""
    return _OWN_BY_NAME.get("--" + token[2:].replace("_", "-")) if token.startswith("--") else None


def split(argv: Sequence[str], table: Sequence[Option]) -> CommandLine:
    """Take `argv` (without the program's name) apart with torchrun's option `table`.

    The script is the first token that is no option and no option's value, or what follows the first `--`. Raises
    UsageError for an option nobody knows, an ambiguous prefix and a missing value of an own option. What torchrun
    rejects for other reasons is left to `optiontable.namespace`.
    """
    line = CommandLine()
    by_name = {name: option for option in table for name in option.names}
    tokens = list(argv)
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token == "--":
            at += 1
            break
        name, equals, value = token.partition("=")
        own = own_option(name)
        if own is not None:
            at += 1
            if own.metavar is None:
                if equals:
                    raise UsageError(f"{name} takes no value, got {value!r}")
            elif not equals:
                if at == len(tokens) or tokens[at] == "--" or own_option(tokens[at].partition("=")[0]):
                    raise UsageError(f"{name} needs a value ({own.metavar})")
                value = tokens[at]
                at += 1
            line.own.setdefault(own.setting, []).append(value)
            continue
        kind = _classify(token, by_name)
        if kind == "script":
            break
        if kind == "help":
            line.help = True
            return line
        line.torchrun.append(token)
        at += 1
        if kind == "next" and at < len(tokens) and _is_value(tokens[at], by_name):
            line.torchrun.append(tokens[at])
            at += 1
    if at < len(tokens):
        line.script = tokens[at]
        line.script_args = tokens[at + 1 :]
    return line


def _is_value(token: str, by_name: dict[str, Option]) -> bool:
    """Whether argparse would take `token` as the value of the option before it, rather than as an option."""
    if token == "--" or own_option(token.partition("=")[0]):
        return False
    try:
        return _classify(token, by_name) == "script"
    except UsageError:
        return False


def _classify(token: str, by_name: dict[str, Option]) -> str:
    """What argparse would see in `token`: "script" (no option), "next" (an option whose value is the next token),
    "alone" (an option complete in itself) or "help". Raises UsageError when it is an option that nobody knows."""
    if not token.startswith("-") or token == "-":
        return "script"
    if token in by_name:
        return _as_kind(by_name[token], explicit=False)
    if token.startswith("--"):
        name, equals, _ = token.partition("=")
        exact = by_name.get(name)
        found = {n: o for n, o in by_name.items() if n.startswith(name)} if exact is None else {name: exact}
        if len({option.dest for option in found.values()}) > 1:
            raise UsageError(f"ambiguous option: {name} could be {' or '.join(sorted(found))}")
        if found:
            return _as_kind(next(iter(found.values())), explicit=bool(equals))
    else:
        kind = _cluster(token, by_name)
        if kind is not None:
            return kind
        if _NEGATIVE_NUMBER.match(token):
            return "script"
    if " " in token:
        return "script"
    raise UsageError(unknown_option(token, by_name))


def _cluster(token: str, by_name: dict[str, Option]) -> str | None:
    """A run of one-letter options such as -mr3; None when the first letter is no option."""
    letters = token[1:]
    for position, letter in enumerate(letters):
        option = by_name.get("-" + letter)
        if option is None:
            return None if position == 0 else "alone"
        if option.dest == "help":
            return "help"
        if option.arity:
            return "next" if position == len(letters) - 1 else "alone"
    return "alone"


def _as_kind(option: Option, explicit: bool) -> str:
    if option.dest == "help":
        return "help"
    return "next" if option.arity and not explicit else "alone"


def unknown_option(token: str, by_name: dict[str, Option]) -> str:
    """One line for an option that neither sdcrun nor torchrun knows, with the nearest one that exists."""
    name = token.partition("=")[0]
    dashed = name[:2] + name[2:].replace("_", "-")
    # The beginning of one of ours first: torchrun's may be abbreviated, ours are not.
    near = [known for known in _OWN_BY_NAME if len(dashed) > 3 and known.startswith(dashed)][:1]
    near = near or difflib.get_close_matches(dashed, [*_OWN_BY_NAME, *by_name], n=1, cutoff=0.6)
    return f"unknown option {name}" + (f" (did you mean {near[0]}?)" if near else "")
