"""Scalars: values without parts that neither msgpack nor JSON can say, as content that both can.

Each has a kind, the word that stands in stored data, and content that reads well: text, or a short list.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import struct
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec

from keepstep.runtime.shapes import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

CODES = {
    "text": 1,
    "int": 2,
    "float": 3,
    "bytes": 4,
    "bytearray": 5,
    "decimal": 6,
    "datetime": 7,
    "date": 8,
    "time": 9,
    "timedelta": 10,
    "uuid": 11,
    "tuple": 12,
    "set": 13,
    "frozenset": 14,
    "dict": 15,
    "object": 16,
    "unset": 17,
}
"""Every kind with its msgpack extension code. Stored for ever: add, never change."""
KINDS = frozenset(CODES)

# Python may refuse to write or read ints of more than 640 decimal digits (by default 4300); hexadecimal has no limit.
_DECIMAL_BITS_MAX = 2000
_ZONE_KEY = re.compile(r"[A-Za-z0-9_+\-]+(/[A-Za-z0-9_+\-]+)*")
_NAN = struct.pack(">d", math.nan)
_MICROSECOND = dt.timedelta(microseconds=1)


def int_to_text(value: int) -> str:
    """Return an int of any size as decimal text, a huge one as hexadecimal."""
    return str(value) if value.bit_length() <= _DECIMAL_BITS_MAX else hex(value)


def float_to_text(value: float) -> str:
    """Return a float that JSON cannot say as text: `inf`, `-inf`, `nan`, and a nan of other bits with its bits."""
    if math.isnan(value) and struct.pack(">d", value) != _NAN:
        return "nan:" + struct.pack(">d", value).hex()
    return repr(value)


def _float_from_text(content: str) -> float:
    bits = content.removeprefix("nan:")
    if bits == content:
        return float(content)
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


def _datetime_content(value: dt.datetime) -> object:
    zone = value.tzinfo
    if not value.fold and (zone is None or (type(zone) is dt.timezone and _zone_name(zone) is None)):
        return value.isoformat()
    return [value.replace(tzinfo=None).isoformat(), value.fold, _zone_content(zone)]


def _datetime_from(content: Any) -> dt.datetime:
    if isinstance(content, str):
        return dt.datetime.fromisoformat(content)
    local, fold, zone = content
    return dt.datetime.fromisoformat(local).replace(fold=fold, tzinfo=_zone_from(zone))


def _time_content(value: dt.time) -> object:
    if not value.fold and value.tzinfo is None:
        return value.isoformat()
    return [value.replace(tzinfo=None).isoformat(), value.fold, _zone_content(value.tzinfo)]


def _time_from(content: Any) -> dt.time:
    if isinstance(content, str):
        return dt.time.fromisoformat(content)
    local, fold, zone = content
    return dt.time.fromisoformat(local).replace(fold=fold, tzinfo=_zone_from(zone))


def _zone_name(zone: dt.timezone) -> str | None:
    """Return the name a fixed offset was given, None when it has only that of its offset."""
    given: tuple[object, ...] = zone.__getinitargs__()  # type: ignore[attr-defined]  # pickle's own, not in typeshed
    return str(given[1]) if len(given) > 1 else None


def _zone_content(zone: dt.tzinfo | None) -> object:
    """Return None, a zone's key, or `[offset in microseconds, name or None]`."""
    if zone is None:
        return None
    if type(zone) is ZoneInfo and zone.key is not None:
        return zone.key
    if type(zone) is dt.timezone:
        return [zone.utcoffset(None) // _MICROSECOND, _zone_name(zone)]
    # Other libraries' zones: one of a fixed offset says so when it is asked without a time.
    offset = zone.utcoffset(None)
    if offset is None:
        reason = f"a time zone of type {type(zone).__qualname__} cannot be stored; use zoneinfo.ZoneInfo with a key"
        raise Refusal(reason)
    return [offset // _MICROSECOND, None]


def _zone_from(content: Any) -> dt.tzinfo | None:
    if content is None:
        return None
    if isinstance(content, str):
        if not _ZONE_KEY.fullmatch(content):  # a key names a file; ZoneInfo checks it too
            message = f"not a time zone: {content!r:.100}"
            raise ValueError(message)
        return ZoneInfo(content)
    microseconds, name = content
    offset = microseconds * _MICROSECOND
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _timedelta_content(value: dt.timedelta) -> object:
    return [value.days, value.seconds, value.microseconds]


def _nothing(_value: object) -> None:
    """Return the content of a kind that has none."""


def _unset_from(_content: object) -> msgspec.UnsetType:
    return msgspec.UNSET


SCALARS: dict[type, tuple[str, Callable[[Any], object]]] = {
    Decimal: ("decimal", str),
    dt.datetime: ("datetime", _datetime_content),
    dt.date: ("date", dt.date.isoformat),
    dt.time: ("time", _time_content),
    dt.timedelta: ("timedelta", _timedelta_content),
    UUID: ("uuid", str),
    msgspec.UnsetType: ("unset", _nothing),
}
"""Per exact type: its kind, and its content from a value."""

LOADERS: dict[str, Callable[[Any], object]] = {
    "int": lambda content: int(content, 0),
    "float": _float_from_text,
    "decimal": Decimal,
    "datetime": _datetime_from,
    "date": dt.date.fromisoformat,
    "time": _time_from,
    "timedelta": lambda content: dt.timedelta(*content),
    "uuid": UUID,
    "unset": _unset_from,
}
"""Per kind: the value from its content; bad content raises whatever it raises."""
