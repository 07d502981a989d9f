"""What JSON can carry exactly: the only values that travel in messages."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from uuid import UUID

from keepstep.errors import NotStorable

DEPTH_MAX = 100
"""Objects and arrays inside each other; a deeper message is a mistake or an attack on whoever reads it."""
_INTEGER_BITS_MAX = 14_000
"""Just under the 4,300 digits that Python turns into a number (CVE-2020-10735)."""
_SHOWN_MAX = 80


def checked_json(value: object, path: str = "$", depth: int = 0) -> None:
    """Raise `NotStorable` naming the path (`$.order.client`) when `value` is not exactly what its JSON would say."""
    if depth >= DEPTH_MAX and type(value) in {dict, list}:
        text = f"more than {DEPTH_MAX} objects and arrays inside each other"
        raise NotStorable(_problem(f"{path[:_SHOWN_MAX]}…", text))
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise NotStorable(_problem(path, f"a key is a {type(key).__name__}; JSON's keys are strings"))
            _check_scalar(key, path)
            checked_json(item, f"{path}.{shown_key(key)}", depth + 1)
    elif type(value) is list:
        for index, item in enumerate(value):
            checked_json(item, f"{path}.{index}", depth + 1)
    else:
        _check_scalar(value, path)


def _check_scalar(value: object, path: str) -> None:
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            text = "a string with half a surrogate pair, which is not Unicode text"
            raise NotStorable(_problem(path, text)) from None
    elif type(value) is int:
        if value.bit_length() > _INTEGER_BITS_MAX:
            raise NotStorable(_problem(path, "an integer of more than 4,200 digits; send it as a string"))
    elif type(value) is float:
        if not math.isfinite(value):
            raise NotStorable(_problem(path, "JSON has no NaN and no infinities; send a string or null"))
    elif value is not None and type(value) is not bool:
        raise NotStorable(_problem(path, f"JSON has no {type(value).__name__}; {_way_out(value)}"))


def shown_key(key: str) -> str:
    """Return a key as it stands in a path: short and printable."""
    return key if key.isprintable() and len(key) <= _SHOWN_MAX else repr(key)[:_SHOWN_MAX]


def _way_out(value: object) -> str:
    if isinstance(value, (Decimal, UUID)):
        return "send str(value): the graph's state schema parses it"
    if isinstance(value, (datetime, date, time)):
        return "send value.isoformat(): the graph's state schema parses it"
    if isinstance(value, timedelta):
        return "send value.total_seconds()"
    if isinstance(value, Enum):
        return "send its value"
    if isinstance(value, (tuple, set, frozenset)):
        return "send a list: the graph's state schema makes its own type of it"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "send base64 text, or a reference to where the bytes are"
    return "send an object, an array, a string, a number, true, false or null"


def _problem(path: str, what: str) -> str:
    return f"{path}: {what}"
