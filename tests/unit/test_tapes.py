"""Tapes: digests of statements, what is stored of an answer, and playing it again."""

from __future__ import annotations

import datetime as dt
import enum
import os
import subprocess
import sys
import uuid
from decimal import Decimal

import psycopg2
import psycopg2.extras
import pytest

from keepstep.errors import Diverged, TooLarge
from keepstep.runtime.codec import Codec, TypeRegistry
from keepstep.store.tapes import Answer, Failure, Player, Tape, digest_of, exactly

KEY = uuid.UUID(int=1)


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"x", memoryview(b"x")),
        (b"x", bytearray(b"x")),
        (b"x", psycopg2.Binary(b"x")),
        ({"a": 1}, psycopg2.extras.Json({"a": 1})),
        ((1, "a"), [1, "a"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {1, 2, 3}),
    ],
)
def test_what_a_driver_is_told_alike_has_one_digest(one, other):
    assert digest_of("SELECT", {"p": one}) == digest_of("SELECT", {"p": other})


def test_different_parameters_have_different_digests():
    values = [
        *(None, True, False, 0, 1, 1.0, "1", b"1", Decimal(1), Decimal("1.0"), KEY, str(KEY), Colour.RED, "", (), {}),
        *(dt.date(2026, 1, 2), dt.datetime(2026, 1, 2), dt.datetime(2026, 1, 2, tzinfo=dt.UTC), dt.timedelta(1)),  # noqa: DTZ001  without a zone is another value
        *((1, 2), ((1,), 2), (1, (2,)), ("1", "2"), ("12",), {"a": 1}, {"a": "1"}, {"b": 1}, "\ud800", 10**40),
    ]
    assert len({digest_of("SELECT", {"p": value}) for value in values}) == len(values)
    assert digest_of("SELECT 1", ()) != digest_of("SELECT 2", ())
    assert digest_of("SELECT 1", None) != digest_of("SELECT 1", ())


def test_a_digest_is_the_same_in_every_process():
    code = (
        "from keepstep.store.tapes import digest_of; print(digest_of('S', {'p': {'b', 'a', 'c'}, 'o': object()}).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize("format_", ["msgpack", "json"])
def test_a_tape_is_stored_exactly(format_):
    row = (1, "a", None, b"\0\xff", Decimal("1.10"), KEY, dt.datetime(2026, 1, 2, tzinfo=dt.UTC), 1.5, [1, [2]])
    answers = [
        Answer(b"d" * 16, [("id", 23), ("name", None)], [row, row], 2, 7),
        Answer(b"e" * 16, None, (), -1, None, Failure("IntegrityError", "no", "23505")),
    ]
    codec = Codec(TypeRegistry(), format=format_, value_bytes_max=10_000)
    found = Tape.from_plain(codec.decode(codec.encode(Tape(0, answers).to_plain()))).answers
    assert [
        (each.digest, each.columns, list(each.rows), each.rowcount, each.lastrowid, each.failure) for each in found
    ] == [(each.digest, each.columns, list(each.rows), each.rowcount, each.lastrowid, each.failure) for each in answers]


def test_views_of_memory_are_given_as_bytes():
    assert exactly((1, memoryview(b"x"), bytearray(b"y"))) == (1, b"x", b"y")


def test_a_tape_holds_so_much_and_no_more():
    tape = Tape(1000)
    tape.weigh([("x" * 400,), (b"y" * 400,)])
    with pytest.raises(TooLarge, match=r"more than 1000 bytes \(value_bytes_max\)"):
        tape.weigh([("z" * 400,)])


def player(*statements):
    return Player(Tape(0, [Answer(digest_of(statement, ())) for statement in statements]), "ctx.transaction()")


def test_answers_come_in_order_and_all_are_wanted():
    playing = player("A", "B")
    assert playing.answer("A", ()).digest == digest_of("A", ())
    with pytest.raises(Diverged, match="it now runs 1 statements, then 2"):
        playing.end()


def test_another_statement_is_diverged_and_stays_so():
    playing = player("A")
    with pytest.raises(Diverged, match=r"statement 1 is now another, or has other parameters: SELECT 1\b"):
        playing.answer("SELECT\n  1", ())
    playing.answer("A", ())
    with pytest.raises(Diverged, match="statement 1 is now another"):
        playing.end()


def test_a_long_statement_is_shown_by_its_beginning_and_never_its_parameters():
    with pytest.raises(Diverged) as caught:
        player().answer("SELECT " + "x" * 500, ("secret",))
    assert "xxx…" in caught.value.message
    assert "secret" not in caught.value.message
    assert len(caught.value.message) < 500 + 100
