"""Settings of a job: flags > SDCRUN_* variables > the YAML file > defaults, checked, as core's frozen `Config`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sdcrun.args import OWN_OPTIONS
from sdcrun.core.types import Config
from sdcrun.errors import UsageError

DEFAULT_DIR = "sdcrun_jobs"
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
INTERVALS = ("audit_every", "weights_every")

_CHOICES = {
    "on_fault": ("skip", "stop"),
    "on_weight_fault": ("repair", "stop", "report"),
    "on_suspect": ("report", "stop"),
    "on_bad_checkpoint": ("withhold", "raise"),
}
_FROM_ONE = ("max_strikes", "max_skipped", "replay_repeats")
_LEAST = {f.name: int(f.name in _FROM_ONE) for f in dataclasses.fields(Config) if type(f.default) is int}
_SECONDS = tuple(f.name for f in dataclasses.fields(Config) if type(f.default) is float)
_FLAGS = ("selftest", "quiet", "off")
_NOT_IN_FILE = ("config", "off")
FILE_KEYS = tuple(sorted({o.setting for o in OWN_OPTIONS} - set(_NOT_IN_FILE) | set(_LEAST) | set(_SECONDS)))
# Set by `sdcrun campaign` in the files of its launches; of no use to anybody else.
_BY_CAMPAIGN = ("campaign",)
PREFIX = "SDCRUN_"
# For people, beside the variables of the options; and what sdcrun sets for its own children, which may run it again.
_NOT_OPTIONS = ("SDCRUN_DEBUG", "SDCRUN_DISABLE", "SDCRUN_SECRET")
_FOR_CHILDREN = ("SDCRUN_RUN", "SDCRUN_RUNTIME", "SDCRUN_HOST", "SDCRUN_LOCAL_NODE", "SDCRUN_START", "SDCRUN_AGENT",
                 "SDCRUN_ROUND", "SDCRUN_OWNER")  # fmt: skip
# What Kubernetes puts into every container for a service called sdcrun or sdcrun-something.
_OF_A_SERVICE = re.compile(r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")


@dataclass(frozen=True)
class Settings:
    """What was asked for. `config` lacks job_id and job_dir, which the supervisor adds.

    `job` is the id asked for or None, `directory` the folder of job folders, `sources` maps each setting that is not a
    default to where it came from ("flag", a variable's name, or the file), `file` is the YAML file or None, `notes` are
    lines for the banner (intervals chosen for the user).
    """

    config: Config
    job: str | None = None
    directory: str = DEFAULT_DIR
    sources: dict[str, str] = field(default_factory=dict)
    file: str | None = None
    notes: tuple[str, ...] = ()

    def origin(self) -> str:
        """One phrase for the banner: where settings came from."""
        flags = [_flag(setting) for setting, source in self.sources.items() if source == "flag"]
        variables = [source for source in self.sources.values() if source.startswith("SDCRUN_")]
        from_file = [setting for setting, source in self.sources.items() if source == self.file]
        parts = [f"flags {' '.join(flags)}"] if flags else []
        parts += [f"environment {' '.join(variables)}"] if variables else []
        if self.file:
            parts.append(f"file {self.file}" + ("" if from_file else " (nothing from it used)"))
        return ", ".join(parts) or "defaults"


def load(own: Mapping[str, list[str]], environ: Mapping[str, str]) -> Settings:
    """Settings from own options (as `args.split` found them) and the environment. Raises UsageError."""
    flags = {setting: _from_texts(setting, texts, _flag(setting)) for setting, texts in own.items()}
    variables: dict[str, Any] = {}
    for option in OWN_OPTIONS:
        text = environ.get(option.variable, "")
        # Ranks find their whole configuration in SDCRUN_CONFIG, as JSON; a nested sdcrun must not take it for a file.
        if text and not (option.setting == "config" and text.lstrip().startswith("{")):
            texts = [t for t in re.split(r"[;\n]", text) if t.strip()] if option.repeatable else [text]
            variables[option.setting] = _from_texts(option.setting, texts, option.variable)
    file = flags.pop("config", None) or variables.pop("config", None)
    variables.pop("config", None)
    from_file = read_file(file) if file else {}
    names = {option.setting: option.variable for option in OWN_OPTIONS}
    levels = [
        (from_file, lambda setting: str(file)),
        (variables, lambda setting: names[setting]),
        (flags, lambda setting: "flag"),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for level, source in levels:
        _no_contradiction(level, source)
        # A budget chooses the intervals: the more important level wins over both ways of the less important ones.
        if level.get("budget") is not None:
            for setting in INTERVALS:
                values.pop(setting, None), sources.pop(setting, None)
        elif any(setting in level for setting in INTERVALS):
            values.pop("budget", None), sources.pop("budget", None)
        values.update(level)
        sources.update({setting: source(setting) for setting in level})
    return _settled(values, sources, file)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One line for each variable that looks like ours and is none.

    They are for warnings, unlike an unknown key of a file: an environment is not of the user's making alone, and a job
    must not end for what an image or a newer sdcrun has left in it.
    """
    variables = [*(option.variable for option in OWN_OPTIONS), *_NOT_OPTIONS]
    lines = []
    for name in sorted(environ):
        rest = name.removeprefix(PREFIX)
        known = rest == name or name in variables or name in _FOR_CHILDREN
        if known or not environ[name] or _OF_A_SERVICE.fullmatch(rest):
            continue
        setting = rest.lower().removeprefix("sdc_")
        near = difflib.get_close_matches(setting, [v.removeprefix(PREFIX).lower() for v in variables], n=1)
        if setting in FILE_KEYS and setting not in near:
            hint = f"; {setting} is a key of the settings file only (--sdc-config)"
        else:
            hint = f" (did you mean {PREFIX}{near[0].upper()}?)" if near else " (sdcrun --help)"
        lines.append(f"{name} is ignored: there is no such variable{hint}")
    return lines


def _settled(values: dict[str, Any], sources: dict[str, str], file: str | None) -> Settings:
    faults = tuple(values.pop("inject_fault", ()))
    job, directory = values.pop("job", None), values.pop("dir", DEFAULT_DIR)
    if values.get("off"):
        for setting in ("inject_fault", "selftest", "controller"):
            # --sdc-off over a file that injects faults is the way to switch that file off, not a contradiction.
            wanted = faults if setting == "inject_fault" else values.get(setting)
            if wanted and _weight(sources[setting]) >= _weight(sources["off"]):
                raise UsageError(f"{_said('off', sources)} contradicts {_said(setting, sources)}: no shim, no checks")
        faults = ()
    notes: list[str] = []
    if faults and not any(setting in values for setting in ("budget", *INTERVALS)):
        values.setdefault("optimizer_every", 1)
        values.update(audit_every=1, weights_every=1)
        notes.append("--inject-fault without intervals: every step is audited and voted on")
    config = Config(**values, faults=faults)
    unseen_faults(config)
    return Settings(config, job, directory, sources, file, tuple(notes))


def unseen_faults(
    config: Config, domains: int | None = None, replicas: int | None = None, nodes: int | None = None
) -> list[str]:
    """Lines for the faults that no check of this run can see by design; UsageError for one outside the grammar or the
    job.

    `domains` is the number of failure domains, `replicas` the world size and `nodes` that of the nodes, where they are
    known before the start.
    """
    if not config.faults:
        return []
    from sdcrun.core import faultspec

    lines = []
    for text in config.faults:
        try:
            spec = faultspec.parse(text)
            unseen = faultspec.by_design_unseen(spec, config, domains, replicas)
        except faultspec.FaultSpecError as error:
            raise UsageError(f"--inject-fault {error}")
        for what, number, count in (("rank", spec.rank, replicas), ("node", spec.node, nodes)):
            if None not in (number, count) and number >= count:
                last = f"the last {what} of this job is {count - 1}"
                raise UsageError(f"--inject-fault {text}: there is no {what} {number}, {last}")
        if unseen:
            why = f"no check of this run can see it and name its device, by design: {unseen}"
            lines.append(f"--inject-fault {text}: {why}")
    return lines


def _no_contradiction(level: Mapping[str, Any], source) -> None:
    for setting in INTERVALS:
        if level.get("budget") is not None and setting in level:
            raise UsageError(
                f"{_said('budget', {'budget': source('budget')})} chooses the intervals, "
                f"{_said(setting, {setting: source(setting)})} contradicts it: give one of them"
            )


def _weight(source: str) -> int:
    """How important a source is: 0 the file, 1 a variable, 2 a flag."""
    return 2 if source == "flag" else 1 if source.startswith("SDCRUN_") else 0


def _flag(setting: str) -> str:
    return next((option.name for option in OWN_OPTIONS if option.setting == setting), setting)


def _said(setting: str, sources: Mapping[str, str]) -> str:
    source = sources[setting]
    return _flag(setting) if source == "flag" else source if source.startswith("SDCRUN_") else f"{setting} in {source}"


def _from_texts(setting: str, texts: list[str], name: str) -> Any:
    """The value of texts from the command line or a variable called `name`; of several the last one counts."""
    if setting == "inject_fault":
        return [text.strip() for text in texts]
    text = texts[-1].strip()
    if setting in _FLAGS:
        words = {"": True, "1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False,
                 "off": False}  # fmt: skip
        if text.lower() not in words:
            raise UsageError(f"{name}: must be 1 or 0, got {text!r}")
        return words[text.lower()]
    if setting in _LEAST:
        try:
            return checked(setting, int(text), name)
        except ValueError:
            raise UsageError(f"{name}: must be a whole number, got {text!r}")
    if setting == "budget":
        try:
            return checked(setting, float(text.removesuffix("%")), name)
        except ValueError:
            raise UsageError(f"{name}: must be a number of per cent, got {text!r}")
    return checked(setting, text, name)


def checked(setting: str, value: Any, name: str) -> Any:
    """`value` when it is valid for `setting`, else UsageError that calls the place `name`."""
    if setting in _LEAST:
        if type(value) is not int:
            raise UsageError(f"{name}: must be a whole number, got {value!r}")
        if value < _LEAST[setting]:
            raise UsageError(f"{name}: must be {_LEAST[setting]} or more, got {value}")
    elif setting == "budget" or setting in _SECONDS:
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise UsageError(f"{name}: must be a number above 0, got {value!r}")
        if setting == "budget" and value > 100:
            raise UsageError(f"{name}: must be at most 100 per cent, got {value:g}")
        value = float(value)
    elif setting in _FLAGS:
        if type(value) is not bool:
            raise UsageError(f"{name}: must be true or false, got {value!r}")
    elif setting in _CHOICES:
        if value not in _CHOICES[setting]:
            near = difflib.get_close_matches(str(value), _CHOICES[setting], n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(f"{name}: must be {' or '.join(_CHOICES[setting])}, got {value!r}{hint}")
    elif not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name}: must be a text, got {value!r}")
    elif setting == "job" and not JOB_ID.fullmatch(value):
        raise UsageError(f"{name}: letters, digits, '.', '_' and '-' (at most 100), got {value!r}")
    elif setting == "controller" and not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):\d{1,5}", value):
        raise UsageError(f"{name}: must be HOST:PORT, got {value!r}")
    return value


