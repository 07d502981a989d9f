"""Values of Python as Cedar has them.

Cedar knows texts, true and false, longs of 64 bits, decimals with four places, records and sets, and no null. What it
has no exact value for is not rounded, since a rounded number could slip past a policy that forbids: a number becomes an
entity `Number::"12.345678"`, bytes an entity `Bytes::"<SHA-256>"`. Those are equal to themselves and to nothing else,
and whatever else a policy does with them is an error, which denies. A value that cannot even be had that way makes the
whole request inexpressible.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

# Cedar's JSON gives these keys a meaning of their own: a mapping that has one would be read as something else.
_RESERVED = frozenset({"__entity", "__expr", "__extn"})
_LONG_MAX = 2**63 - 1
_PLACES = 4
_DIGITS_MAX = 20
_DEPTH_MAX = 50
_SHOWN_BITS_MAX = 10_000
_NOTHING = object()


class Inexpressible(ValueError):
    """Cedar has no value for it; the message names the path, never the value."""


def record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as a record in Cedar's JSON, None left out; raise `Inexpressible` naming the path."""
    return _record(values, "$", 0)


def _value(value: Any, path: str, depth: int) -> Any:
    if value is None:
        return _NOTHING
    if isinstance(value, Enum):
        return _value(value.value, path, depth)
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float | Decimal):
        return _number(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    return _composite(value, path, depth)


def _composite(value: Any, path: str, depth: int) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return _entity("Bytes", hashlib.sha256(value).hexdigest())
    if depth >= _DEPTH_MAX:
        message = f"{path} is nested more than {_DEPTH_MAX} levels deep"
        raise Inexpressible(message)
    fields = _fields(value)
    if fields is not None:
        return _record(fields, path, depth + 1)
    if isinstance(value, list | tuple | set | frozenset):
        items = (_value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value))
        return [item for item in items if item is not _NOTHING]
    message = f"{path} is of the type {type(value).__name__}, which policies have nothing like"
    raise Inexpressible(message)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return what has named parts as a mapping: a dataclass, named tuple, msgspec Struct or pydantic model, too."""
    if isinstance(value, Mapping):
        return value
    kind = type(value)
    names = (
        [field.name for field in dataclasses.fields(value)]
        if dataclasses.is_dataclass(value)
        else getattr(kind, "__struct_fields__", None) or getattr(kind, "model_fields", None)
    )
    if names is None and isinstance(value, tuple):
        names = getattr(kind, "_fields", None)
    return None if names is None else {name: getattr(value, name) for name in names}


def _record(values: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in values.items():
        name = _key(key, path)
        value = _value(item, f"{path}.{name}", depth)
        if name in found:
            message = f"{path} has two keys that are both {name!r} as text"
            raise Inexpressible(message)
        found[name] = value
    return {name: value for name, value in found.items() if value is not _NOTHING}


def _key(key: Any, path: str) -> str:
    plain = key.value if isinstance(key, Enum) else key
    if isinstance(plain, bool) or not isinstance(plain, str | int | date | UUID):
        message = f"{path} has a key of the type {type(key).__name__}, which policies have nothing like"
        raise Inexpressible(message)
    name = _text(plain, path) if isinstance(plain, str) else _digits(plain) if isinstance(plain, int) else str(plain)
    if name in _RESERVED:
        message = f"{path} has a key {name!r}, which would be read as something else"
        raise Inexpressible(message)
    return name


def _text(value: str, path: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            message = f"{path} is no Unicode text"
            raise Inexpressible(message) from None
    return value


def _number(value: float | Decimal) -> int | dict[str, Any]:
    """Return an int as a long, else a decimal; as an entity that names it when Cedar has it not exactly."""
    if isinstance(value, int):
        return value if -_LONG_MAX - 1 <= value <= _LONG_MAX else _entity("Number", _digits(value))
    # A float is what it is written as: 0.1, not the 55 digits of the binary fraction.
    return _fixed(value if isinstance(value, Decimal) else Decimal(repr(float(value))))


def _fixed(value: Decimal) -> dict[str, Any]:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        return _entity("Number", "NaN" if value.is_nan() else "-Infinity" if sign else "Infinity")
    # Not `normalize()`: it rounds to the context's precision.
    last = max((index for index, digit in enumerate(digits) if digit), default=-1) + 1
    digits, exponent = digits[:last], exponent + len(digits) - last
    if not digits:
        return _decimal("0.0")
    if exponent >= -_PLACES and len(digits) + exponent <= _DIGITS_MAX:
        unscaled = int("".join(map(str, digits))) * 10 ** (exponent + _PLACES)
        if unscaled <= _LONG_MAX + sign:
            whole, rest = divmod(unscaled, 10**_PLACES)
            return _decimal(f"{'-' if sign else ''}{whole}.{rest:0{_PLACES}d}")
    return _entity("Number", str(Decimal((sign, digits, exponent))))


def _digits(value: int) -> str:
    # Python refuses to write thousands of digits.
    return str(int(value)) if value.bit_length() <= _SHOWN_BITS_MAX else hex(value)


def _decimal(text: str) -> dict[str, Any]:
    return {"__extn": {"fn": "decimal", "arg": text}}


def _entity(kind: str, name: str) -> dict[str, Any]:
    return {"__entity": {"type": kind, "id": name}}
