"""Which room may import which: read from the syntax trees, so that imports inside functions count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sdcrun"
ROOT = PACKAGE.parent

# Modules of ours that each room may use. A room is a folder of the package; the modules beside the folders are the
# command line ("front") and what it shares with the runner ("options").
OURS = {
    "core": {"core"},
    "wire": {"wire", "core"},
    "shim": {"shim", "wire", "core"},
    "report": {"report", "core"},
    "options": {"options", "core"},
    "runner": {"runner", "report", "options", "wire", "core"},
    "front": {"front", "runner", "report", "options", "wire", "core"},
}
OPTIONS = {"args", "campaignfile", "config", "errors", "optiontable"}
# Packages of others. `core` has none: it must run, and be tested, on a bare interpreter.
OTHERS = {
    "core": set(),
    "wire": set(),
    "shim": {"torch"},
    "report": {"rich", "jinja2"},
    "options": {"yaml"},
    "runner": {"psutil", "pynvml", "rich"},
    "front": {"typer", "click", "rich"},
}
# The exceptions, file by file.
ALLOWED = {
    "shim/fingerprint/reference.py": {"numpy"},
    "shim/fingerprint/triton_kernel.py": {"triton"},
    "shim/site/sitecustomize.py": {"sitecustomize"},  # the user's own one
    "runner/start.py": {"torch"},  # becomes torchrun
    "optiontable.py": {"torch"},  # asks torchrun for its parser where reading its source is not enough
}
LOADERS = {"import_module", "__import__", "find_spec"}


def room_of(path: str) -> str:
    """Room of a file of the package, by its path relative to the package."""
    if "/" in path:
        return path.split("/")[0]
    return "options" if path.removesuffix(".py") in OPTIONS else "front"


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of everything that a file of `package` (dotted) imports, by statement or by a call
    with a literal name. `from x import y` counts as x and as x.y, since y may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            literal = node.args[0]
            if name in LOADERS and isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                yield node.lineno, literal.value


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of one file; `path` is relative to the package."""
    room = room_of(path)
    package = ".".join(["sdcrun", *path.split("/")[:-1]])
    found = []
    for line, module in imported(ast.parse(source), package):
        top, *rest = module.split(".")
        if top == "sdcrun":
            # The package itself holds the version and nothing else; anybody may read that.
            if not rest or rest == ["__version__"]:
                continue
            target = rest[0] if (PACKAGE / rest[0]).is_dir() else room_of(rest[0])
            if target not in OURS[room]:
                found.append(f"{path}:{line}: {room} must not import {module}")
        elif top not in sys.stdlib_module_names and top not in OTHERS[room] | ALLOWED.get(path, set()):
            found.append(f"{path}:{line}: {room} must not import {module}")
    return found


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def test_there_are_files_in_every_room() -> None:
    assert {room_of(path) for path in FILES} == set(OURS)


@pytest.mark.parametrize("path", FILES)
def test_imports_keep_to_the_directions(path: str) -> None:
    assert violations(path, (PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(("path", "source"), [
    ("core/x.py", "import torch"),
    ("core/x.py", "from sdcrun.report import store"),
    ("core/x.py", "from sdcrun import cli"),
    ("core/x.py", "from ..shim import guard"),
    ("core/deep/x.py", "from ...runner import supervise"),
    ("core/x.py", "def f():\n    import numpy"),
    ("shim/x.py", "from sdcrun.runner.controller import main"),
    ("shim/x.py", "import typer"),
    ("shim/checks/x.py", "if False:\n    import psutil"),
    ("shim/x.py", "import importlib\nimportlib.import_module('yaml')"),
    ("report/x.py", "from sdcrun.runner import supervise"),
    ("report/x.py", "import torch"),
    ("runner/x.py", "from sdcrun.shim import link"),
    ("runner/x.py", "from sdcrun import cli"),
    ("runner/x.py", "__import__('torch')"),
    ("wire/x.py", "from sdcrun.runner import controller"),
    ("shim/x.py", "from sdcrun.config import Settings"),
    ("report/x.py", "from sdcrun.errors import UsageError"),
    ("config.py", "from sdcrun.runner import supervise"),
    ("cli.py", "import sdcrun.shim.guard"),
    ("cli.py", "def f():\n    from torch import nn"),
])  # fmt: skip
def test_a_wrong_import_is_seen(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(("path", "source"), [
    ("core/x.py", "import json\nfrom sdcrun.core import types\nfrom . import types\nfrom sdcrun import __version__"),
    ("shim/checks/x.py", "import torch\nfrom ..guard import Guard\nfrom sdcrun.core.types import Event"),
    ("runner/x.py", "import psutil\nfrom sdcrun.report import store"),
    ("cli.py", "import typer\nfrom sdcrun.runner import supervise"),
    ("optiontable.py", "def f():\n    from torch.distributed.run import get_args_parser"),
    ("runner/x.py", "from sdcrun.config import Settings\nfrom sdcrun.wire.link import Link"),
])  # fmt: skip
def test_a_right_import_is_let_through(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_torch_is_imported_lazily_outside_the_shim() -> None:
    for path in (path for path, packages in ALLOWED.items() if "torch" in packages and (PACKAGE / path).exists()):
        tree = ast.parse((PACKAGE / path).read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        lazy = {line for function in functions for line, _ in imported(function, "sdcrun")}
        eager = [line for line, module in imported(tree, "sdcrun") if module.startswith("torch") and line not in lazy]
        assert eager == [], path
