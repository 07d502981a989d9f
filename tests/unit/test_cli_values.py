"""Values as they are written on a command line: exact, or refused."""

from __future__ import annotations

import io
import sys

import pytest

from keepstep.cli import values
from keepstep.errors import InvalidInput


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("12", 12),
        ("-3", -3),
        ("1.5", 1.5),
        ("true", True),
        ("null", None),
        ('{"a": [1, 2]}', {"a": [1, 2]}),
        ('"12"', "12"),
        ("9007199254740993", 2**53 + 1),
        ("115792089237316195423570985008687907853269984665640564039457584007913129639936", 2**256),
        ("hello", "hello"),
        ("A-81", "A-81"),
        ("0081", "0081"),
        ("2027-03-01", "2027-03-01"),
        ("{half", "{half"),
        ("", ""),
        ("12.50 EUR", "12.50 EUR"),
    ],
)
def test_a_value_is_json_or_else_text(written, meant):
    found = values.from_text(written, "x")
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("120", "120"),
        ("12.50", "12.50"),
        ("0.12345678901234567890", "0.12345678901234567890"),
        ("true", "true"),
        ("0081", "0081"),
        ("NaN", "NaN"),
        ("nullable", "nullable"),
        ("null", None),
        ('"null"', "null"),
        ("[1, 2]", [1, 2]),
        ('{"a": 1}', {"a": 1}),
        ("[urgent] call back", "[urgent] call back"),
    ],
)
def test_a_pairs_value_is_a_text_unless_it_is_written_as_json(written, meant):
    found = values.from_pairs([f"x={written}"])["x"]
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("[0.12345678901234567890]", "does not fit a 64-bit number"),
        ("[1e999]", "does not fit a 64-bit number"),
        ('{"a": 1, "a": 2}', "one key twice"),
        ("[NaN]", "NaN is not JSON"),
        ("[" * 100_000 + "]" * 100_000, "too many objects"),
        ("[" + "9" * 5000 + "]", "too many digits"),
    ],
)
def test_what_would_be_rounded_or_guessed_is_refused_naming_its_key(written, problem):
    with pytest.raises(InvalidInput, match=problem) as refused:
        values.from_pairs([f"amount={written}"])
    assert refused.value.message.startswith("amount: ")


def test_pairs_make_an_object():
    assert values.from_pairs(["a=1", "b=x=y", "c=", "d=[1]"]) == {"a": "1", "b": "x=y", "c": "", "d": [1]}
    assert values.from_pairs([]) == {}


@pytest.mark.parametrize(
    ("pairs", "problem"), [(["a"], "written key=value"), (["=1"], "written key=value"), (["a=1", "a=2"], "given twice")]
)
def test_pairs_that_are_none_are_refused(pairs, problem):
    with pytest.raises(InvalidInput, match=problem):
        values.from_pairs(pairs)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[1]", "an object is needed"), ("{a", "not JSON"), ("", "not JSON"), ('"x"', "an object is needed")],
)
def test_an_input_must_be_an_object(text, problem):
    with pytest.raises(InvalidInput, match=f"--input: {problem}"):
        values.an_object(text, "--input")


def test_a_file_is_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "input.json"
    path.write_bytes(b'\xef\xbb\xbf{"name": "Zo\xc3\xab"}')  # with the mark that some editors put first
    assert values.an_object(values.from_file(str(path), "--input-file"), "--input-file") == {"name": "Zoë"}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"from": "a pipe"}')))
    assert values.from_file("-", "--input-file") == '{"from": "a pipe"}'


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"--input-file: nothing\.json: No such file"):
        values.from_file("nothing.json", "--input-file")
    (tmp_path / "latin.json").write_bytes(b'{"name": "Zo\xeb"}')
    with pytest.raises(InvalidInput, match=r"--input-file: latin\.json is not UTF-8 text"):
        values.from_file("latin.json", "--input-file")
