"""Values as they are written on a command line."""

from __future__ import annotations

import getpass
import json
import math
import os
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from keepstep.errors import InvalidInput

_BYTES_MAX = 64 * 1024 * 1024


def from_json(text: str, what: str, *, decimals: bool = False) -> Any:
    """Return what a JSON text says; raise `InvalidInput` naming `what` when it is no JSON or would be rounded.

    `decimals`: numbers with a point or an exponent are decimals, just as they are written.
    """

    def refuse(problem: str) -> NoReturn:
        message = f"{what}: {problem}"
        raise InvalidInput(message)

    def number(digits: str) -> float:
        found = float(digits)
        if math.isinf(found) or Decimal(digits) != Decimal(repr(found)):
            refuse(f"{digits[:40]} does not fit a 64-bit number; write it as a string, in quotes")
        return found

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) != len(items):
            refuse("an object has one key twice")
        return dict(items)

    try:
        return json.loads(
            text,
            parse_float=Decimal if decimals else number,
            parse_constant=lambda name: refuse(f"{name} is not JSON"),
            object_pairs_hook=pairs,
        )
    except json.JSONDecodeError as error:
        refuse(f"not JSON ({error.msg} at character {error.pos + 1})")
    except RecursionError:
        refuse("too many objects and arrays inside each other")
    except ValueError:
        refuse("an integer has too many digits; write it as a string, in quotes")


def from_text(text: str, what: str) -> Any:
    """Return what a text says when it is JSON (`12`, `true`, `{"a": 1}`), else the text itself."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError):
        pass
    return from_json(text, what)


def from_pair(text: str, what: str) -> Any:
    """Return the value of a `key=value`: JSON if it begins like an array, an object or a quoted text, or is `null`.

    Everything else is a text: the state's schema makes numbers of it without rounding, which JSON would.
    """
    return from_text(text, what) if text == "null" or text.startswith(("[", "{", '"')) else text


def an_object(text: str, what: str, *, decimals: bool = False) -> dict[str, Any]:
    """Return the object that a JSON text is; `decimals` as for `from_json`."""
    value = from_json(text, what, decimals=decimals)
    if not isinstance(value, dict):
        message = f'{what}: an object is needed, like {{"key": "value"}}'
        raise InvalidInput(message)
    return value


def from_pairs(
    pairs: Sequence[str], how: str = "an input is written key=value (or give the whole input: --input '{…}')"
) -> dict[str, Any]:
    """Return the object that `key=value` arguments say; `how` one is written is told when one is not."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            message = f"{pair!r}: {how}"
            raise InvalidInput(message)
        if key in found:
            message = f"{key!r} is given twice"
            raise InvalidInput(message)
        found[key] = from_pair(value, key)
    return found


def from_file(name: str, what: str) -> str:
    """Return the text of a file, or of standard input for `-`; raise `InvalidInput` when it cannot be read."""
    try:
        data = sys.stdin.buffer.read(_BYTES_MAX + 1) if name == "-" else _read(Path(name))
        if len(data) > _BYTES_MAX:
            message = f"{what}: {name} is larger than {_BYTES_MAX} bytes"
            raise InvalidInput(message)
        return data.decode("utf-8-sig")
    except OSError as error:
        message = f"{what}: {name}: {error.strerror}"
        raise InvalidInput(message) from None
    except UnicodeDecodeError:
        message = f"{what}: {name} is not UTF-8 text"
        raise InvalidInput(message) from None


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_BYTES_MAX + 1)


def this_user() -> str:
    """Return who is at the keyboard, as the operating system knows them."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"
