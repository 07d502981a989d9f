"""Ids: sortable by time, random enough not to be guessed, safe in every column, path and shell."""

from __future__ import annotations

import os
import time

from keepstep.errors import InvalidInput

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
# Two characters at a time: every step makes ids.
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
_SHIFTS = range(120, -1, -10)
_NAME_LENGTH_MAX = 200


def new_id() -> str:
    """Return a new id: 26 characters of Crockford base 32, 48 bits of milliseconds, then 80 random bits (ULID)."""
    number = (int(time.time() * 1000) << 80) | int.from_bytes(os.urandom(10))
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in _SHIFTS])


def checked_name(kind: str, value: object) -> str:
    """Return `value` when it can name a thing of `kind`; raise `InvalidInput` naming the kind when it cannot.

    Names stand in messages, tables, log lines and shells: 1 to 200 printable characters.
    """
    if not isinstance(value, str) or not value or len(value) > _NAME_LENGTH_MAX or not value.isprintable():
        shown = repr(value)[:80]
        message = f"{kind} must be 1 to {_NAME_LENGTH_MAX} printable characters, not {shown}"
        raise InvalidInput(message)
    return value
