"""What the codec refuses: values that would not come back, and bytes that it did not write."""

from __future__ import annotations

import collections
import datetime as dt
import json
import sys
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from keepstep.errors import (
    HistoryCorrupt,
    InvalidSettings,
    KeepstepError,
    NotStorable,
    ThreadBlocked,
    TooLarge,
    UnknownType,
)
from keepstep.runtime.codec import DEPTH_MAX, Codec, Header, TypeRegistry, read_header, view
from keepstep.runtime.scalars import CODES
from tests.unit.samples import (
    DECLARED,
    FORMATS,
    LIMIT,
    Counter,
    Event,
    Invoice,
    Open,
    Order,
    Page,
    Pair,
    Row,
    assert_exact,
    canonical,
    shown,
)


@pytest.fixture(params=FORMATS)
def codec(request):
    return Codec(DECLARED, format=request.param, value_bytes_max=LIMIT)


# --- refusals ---


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
        ({Plain(): 1}, "$: a key: tests.unit.test_codec_refusals.Plain is no dataclass"),
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
    with pytest.raises(TooLarge, match=r"^\$\.bomb.*: more than 1000000 items"):
        codec.encode({"bomb": value})


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


# --- reading ---


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
    keys = {"../../etc/passwd": "ValueError", "/etc/passwd": "ValueError", "os.path/x": "ValueError", "": "ValueError"}
    for key, kind in {**keys, "Mars/Olympus": "ZoneInfoNotFoundError"}.items():
        data = b"KS1j- 1 \n" + json.dumps({"$": "datetime", "v": ["2027-01-01T00:00:00", 0, key]}).encode()
        with pytest.raises(HistoryCorrupt, match=f"^stored data cannot be read: {kind}$"):
            codec.decode(data)


@pytest.mark.parametrize(
    "envelope",
    [
        {"$": "set", "v": "abc"},
        {"$": "tuple", "v": {"a": 1}},
        {"$": "dict", "v": [[[], 1]]},
        {"$": "dict", "v": [[1, 2, 3]]},
        {"$": "bytes", "v": "AA=!="},
        {"$": "int", "v": 1.5},
        {"$": "decimal", "v": "x"},
        {"$": "uuid", "v": "x"},
        {"$": "timedelta", "v": [10**12, 0, 0]},
        {"$": "text", "v": "é"},
        {"$": "text", "v": "\\ "},
        {"$": "text", "v": "\\x4"},
        {"$": "text", "v": "\\N{DIGIT ONE}"},
        {"$": "int"},
        {"$": [], "v": 1},
        {"$": "Invoice", "v": {"stage": 1}, "set": 5},
    ],
    ids=shown,
)
def test_an_envelope_that_nobody_wrote_is_corrupt(envelope):
    with pytest.raises(HistoryCorrupt, match=r"^stored data cannot be read: \w+$"):
        Codec(DECLARED, value_bytes_max=LIMIT).decode(b"KS1j- 1 \n" + json.dumps({"a": envelope}).encode())


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
