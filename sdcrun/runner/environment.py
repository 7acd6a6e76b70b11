"""The environment of torchrun's agents: the user's own, with the shim's folder on PYTHONPATH and SDCRUN_* added."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import sdcrun
from sdcrun.core.types import Config

SITE = os.path.join(os.path.dirname(os.path.abspath(sdcrun.__file__)), "shim", "site")
# Variables of an outer sdcrun's rank. In a nested run they would make the shim believe that it is a rank's child.
_OF_OUTER_RANK = ("SDCRUN_OWNER", "SDCRUN_AGENT")
SECRET = "SDCRUN_SECRET"


def guarded(environ: Mapping[str, str], config: Config, runtime: str, host: str) -> dict[str, str]:
    """`environ` for agents whose ranks are to be guarded. cuBLAS gets a workspace with reproducible results, unless the
    user has chosen one: a replay on the same device must give the same bits."""
    values = {name: value for name, value in environ.items() if name not in (*_OF_OUTER_RANK, SECRET)}
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != SITE]
    values["PYTHONPATH"] = os.pathsep.join([SITE, *paths])
    values["SDCRUN_RUN"] = config.job_id
    values["SDCRUN_CONFIG"] = json.dumps(config.to_json())
    values["SDCRUN_RUNTIME"] = runtime
    values["SDCRUN_HOST"] = host
    values.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return values


def of_node(values: Mapping[str, str], index: int, devices: list[str] | None) -> dict[str, str]:
    """The environment of the agent that plays local node `index`, with the GPUs that are its own."""
    extra = {"SDCRUN_LOCAL_NODE": str(index)} if "SDCRUN_RUN" in values else {}
    return {**values, **extra, **({"CUDA_VISIBLE_DEVICES": devices[index]} if devices else {})}
