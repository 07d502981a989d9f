"""Ids: sortable by time, random enough not to be guessed, safe in every column, path and shell."""

from __future__ import annotations

import secrets
import time

from keepstep.errors import InvalidInput

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_NAME_LENGTH_MAX = 200


def new_id() -> str:
    """Return a new id: 26 characters of Crockford base 32, 48 bits of milliseconds, then 80 random bits (ULID)."""
    number = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def checked_name(kind: str, value: object) -> str:
    """Return `value` when it can name a thing of `kind`; raise `InvalidInput` naming the kind when it cannot.

    Names stand in messages, tables, log lines and shells: 1 to 200 printable characters.
    """
    if not isinstance(value, str) or not value or len(value) > _NAME_LENGTH_MAX or not value.isprintable():
        shown = repr(value)[:80]
        message = f"{kind} must be 1 to {_NAME_LENGTH_MAX} printable characters, not {shown}"
        raise InvalidInput(message)
    return value
