"""Changes between two sets of channels: small where they can be, exact always."""

from __future__ import annotations

import datetime as dt
import math
import struct
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from keepstep.errors import HistoryCorrupt
from keepstep.runtime.codec import Codec, TypeRegistry, private_copy
from keepstep.runtime.delta import apply, change, same
from tests.unit.samples import shown


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: Any
    y: Any = None


class Model(BaseModel):
    x: Any = None


class Opaque:
    """Equal to everything, and cannot be compared."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None

    def __repr__(self) -> str:
        return "Opaque()"


NEW_YEAR = dt.datetime(2027, 1, 1)  # noqa: DTZ001  a naive one is a value too
CODEC = Codec(TypeRegistry([Color, Point, Model]), value_bytes_max=10_000_000)


def test_what_did_not_change_is_not_written():
    old = {"a": [1, {"b": 2}], "p": Point(1), "m": Model(x=[1]), "t": dt.datetime(2027, 1, 1, tzinfo=ZoneInfo("UTC"))}
    assert change(old, private_copy(old)) == {}
    assert change(old, CODEC.decode(CODEC.encode(old))) == {}
    assert change({}, {}) == {}


@pytest.mark.parametrize(
    ("old", "new", "operation"),
    [
        ([1, [2]], [1, [2], 3, 4], ["extend", [3, 4]]),
        ([1, 2], [1, 2.0, 3], ["set", [1, 2.0, 3]]),
        ([1, 2], [1], ["set", [1]]),
        ([], [1], ["set", [1]]),
        ((1,), (1, 2), ["set", (1, 2)]),
        ("ab", "abc", ["text", "c"]),
        ("ab", "cab", ["set", "cab"]),
        ("", "abc", ["set", "abc"]),
        (b"ab", b"abc", ["set", b"abc"]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, ["put", {"b": 3}, []]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, ["put", {"c": 3}, []]),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3}, ["put", {}, ["b"]]),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 4, "d": 5}, ["set", {"a": 1, "c": 4, "d": 5}]),
        ({"a": 1, "b": 2}, {"a": 5, "b": 6}, ["set", {"a": 5, "b": 6}]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ["set", {"b": 2, "a": 1}]),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3, "b": 2}, ["set", {"a": 1, "c": 3, "b": 2}]),
        ({"a": 1, "b": 2}, {}, ["set", {}]),
        ({}, {"a": 1}, ["set", {"a": 1}]),
        ({1: "a", 2: "b"}, {1: "a", 2: "c"}, ["put", {2: "c"}, []]),
        ({1: "a", 2: "b"}, {True: "a", 2: "c"}, ["set", {True: "a", 2: "c"}]),
        ({math.nan: 1, "a": 1}, {math.nan: 1, "a": 2}, ["set", {math.nan: 1, "a": 2}]),
        ([1], {"a": 1}, ["set", {"a": 1}]),
        ([1], "1", ["set", "1"]),
    ],
    ids=shown,
)
def test_the_smallest_safe_operation_is_written(old, new, operation):
    changed = change({"k": old}, {"k": new})
    assert repr(changed) == repr({"k": operation})
    assert repr(apply({"k": old}, changed)) == repr({"k": new})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (0.0, -0.0),
        (math.nan, -math.nan),
        ("1", 1),
        ("a", b"a"),
        (b"a", bytearray(b"a")),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ({1}, {True}),
        ({1: 1}, {True: 1}),
        ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
        (None, False),
        (Decimal("1.0"), Decimal("1.00")),
        (Decimal(0), Decimal("-0")),
        (
            dt.datetime(2027, 1, 1, 12, tzinfo=dt.UTC),
            dt.datetime(2027, 1, 1, 13, tzinfo=dt.timezone(dt.timedelta(hours=1))),
        ),
        (dt.datetime(2027, 1, 1, tzinfo=dt.UTC), dt.datetime(2027, 1, 1, tzinfo=ZoneInfo("UTC"))),
        (dt.datetime(2027, 1, 1, tzinfo=dt.timezone(dt.timedelta(0), "Z")), dt.datetime(2027, 1, 1, tzinfo=dt.UTC)),
        (NEW_YEAR, NEW_YEAR.replace(fold=1)),
        (dt.time(1), dt.time(1, fold=1)),
        (NEW_YEAR, NEW_YEAR.date()),
        (Color.RED, Color.BLUE),
        (Point(1), Point(True)),
        (Model(x=1), Model(x=1.0)),
        (Model(x=None), Model()),
        (Opaque(), Opaque()),
    ],
    ids=shown,
)
def test_what_is_only_equal_is_not_the_same(first, second):
    assert not same(first, second)
    assert not same([first], [second])
    changed = change({"k": first}, {"k": second})
    assert changed["k"][0] == "set"
    assert changed["k"][1] is second


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        Decimal("sNaN"),
        {1, 2.5, "x"},
        [Point([1], {2}), Model(x=(1,))],
        Color.RED,
        dt.datetime(2027, 10, 31, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        dt.datetime(2027, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    ],
    ids=shown,
)
def test_what_came_back_from_the_store_is_the_same(value):
    assert same(value, CODEC.decode(CODEC.encode(value)))


def test_keys_come_and_go_and_keep_their_order():
    old = {"a": 1, "b": 2, "c": 3}
    assert change(old, {"a": 1, "c": 3, "d": 4}) == {"b": ["unset"], "d": ["set", 4]}
    assert change(old, {"b": 2, "a": 1, "c": 3}) == {"b": ["last", 2], "a": ["last", 1], "c": ["last", 3]}
    for new in ({"c": 3, "a": 1}, {"b": 2, "a": 1, "c": 3}, {"d": 1, "a": 1}, {}, {"a": 1, "c": 3, "b": 2, "d": 4}):
        assert list(apply(old, change(old, new)).items()) == list(new.items())


def test_a_grown_list_costs_only_its_growth():
    old = {"messages": ["x" * 1000 for _ in range(100)], "count": 1}
    new = {"messages": [*old["messages"], "y" * 1000], "count": 2}
    changed = change(old, CODEC.decode(CODEC.encode(new)))
    assert changed == {"messages": ["extend", ["y" * 1000]], "count": ["set", 2]}
    assert len(CODEC.encode(changed)) < 1100


def test_neither_side_is_changed():
    old = {"l": [1], "d": {"a": 1, "b": 2}, "t": "a"}
    new = {"l": [1, 2], "d": {"a": 1, "b": 2, "c": 3}, "t": "ab"}
    before = private_copy([old, new])
    changed = change(old, new)
    result = apply(old, changed)
    assert [old, new] == before
    result["l"].append(9)
    result["d"]["z"] = 9
    assert [old, new] == before
    assert changed == {"l": ["extend", [2]], "d": ["put", {"c": 3}, []], "t": ["text", "b"]}


ATOMS = st.sampled_from(
    [None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, math.nan, "", "a", "ab", "abc", b"a", Decimal(1), Color.RED]
)
HASHABLE = ATOMS | st.tuples(ATOMS)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=3)
        | st.builds(Point, inner)
        | st.tuples(inner)
    ),
    max_leaves=8,
)
CHANNELS = st.dictionaries(st.sampled_from("abcde"), VALUES, max_size=5)


@st.composite
def steps(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Channels before and after a step: often grown from each other, sometimes unrelated."""
    old = draw(CHANNELS)
    new = private_copy(old)
    for key in draw(st.lists(st.sampled_from("abcde"), max_size=4)):
        value = new.get(key)
        if type(value) is list and draw(st.booleans()):
            value.extend(draw(st.lists(VALUES, max_size=2)))
        elif type(value) is str and draw(st.booleans()):
            new[key] = value + draw(st.text("abc", max_size=2))
        elif type(value) is dict and draw(st.booleans()):
            for gone in draw(st.lists(st.sampled_from(list(value) or [0]), max_size=1)):
                value.pop(gone, None)
            value.update(draw(st.dictionaries(HASHABLE, VALUES, max_size=2)))
        elif draw(st.booleans()):
            new.pop(key, None)
        else:
            new[key] = draw(VALUES)
    return old, new


