"""The codec: what goes in comes out, type for type and bit for bit, or is refused with its path."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import functools
import json
import math
import os
import struct
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b, sha256
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from keepstep.errors import (
    HistoryCorrupt,
    InvalidSettings,
    KeepstepError,
    NotStorable,
    ThreadBlocked,
    TooLarge,
    UnknownType,
)
from keepstep.runtime.codec import DEPTH_MAX, Codec, Header, TypeRegistry, digest, read_header, view
from keepstep.runtime.scalars import CODES

T = TypeVar("T")
FORMATS = ("msgpack", "json")
LIMIT = 1_000_000


class Invoice(BaseModel):
    class Stage(enum.Enum):
        DRAFT = "draft"
        SENT = "sent"

    stage: Stage
    amount: Decimal = Decimal("0.00")
    numbers: list[int] = Field(default_factory=list)


class Priority(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Color(enum.StrEnum):
    RED = "red"


class Permission(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Row(BaseModel):
    model_config = ConfigDict(frozen=True)
    id: int


class Page(BaseModel, Generic[T]):
    items: list[T]
    next: str | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    _token: list[int] = PrivateAttr(default_factory=list)
    _unset: int


class Strict(BaseModel):
    even: int

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise AssertionError
        return value

    @functools.cached_property
    def half(self) -> float:
        return self.even / 2


@dataclass
class Order:
    name: str
    total: int = field(init=False)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total = -1


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: tuple[int, ...] = ()


@dataclass
class Later:
    known: int
    unknown: int = field(init=False)


class Pair(NamedTuple):
    left: Any
    right: Any = None


POST_INIT_CALLS: list[str] = []


class Event(msgspec.Struct, frozen=True, tag=True, rename="camel"):
    event_name: str
    when: dt.datetime | msgspec.UnsetType = msgspec.UNSET
    tags: set[str] = msgspec.field(default_factory=set)

    def __post_init__(self) -> None:
        POST_INIT_CALLS.append(self.event_name)


class Counter(msgspec.Struct):
    value: int = 0


DECLARED = TypeRegistry(
    [
        Invoice,
        Priority,
        Color,
        Permission,
        Row,
        Page[Row],
        Page,
        Open,
        Strict,
        Order,
        Point,
        Later,
        Pair,
        Event,
        Counter,
        HTTPStatus,
    ]
)


@pytest.fixture(params=FORMATS)
def codec(request):
    return Codec(DECLARED, format=request.param, value_bytes_max=LIMIT)


def canonical(value: Any) -> Any:
    """Everything that makes a value what it is, as nested tuples of text that compare."""
    kind = type(value)
    match value:
        case bool() | None:
            content: Any = repr(value)
        case enum.Enum():
            return (kind, id(value))
        case int():
            content = hex(value)
        case float():
            content = struct.pack(">d", value).hex()
        case dict():
            content = tuple((canonical(key), canonical(item)) for key, item in value.items())
        case tuple() | list():
            content = tuple(canonical(item) for item in value)
        case set() | frozenset():
            content = tuple(sorted((canonical(item) for item in value), key=repr))
        case dt.datetime() | dt.time():
            content = (value.replace(tzinfo=None).isoformat(), value.fold, repr(value.tzinfo))
        case Decimal():
            content = str(value)
        case BaseModel():
            content = tuple(canonical(part) for part in value.__getstate__().values())
        case msgspec.Struct():
            content = tuple(canonical(getattr(value, name)) for name in value.__struct_fields__)
        case Order() | Later():
            content = canonical({name: value.__dict__.get(name) for name in kind.__dataclass_fields__})
        case _:
            content = repr(value)
    return (kind, content)


def assert_exact(codec: Codec, value: Any) -> Any:
    """Round-trip `value`, assert that it comes back as it was and that it is written the same way again."""
    data = codec.encode(value)
    back = codec.decode(data)
    assert canonical(back) == canonical(value)
    assert codec.encode(back) == data
    assert canonical(codec.decode(memoryview(data))) == canonical(value)
    json.dumps(view(data), allow_nan=False).encode()  # a view is JSON
    return back


# --- exact values ----------------------------------------------------------------------------------------------------


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
    ids=repr,
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
        dt.datetime(1, 1, 1),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
        dt.datetime(2027, 10, 31, 2, 30, fold=1),
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
    ids=repr,
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


# --- typed objects ----------------------------------------------------------------------------------------------------


def test_enums_of_every_kind_come_back_as_the_members_they_were(codec):
    members = [
        Invoice.Stage.SENT,
        Priority.HIGH,
        Color.RED,
        Permission.READ,
        Permission.READ | Permission.WRITE,
        Permission(0),
        HTTPStatus.OK,
    ]
    back = codec.decode(codec.encode({"members": members, Priority.LOW: {Color.RED}}))
    assert all(a is b for a, b in zip(back["members"], members, strict=True))
    assert [type(key) for key in back] == [str, Priority]
    assert type(next(iter(back[Priority.LOW]))) is Color


def test_a_model_comes_back_with_what_was_set_extra_and_private(codec):
    model = Open(name="n", other=(1, 2))
    model._token.append(2**70)
    back = assert_exact(codec, {"model": model})["model"]
    assert type(back) is Open
    assert back == model
    assert back.other == (1, 2)
    assert back._token == [2**70]
    assert not hasattr(back, "_unset")
    assert back.model_fields_set == {"name", "other"}


def test_which_fields_were_set_is_kept(codec):
    draft = Invoice(stage=Invoice.Stage.DRAFT)
    back = codec.decode(
        codec.encode(
            [draft, Invoice.model_construct(amount=1), Invoice(stage=Invoice.Stage.SENT, amount=2, numbers=[])]
        )
    )
    assert [item.model_fields_set for item in back] == [{"stage"}, {"amount"}, {"stage", "amount", "numbers"}]
    assert back[0].model_dump(exclude_unset=True) == {"stage": Invoice.Stage.DRAFT}
    assert not hasattr(back[1], "stage")


def test_generic_models_come_back_as_the_parametrized_class(codec):
    page = Page[Row](items=[Row(id=1), Row(id=2)])
    back = assert_exact(codec, {"page": page, "bare": Page(items=[Row(id=3)])})
    assert type(back["page"]) is Page[Row]
    assert type(back["page"].items[1]) is Row
    assert type(back["bare"]) is Page


def test_validators_and_cached_properties_do_not_touch_stored_values(codec):
    odd = Strict.model_construct(even=3)
    assert odd.half == 1.5
    back = codec.decode(codec.encode(odd))
    assert back.__dict__ == {"even": 3}


def test_dataclasses_come_back_without_running_their_post_init(codec):
    order = Order("a", lines=["x"])
    order.total = 7
    back = codec.decode(codec.encode({"order": order, "point": Point(-0.0, (1, 2)), "later": Later(1)}))
    assert back["order"] == order
    assert back["order"].total == 7
    assert type(back["point"]) is Point
    assert math.copysign(1, back["point"].x) == -1
    assert back["point"].y == (1, 2)
    assert back["later"].__dict__ == {"known": 1}


def test_an_attribute_that_is_no_field_is_refused(codec):
    order = Order("a")
    order.note = "lost otherwise"
    with pytest.raises(NotStorable, match=r"^\$\.order: the attribute 'note' of Order is not one of its fields$"):
        codec.encode({"order": order})


def test_structs_and_named_tuples_come_back_as_their_types(codec):
    event = Event("paid", tags={"b", "a"})
    back = assert_exact(codec, {"event": event, "pair": Pair((1,), [2]), "counter": Counter(3)})
    assert type(back["event"]) is Event
    assert back["event"] == event
    assert back["event"].when is msgspec.UNSET
    assert type(back["pair"]) is Pair
    assert back["pair"].left == (1,)
    assert back["counter"].value == 3


def test_a_struct_comes_back_without_running_its_post_init(codec):
    data = codec.encode(Event("paid"))
    POST_INIT_CALLS.clear()
    back = codec.decode(data)
    assert POST_INIT_CALLS == []
    assert type(back) is Event
    with pytest.raises(AttributeError):
        back.event_name = "it is still frozen"
    assert Event("paid") == back
    assert POST_INIT_CALLS == ["paid"]


def test_types_survive_into_another_process(tmp_path):
    """A script writes its own classes as `__main__`; another process imports it as a module and reads them."""
    (tmp_path / "app.py").write_text(
        textwrap.dedent(
            """
            import enum, sys
            from dataclasses import dataclass, field
            from typing import Generic, TypeVar
            from pydantic import BaseModel
            from keepstep.runtime.codec import Codec, TypeRegistry

            T = TypeVar("T")

            class Invoice(BaseModel):
                class Stage(enum.Enum):
                    DRAFT = "draft"
                    SENT = "sent"
                stage: Stage

            class Row(BaseModel):
                id: int

            class Page(BaseModel, Generic[T]):
                items: list[T]

            class Level(enum.IntEnum):
                HIGH = 2

            @dataclass
            class Order:
                name: str
                total: int = field(init=False)

            class State(BaseModel):
                invoice: Invoice
                page: Page[Row]
                order: Order
                level: Level

            codec = Codec(TypeRegistry([State]), format=sys.argv[1], value_bytes_max=10_000)
            order = Order("o")
            order.total = 5
            values = {"invoice": Invoice(stage="sent"), "page": Page[Row](items=[Row(id=2)]), "order": order, "level": Level.HIGH}

            if __name__ == "__main__":
                assert Invoice.__module__ == "__main__"
                sys.stdout.buffer.write(codec.encode(values))
            """
        )
    )
    (tmp_path / "read.py").write_text(
        textwrap.dedent(
            """
            import sys, app
            back = app.codec.decode(sys.stdin.buffer.read())
            assert isinstance(back["invoice"], app.Invoice) and back["invoice"].stage is app.Invoice.Stage.SENT
            assert type(back["page"]) is app.Page[app.Row] and type(back["page"].items[0]) is app.Row
            assert type(back["order"]) is app.Order and back["order"].total == 5
            assert back["level"] is app.Level.HIGH
            assert back == app.values
            print("equal")
            """
        )
    )
    for name in FORMATS:
        written = subprocess.run([sys.executable, "app.py", name], cwd=tmp_path, capture_output=True, check=True).stdout
        read = subprocess.run(
            [sys.executable, "read.py", name], cwd=tmp_path, input=written, capture_output=True, check=False
        )
        assert (read.stdout, read.stderr) == (b"equal\n", b"")


def test_one_value_has_one_digest_whatever_the_hash_seed():
    program = (
        "from keepstep.runtime.codec import Codec, TypeRegistry, digest\n"
        "value = {'tags': {'a', 'b', 'c', 'dd', 'eee', ('x', 1), frozenset({'p', 'q', 'r'})}, 'n': {str(i) for i in range(50)}}\n"
        "for name in ('msgpack', 'json'):\n"
        "    print(digest(Codec(TypeRegistry(), format=name, value_bytes_max=10_000).encode(value)).hex())\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1
    assert len(set(seen.pop().split())) == 2


# --- refusals -----------------------------------------------------------------------------------------------------------


class Undeclared(BaseModel):
    id: int


class Text(str):
    __slots__ = ()


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Undeclared(id=1), "the graph does not declare .*Undeclared: name it"),
        (Page[int](items=[1]), r"the graph does not declare .*Page\[int\]: name it"),
        (Text("x"), "Text is a subclass of str, as which it would come back"),
        (collections.OrderedDict(a=1), "collections.OrderedDict is a subclass of dict"),
        (collections.defaultdict(int), "collections.defaultdict is a subclass of dict"),
        (Plain(), ".*Plain is no dataclass"),
        (Plain, "builtins.type is no dataclass"),
        (threading.Lock(), "_thread.lock is no dataclass"),
        (len, "is no dataclass"),
        (1j, "builtins.complex is no dataclass"),
        (range(3), "builtins.range is no dataclass"),
        (memoryview(b""), "builtins.memoryview is no dataclass"),
        (iter([]), "is no dataclass"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_come_back_is_refused_with_its_path(codec, value, reason):
    with pytest.raises(NotStorable, match=rf"^\$\.order\.client\[2\]: .*{reason}"):
        codec.encode({"a": 1, "order": {"client": [1, 2, value]}})


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"odd key": Plain()}, "$['odd key']: "),
        ({"nul\x00": Plain()}, "$['nul\\x00']: "),
        ({1: {2: Plain()}}, "$[1][2]: "),
        ({(1,): Plain()}, "$[tuple]: "),
        ({Plain(): 1}, "$: a key: tests.unit.test_codec.Plain is no dataclass"),
        (({"a": (0, Plain())},), "$[0].a[1]: "),
        ({"s": {Plain()}}, "$.s{…}: "),
        (Order("a", lines=[Plain()]), "$.lines[0]: "),
        (Pair(1, Plain()), "$.right: "),
        (Counter(Plain()), "$.value: "),
        (Open(name="n", extra=Plain()), "$.extra: "),
        (Page(items=[{"x": Plain()}]), "$.items[0].x: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_the_path(codec, value, path):
    with pytest.raises(NotStorable) as refused:
        codec.encode(value)
    assert refused.value.message.startswith(path)
    with pytest.raises(NotStorable) as refused:
        codec.encode(value, path="$.result")
    assert refused.value.message.startswith("$.result" + path[1:])


def test_a_private_attribute_that_cannot_be_stored_is_refused(codec):
    model = Open(name="n")
    model._token = threading.Lock()
    with pytest.raises(NotStorable, match=r"^\$\.m\._token: _thread\.lock"):
        codec.encode({"m": model})


def test_a_refusal_does_not_quote_the_value(codec):
    with pytest.raises(NotStorable) as refused:
        codec.encode({"a": Text("hunter2")})
    assert "hunter2" not in refused.value.message


def test_data_that_holds_itself_is_refused(codec):
    ring: dict[str, Any] = {"list": [1]}
    ring["list"].append(ring)
    order = Order("a")
    order.lines.append(order)
    for value in (ring, order, (ring,)):
        with pytest.raises(NotStorable, match=r"^\$.*: nested more than 100 deep, or it holds itself$"):
            codec.encode(value)


def test_keys_of_mixed_types_at_every_level_are_written_once(codec):
    value: Any = {}
    for _ in range(DEPTH_MAX - 1):
        value = {"text first": value, 1: None}  # written twice per level, this would not end
    assert codec.decode(codec.encode(value)) == value


@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: Page.model_construct(items=v)],
    ids="ltdpm",
)
def test_depth_is_bounded_and_what_is_allowed_comes_back(codec, wrap):
    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = wrap(value)
        return value

    deepest = DEPTH_MAX if canonical(wrap(1))[0] is not Page else DEPTH_MAX - 1
    value = nested(deepest)
    assert codec.encode(codec.decode(codec.encode(value))) == codec.encode(value)
    assert view(codec.encode(value))
    with pytest.raises(NotStorable, match="nested more than 100 deep"):
        codec.encode(nested(DEPTH_MAX + 2))


def test_a_small_value_that_unfolds_to_a_huge_one_is_stopped(codec):
    value: Any = [1] * 10
    for _ in range(40):
        value = [value] * 10
    started = time.monotonic()
    with pytest.raises(TooLarge, match=r"^\$\.bomb.*: more than 1000000 items"):
        codec.encode({"bomb": value})
    assert time.monotonic() - started < 60


def test_a_value_one_byte_above_the_limit_is_refused_naming_key_size_and_limit():
    codec = Codec(DECLARED, value_bytes_max=1000)
    text = "x" * 997  # msgpack says the length of a text of this size in three bytes
    value = {"other": "y" * 500, "document": text, "more": b"z" * 900}
    assert codec.decode(codec.encode(value)) == value
    with pytest.raises(TooLarge, match=r"^\$\.document: 1001 bytes, the limit is 1000 bytes$"):
        codec.encode({**value, "document": text + "x"})
    assert codec.decode(codec.encode([text[:-3]])) == [text[:-3]]
    with pytest.raises(TooLarge, match=r"^\$\.arguments: 1001 bytes, the limit is 1000 bytes$"):
        codec.encode([text], path="$.arguments")


def test_an_unknown_format_is_refused():
    with pytest.raises(InvalidSettings, match="must be msgpack or json, not 'pickle'"):
        Codec(DECLARED, format="pickle", value_bytes_max=1)


# --- reading what others wrote ----------------------------------------------------------------------------------------


def test_either_format_is_read_whatever_the_codec_writes():
    value = {"invoice": Invoice(stage=Invoice.Stage.SENT), "n": 2**70, "$": "x"}
    msgpack, as_json = (Codec(DECLARED, format=name, value_bytes_max=LIMIT) for name in FORMATS)
    assert msgpack.decode(as_json.encode(value)) == value
    assert as_json.decode(msgpack.encode(value)) == value


def test_data_that_looks_like_an_envelope_comes_back_as_itself(codec):
    lookalikes = [{"$": kind, "v": []} for kind in (*CODES, "Invoice", "os.system", None, 1)]
    lookalikes += [{"__type__": "os.system", "args": ["id"]}, {"$": "Invoice", "v": {"stage": "sent"}, "set": []}]
    lookalikes += [{"$": {"$": "int", "v": "1"}}, {"v": {"$": 1}}]
    back = assert_exact(codec, {"texts": lookalikes, "$": "set", "v": [1]})
    assert back == {"texts": lookalikes, "$": "set", "v": [1]}


def test_a_type_that_is_not_declared_is_not_rebuilt_and_its_path_is_named(codec):
    data = codec.encode({"orders": [{"client": Invoice(stage=Invoice.Stage.SENT)}], "row": Row(id=1)})
    narrow = Codec(TypeRegistry([Invoice.Stage, Row]), value_bytes_max=LIMIT)
    with pytest.raises(UnknownType) as unknown:
        narrow.decode(data)
    assert unknown.value.message == "$.orders[0].client: type not allowed: the graph does not declare 'Invoice'"


def test_a_name_in_data_is_never_imported(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (tmp_path / "trap.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Trap: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    codec = Codec(DECLARED, value_bytes_max=LIMIT)
    for name in ("os.system", "trap.Trap", "Trap", "builtins.eval"):
        as_json = b"KS1j- 1 \n" + json.dumps({"a": {"$": name, "v": {"args": [f"touch {marker}"]}}}).encode()
        packed = msgspec.msgpack.encode({"a": msgspec.msgpack.Ext(CODES["object"], msgspec.msgpack.encode([name, {}]))})
        for data in (as_json, b"KS1m- 1 \n" + packed):
            with pytest.raises(UnknownType, match=rf"^\$\.a: type not allowed: the graph does not declare '{name}'"):
                codec.decode(data)
            assert view(data)["a"]["$"] == name
    pickled = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for data in (pickled, b"\x80\x04" + pickled, b"KS1p- 1 \n" + pickled):
        with pytest.raises(HistoryCorrupt, match="stored data has no Keepstep header"):
            codec.decode(data)
    assert not marker.exists()
    assert "trap" not in sys.modules


def test_a_zone_key_cannot_leave_the_zones():
    codec = Codec(DECLARED, value_bytes_max=LIMIT)
    for key in ("../../etc/passwd", "/etc/passwd", "Mars/Olympus", "a.b", ""):
        data = b"KS1j- 1 \n" + json.dumps({"$": "datetime", "v": ["2027-01-01T00:00:00", 0, key]}).encode()
        with pytest.raises(HistoryCorrupt, match="stored data cannot be read"):
            codec.decode(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.parametrize("format_name", FORMATS)
def test_damaged_bytes_raise_only_typed_errors(format_name, data):
    codec = Codec(DECLARED, format=format_name, value_bytes_max=LIMIT)
    whole = codec.encode(
        {
            "i": Invoice(stage=Invoice.Stage.SENT),
            "o": Order("a"),
            "t": (1, {2}),
            "d": dt.datetime(2027, 1, 1, tzinfo=dt.UTC),
            "s": "\ud800",
            1: Pair(1, Event("e")),
        }
    )
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for candidate in (bytes(damaged), bytes(damaged[:cut]), bytes(damaged) + b"\x00"):
        for read in (codec.decode, view):
            try:
                read(candidate)
            except KeepstepError as error:
                assert isinstance(error, ThreadBlocked)  # noqa: PT017  most damage is noticed, not all


def test_empty_and_cut_data_is_corrupt(codec):
    data = codec.encode({"a": [1, 2, 3]})
    for cut in (b"", data[:3], data[:9], data[:-1]):
        with pytest.raises(HistoryCorrupt):
            codec.decode(cut)
    with pytest.raises(HistoryCorrupt, match=r"^stored data cannot be read: \w+$"):
        codec.decode(data + b"x")


def test_an_error_of_reading_does_not_quote_what_was_stored():
    with pytest.raises(HistoryCorrupt) as corrupt:
        Codec(DECLARED, value_bytes_max=LIMIT).decode(b'KS1j- 1 \n{"$":"date","v":"hunter2"}')
    assert corrupt.value.message == "stored data cannot be read: ValueError"
    assert corrupt.value.__suppress_context__


def test_the_header_says_what_the_payload_is():
    data = Codec(DECLARED, format="json", value_bytes_max=LIMIT, schema_version=7).encode([1])
    assert data == b"KS1j- 7 \n[1]"
    assert read_header(data) == Header(format="json", schema_version=7, compression="-", key_id="")
    assert Codec(DECLARED, value_bytes_max=LIMIT).encode([1]) == b"KS1m- 1 \n\x91\x01"


@pytest.mark.parametrize("data", [b"KS2m- 1 \n\x91\x01", b"KS1mz 1 \n\x91\x01", b"KS1m- 1 key-7\n\x91\x01"])
def test_a_header_of_another_release_is_refused(data):
    for read in (Codec(DECLARED, value_bytes_max=LIMIT).decode, view, read_header):
        with pytest.raises(HistoryCorrupt, match="this release reads version 1, neither compressed nor encrypted"):
            read(data)


def test_another_schema_version_blocks_instead_of_guessing():
    data = Codec(DECLARED, value_bytes_max=LIMIT, schema_version=2).encode([1])
    with pytest.raises(ThreadBlocked, match="stored with schema version 2, this graph has 1"):
        Codec(DECLARED, value_bytes_max=LIMIT).decode(data)
    assert view(data) == [1]


# --- a class that has changed since ------------------------------------------------------------------------------------


def changed(cls: type, name: str) -> Codec:
    cls.__qualname__ = name
    return Codec(TypeRegistry([cls]), value_bytes_max=LIMIT)


def test_a_new_field_takes_its_default_and_one_without_is_refused(codec):
    @dataclass
    class Wider:
        x: float
        y: tuple[int, ...]
        unit: str = "m"
        notes: list[str] = field(default_factory=list)

    @dataclass
    class Needy:
        x: float
        y: tuple[int, ...]
        unit: str

    data = codec.encode({"p": Point(1.0)})
    assert changed(Wider, "Point").decode(data)["p"] == Wider(1.0, (), "m", [])
    with pytest.raises(
        UnknownType, match=r"^\$\.p: type not allowed: 'Point' was stored without the field 'unit', which"
    ):
        changed(Needy, "Point").decode(data)


def test_new_fields_of_models_structs_and_named_tuples_take_their_defaults(codec):
    class WiderRow(BaseModel):
        id: int
        tags: list[str] = Field(default_factory=list)

    class WiderCounter(msgspec.Struct):
        value: int
        step: int = 5

    class WiderPair(NamedTuple):
        left: Any
        right: Any
        third: str = "t"

    row = changed(WiderRow, "Row").decode(codec.encode(Row(id=1)))
    assert (row.id, row.tags, row.model_fields_set) == (1, [], {"id"})
    assert changed(WiderCounter, "Counter").decode(codec.encode(Counter(2))) == WiderCounter(2, 5)
    assert changed(WiderPair, "Pair").decode(codec.encode(Pair(1, 2))) == (1, 2, "t")


def test_a_field_or_a_member_that_is_gone_is_refused(codec):
    class Narrow(msgspec.Struct):
        pass

    class Fewer(enum.Enum):
        LOW = 1

    class NowAModel(BaseModel):
        x: float

    with pytest.raises(UnknownType, match=r"^\$: type not allowed: 'Counter' no longer has the fields \['value'\]"):
        changed(Narrow, "Counter").decode(codec.encode(Counter(2)))
    with pytest.raises(UnknownType, match=r"^\$\[0\]: type not allowed: 'Priority' has no member 'HIGH'"):
        changed(Fewer, "Priority").decode(codec.encode([Priority.HIGH]))
    with pytest.raises(UnknownType, match=r"'Priority' was another kind of class"):
        changed(NowAModel, "Priority").decode(codec.encode(Priority.HIGH))
    with pytest.raises(UnknownType, match=r"'Open' was another kind of class: it was stored with"):
        changed(dataclass(type("D", (), {"__annotations__": {"name": str}})), "Open").decode(
            codec.encode(Open(name="n"))
        )


# --- view and digest ----------------------------------------------------------------------------------------------------


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


def test_threads_may_share_a_codec(codec):
    values = [{"n": 2**70 + index, "t": ("x" * index, {index}), "o": Order(str(index))} for index in range(20)]
    failures: list[object] = []

    def work(value: dict[str, Any]) -> None:
        for _ in range(50):
            if codec.decode(codec.encode(value)) != value:
                failures.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
