"""Which part of a command line belongs to whom."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun import args, optiontable
from sdcrun.errors import UsageError

TABLE = optiontable.read()


def real_parser():
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def real_namespace(tokens):
    """torchrun's own namespace, or None when its parser refuses the tokens."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return vars(real_parser().parse_args(tokens))
        except SystemExit:
            return None


def test_table_from_source_is_the_real_parsers():
    from_parser = optiontable.from_parser()
    assert [(o.names, o.dest, o.arity, o.kind, o.environment, o.default) for o in TABLE] == [
        (o.names, o.dest, o.arity, o.kind, o.environment, o.default) for o in from_parser
    ]
    for ours, theirs in zip(TABLE, from_parser, strict=True):
        assert ours.choices in (theirs.choices, None)
    assert len(TABLE) > 25


@pytest.mark.parametrize(
    "change",
    [
        ("action=env,\n        type=str,\n        default=\"1:1\"", "nargs='*',\n        default=\"1:1\""),
        ('ArgumentParser(description="Torch', 'ArgumentParser(prefix_chars="+", description="Torch'),
        ('parser.add_argument(\n        "--nnodes"', 'parser.add_argument(\n        NAME'),
        ("    return parser\n", "    parser.register('x', 'y')\n    return parser\n"),
        ("def get_args_parser", "def get_parser"),
    ],
)
def test_source_in_another_form_is_not_guessed_at(change):
    with open(optiontable.source_path(), encoding="utf-8") as file:
        source = file.read()
    changed = source.replace(*change, 1)
    assert changed != source
    with pytest.raises(optiontable.NotUnderstood):
        optiontable.from_source(changed)


def test_unknown_source_falls_back_to_the_parser(tmp_path):
    path = tmp_path / "run.py"
    path.write_text("def get_args_parser():\n    return make_it()\n")
    with mock.patch.object(optiontable, "source_path", lambda: str(path)):
        assert [o.names for o in optiontable.read()] == [o.names for o in TABLE]


@pytest.mark.parametrize(
    ("typed", "own", "torchrun", "script", "rest"),
    [
        ("--nnodes 4 --inject-fault x train.py --inject-fault y --r=16", {"inject_fault": ["x"]}, "--nnodes 4",
         "train.py", "--inject-fault y --r=16"),
        ("-mr 3 pkg.mod -x", {}, "-mr 3", "pkg.mod", "-x"),
        ("-mr3 pkg.mod -r 1", {}, "-mr3", "pkg.mod", "-r 1"),
        ("-r 0:1,1:2 a.py", {}, "-r 0:1,1:2", "a.py", ""),
        ("--rdzv-conf a=1,b=2 -- train.py -- z", {}, "--rdzv-conf a=1,b=2", "train.py", "-- z"),
        ("--stand --sdc-off train.py", {"off": [""]}, "--stand", "train.py", ""),
        ("--sdc_audit_every 3 --nproc_per_node=2 a.py", {"audit_every": ["3"]}, "--nproc_per_node=2", "a.py", ""),
        ("--sdc-job=x --inject_fault a:b=c --inject-fault d a.py", {"job": ["x"], "inject_fault": ["a:b=c", "d"]}, "",
         "a.py", ""),
        ("--max-restarts -1 a.py", {}, "--max-restarts -1", "a.py", ""),
        ("--sdc-quiet -- --odd.py --sdc-off", {"quiet": [""]}, "", "--odd.py", "--sdc-off"),
        ("train.py --nnodes 2 --sdc-off", {}, "", "train.py", "--nnodes 2 --sdc-off"),
        ("--sdc-audit-every -1 a.py", {"audit_every": ["-1"]}, "", "a.py", ""),
    ],
)  # fmt: skip
def test_split(typed, own, torchrun, script, rest):
    line = args.split(typed.split(), TABLE)
    assert (line.own, line.torchrun, line.script, line.script_args) == (own, torchrun.split(), script, rest.split())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--nodes 4 a.py", "unknown option --nodes (did you mean --nnodes?)"),
        ("--sdc-audit-evry 4 a.py", "unknown option --sdc-audit-evry (did you mean --sdc-audit-every?)"),
        ("--inject-faults x a.py", "unknown option --inject-faults (did you mean --inject-fault?)"),
        ("--sdc-audit 3 a.py", "unknown option --sdc-audit (did you mean --sdc-audit-every?)"),
        ("--sdc a.py", "unknown option --sdc (did you mean --sdc-config?)"),
        ("-z a.py", "unknown option -z"),
        ("--r 3 a.py", "ambiguous option: --r could be"),
        ("--sdc-job", "--sdc-job needs a value (ID)"),
        ("--sdc-job --sdc-off a.py", "--sdc-job needs a value (ID)"),
        ("--sdc-quiet=1 a.py", "--sdc-quiet takes no value, got '1'"),
    ],
)
def test_split_refuses(typed, said):
    with pytest.raises(UsageError) as error:
        args.split(typed.split(), TABLE)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("typed", ["--help", "-h", "--he", "-mh", "--nnodes 2 --help a.py", "--sdc-off -h"])
