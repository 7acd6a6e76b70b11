"""Completion in a shell: sub-commands, own options with their values, torchrun's options, jobs; files otherwise.

A shell's script asks `sdcrun` itself, with `_SDCRUN_COMPLETE=1` and the words so far as arguments; the answer is one
candidate a line. A launch never sees that variable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sdcrun import args, optiontable
from sdcrun.errors import UsageError

VARIABLE = "_SDCRUN_COMPLETE"
SHOW, INSTALL = "--show-completion", "--install-completion"
WITH_JOB = ("report", "watch", "checkpoints", "approve")
WITH_LAUNCH = ("doctor", "campaign")
CHOICES = {
    "--format": ("text", "json", "html", "junit", "prometheus"),
    "--commands": ("slurm", "kubernetes", "hyperpod", "gcloud"),
}

SCRIPTS = {
    "bash": """\
_sdcrun() {
    local IFS=$'\\n'
    COMPREPLY=($(_SDCRUN_COMPLETE=1 sdcrun "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _sdcrun sdcrun
""",
    "zsh": """\
#compdef sdcrun
_sdcrun() {
    local -a found
    found=("${(@f)$(_SDCRUN_COMPLETE=1 sdcrun "${(@)words[2,$CURRENT]}" 2>/dev/null)}")
    if [[ -n $found[1] ]]; then compadd -- "${found[@]}"; else _files; fi
}
compdef _sdcrun sdcrun
""",
    "fish": """\
function __sdcrun
    set -l words (commandline -opc) (commandline -ct)
    _SDCRUN_COMPLETE=1 sdcrun $words[2..-1] 2>/dev/null
end
complete -c sdcrun -a '(__sdcrun)'
""",
}


def command(tokens: Sequence[str], environ: Mapping[str, str]) -> int:
    """`--show-completion [SHELL]` prints a shell's script, `--install-completion [SHELL]` puts it where the shell
    looks. Raises UsageError."""
    shell = tokens[1] if len(tokens) > 1 else os.path.basename(environ.get("SHELL", ""))
    if shell not in SCRIPTS or len(tokens) > 2:
        raise UsageError(f"{tokens[0]}: must be one of {', '.join(SCRIPTS)}, got {shell or 'nothing'!r}")
    if tokens[0] == SHOW:
        print(SCRIPTS[shell], end="")
        return 0
    path = place(shell, environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SCRIPTS[shell])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; sdcrun {SHOW} {shell} prints it instead")
    print(f"{path} written; it works in shells that are started from now on")
    if shell == "zsh":
        print("if it does not, put this into ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit")
    return 0


def place(shell: str, environ: Mapping[str, str]) -> Path:
    """Where a shell looks for the completions of a user."""
    home = Path(environ.get("HOME") or Path.home())
    if shell == "bash":
        return Path(environ.get("XDG_DATA_HOME") or home / ".local/share") / "bash-completion/completions/sdcrun"
    if shell == "fish":
        return Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish/completions/sdcrun.fish"
    return home / ".zfunc/_sdcrun"


def answer(words: Sequence[str], subcommands: Iterable[str]) -> int:
    """Print what could stand where the last of `words` is being typed. Anything that goes wrong is no candidate."""
    try:
        found = candidates(list(words) or [""], tuple(subcommands), optiontable.read())
    except Exception:
        found = []
    sys.stdout.write("".join(f"{text}\n" for text in found))
    return 0


def candidates(words: list[str], subcommands: tuple[str, ...], table: Sequence[optiontable.Option]) -> list[str]:
    """What could stand for the last of `words` (those after `sdcrun`); [] leaves it to the shell, which takes files."""
    *before, typed = words
    if before and before[0] in subcommands and before[0] != "run":
        if "--" in before and before[0] in WITH_LAUNCH:
            return candidates(["run", *before[before.index("--") + 1 :], typed], ("run",), table)
        return _matching(typed, _of_subcommand(before))
    if before and before[0] == "run":
        before = before[1:]
    elif not before and not typed.startswith("-"):
        return _matching(typed, subcommands)
    return _matching(typed, _of_launch(before, typed, table))


def _of_launch(before: list[str], typed: str, table: Sequence[optiontable.Option]) -> list[str]:
    own = args.own_option(before[-1]) if before else None
    if own is not None and own.metavar is not None:
        return own.metavar.split("|") if "|" in own.metavar else []
    line = args.split(before, table)
    if line.script is not None or not typed.startswith("-"):
        return []
    names = [option.name for option in args.OWN_OPTIONS]
    return [*names, *(name for option in table for name in option.names if name.startswith("--") and "_" not in name)]


def _of_subcommand(before: list[str]) -> list[str]:
    """Options of a sub-command and, where it takes one, the jobs here."""
    if before[-1] in CHOICES:
        return list(CHOICES[before[-1]])
    from sdcrun import subcommands

    found = subcommands.options(before[0])
    if before[0] in WITH_JOB and not any(not word.startswith("-") for word in before[1:]):
        from sdcrun.report import store

        found += [folder.name for folder in store.list_jobs()]
    return found


def _matching(typed: str, found: Iterable[str]) -> list[str]:
    return [text for text in found if text.startswith(typed)]
