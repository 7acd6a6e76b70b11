"""The coverage table of a campaign as one self-contained page: no script, no network, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from sdcrun.core import words
from sdcrun.core.coverage import MEANING
from sdcrun.report.coverage import headline
from sdcrun.report.render.coverage_text import distance


def render(data: dict[str, Any]) -> str:
    """The page as HTML text."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    env.filters["safe_name"] = words.clean
    env.filters["gap"] = lambda value: "-" if value is None else distance(value)
    level, text = headline(data)
    return env.get_template("coverage.html.j2").render(data=data, level=level, headline=text, meaning=MEANING)