def test_help_among_the_options(typed):
    assert args.split(typed.split(), TABLE).help


def test_help_behind_the_script_is_the_scripts():
    assert not args.split(["a.py", "--help"], TABLE).help


def test_own_options_do_not_shadow_torchruns():
    theirs = {name for option in TABLE for name in option.names}
    for own in args.OWN_OPTIONS:
        assert not any(name.startswith(own.name) or own.name.startswith(name) for name in theirs if name != "-h")


values = {"int": st.integers(-3, 99).map(str), "float": st.sampled_from(["0.5", "2", "1e-3"]), None: st.just("a,b")}
texts = st.sampled_from(["4", "1:2", "a=1,b=2", "x y", "", "-1", "file.log", "0:3", "a=b=c", "-", "--x y"])


def prefixes(name: str):
    """Spellings of a long option that mean it alone."""
    return [
        name[:end]
        for end in range(3, len(name) + 1)
        if len({o.dest for o in TABLE for n in o.names if n.startswith(name[:end])}) == 1 or end == len(name)
    ]


@st.composite
def spelled(draw):
    """One option of torchrun in one of the spellings that argparse takes: a list of tokens."""
    option = draw(st.sampled_from([o for o in TABLE if o.dest != "help"]))
    name = draw(st.sampled_from(option.names))
    if name.startswith("--"):
        name = draw(st.sampled_from(prefixes(name)))
    if option.arity == 0:
        return [name]
    value = draw(st.sampled_from(option.choices) if option.choices else values.get(option.kind, texts))
    if name.startswith("--"):
        return draw(st.sampled_from([[f"{name}={value}"], [name, value]]))
    joined = draw(st.sampled_from([[name + value], [f"{name}={value}"]])) if value else [name, value]
    return draw(st.sampled_from([joined, [name, value], ["-m" + name[1:], value], ["-m" + name[1:] + (value or "0")]]))


own_spelled = st.sampled_from(
    [["--sdc-off"], ["--sdc_quiet"], ["--sdc-job", "j"], ["--sdc-job=j"], ["--inject-fault", "weight:rank=1"],
     ["--inject_fault=gradient"], ["--sdc-audit-every", "5"], ["--sdc-budget", "-1"]]
)  # fmt: skip
pet = st.dictionaries(
    st.sampled_from([o for o in TABLE if o.environment]).map(lambda o: "PET_" + o.dest.upper()),
    st.sampled_from(["1", "0", "2"]),
    max_size=3,
)
script_args = st.lists(st.sampled_from(["--nnodes", "-r", "--r=16", "x", "--sdc-off", "--", "--log", ""]), max_size=4)


