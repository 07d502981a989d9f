"""The codec: what goes in comes out, type for type and bit for bit; header, view and digest."""

from __future__ import annotations

import datetime as dt
import json
import math
import struct
import threading
import uuid
from decimal import Decimal
from hashlib import blake2b, sha256
from http import HTTPStatus
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from keepstep.errors import (
    NotStorable,
)
from keepstep.runtime.codec import Codec, digest, view
from tests.unit.samples import (
    DECLARED,
    FORMATS,
    LIMIT,
    Color,
    Counter,
    Invoice,
    Open,
    Order,
    Page,
    Pair,
    Permission,
    Point,
    Priority,
    assert_exact,
    canonical,
    shown,
)


@pytest.fixture(params=FORMATS)
def codec(request):
    return Codec(DECLARED, format=request.param, value_bytes_max=LIMIT)


# --- exact ---


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        0.0,
        -0.0,
        1.0,
        1e22,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
        -math.nan,
        struct.unpack(">d", bytes.fromhex("7ff0000000000123"))[0],
        "",
        "é€😀",
        b"",
        b"\x00\xff",
        bytearray(b"\x00\xff"),
        [],
        {},
        (),
        set(),
        frozenset(),
        [1, True, 1.0, "1", None, [[], {}], ()],
        [(1, (2, [3])), {"a": (4,)}],
        {1, 2.5, "x", None, (1, 2), frozenset({3})},
        {"z": 1, "a": 2, "m": {"y": 1, "b": 2}},
        {1: "int", "1": "text", 2.5: "float", None: "none", (1, "a"): "tuple", b"x": "bytes", frozenset({1}): 0},
        {True: "bool"},
        {1.0: "float"},
        {math.inf: -math.inf},
    ],
    ids=shown,
)
def test_builtin_values_round_trip_exactly(codec, value):
    assert_exact(codec, value)
    assert_exact(codec, {"inside": [value]})


def test_nul_characters_are_kept_in_values_and_in_keys(codec):
    back = assert_exact(codec, {"note": "invoice\x00 2027", "ref\x00no": 1, "utf16": "O\x00K\x00"})
    assert back == {"note": "invoice\x00 2027", "ref\x00no": 1, "utf16": "O\x00K\x00"}


def test_json_holds_no_nul_and_no_surrogate_that_a_database_refuses():
    data = Codec(DECLARED, format="json", value_bytes_max=LIMIT).encode({"k\x00": "\x00", "s": "\ud83d"})
    assert b"\\u0000" not in data
    assert data.endswith(
        b'{"$":"dict","v":[[{"$":"text","v":"k\\\\x00"},{"$":"text","v":"\\\\x00"}],["s",{"$":"text","v":"\\\\ud83d"}]]}'
    )


@pytest.mark.parametrize(
    "number",
    [
        2**53 + 1,
        2**63 - 1,
        2**63,
        -(2**63),
        -(2**63) - 1,
        2**64 - 1,
        2**64,
        int(sha256(b"x").hexdigest(), 16),
        -(10**5000),
    ],
    ids=lambda number: f"{number.bit_length()} bits",
)
def test_ints_of_any_size_stay_ints(codec, number):
    assert codec.decode(codec.encode(number)) == number
    assert_exact(codec, {"n": number, "model": Invoice(stage=Invoice.Stage.DRAFT, numbers=[number]), number: number})


def test_lone_surrogates_are_kept_in_values_and_in_keys(codec):
    value = {
        "files": ["caf\udce9.txt", "\ud83d"],
        "\ud83d\ude00": "two halves, not one emoji: \ud83d\ude00",
        "\udfff": {"\ud800"},
    }
    back = assert_exact(codec, value)
    assert back == value
    assert list(back)[1] != "😀"


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-0",
        "1.0",
        "1.00",
        "1E+3",
        "-1E-300",
        "NaN",
        "-NaN",
        "sNaN123",
        "Infinity",
        "0E-7",
        "9" * 200,
        "1E+999999999999999999",
    ],
)
def test_decimals_keep_their_exponent_sign_and_kind(codec, text):
    back = codec.decode(codec.encode(Decimal(text)))
    assert type(back) is Decimal
    assert back.as_tuple() == Decimal(text).as_tuple()


