"""The option table of the installed torchrun, read without importing torch (that import takes 1.5 s and 225 MB).

`torch/distributed/run.py` builds its parser with one literal `add_argument` call per option, so its syntax tree holds
all that is needed: names, how many values an option takes, type, choices, the `PET_*` variable. When the source holds
anything this reader does not know, the real parser is asked in a child process instead.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdcrun.errors import UsageError

TYPES = {"str": str, "int": int, "float": float}


@dataclass(frozen=True)
class Option:
    """One option of torchrun.

    `names` are all spellings, `dest` the attribute of the namespace, `arity` the values it takes (0 or 1), `kind` the
    name of its type ("str", "int", "float") or None where it is something else, `choices` the valid values where they
    are literals, `default` as written there (None where it is not a literal), `environment` whether `PET_<DEST>` is
    read.
    """

    names: tuple[str, ...]
    dest: str
    arity: int
    kind: str | None = "str"
    choices: tuple[str, ...] | None = None
    default: Any = None
    environment: bool = False


class NotUnderstood(Exception):
    """The source of torchrun's parser is not in the form this reader knows."""


HELP = Option(("-h", "--help"), "help", 0, None)
_FLAG_ACTIONS = {"check_env": True, "store_true": False, "store_false": False, "store_const": False, "count": False}
_VALUE_ACTIONS = {"env": True, "store": False, "append": False}
_PARSER_KEYWORDS = {"description", "prog", "usage", "epilog", "formatter_class"}
_KNOWN_KEYWORDS = {"action", "type", "default", "help", "choices", "dest", "nargs", "const", "metavar", "required"}


def source_path() -> str:
    """Path of the installed torch/distributed/run.py; UsageError when torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"torch is not installed for {sys.executable}")
    return os.path.join(spec.submodule_search_locations[0], "distributed", "run.py")


def read() -> tuple[Option, ...]:
    """The table of the installed torchrun: from its source, else (slow) from its parser in a child process."""
    try:
        with open(source_path(), encoding="utf-8") as file:
            return from_source(file.read())
    except (NotUnderstood, OSError, SyntaxError, UnicodeDecodeError):
        return from_parser()


def from_source(source: str) -> tuple[Option, ...]:
    """Options in `get_args_parser` of the given source text. Raises NotUnderstood on any unknown form."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_args_parser":
            options = [option for statement in node.body for option in _statement(statement)]
            if not options:
                raise NotUnderstood("no options")
            return (HELP, *options)
    raise NotUnderstood("no get_args_parser")


def _statement(node: ast.stmt) -> list[Option]:
    if isinstance(node, ast.FunctionDef | ast.Return):
        return []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        call = node.value
        plain = {keyword.arg for keyword in call.keywords} <= _PARSER_KEYWORDS and not call.args
        if plain and isinstance(call.func, ast.Name) and call.func.id == "ArgumentParser":
            return []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and function.attr == "add_argument":
            if isinstance(function.value, ast.Name) and function.value.id == "parser":
                return _option(node.value)
    raise NotUnderstood(ast.unparse(node).splitlines()[0])


def _option(call: ast.Call) -> list[Option]:
    if not all(isinstance(name, ast.Constant) and isinstance(name.value, str) for name in call.args):
        raise NotUnderstood("computed name")
    names = tuple(name.value for name in call.args)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if not set(keywords) <= _KNOWN_KEYWORDS:
        raise NotUnderstood(f"{names}: keywords {sorted(map(str, keywords))}")
    if not names[0].startswith("-"):
        return []
    action = _text(keywords["action"]) if "action" in keywords else "store"
    if action in _FLAG_ACTIONS:
        arity, environment, kind = 0, _FLAG_ACTIONS[action], None
    elif action in _VALUE_ACTIONS and "nargs" not in keywords:
        arity, environment = 1, _VALUE_ACTIONS[action]
        kind = _text(keywords["type"]) if "type" in keywords else "str"
        kind = kind if kind in TYPES else None
    else:
        raise NotUnderstood(f"{names}: action {action}")
    dest = _literal(keywords.get("dest")) or destination(names)
    choices = _literal(keywords.get("choices"))
    return [
        Option(
            names,
            dest,
            arity,
            kind,
            tuple(choices) if isinstance(choices, list | tuple) else None,
            _literal(keywords.get("default")),
            environment,
        )
    ]


