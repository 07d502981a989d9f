"""What people and programs are shown."""

from __future__ import annotations

import io
import json
import sys
from datetime import UTC, datetime

import pytest

from keepstep.cli import output
from keepstep.runtime.codec import Codec, TypeRegistry, view

BIG = [2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, int("7" * 80)]


def printed(capsys, value):
    output.print_json(value)
    return capsys.readouterr().out


def test_a_document_does_not_round_integers(capsys):
    codec = Codec(TypeRegistry(), value_bytes_max=10**6)
    text = printed(capsys, view(codec.encode({"big": BIG, "small": 2**53})))
    # As a reader that keeps every number in 64-bit floating point has it.
    found = json.loads(text, parse_int=float)
    assert [int(each["v"]) for each in found["big"]] == BIG
    assert {each["$"] for each in found["big"]} == {"int"}
    assert found["small"] == 2**53


def test_a_document_keeps_every_character(capsys):
    text = printed(capsys, {"name": "Zoë 日本 \x1b[31m \x00"})
    assert json.loads(text) == {"name": "Zoë 日本 \x1b[31m \x00"}
    assert "\x1b" not in text
    assert "日本" in text


def test_a_document_with_half_a_character_is_ascii(capsys):
    assert json.loads(printed(capsys, {"file": "caf\udce9.txt"})) == {"file": "caf\udce9.txt"}


def test_a_document_for_a_terminal_without_unicode_is_ascii(monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", written)
    output.print_json({"name": "Zoë"})
    written.flush()
    assert json.loads(written.buffer.getvalue()) == {"name": "Zoë"}


def test_times_in_documents_are_utc(capsys):
    at = datetime(2027, 3, 1, 12, 30, tzinfo=UTC)
    assert json.loads(printed(capsys, {"at": at})) == {"at": "2027-03-01T12:30:00+00:00"}


def test_what_has_no_place_in_a_document_is_an_error():
    with pytest.raises(TypeError, match="object has no place"):
        output.print_json({"x": object()})
    with pytest.raises(ValueError, match="JSON compliant"):
        output.print_json({"x": float("nan")})


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("plain ü 日本", "plain ü 日本"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31m", r"\x9b31m"),
        ("a\rb\x00", r"a\rb\x00"),
        ("caf\udce9", r"caf\udce9"),
        ("right\u202eleft", r"right\u202eleft"),
    ],
)
def test_data_does_not_steer_a_terminal(text, meant):
    assert output.visible(text) == meant


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a text", "a text"),
        (12, "12"),
        (None, "null"),
        ([], "[]"),
        ({"a": "b", "n": [1, True]}, '{"a": "b", "n": [1, true]}'),
        ({"$": "int", "v": "18446744073709551616"}, "18446744073709551616"),
        ({"amount": {"$": "decimal", "v": "12.50"}}, '{"amount": 12.50}'),
        ({"$": "Invoice", "v": {"id": 7}}, 'Invoice {"id": 7}'),
        ({"$": "tuple", "v": [1, 2]}, "tuple [1, 2]"),
        (["x" * 40, "y" * 40], '[\n  "' + "x" * 40 + '",\n  "' + "y" * 40 + '"\n]'),
        ({"k": ["x" * 40, "y" * 40]}, '{\n  "k": [\n    "' + "x" * 40 + '",\n    "' + "y" * 40 + '"\n  ]\n}'),
    ],
)
def test_a_value_looks_like_itself(value, text):
    assert output.shown(value) == text


def test_a_long_value_is_cut_and_says_where_the_rest_is(capsys):
    output.Output(as_json=False).state({"items": ["x" * 30] * 30}, lines_max=3, more="keepstep state a")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[-1].strip() == "… 29 more lines: keepstep state a"


def test_a_piped_table_is_neither_cut_nor_padded(capsys):
    output.Output(as_json=False).table(("NAME", "TEXT"), [("a", "word " * 60), ("longer", "end")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["NAME    TEXT", "a       " + ("word " * 60).strip(), "longer  end"]


def test_short_is_one_line():
    assert output.short("two\nlines") == "two lines"
    assert output.short({"a": "x" * 200}, 10) == '{"a": "xx…'


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (45, "45 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172800, "2 d")],
)
def test_durations_have_one_unit(seconds, text):
    assert output.duration(seconds) == text