@pytest.mark.parametrize(
    "value",
    [
        dt.datetime(1, 1, 1),  # noqa: DTZ001  a naive one is a value too
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
        dt.datetime(2027, 10, 31, 2, 30, fold=1),  # noqa: DTZ001
        dt.datetime(2027, 10, 31, 2, 30, tzinfo=dt.UTC),
        dt.datetime(2027, 10, 31, 2, 30, tzinfo=dt.timezone(dt.timedelta(hours=-5))),
        dt.datetime(2027, 10, 31, 2, 30, tzinfo=dt.timezone(dt.timedelta(seconds=1, microseconds=5)), fold=1),
        dt.datetime(2027, 10, 31, 2, 30, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
        dt.datetime(2027, 10, 31, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
        dt.datetime(2027, 10, 31, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        dt.datetime(2027, 10, 31, 2, 30, tzinfo=ZoneInfo("UTC")),
        dt.date(2027, 2, 28),
        dt.time(2, 30, 0, 1),
        dt.time(2, 30, fold=1),
        dt.time(2, 30, tzinfo=dt.UTC),
        dt.time(2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
        dt.timedelta(days=-1, seconds=1, microseconds=999999),
        dt.timedelta.max,
        uuid.UUID("12345678-1234-5678-1234-567812345678"),
        msgspec.UNSET,
    ],
    ids=shown,
)
def test_scalars_round_trip_exactly(codec, value):
    assert_exact(codec, value)


def test_a_zone_with_a_key_comes_back_as_that_zone(codec):
    summer_again = dt.datetime(2027, 10, 31, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    back = codec.decode(codec.encode({"first": summer_again, "second": summer_again.replace(fold=1)}))
    assert back["first"].tzinfo is ZoneInfo("Europe/Berlin")
    assert back["first"].utcoffset() == dt.timedelta(hours=2)
    assert back["second"].utcoffset() == dt.timedelta(hours=1)


def test_another_librarys_fixed_offset_comes_back_as_one_of_the_standard_library(codec):
    class At(BaseModel):
        at: dt.datetime

    parsed = At.model_validate_json('{"at": "2027-01-01T00:00:00+01:00"}').at
    assert type(parsed.tzinfo) is not dt.timezone
    back = codec.decode(codec.encode([parsed, parsed.replace(fold=1)]))
    assert [item.tzinfo for item in back] == [dt.timezone(dt.timedelta(hours=1))] * 2
    assert [item.fold for item in back] == [0, 1]
    assert back[0] == parsed


def test_a_zone_that_nothing_names_is_refused(codec):
    class Seasonal(dt.tzinfo):
        def utcoffset(self, when: dt.datetime | None) -> dt.timedelta | None:
            return None if when is None else dt.timedelta(hours=1 + (4 < when.month < 10))

    with pytest.raises(NotStorable, match=r"^\$\.a\[1\]: a time zone of type .*Seasonal cannot be stored"):
        codec.encode({"a": [1, dt.datetime(2027, 1, 1, tzinfo=Seasonal())]})


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs", "Cc", "L"]))
    | st.binary()
    | st.decimals()
    | st.datetimes(timezones=st.none() | st.timezones() | st.just(dt.UTC), allow_imaginary=True)
    | st.times()
    | st.dates()
    | st.timedeltas()
    | st.uuids()
    | st.sampled_from([*Priority, *Color, *Invoice.Stage, Permission.READ | Permission.WRITE, HTTPStatus.OK])
)
HASHABLE = st.recursive(
    SCALARS.filter(lambda item: not (isinstance(item, Decimal) and item.is_snan())),
    lambda inner: (
        st.tuples(inner, inner) | st.frozensets(inner, max_size=3) | st.builds(Point, inner, st.tuples(inner))
    ),
    max_leaves=4,
)
KEYS = st.text(max_size=4) | st.sampled_from(["$", "v", "\x00", "\ud800"]) | HASHABLE
VALUES = st.recursive(
    SCALARS | HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(HASHABLE, max_size=3)
        | st.binary().map(bytearray)
        | st.builds(Pair, inner, inner)
        | st.builds(Page.model_construct, items=st.lists(inner, max_size=2))
        | st.builds(
            lambda extra, inner: Open.model_construct(name=inner, **extra),
            st.dictionaries(st.text(max_size=3).map(lambda t: "x" + t), inner, max_size=2),
            inner,
        )
        | st.builds(Counter, inner)
        | st.builds(Order, inner, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
@pytest.mark.parametrize("format_name", FORMATS)
def test_any_value_round_trips_exactly(format_name, value):
    assert_exact(Codec(DECLARED, format=format_name, value_bytes_max=LIMIT), value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_both_formats_have_one_view(value):
    msgpack, as_json = (Codec(DECLARED, format=name, value_bytes_max=LIMIT).encode(value) for name in FORMATS)
    if '{"$":"set"' not in as_json.decode() and "frozenset" not in as_json.decode():  # each sorts by its own bytes
        assert json.dumps(view(msgpack)) == json.dumps(view(as_json))


def test_the_value_is_neither_copied_nor_changed(codec):
    value = {"plain": [1, {"a": 2}], "special": [(1,), {2}, Order("n")], "n": 2**70}
    before = canonical(value)
    plain = value["plain"]
    codec.encode(value)
    assert canonical(value) == before
    assert value["plain"] is plain


# --- view ---


def test_a_view_shows_everything_as_json_without_any_type(codec):
    value = {
        "n": [2**53, 2**53 + 1, -(2**70)],
        "invoice": Invoice(stage=Invoice.Stage.SENT, amount=Decimal("1.50")),
        "at": dt.datetime(2027, 1, 1, tzinfo=dt.UTC),
        "zoned": dt.datetime(2027, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")),
        "tuple": (1, b"\x00"),
        "nan": math.nan,
        "text": "\ud83d",
        1: {"$": 2},
    }
    assert view(codec.encode(value)) == {
        "$": "dict",
        "v": [
            ["n", [2**53, {"$": "int", "v": "9007199254740993"}, {"$": "int", "v": "-1180591620717411303424"}]],
            [
                "invoice",
                {
                    "$": "Invoice",
                    "v": {
                        "stage": {"$": "Invoice.Stage", "v": "SENT"},
                        "amount": {"$": "decimal", "v": "1.50"},
                        "numbers": [],
                    },
                    "set": ["amount", "stage"],
                },
            ],
            ["at", {"$": "datetime", "v": "2027-01-01T00:00:00+00:00"}],
            ["zoned", {"$": "datetime", "v": ["2027-01-01T00:00:00", 0, "Europe/Berlin"]}],
            ["tuple", {"$": "tuple", "v": [1, {"$": "bytes", "v": "AA=="}]}],
            ["nan", {"$": "float", "v": "nan"}],
            ["text", {"$": "text", "v": "\\ud83d"}],
            [1, {"$": "dict", "v": [["$", 2]]}],
        ],
    }


def test_a_digest_frames_its_parts():
    assert digest(b"ab", b"c") != digest(b"a", b"bc")
    assert digest(b"ab") != digest(b"ab", b"")
    assert len(digest()) == 32
    assert digest(b"a") == blake2b(b"\x00\x00\x00\x00\x00\x00\x00\x01a", digest_size=32).digest()


def test_a_wider_codec_reads_and_writes_more_types(codec):
    class Extra(BaseModel):
        id: int

    wider = codec.including(list[Extra], int)
    assert wider.format == codec.format
    assert type(wider.decode(wider.encode([Extra(id=1), Order("a")]))[0]) is Extra
    with pytest.raises(NotStorable, match="the graph does not declare"):
        codec.encode(Extra(id=1))
    assert codec.including(int, list[Order]) is codec
    assert codec.including(Extra) is codec.including(Extra)


def test_threads_may_share_a_codec(codec):
    values = [{"n": 2**70 + index, "t": ("x" * index, {index}), "o": Order(str(index))} for index in range(20)]
    failures: list[object] = []

    def work(value: dict[str, Any]) -> None:
        failures.extend(value for _ in range(50) if codec.decode(codec.encode(value)) != value)

    threads = [threading.Thread(target=work, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
