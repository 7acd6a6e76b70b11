"""The wire format: what is encoded comes back, what cannot have been encoded is refused, nothing is ever too long."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcrun.core.codec import (
    MAX_LINE,
    CodecError,
    Lines,
    decode_event,
    decode_line,
    encode_event,
    encode_message,
    message_of,
    plain,
    proof,
    proven,
    whole_lines,
)
from sdcrun.core.types import EVENT_SCHEMA, Event

names = st.text(min_size=1, max_size=256)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(1 << 63), max_value=(1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
events = st.builds(
    Event,
    kind=names,
    source=names,
    attempt=st.integers(0, 1 << 40),
    seq=st.integers(1, 1 << 40),
    time=st.floats(0, 1e11),
    data=st.dictionaries(st.text(), values, max_size=5),
    session=st.text(max_size=64),
)


@given(events)
def test_every_event_comes_back_as_it_was(event):
    line = encode_event(event)
    assert line.isascii() and line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode_event(line) == event
    assert decode_event(line[:-1]) == event


class Odd:
    def __str__(self):
        raise RuntimeError("no text")


anything = st.recursive(
    scalars
    | st.floats()
    | st.integers()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([Odd(), object(), 10**400, -(10**400), math.nan, math.inf]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()) | st.floats(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), anything, max_size=4))
def test_data_of_any_kind_becomes_a_line_that_decodes(data):
    line = encode_event(Event("k", "s", 0, 1, 1.0, data))
    event = decode_event(line)
    assert set(event.data) == set(data)
    assert encode_event(event) == line, "plain values must stay what they are"


def test_values_that_json_lacks():
    data = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1 << 64, "g": 10**5000, "e": (1, 2), "f": {3}, 4: True}
    event = decode_event(encode_event(Event("k", "s", 0, 1, 1.0, data)))
    assert event.data.pop("g").startswith("0x")
    assert event.data == {"a": "nan", "b": "inf", "c": "-inf", "d": hex(1 << 64), "e": [1, 2], "f": [3], "4": True}


def test_a_value_that_holds_itself_ends():
    loop = {}
    loop["self"] = loop
    assert decode_event(encode_event(Event("k", "s", 0, 1, 1.0, loop))).kind == "k"


TOO_MUCH = {
    "long text": {"text": "x" * MAX_LINE},
    "many tensors": {"minority": {f"layer.{i}.weight": [1, 2] for i in range(40_000)}},
    "wide and deep": {"a": [[["y" * 60] * 30] * 30] * 30},
    "many keys": {f"key {i}": i for i in range(60_000)},
    "just too long": {"text": "x" * (MAX_LINE - 100)},
}


@pytest.mark.parametrize("shape", TOO_MUCH)
def test_too_much_data_is_cut_and_says_so(shape):
    line = encode_event(Event("vote", "rank:0", 0, 1, 1.0, {"step": 3, **TOO_MUCH[shape]}))
    event = decode_event(line)
    assert len(line) <= MAX_LINE
    assert event.data["truncated"] is True and event.data["step"] == 3


@given(st.binary(max_size=200))
def test_noise_is_refused_never_raised_on(noise):
    try:
        decode_event(noise)
    except CodecError as error:
        assert noise.decode("latin1") not in str(error) or len(noise) < 3


GOOD = {"v": EVENT_SCHEMA, "kind": "k", "source": "s", "session": "x", "attempt": 0, "seq": 1, "time": 1.0, "data": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": None},
        {"kind": ""},
        {"kind": 3},
        {"source": "s" * 257},
        {"session": None},
        {"attempt": -1},
        {"attempt": True},
        {"attempt": 1.0},
        {"seq": 0},
        {"seq": 1 << 63},
        {"time": "now"},
        {"time": True},
        {"data": []},
        {"data": None},
    ],
)
def test_a_field_out_of_place_is_refused(change):
    assert decode_event(json.dumps(GOOD).encode()).kind == "k"
    with pytest.raises(CodecError):
        decode_event(json.dumps({**GOOD, **change}).encode())
    with pytest.raises(CodecError):
        decode_event(json.dumps({key: value for key, value in GOOD.items() if key not in change}).encode())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"{",
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "' + b"x" * MAX_LINE + b'"}',
    ],
)
def test_lines_that_are_no_message(line):
    with pytest.raises(CodecError):
        decode_line(line)


def test_control_messages():
    values = decode_line(encode_message("ack", attempt=1, seq=2))
    assert values == {"msg": "ack", "attempt": 1, "seq": 2}
    assert message_of(values, "pong", "ack") == "ack"
    for other in ({}, {"msg": 3}, {"msg": "boo"}, {"msg": ["ack"]}):
        with pytest.raises(CodecError):
            message_of(other, "ack")
    with pytest.raises(CodecError):
        encode_message("reply", data="x" * MAX_LINE)


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=20), st.data())
def test_lines_are_cut_alike_however_the_stream_arrives(lines, data):
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    framing, found = Lines(64), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += framing.feed(stream[start:end])
    assert found == lines


def test_an_endless_line_is_refused_at_the_limit():
    framing = Lines(100)
    assert framing.feed(b"x" * 99) == []
    with pytest.raises(CodecError):
        framing.feed(b"x")
    with pytest.raises(CodecError):
        Lines(100).feed(b"x" * 100 + b"\n")
    assert Lines(100).feed(b"x" * 99 + b"\n") == [b"x" * 99]


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=5), st.binary(max_size=5))
def test_a_torn_last_line_is_left_out(lines, torn):
    torn = torn.replace(b"\n", b"")
    assert whole_lines(b"".join(line + b"\n" for line in lines) + torn) == lines


def test_a_proof_holds_for_one_secret_one_role_and_one_pair_of_nonces():
    right = proof("secret", "client", "s", "c")
    assert proven("secret", "client", "s", "c", right)
    for arguments in (
        ("other", "client", "s", "c"),
        ("secret", "server", "s", "c"),
        ("secret", "client", "c", "s"),
        ("secret", "client", "s", "d"),
    ):
        assert not proven(*arguments, right)
    for wrong in ("", None, 3, right[:-1], right.upper(), "\udc80" * 64):
        assert not proven("secret", "client", "s", "c", wrong)


@given(anything)
def test_plain_is_idempotent(value):
    once = plain(value)
    assert plain(once) == once
    json.dumps(once, allow_nan=False)
