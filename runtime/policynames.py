"""The names that a policy may use: what Keepstep tells Cedar of a call, and nothing else.

A name that is never given is refused when policies are read: one that forbids `resource.rsk == "high"` or
`Action::"cal"` would be wrong at each call or silently never match.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

RISKS = ("low", "medium", "high")
ATTRIBUTES = {
    "principal": ("tenant",),
    "resource": ("version", "risk", "scopes"),
    "context": ("arguments", "tenant", "thread", "node"),
}
"""What a policy can ask, by Cedar's variables."""
_TYPES = {"principal": "Agent", "action": "Action", "resource": "Tool"}
_ENTITY_TYPES = (*_TYPES.values(), "Number", "Bytes")
_ACTION = "call"


def misnamed(tree: dict[str, Any]) -> Iterator[str]:
    """Say which names of a policy's syntax tree (Cedar's JSON) a request never has."""
    for variable, kind in _TYPES.items():
        scope = tree[variable]
        entities = [scope.get("entity"), *scope.get("entities", ()), (scope.get("in") or {}).get("entity")]
        for found in [each["type"] for each in entities if each] + [scope.get("entity_type", kind)]:
            if found != kind:
                yield f"says {found} of {variable}, which is always of the type {kind}"
        for each in entities:
            yield from _misnamed_entity(each or {})
    for condition in tree["conditions"]:
        yield from _misnamed_in(condition["body"])


def _misnamed_in(node: Any) -> Iterator[str]:
    todo = [node]
    while todo:
        each = todo.pop()
        if isinstance(each, list):
            todo += each
        if not isinstance(each, dict):
            continue
        todo += each.values()
        if isinstance(each.get("__entity"), dict):
            yield from _misnamed_entity(each["__entity"])
        if isinstance(each.get("is"), dict):
            yield from _misnamed_entity({"type": each["is"].get("entity_type", "Agent")})
        for operator in (".", "has"):
            yield from _misnamed_attribute(each.get(operator))
        for operator in ("==", "!="):
            yield from _misnamed_risk(each.get(operator))


def _misnamed_entity(entity: dict[str, Any]) -> Iterator[str]:
    kind = entity.get("type", "Agent")
    if kind not in _ENTITY_TYPES:
        yield f"names the type {kind}: known are {', '.join(_ENTITY_TYPES)}"
    if kind == "Action" and entity.get("id", _ACTION) != _ACTION:
        yield f'names Action::"{entity["id"]}": the only action is Action::"{_ACTION}"'


def _misnamed_attribute(access: Any) -> Iterator[str]:
    if not isinstance(access, dict):
        return
    left = access.get("left")
    variable = left.get("Var") if isinstance(left, dict) else None
    known = ATTRIBUTES.get(variable) if isinstance(variable, str) else None
    if known is not None and access.get("attr") not in known:
        yield f"asks {variable}.{access.get('attr')}: {variable} has {', '.join(known)}"


def _misnamed_risk(comparison: Any) -> Iterator[str]:
    if not isinstance(comparison, dict):
        return
    sides = [comparison.get("left"), comparison.get("right")]
    if {".": {"left": {"Var": "resource"}, "attr": "risk"}} not in sides:
        return
    for side in sides:
        value = side.get("Value") if isinstance(side, dict) else None
        if value is not None and value not in RISKS:
            yield f"compares resource.risk with {json.dumps(value)}: a risk is {', '.join(RISKS)}"