@settings(max_examples=500, deadline=None)
@given(steps())
def test_a_change_gives_exactly_the_new_channels(step):
    old, new = step
    before, wanted = CODEC.encode(old), CODEC.encode(new)
    changed = change(old, new)
    stored = CODEC.decode(CODEC.encode(changed))
    restored = apply(CODEC.decode(before), stored)
    assert CODEC.encode(restored) == wanted
    assert CODEC.encode(apply(old, changed)) == wanted
    assert CODEC.encode(old) == before
    assert (changed == {}) == (before == wanted)


@pytest.mark.parametrize(
    "operation",
    [
        ["extend", [1]],
        ["text", "x"],
        ["put", {"a": 1}, []],
        ["unknown", 1],
        ["set"],
        ["extend", "x"],
        [],
        "set",
        None,
    ],
    ids=shown,
)
def test_a_change_that_does_not_fit_is_corrupt(operation):
    with pytest.raises(HistoryCorrupt, match="a stored change does not fit the state before it"):
        apply({"k": 1}, {"k": operation})
    with pytest.raises(HistoryCorrupt, match="does not fit"):
        apply({}, {"k": ["unset"]})
    with pytest.raises(HistoryCorrupt, match="does not fit"):
        apply({"k": {"a": 1}}, {"k": ["put", {}, ["b"]]})


def test_floats_are_compared_by_their_bits():
    quiet = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]
    assert not same(math.nan, quiet)
    assert same(quiet, struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0])
