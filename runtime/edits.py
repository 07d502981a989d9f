"""What an approver may edit: the values of the arguments that were asked about, not their names and kinds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter, ValidationError

from keepstep.errors import StateError

_WANTED_CHARACTERS_MAX = 200
# How `codec.view` names values that JSON does not have, and what an edit of one must parse as.
_TYPES: dict[str, type] = {
    "date": date,
    "datetime": datetime,
    "decimal": Decimal,
    "int": int,
    "time": time,
    "timedelta": timedelta,
    "uuid": UUID,
}


def check(original: Any, edited: Any, path: str = "$.arguments") -> None:
    """Refuse an edit that the node could not take for the arguments it asked about.

    `original` is the arguments' plain view, `edited` came as JSON. Objects must keep their keys, and values their kind;
    lists may change their length. Raises `StateError` naming the path.
    """
    if isinstance(original, Mapping) and "$" in original:
        _check_tagged(str(original["$"]), edited, path)
    elif isinstance(original, Mapping):
        _check_keys(original, edited, path)
    elif isinstance(original, int) and isinstance(edited, float) and not edited.is_integer():
        message = f"{path}: is a whole number and cannot be edited to {edited:g}"
        raise StateError(message)
    elif original is not None and _kind(original) != _kind(edited):
        message = f"{path}: is {_kind(original)} and cannot be edited to {_kind(edited)}"
        raise StateError(message)


def untagged(original: Any, edited: Any) -> Any:
    """Return an edit with its values as JSON has them, where they came as the question shows them.

    `{"$": "decimal", "v": "12.50"}`, copied from what was asked, is `"12.50"`.
    """
    if isinstance(original, Mapping) and "$" in original:
        is_copied = isinstance(edited, Mapping) and edited.keys() == {"$", "v"} and edited["$"] == original["$"]
        return edited["v"] if is_copied and original["$"] in _TYPES else edited
    if isinstance(original, Mapping) and isinstance(edited, Mapping):
        return {name: untagged(original.get(name), value) for name, value in edited.items()}
    if isinstance(original, list) and isinstance(edited, list) and original:
        pairs = zip((*original, *original[-1:] * len(edited)), edited, strict=False)
        return [untagged(*pair) for pair in pairs]
    return edited


def check_schema(schema: Any, value: Any, path: str) -> None:
    """Refuse what does not fit a question's JSON schema; raise `StateError` naming the path."""
    import jsonschema  # noqa: PLC0415  a tenth of a worker's start, and few questions have a schema

    kind = jsonschema.Draft202012Validator
    problem = next(iter(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value)), None)
    if problem is not None:
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem.absolute_path)
        wanted = json.dumps(problem.validator_value, ensure_ascii=False)
        shown = f" {wanted}" if len(wanted) <= _WANTED_CHARACTERS_MAX else ""
        message = f"{path}{place}: does not fit the question's schema ({problem.validator}{shown})"
        raise StateError(message)


def _check_keys(original: Mapping[str, Any], edited: Any, path: str) -> None:
    if not isinstance(edited, Mapping):
        message = f"{path}: is an object and cannot be edited to {_kind(edited)}"
        raise StateError(message)
    for name in original.keys() - edited.keys():
        message = f"{path}.{name}: missing; an edit gives all arguments ({', '.join(original)})"
        raise StateError(message)
    for name in edited.keys() - original.keys():
        message = f"{path}.{name}: was not asked about (known: {', '.join(original)})"
        raise StateError(message)
    for name, value in edited.items():
        check(original[name], value, f"{path}.{name}")


def _check_tagged(tag: str, edited: Any, path: str) -> None:
    expected = _TYPES.get(tag)
    if expected is None:  # a class of the graph's: its node checks it
        return
    try:
        TypeAdapter(expected).validate_python(edited)
    except ValidationError:
        message = f"{path}: must be readable as {tag}"
        raise StateError(message) from None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, list) else "an object"