parts_of_a_line = st.one_of(spelled().map(lambda t: ("torchrun", t)), own_spelled.map(lambda t: ("own", t)))


@settings(max_examples=200)
@given(
    parts=st.lists(parts_of_a_line, max_size=6),
    environ=pet,
    dashes=st.booleans(),
    rest=script_args,
)
def test_torchrun_ends_with_the_same_namespace(parts, environ, dashes, rest):
    """With and without sdcrun in front, for every option in every spelling: the same values, refused alike."""
    theirs = [token for kind, tokens in parts if kind == "torchrun" for token in tokens]
    typed = [token for _, tokens in parts for token in tokens]
    with mock.patch.dict(os.environ, environ):
        expected = real_namespace([*theirs, "--", "script.py", *rest])
        # Without a "--" torchrun looks for options behind the script's name as well, which is what sdcrun avoids.
        typed += ["--", "script.py", *rest] if dashes else ["script.py", *rest]
        try:
            line = args.split(typed, TABLE)
            mirrored = optiontable.namespace(TABLE, line.torchrun, os.environ)
        except UsageError:
            assert expected is None
            return
        assert line.torchrun == theirs
        assert (line.script, line.script_args) == ("script.py", rest)
        assert real_namespace([*line.torchrun, "--", line.script, *line.script_args]) == expected
        if expected is None:
            # The valid values of --numa-binding are no literals in torchrun's source: it alone can refuse them.
            assert any(token.startswith("--nu") for token in theirs)
            return
        for option in TABLE:
            if option.dest != "help" and (option.kind is not None or option.arity == 0):
                assert getattr(mirrored, option.dest) == expected[option.dest], option.dest


def test_every_option_in_every_spelling_alone():
    """What the property above draws by chance, in full: each name and each beginning of it, with "=" and with a space,
    each short one joined, apart and behind -m, each variable."""
    wrong, count = [], 0
    for option in (o for o in TABLE if o.dest != "help"):
        value = (option.choices or ("3",))[0]
        for name in option.names:
            if not name.startswith("--"):
                forms = [[f"{name}{value}"], [name, value], [f"{name}={value}"], [f"-m{name[1:]}", value],
                         [f"-m{name[1:]}{value}"]] if option.arity else [[name]]  # fmt: skip
            else:
                forms = [f for p in prefixes(name) for f in ([[f"{p}={value}"], [p, value]] if option.arity else [[p]])]
            for tokens in forms:
                count += 1
                line = args.split([*tokens, "script.py", "-r", "x"], TABLE)
                theirs = real_namespace([*tokens, "--", "script.py", "-r", "x"])
                if line.torchrun != tokens or line.script_args != ["-r", "x"]:
                    wrong.append(tokens)
                elif theirs is not None and (option.kind is not None or option.arity == 0):
                    mirrored = optiontable.namespace(TABLE, tokens, {})
                    if getattr(mirrored, option.dest) != theirs[option.dest]:
                        wrong.append(tokens)
        if option.environment and (option.kind is not None or option.arity == 0):
            count += 1
            variable = {f"PET_{option.dest.upper()}": "1"}
            with mock.patch.dict(os.environ, variable):
                theirs = real_namespace(["script.py"])
            if getattr(optiontable.namespace(TABLE, [], variable), option.dest) != theirs[option.dest]:
                wrong.append(variable)
    assert not wrong and count > 600, (wrong, count)


def test_given_are_tokens_and_variables():
    tokens = ["--nnodes", "2", "-r3"]
    found = optiontable.given(TABLE, tokens, {"PET_NODE_RANK": "1", "PET_OTHER": "1"})
    assert found == {"nnodes", "redirects", "node_rank"}


def test_malformed_variable_is_one_line():
    with pytest.raises(UsageError, match="PET_STANDALONE=yes: must be 0 or 1"):
        optiontable.namespace(TABLE, [], {"PET_STANDALONE": "yes"})