def destination(names: Sequence[str]) -> str:
    """argparse's name of the attribute: the first long spelling, else the first short one."""
    long = [name for name in names if name.startswith("--")]
    return (long or list(names))[0].lstrip("-").replace("-", "_")


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


_ASK_PARSER = """
import json, os
for name in [n for n in os.environ if n.startswith("PET_")]:
    del os.environ[name]
from torch.distributed.run import get_args_parser
rows = []
for action in get_args_parser()._actions:
    if action.option_strings:
        arity = 0 if action.nargs == 0 else 1
        kind = "str" if action.type is None else getattr(action.type, "__name__", "")
        plain = action.default if isinstance(action.default, (str, int, float, list)) else None
        rows.append(dict(names=action.option_strings, dest=action.dest, arity=arity, kind=kind if arity else "",
                         choices=[str(c) for c in action.choices] if action.choices else None, default=plain,
                         environment=type(action).__name__ in ("env", "check_env")))
print("\\n" + json.dumps(rows))
"""


def from_parser() -> tuple[Option, ...]:
    """The same table, asked of torchrun's own parser in a child process. UsageError when that fails."""
    child = subprocess.run([sys.executable, "-c", _ASK_PARSER], capture_output=True, text=True)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"torchrun's options cannot be read from torch in {sys.executable}: {last}")
    options = []
    for row in json.loads(child.stdout.splitlines()[-1]):
        if row["dest"] == "help":
            options.append(HELP)
            continue
        choices = tuple(row["choices"]) if row["choices"] else None
        kind = row["kind"] if row["kind"] in TYPES else None
        default = (row["default"] or None) if row["arity"] == 0 else row["default"]
        names = tuple(row["names"])
        options.append(Option(names, row["dest"], row["arity"], kind, choices, default, row["environment"]))
    return tuple(options)


class _Mirror(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(f"torchrun: {message}")


def given(table: Sequence[Option], tokens: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """The attributes that tokens or `PET_*` variables set, rather than a default. `tokens` must be valid."""
    parser = _Mirror(prog="torchrun", add_help=False, argument_default=argparse.SUPPRESS)
    for option in table:
        action = {"action": "store_true"} if option.arity == 0 else {}
        parser.add_argument(*option.names, dest=option.dest, default=argparse.SUPPRESS, **action)
    variables = {o.dest for o in table if o.environment and f"PET_{o.dest.upper()}" in environ}
    return set(vars(parser.parse_args(list(tokens)))) | variables


def namespace(table: Sequence[Option], tokens: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """What torchrun's parser will make of its option tokens: defaults, `PET_*` variables, tokens, types and choices.

    The values of options whose type or default is no literal stay text (or None). Raises UsageError with argparse's own
    message for whatever torchrun would reject.
    """
    parser = _Mirror(prog="torchrun", add_help=False)
    for option in table:
        variable = f"PET_{option.dest.upper()}"
        given = environ.get(variable) if option.environment else None
        if option.arity == 0:
            try:
                default = bool(int(given)) if given is not None else bool(option.default)
            except ValueError:
                raise UsageError(f"{variable}={given}: must be 0 or 1")
            parser.add_argument(*option.names, dest=option.dest, action="store_true", default=default)
        else:
            parser.add_argument(
                *option.names,
                dest=option.dest,
                type=TYPES.get(option.kind or "str"),
                choices=option.choices,
                default=option.default if given is None else given,
            )
    return parser.parse_args(list(tokens))
