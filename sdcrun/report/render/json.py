"""The report as JSON, by the schema in `report/schema.json`."""

from __future__ import annotations

import json
from typing import Any


def render(report: dict[str, Any]) -> str:
    """`report` as indented ASCII JSON with a final newline; no NaN or Infinity can be in it."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"
