"""The --inject-fault grammar: what parses to what, what is refused with which words, when a fault fires."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcrun.core import faultspec
from sdcrun.core.faultspec import FaultSpec, FaultSpecError, by_design_unseen, fires, parse
from sdcrun.core.types import Config


def test_the_smoke_run_s_spec():
    assert parse("gradient:rank=2,step=5,kind=bitflip,bit=30") == FaultSpec(
        "gradient", rank=2, kind="bitflip", bit=30, where="device", first=5, last=5)


def test_site_alone_has_defaults():
    spec = parse("weight")
    assert spec == FaultSpec("weight", rank=0, tensor="*", index=None, count=1, kind="bitflip", bit=None, where="step",
                             first=1, last=1)
    assert parse("allreduce").rank is None and parse("checkpoint").rank is None


@pytest.mark.parametrize("site", faultspec.SITES)
def test_where_defaults_to_device_for_what_a_device_computes(site):
    assert parse(site).where == ("device" if site in ("activation", "saved", "gradient") else "step")
    assert parse(f"{site}:where=step").where == "step"


@pytest.mark.parametrize("table", [faultspec.SITES, faultspec.KINDS, faultspec.PLACES, faultspec.TIMES])
def test_every_example_of_the_help_parses(table):
    text = faultspec.help_text()
    for name, (_, example) in table.items():
        assert example in text and name in text
        assert parse(faultspec.format(parse(example))) == parse(example)


def test_help_names_every_key():
    text = faultspec.help_text()
    assert all(key in text for key in faultspec.KEYS)


@pytest.mark.parametrize(("text", "words"), [
    ("gradint:rank=1", ["'gradint'", "did you mean 'gradient'", "optimizer"]),
    ("gradient:ran=1", ["'ran'", "did you mean 'rank'", "index"]),
    ("gradient:kind=bitflp", ["kind=bitflp", "did you mean 'bitflip'", "stuck"]),
    ("gradient:kind=nan,bit=3", ["bit=3", "kind=bitflip or kind=stuck", "kind=nan"]),
    ("gradient:bit=64", ["bit=64", "0 to 63"]),
    ("gradient:by=3", ["by=3", "kind=scale"]),
    ("gradient:kind=scale,by=1", ["by=1"]),
    ("gradient:kind=scale,by=inf", ["by", "finite"]),
    ("gradient:kind=stuck,to=2", ["to=2", "0 or 1"]),
    ("gradient:rank=1,node=1", ["rank=1", "node=1"]),
    ("gradient:rank=1,rank=2", ["rank", "twice"]),
    ("gradient:rank=-1", ["rank", "'-1'"]),
    ("gradient:rank=²", ["rank"]),
    ("gradient:index=randon", ["index", "'randon'", "did you mean 'random'"]),
    ("gradient:count=0", ["count", "from 1 on"]),
    ("gradient:step=9-3", ["step=9-3", "before it begins"]),
    ("gradient:step=3-", ["step"]),
    ("gradient:step=3-9,repeat=always", ["step=3-9", "repeat=always"]),
    ("gradient:repeat=never", ["repeat=never", "always"]),
    ("gradient:every=0", ["every"]),
    ("gradient:p=0", ["p=0"]),
    ("gradient:p=1.5", ["p=1.5"]),
    ("gradient:when=3", ["when=3", "lo:hi"]),
    ("gradient:when=:", ["when=:"]),
    ("gradient:when=5:1", ["when=5:1"]),
    ("gradient:where=host", ["where=host", "device or step"]),
    ("gradient:", ["nothing after the colon"]),
    ("gradient:rank", ["rank has no value"]),
    ("gradient:rank=", ["rank has no value"]),
    ("gradient:rank=1,", ["no key ''"]),
    ("", ["no site ''"]),
])
def test_errors_point_at_the_wrong_word_and_name_the_right_ones(text, words):
    with pytest.raises(FaultSpecError) as error:
        parse(text)
    assert repr(text) in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("text", "steps"), [
    ("gradient", [1]),
    ("gradient:step=0", [0]),
    ("gradient:step=3-5", [3, 4, 5]),
    ("gradient:step=3-3", [3]),
    ("gradient:every=4", [0, 4, 8]),
    ("gradient:step=3,every=4", [3, 7]),
    ("gradient:step=3-8,every=2", [3, 5, 7]),
    ("gradient:step=8,repeat=always", [8, 9]),
    ("gradient:repeat=always", list(range(10))),
])
def test_when_it_fires(text, steps):
    spec = parse(text)
    assert [s for s in range(10) if fires(spec, s, rank=0, node=0)] == steps


def test_where_it_fires():
    assert [r for r in range(4) if fires(parse("gradient:rank=2,step=1"), 1, r, r // 2)] == [2]
    assert [r for r in range(4) if fires(parse("gradient:node=1,step=1"), 1, r, r // 2)] == [2, 3]
    assert [r for r in range(4) if fires(parse("allreduce:rank=1,step=1"), 1, r, r // 2)] == [0, 1, 2, 3]


def test_chance_is_seeded_per_step_and_near_p():
    spec = parse("gradient:p=0.25")
    hits = [s for s in range(4000) if fires(spec, s, 0, 0, position=1, seed=7)]
    assert hits == [s for s in range(4000) if fires(spec, s, 0, 0, position=1, seed=7)]
    assert hits != [s for s in range(4000) if fires(spec, s, 0, 0, position=2, seed=7)]
    assert hits != [s for s in range(4000) if fires(spec, s, 0, 0, position=1, seed=8)]
    assert abs(len(hits) - 1000) < 140, "5 standard deviations"


def test_chance_of_a_wrong_sum_is_the_same_on_every_rank():
    spec = parse("allreduce:p=0.5")
    for step in range(30):
        assert len({fires(spec, step, rank, rank, position=0, seed=1) for rank in range(4)}) == 1


@st.composite
def texts(draw):
    """Any text of the grammar."""
    kind = draw(st.sampled_from(sorted(faultspec.KINDS)))
    whole = st.integers(0, 10**6)
    number = st.floats(0, 1e30, allow_nan=False)
    parts = draw(st.lists(st.sampled_from(["kind=" + kind]), min_size=0 if kind == "bitflip" else 1, max_size=1))
    options = {
        "tensor": st.sampled_from(["*", "a.*", "blocks.[01].w?"]),
        "index": st.one_of(whole, st.just("random")), "count": st.integers(1, 99),
        "where": st.sampled_from(["device", "step"]), "every": st.integers(1, 50),
        "p": st.floats(0, 1, exclude_min=True),
        "when": st.builds(lambda a, b: f"{min(a, b)!r}:{max(a, b)!r}", number, number)}
    options[draw(st.sampled_from(["rank", "node"]))] = whole
    if kind in ("bitflip", "stuck"):
        options["bit"] = st.one_of(st.integers(0, 63), st.just("random"))
    if kind == "scale":
        options["by"] = st.floats(allow_nan=False, allow_infinity=False).filter(lambda f: f != 1)
    if kind == "stuck":
        options["to"] = st.integers(0, 1)
    ranged = draw(st.booleans())
    options["step"] = st.builds(lambda a, b: f"{a}-{a + b}", whole, whole) if ranged else whole
    if not ranged:
        options["repeat"] = st.just("always")
    for key in draw(st.lists(st.sampled_from(sorted(options)), unique=True)):
        parts.append(f"{key}={draw(options[key])}")
    site = draw(st.sampled_from(sorted(faultspec.SITES)))
    return f"{site}:{','.join(parts)}" if parts else site


@given(texts())
def test_canonical_text_round_trips(text):
    spec = parse(text)
    canonical = faultspec.format(spec)
    assert parse(canonical) == spec
    assert faultspec.format(parse(canonical)) == canonical


@given(st.text(alphabet="gradientkbs:=,-0159.*", max_size=30))
def test_any_text_parses_or_says_why_not(text):
    try:
        spec = parse(text)
    except FaultSpecError:
        return
    assert spec.site in faultspec.SITES and spec.count >= 1 and spec.low <= spec.high <= math.inf


SMOKE = Config(audit_every=1, weights_every=1)


@pytest.mark.parametrize("text", ["allreduce:kind=bitflip", "input:kind=zero", "allreduce:kind=nan"])
def test_what_no_check_can_see(text):
    assert by_design_unseen(parse(text), SMOKE)


@pytest.mark.parametrize("site", ["activation", "saved", "gradient", "loss", "reduced", "weight", "optimizer", "buffer",
                                  "checkpoint"])
def test_what_a_smoke_run_must_see(site):
    assert by_design_unseen(parse(f"{site}:step=5"), SMOKE, domains=3, replicas=3) is None


def test_checks_that_are_off_see_nothing():
    off = Config(audit_every=0, weights_every=0, optimizer_every=0)
    for site in ("activation", "saved", "gradient", "loss"):
        assert "audits are off" in by_design_unseen(parse(site), off)
    for site in ("reduced", "weight", "optimizer", "buffer"):
        assert "votes are off" in by_design_unseen(parse(site), off)
    assert by_design_unseen(parse("gradient:kind=nan"), off) is None
    assert by_design_unseen(parse("reduced:kind=inf"), off) is None
    assert by_design_unseen(parse("optimizer"), Config(weights_every=0, optimizer_every=1)) is None


def test_a_fault_between_audits_is_gone():
    sparse = Config(audit_every=10)
    assert "no audit" in by_design_unseen(parse("gradient:step=11-19"), sparse)
    for text in ("gradient:step=10", "gradient:step=11-20", "gradient:step=0", "gradient:step=11,repeat=always"):
        assert by_design_unseen(parse(text), sparse) is None
    assert by_design_unseen(parse("gradient:step=11"), Config(audit_every=10, budget=2.0)) is None


def test_two_sides_cannot_be_told_apart():
    assert "which of the two" in by_design_unseen(parse("gradient"), SMOKE, domains=2)
    assert "no other device" in by_design_unseen(parse("gradient"), SMOKE, domains=1)
    assert "majority" in by_design_unseen(parse("weight"), SMOKE, replicas=2)
    assert by_design_unseen(parse("weight"), SMOKE, domains=2, replicas=4) is None
