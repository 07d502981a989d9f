"""What an approver may edit."""

from __future__ import annotations

import pytest

from keepstep.errors import StateError
from keepstep.runtime import edits


@pytest.mark.parametrize(
    ("original", "edited"),
    [
        ({"amount": 1, "to": "x"}, {"amount": 2.0, "to": "y"}),
        ({"items": ["a", "b"]}, {"items": []}),
        ({"deep": {"x": True}}, {"deep": {"x": False}}),
        ({"amount": {"$": "decimal", "v": "1.5"}}, {"amount": "2.50"}),
        ({"amount": {"$": "decimal", "v": "1.5"}}, {"amount": 2}),
        ({"at": {"$": "datetime", "v": ["2027-01-01T00:00:00", 0, None]}}, {"at": "2027-02-01T00:00:00"}),
        ({"anything": None}, {"anything": [1]}),
        ({"order": {"$": "Order", "v": {}}}, {"order": {"id": 1}}),
        ("a text", "another"),
        (None, {"a": 1}),
    ],
)
def test_values_may_be_edited(original, edited):
    edits.check(original, edited)


@pytest.mark.parametrize(
    ("original", "edited", "refusal"),
    [
        ({"amount": 1, "to": "x"}, {"amount": 1}, "$.arguments.to: missing; an edit gives all arguments (amount, to)"),
        ({"amount": 1}, {"amount": 1, "z": 2}, "$.arguments.z: was not asked about (known: amount)"),
        ({"amount": 1}, {"amount": "two"}, "$.arguments.amount: is a number and cannot be edited to a text"),
        ({"ok": True}, {"ok": 1}, "$.arguments.ok: is true or false and cannot be edited to a number"),
        ({"deep": {"x": 1}}, {"deep": {"x": None}}, "$.arguments.deep.x: is a number and cannot be edited to null"),
        ({"deep": {"x": 1}}, {"deep": []}, "$.arguments.deep: is an object and cannot be edited to a list"),
        ({"amount": {"$": "decimal", "v": "1"}}, {"amount": "two"}, "$.arguments.amount: must be readable as decimal"),
        (["a"], {}, "$.arguments: is a list and cannot be edited to an object"),
        ({"amount": 1}, {"amount": 1.5}, "$.arguments.amount: is a whole number and cannot be edited to 1.5"),
    ],
)
def test_names_and_kinds_may_not(original, edited, refusal):
    with pytest.raises(StateError) as refused:
        edits.check(original, edited)
    assert refused.value.message == refusal