def read_file(path: str) -> dict[str, Any]:
    """Checked settings of a YAML file. Raises UsageError for a file that cannot be read, is no mapping, or has a key
    that does not exist (the nearest valid one is named)."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UsageError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must hold 'key: value' lines, found a {type(content).__name__}")
    values: dict[str, Any] = {}
    for key, value in content.items():
        setting = str(key).replace("-", "_").removeprefix("sdc_")
        name = f"{path}: {key}"
        if setting not in FILE_KEYS + _BY_CAMPAIGN:
            near = difflib.get_close_matches(setting, FILE_KEYS, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else f"; known are {', '.join(FILE_KEYS)}"
            raise UsageError(f"{path}: unknown key {str(key)!r}{hint}")
        if setting in values:
            raise UsageError(f"{name}: given twice")
        if setting == "inject_fault":
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise UsageError(f"{name}: must be a text or a list of texts")
        elif value is None:
            raise UsageError(f"{name}: has no value")
        elif setting == "job" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        # YAML reads a bare `on_fault: off` as a boolean; `checked` then names the valid words.
        values[setting] = value if setting == "inject_fault" else checked(setting, value, name)
    return values


def absolute(directory: str) -> str:
    """The folder of job folders as an absolute path; "~" is the home directory."""
    return os.path.abspath(os.path.expanduser(directory))


def with_job(config: Config, job_id: str, job_dir: str) -> Config:
    """`config` of a job that has its name and its folder."""
    return dataclasses.replace(config, job_id=job_id, job_dir=job_dir)
