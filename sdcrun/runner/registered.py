"""Words that the installed torch knows for options whose valid values are not in its parser, read without importing it.

An unknown word ends torchrun in a traceback, some of them only after the ranks have run.
"""

from __future__ import annotations

import difflib
import os
import re
from importlib.metadata import entry_points

from sdcrun import optiontable
from sdcrun.errors import UsageError

# option: (file of torch, what a registration looks like there, group of entry points through which others add theirs)
_PLACES = {
    "rdzv_backend": (
        "distributed/elastic/rendezvous/registry.py",
        r'^\s*handler_registry\.register\(\s*"([^"]+)"',
        "torchrun.handlers",
    ),
    "event_log_handler": ("distributed/elastic/events/handlers.py", r'^    "([^"]+)":', None),
    "numa_binding": ("numa/binding.py", r'^    [A-Z_]+ = "([^"]+)"', None),
    "logs_specs": (None, "", "torchrun.logs_specs"),
}


def check(options) -> None:
    """Raise UsageError for a word in torchrun's namespace `options` that no part of torch or of its plug-ins has."""
    for name, (file, pattern, group) in _PLACES.items():
        word = getattr(options, name, None)
        if not word:
            continue
        known = _in_torch(file, pattern) if file else []
        if (file and not known) or word in known:
            continue
        known += [point.name for point in entry_points(group=group)] if group else []
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            must = f"must be one of {', '.join(sorted(known)) or 'those installed (none)'}"
            raise UsageError(f"--{name.replace('_', '-')} {word}: {must}{hint}")


def _in_torch(file: str, pattern: str) -> list[str]:
    """Empty when the source is not there or does not look as expected: then torch itself has to say."""
    root = os.path.dirname(os.path.dirname(optiontable.source_path()))
    try:
        with open(os.path.join(root, file), encoding="utf-8") as source:
            return re.findall(pattern, source.read(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return []
