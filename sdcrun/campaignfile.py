"""The file of a campaign: YAML that holds a matrix of faults."""

from __future__ import annotations

import yaml

from sdcrun.core import matrix
from sdcrun.core.matrix import Matrix
from sdcrun.errors import UsageError


def read(path: str) -> Matrix:
    """The matrix in a YAML file. Raises UsageError."""
    try:
        with open(path, encoding="utf-8") as file:
            return matrix.read(yaml.safe_load(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UsageError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except matrix.MatrixError as error:
        raise UsageError(f"{path}: {error}") from None
