"""What policies see of a call's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import NamedTuple
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel

from tests.unit.policy_samples import PERMIT, decided, forbid_when, permit_when


@pytest.fixture
def decide(tmp_path):
    """Return what one text says of `CALL` with other arguments or other facts."""
    return partial(decided, tmp_path)


class Country(Enum):
    DE = "de"


@dataclass
class Address:
    city: str
    floor: int | None = None


class Struct(msgspec.Struct):
    city: str


class Model(BaseModel):
    city: str


class Pair(NamedTuple):
    city: str
    code: int


@pytest.mark.parametrize(
    ("value", "condition"),
    [
        ("DE", 'context.arguments.x == "DE"'),
        ("Zürich \x00 '\"", 'context.arguments.x like "Zürich*"'),
        (True, "context.arguments.x"),
        (7, "context.arguments.x == 7"),
        (2**63 - 1, "context.arguments.x == 9223372036854775807"),
        (-(2**63), "context.arguments.x == -9223372036854775808"),
        (Decimal("120.00"), 'context.arguments.x == decimal("120.0")'),
        (Decimal("1.2E2"), 'context.arguments.x == decimal("120.0")'),
        (Decimal("0.00010000"), 'context.arguments.x == decimal("0.0001")'),
        (Decimal("-0.5"), 'context.arguments.x == decimal("-0.5")'),
        (Decimal("-0"), 'context.arguments.x == decimal("0.0")'),
        (Decimal("0E+99"), 'context.arguments.x == decimal("0.0")'),
        (Decimal("922337203685477.5807"), 'context.arguments.x == decimal("922337203685477.5807")'),
        (Decimal("-922337203685477.5808"), 'context.arguments.x == decimal("-922337203685477.5808")'),
        (0.1, 'context.arguments.x == decimal("0.1")'),
        (1e3, 'context.arguments.x == decimal("1000.0")'),
        (date(2026, 2, 3), 'context.arguments.x == "2026-02-03"'),
        (date(2026, 2, 3), 'datetime(context.arguments.x) < datetime("2026-02-04")'),
        (datetime(2026, 2, 3, 4, 5, tzinfo=UTC), 'context.arguments.x == "2026-02-03T04:05:00+00:00"'),
        (UUID(int=7), 'context.arguments.x == "00000000-0000-0000-0000-000000000007"'),
        (Country.DE, 'context.arguments.x == "de"'),
        (None, "!(context.arguments has x)"),
        ({"a": {"b": 3, "c": None}}, "context.arguments.x == {a: {b: 3}}"),
        ({1: "one", Country.DE: 2}, 'context.arguments.x == {"1": "one", de: 2}'),
        (Address("Bern"), 'context.arguments.x == {city: "Bern"}'),
        (Struct("Bern"), 'context.arguments.x == {city: "Bern"}'),
        (Model(city="Bern"), 'context.arguments.x == {city: "Bern"}'),
        (Pair("Bern", 3), 'context.arguments.x == {city: "Bern", code: 3}'),
        ([3, 1, 3, None], "context.arguments.x == [1, 3]"),
        ({"a", "b"}, 'context.arguments.x.containsAll(["a", "b"])'),
        ((Decimal("1.5"), "x"), 'context.arguments.x == [decimal("1.5"), "x"]'),
        (b"abc", "context.arguments.x is Bytes"),
    ],
)
def test_an_argument_is_what_cedar_has_for_it(decide, value, condition):
    assert decide(permit_when(condition), {"x": value}).verdict == "allow"
    assert decide(permit_when(f"!({condition})"), {"x": value}).verdict == "deny"


INEXACT = [
    Decimal("12.34567"),
    Decimal("922337203685477.5808"),
    Decimal("1E+999999999999"),
    Decimal("1E-999999999999"),
    Decimal("NaN"),
    Decimal("-Infinity"),
    float("inf"),
    0.1 + 0.2,
]


@pytest.mark.parametrize("value", INEXACT)
def test_an_inexact_number_is_denied_where_a_policy_compares_it(decide, value):
    decision = decide(forbid_when('context.arguments.x.greaterThan(decimal("100.0"))'), {"x": value})
    assert (decision.verdict, decision.policies) == ("deny", ("f",))
    assert decision.reason == (
        "f could not be evaluated: it needs decimal, and the number is none: a decimal has at most 4 places, and all "
        "numbers 64 bits"
    )


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, pytest.param(10**5000, id="huge")])
def test_a_long_of_more_than_64_bits_is_denied_where_a_policy_compares_it(decide, value):
    decision = decide(forbid_when("context.arguments.x > 100"), {"x": value})
    assert (decision.verdict, decision.policies) == ("deny", ("f",))
    assert "it needs long, and the number is none" in decision.reason


@pytest.mark.parametrize("value", [*INEXACT, 2**63, pytest.param(10**5000, id="huge")])
def test_an_inexact_number_is_itself_and_no_other(decide, value):
    near = 'context.arguments.x == decimal("12.3456") || context.arguments.x == decimal("0.3")'
    assert decide(permit_when(f"!({near}) && context.arguments.x is Number"), {"x": value}).verdict == "allow"
    assert (
        decide(permit_when("context.arguments.x == context.arguments.y"), {"x": value, "y": value}).verdict == "allow"
    )
    assert decide(permit_when("context.arguments.x == context.arguments.y"), {"x": value, "y": 1}).verdict == "deny"


def test_a_number_that_no_policy_looks_at_may_be_anything(decide):
    assert decide(PERMIT, {"latitude": 52.520008}).verdict == "allow"


def deep(levels):
    value = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"x": {"__entity": {"type": "Tool", "id": "a"}}},
            "$.x has a key '__entity', which would be read as something else",
        ),
        ({"x": [{"__extn": 1}]}, "$.x[0] has a key '__extn', which would be read as something else"),
        ({"__expr": None}, "$ has a key '__expr', which would be read as something else"),
        ({"x": {1: 2, "1": None}}, "$.x has two keys that are both '1' as text"),
        ({"x": {1.5: 2}}, "$.x has a key of the type float, which policies have nothing like"),
        ({"x": {True: 2}}, "$.x has a key of the type bool, which policies have nothing like"),
        ({"x": "a\ud800"}, "$.x is no Unicode text"),
        ({"x": {"a\ud800": 1}}, "$.x is no Unicode text"),
        ({"x": timedelta(1)}, "$.x is of the type timedelta, which policies have nothing like"),
        ({"x": object()}, "$.x is of the type object, which policies have nothing like"),
        ({"x": deep(51)}, f"$.x{'.a' * 50} is nested more than 50 levels deep"),
    ],
)
def test_arguments_that_cedar_cannot_have_are_denied(decide, arguments, reason):
    decision = decide(PERMIT, arguments)
    assert (decision.verdict, decision.policies) == ("deny", ())
    assert decision.reason == f"the policies cannot judge the call: {reason}"


def test_what_is_just_not_too_deep_is_judged(decide):
    assert decide(permit_when("context.arguments.x.a.a has a"), {"x": deep(50)}).verdict == "allow"


def test_names_that_are_no_text_are_denied(decide):
    for facts in ({"thread": "a\ud800"}, {"graph": "a\ud800"}, {"tool": "a\ud800"}, {"scopes": ("a\ud800",)}):
        decision = decide(PERMIT, **facts)
        assert (decision.verdict, decision.reason) == ("deny", "the policies could not be asked about the call")


def test_names_with_quotes_and_backslashes_are_only_names(decide):
    name = 'x" || Tool::"\\'
    text = '@id("p") permit(principal == Agent::"x\\" || Tool::\\"\\\\", action, resource);'
    assert decide(text, graph=name).verdict == "allow"
