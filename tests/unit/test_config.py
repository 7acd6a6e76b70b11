"""Settings: who wins, what is refused, and with which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcrun import config
from sdcrun.args import OWN_OPTIONS
from sdcrun.core.types import Config
from sdcrun.errors import UsageError


def yaml_file(tmp_path, text):
    path = tmp_path / "sdcrun.yaml"
    path.write_text(text)
    return str(path)


def refused(own, environ, said):
    with pytest.raises(UsageError) as error:
        config.load(own, environ)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_defaults_are_cores():
    settings = config.load({}, {})
    assert settings.config == Config()
    assert (settings.job, settings.directory, settings.origin()) == (None, "sdcrun_jobs", "defaults")


def test_flags_beat_variables_beat_file_beat_defaults(tmp_path):
    file = yaml_file(tmp_path, "audit_every: 7\nweights-every: 8\nmax_strikes: 9\non_suspect: stop\nseed: 3\n")
    environ = {"SDCRUN_WEIGHTS_EVERY": "18", "SDCRUN_MAX_STRIKES": "19", "SDCRUN_DIR": "/d"}
    settings = config.load({"config": [file], "max_strikes": ["29"], "quiet": [""]}, environ)
    got = settings.config
    assert (got.audit_every, got.weights_every, got.max_strikes, got.on_suspect, got.seed) == (7, 18, 29, "stop", 3)
    assert got.quiet and got.on_fault == "skip" and settings.directory == "/d"
    assert settings.origin() == (
        f"flags --sdc-max-strikes --sdc-quiet, environment SDCRUN_WEIGHTS_EVERY SDCRUN_DIR, file {file}"
    )


@pytest.mark.parametrize("option", OWN_OPTIONS, ids=lambda option: option.name)
def test_every_option_is_a_variable_too(option, tmp_path):
    value = {"config": yaml_file(tmp_path, "seed: 4\n"), "job": "x", "dir": "/d", "budget": "5", "on_fault": "stop",
             "on_weight_fault": "report", "on_suspect": "stop", "on_bad_checkpoint": "raise", "controller": "h:1",
             "inject_fault": "weight:rank=1"}.get(option.setting, "" if option.metavar is None else "7")  # fmt: skip
    by_flag = config.load({option.setting: [value]}, {})
    by_variable = config.load({}, {option.variable: value or "1"})
    assert by_flag.config == by_variable.config
    assert (by_flag.job, by_flag.directory) == (by_variable.job, by_variable.directory)
    assert by_flag != config.load({}, {})


def test_variable_names():
    names = {option.name: option.variable for option in OWN_OPTIONS}
    assert names["--sdc-audit-every"] == "SDCRUN_AUDIT_EVERY" and names["--inject-fault"] == "SDCRUN_INJECT_FAULT"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SDCRUN_AUDIT_EVRY", " (did you mean SDCRUN_AUDIT_EVERY?)"),
        ("SDCRUN_SDC_AUDIT_EVERY", " (did you mean SDCRUN_AUDIT_EVERY?)"),
        ("SDCRUN_audit_every", " (did you mean SDCRUN_AUDIT_EVERY?)"),
        ("SDCRUN_DISABEL", " (did you mean SDCRUN_DISABLE?)"),
        ("SDCRUN_OPTIMIZER_EVERY", "; optimizer_every is a key of the settings file only (--sdc-config)"),
        ("SDCRUN_ZZZ", " (sdcrun --help)"),
    ],
)
def test_a_mistyped_variable_is_said_with_the_nearest_name(name, hint):
    given = {name: "3", "PATH": "/bin", "SDCRUN": "x", "SDCRUN_QIET": ""}
    assert config.unknown_variables(given) == [f"{name} is ignored: there is no such variable{hint}"]


def test_no_variable_that_sdcrun_reads_or_sets_is_called_unknown():
    source = "".join(path.read_text() for path in Path(config.__file__).parent.rglob("*.py"))
    names = set(re.findall(r"[\"'](SDCRUN_[A-Z_]*[A-Z])[\"']", source)) | {option.variable for option in OWN_OPTIONS}
    assert {"SDCRUN_OWNER", "SDCRUN_ROUND", "SDCRUN_DEBUG", "SDCRUN_SECRET", "SDCRUN_DIR"} <= names
    assert config.unknown_variables(dict.fromkeys(names, "1")) == []


def test_what_kubernetes_says_of_a_service_called_sdcrun_is_no_typing_error():
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_EVENTS", "PORT", "PORT_4711_TCP", "PORT_4711_TCP_ADDR"]
    given = [f"SDCRUN_{name}" for name in names] + [f"SDCRUN_CONTROLLER_{name}" for name in names]
    assert config.unknown_variables(dict.fromkeys(given, "tcp://10.0.0.1:4711")) == []


def test_ranks_configuration_is_not_taken_for_a_file():
    assert config.load({}, {"SDCRUN_CONFIG": '{"job_id": "outer"}'}).config == Config()


def test_several_faults_in_a_variable():
    environ = {"SDCRUN_INJECT_FAULT": "weight:rank=1,step=3; gradient:rank=2"}
    assert config.load({}, environ).config.faults == ("weight:rank=1,step=3", "gradient:rank=2")


def test_inject_without_intervals_checks_every_step():
    settings = config.load({"inject_fault": ["weight"]}, {})
    assert (settings.config.audit_every, settings.config.weights_every, settings.config.optimizer_every) == (1, 1, 1)
    assert any("every step" in note for note in settings.notes)


@pytest.mark.parametrize("given_too", [{"weights_every": ["5"]}, {"audit_every": ["5"]}, {"budget": ["3"]}])
def test_inject_with_an_interval_leaves_the_others(given_too):
    settings = config.load({"inject_fault": ["weight"], **given_too}, {})
    assert settings.config.audit_every == (5 if "audit_every" in given_too else 100)
    assert settings.notes == ()


def test_budget_of_a_stronger_source_replaces_intervals(tmp_path):
    file = yaml_file(tmp_path, "audit_every: 7\n")
    assert config.load({"config": [file], "budget": ["5%"]}, {}).config.audit_every == 100
    assert config.load({"config": [file], "budget": ["5%"]}, {}).config.budget == 5.0
    file = yaml_file(tmp_path, "budget: 7\n")
    got = config.load({"config": [file], "audit_every": ["3"]}, {}).config
    assert (got.budget, got.audit_every) == (None, 3)


def test_unseen_faults_are_named_before_the_run():
    settings = config.load({"inject_fault": ["allreduce:step=3", "weight:rank=1"]}, {})
    lines = config.unseen_faults(settings.config, domains=4, replicas=4)
    assert len(lines) == 1 and "allreduce:step=3" in lines[0] and "by design" in lines[0]
    assert len(config.unseen_faults(settings.config, domains=2, replicas=2)) == 2


def test_fault_on_a_rank_that_the_job_does_not_have():
    settings = config.load({"inject_fault": ["weight:rank=3"]}, {})
    assert config.unseen_faults(settings.config, 4, 4) == [] == config.unseen_faults(settings.config)
    with pytest.raises(UsageError, match="there is no rank 3, the last rank of this job is 2"):
        config.unseen_faults(settings.config, 3, 3)
    settings = config.load({"inject_fault": ["weight:node=2"]}, {})
    assert config.unseen_faults(settings.config, 3, 3, 3) == []
    with pytest.raises(UsageError, match="there is no node 2, the last node of this job is 1"):
        config.unseen_faults(settings.config, 8, 8, 2)


@pytest.mark.parametrize(
    ("own", "environ", "said"),
    [
        ({"audit_every": ["x"]}, {}, "--sdc-audit-every: must be a whole number, got 'x'"),
        ({"audit_every": ["-1"]}, {}, "--sdc-audit-every: must be 0 or more, got -1"),
        ({"max_strikes": ["0"]}, {}, "--sdc-max-strikes: must be 1 or more"),
        ({"budget": ["101"]}, {}, "--sdc-budget: must be at most 100 per cent"),
        ({"budget": ["nan"]}, {}, "--sdc-budget: must be a number above 0"),
        ({"on_fault": ["skp"]}, {}, "--sdc-on-fault: must be skip or stop, got 'skp' (did you mean skip?)"),
        ({"job": ["../x"]}, {}, "--sdc-job: letters, digits"),
        ({"controller": ["host"]}, {}, "--sdc-controller: must be HOST:PORT"),
        ({}, {"SDCRUN_QUIET": "maybe"}, "SDCRUN_QUIET: must be 1 or 0, got 'maybe'"),
        ({}, {"SDCRUN_AUDIT_EVERY": "1.5"}, "SDCRUN_AUDIT_EVERY: must be a whole number"),
        ({"inject_fault": ["wieght:rank=1"]}, {}, "weight"),
        ({"inject_fault": ["weight:rnk=1"]}, {}, "no key 'rnk'"),
        ({"config": ["/no/such.yaml"]}, {}, "/no/such.yaml: cannot be read: No such file"),
        ({"off": [""], "inject_fault": ["weight"]}, {}, "--sdc-off contradicts --inject-fault"),
        ({"inject_fault": ["weight"], "off": [""]}, {"SDCRUN_SELFTEST": "1"}, "--sdc-off contradicts --inject-fault"),
        ({"selftest": [""]}, {"SDCRUN_OFF": "1"}, "SDCRUN_OFF contradicts --sdc-selftest"),
        ({"budget": ["5"], "audit_every": ["3"]}, {}, "--sdc-audit-every contradicts it"),
        ({}, {"SDCRUN_BUDGET": "5", "SDCRUN_WEIGHTS_EVERY": "3"}, "SDCRUN_WEIGHTS_EVERY contradicts it"),
    ],
)
def test_refused(own, environ, said):
    refused(own, environ, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("audit_evry: 3\n", "unknown key 'audit_evry' (did you mean 'audit_every'?)"),
        ("zzz: 3\n", "unknown key 'zzz'; known are"),
        ("off: true\n", "unknown key"),
        ("- a\n", "must hold 'key: value' lines, found a list"),
        ("just text\n", "found a str"),
        ("a: [1\nb: 2\n", ":2: not valid YAML"),
        ("audit_every: true\n", "must be a whole number, got True"),
        ("audit_every: 1.5\n", "must be a whole number, got 1.5"),
        ("audit_every:\n", "audit_every: has no value"),
        ("on_fault: off\n", "must be skip or stop, got False"),
        ("quiet: 1\n", "must be true or false"),
        ("inject_fault: {a: 1}\n", "must be a text or a list of texts"),
        ("audit_every: 3\nbudget: 4\n", "audit_every in "),
        ("audit_every: 3\naudit-every: 4\n", "given twice"),
        ("1: 2\n", "unknown key '1'"),
    ],
)
def test_bad_files(tmp_path, text, said):
    refused({"config": [yaml_file(tmp_path, text)]}, {}, said)


def test_off_flag_overrules_a_file_that_injects(tmp_path):
    settings = config.load({"config": [yaml_file(tmp_path, "inject_fault: weight\n")], "off": [""]}, {})
    assert settings.config.off and settings.config.faults == ()


def test_empty_file_is_said(tmp_path):
    file = yaml_file(tmp_path, "")
    assert config.load({"config": [file]}, {}).origin() == f"file {file} (nothing from it used)"


anything = st.none() | st.booleans() | st.integers() | st.text(max_size=5)


@given(st.dictionaries(st.text(max_size=8), anything, max_size=3))
def test_any_mapping_is_taken_or_refused_in_one_line(tmp_path_factory, values):
    import yaml

    path = tmp_path_factory.mktemp("y") / "f.yaml"
    path.write_text(yaml.safe_dump(values))
    try:
        config.load({"config": [str(path)]}, {})
    except UsageError as error:
        assert len(str(error).splitlines()) == 1


def test_config_travels_as_json():
    settings = config.load({"inject_fault": ["weight"], "budget": ["4"]}, {})
    assert Config.from_json(settings.config.to_json()) == settings.config


def test_example_file_names_every_key_and_means_the_defaults():
    path = Path(__file__).parents[2] / "configs" / "sdcrun.yaml"
    settings = config.load({"config": [str(path)]}, {})
    assert settings.config == Config()
    named = set(re.findall(r"^(?:# )?([a-z_]+): ", path.read_text(), re.MULTILINE))
    assert set(config.FILE_KEYS) <= named
