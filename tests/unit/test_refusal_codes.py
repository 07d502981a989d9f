"""Every code by which a command can be refused stands in the contract's documents, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep import errors
from keepstep.tasks import refusalcodes

DOCS = Path(__file__).resolve().parents[2] / "docs"
NEVER_REPLIED = {
    errors.GraphError: "a graph that does not hold together ends its worker at the start",
    errors.InvalidSettings: "of this process's own settings",
    errors.PolicyError: "policies are asked by steps, which are put off",
    errors.ToolArguments: "of a call in a node",
    errors.UnknownTool: "of a call in a node",
    errors.ConflictingWrites: "of node runs",
}


def below(error):
    """Return an error class and all that are of its kind."""
    return {error}.union(*(below(each) for each in error.__subclasses__()))


def test_each_error_that_refuses_a_command_is_listed():
    ours = {each for each in below(errors.InvalidInput) if each.__module__ == "keepstep.errors"}
    listed = [each for each, _ in refusalcodes.REFUSALS]
    assert len(set(listed)) == len(listed)
    assert set(listed) == ours - NEVER_REPLIED.keys() | {errors.KeepstepError}


@pytest.mark.parametrize("refusal", [each for each, _ in refusalcodes.REFUSALS], ids=lambda each: each.code)
def test_each_code_stands_in_both_documents_and_is_known_to_clients(refusal):
    again = "yes, a little later" if refusal.retryable else "no"
    refusals = (DOCS / "messages.md").read_text().partition("## Refusals")[2]
    (row,) = [row for row in refusals.splitlines() if row.startswith(f"| `{refusal.code}` |")]
    assert row.endswith(f"| {again} |")
    schema = json.loads((DOCS / "asyncapi.json").read_text())["components"]["schemas"]["ErrorPart"]
    (told,) = [each for each in schema["properties"]["code"]["x-codes"] if each["code"] == refusal.code]
    assert told["retryable"] is refusal.retryable
    assert errors.by_code(refusal.code) is refusal
