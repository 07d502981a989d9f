"""Delta: what changed between two sets of channels, small, and exactly reversible.

A change holds one operation per key that differs, in the order of the new channels:

* `["set", value]`: the value is new; a new key comes last;
* `["extend", tail]`: a list has grown at its end;
* `["text", tail]`: a text has grown at its end;
* `["put", {key: value}, [removed keys]]`: entries of a dict were added, replaced, removed;
* `["last", value]`: as `set`, and the key moves to the end, where the order of the keys has changed;
* `["unset"]`: the key is gone.

"Differs" is strict: 1, 1.0 and True differ, and so do 0.0 and -0.0, two orders of one dict, two zones of one instant.
What cannot be compared counts as changed, which is always safe.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from keepstep.errors import HistoryCorrupt
from keepstep.runtime.shapes import Refusal, shape_of

_DEPTH_MAX = 100
_KEYS = frozenset({str, int, bool, bytes})  # a key such as nan is not found again
_PLAIN = frozenset({type(None), bool, int, str, bytes, bytearray, UUID, dt.date, dt.timedelta})


def change(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the operations that turn `old` into `new`; empty when they are the same. Neither is copied or changed."""
    moved = _moved(old, new)
    operations: dict[str, list[Any]] = {key: ["unset"] for key in old if key not in new}
    for key, value in new.items():
        if key in moved:
            operations[key] = ["last", value]
        elif key not in old:
            operations[key] = ["set", value]
        elif not same(old[key], value):
            operations[key] = _operation(old[key], value)
    return operations


def apply(old: dict[str, Any], changed: dict[str, list[Any]]) -> dict[str, Any]:
    """Return `old` after `changed`; `old` stays as it is. Raises `HistoryCorrupt` when the change does not fit it."""
    new = dict(old)
    try:
        for key, operation in changed.items():
            _apply_operation(new, key, operation)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        message = f"a stored change does not fit the state before it: {type(error).__name__}"
        raise HistoryCorrupt(message) from error
    return new


def same(first: Any, second: Any, depth: int = 0) -> bool:
    """Whether two values are the same in every type, value, order and zone; False when that cannot be told."""
    if first is second:
        return True
    cls = type(first)
    if cls is not type(second) or depth > _DEPTH_MAX:
        return False
    if cls in _PLAIN:
        return bool(first == second)
    compare = _COMPARISONS.get(cls, _same_objects)
    return compare(first, second, depth)


def _same_floats(first: float, second: float, _depth: int) -> bool:
    return struct.pack("d", first) == struct.pack("d", second)


def _same_decimals(first: Decimal, second: Decimal, _depth: int) -> bool:
    return str(first) == str(second)


def _same_dicts(first: dict[Any, Any], second: dict[Any, Any], depth: int) -> bool:
    return _same_items(first.keys(), second.keys(), depth) and _same_items(first.values(), second.values(), depth)


def _same_sets(first: Any, second: Any, depth: int) -> bool:
    there = {item: item for item in first}
    return len(first) == len(second) and all(item in there and same(there[item], item, depth + 1) for item in second)


def _same_items(first: Any, second: Any, depth: int) -> bool:
    return len(first) == len(second) and all(
        a is b or same(a, b, depth + 1) for a, b in zip(first, second, strict=True)
    )


def _same_times(first: dt.datetime | dt.time, second: dt.datetime | dt.time, _depth: int) -> bool:
    zones_agree = first.tzinfo is second.tzinfo or (
        type(first.tzinfo) is type(second.tzinfo) is dt.timezone and repr(first.tzinfo) == repr(second.tzinfo)
    )
    return zones_agree and first.fold == second.fold and first.replace(tzinfo=None) == second.replace(tzinfo=None)


def _same_objects(first: Any, second: Any, depth: int) -> bool:
    shape = shape_of(type(first))
    if shape is None or isinstance(first, Enum):  # members are one object each
        return False
    try:
        return same(shape.take(first), shape.take(second), depth + 1)
    except Refusal:
        return False


_COMPARISONS: dict[type, Callable[[Any, Any, int], bool]] = {
    float: _same_floats,
    Decimal: _same_decimals,
    dt.datetime: _same_times,
    dt.time: _same_times,
    dict: _same_dicts,
    list: _same_items,
    tuple: _same_items,
    set: _same_sets,
    frozenset: _same_sets,
}


def _moved(old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    """Return the keys, from the first that stands elsewhere on, that must be written again to restore the order."""
    kept = [key for key in old if key in new]
    order = kept + [key for key in new if key not in old]
    actual = list(new)
    for index, key in enumerate(actual):
        if key != order[index]:
            return set(actual[index:])
    return set()


def _operation(old: Any, new: Any) -> list[Any]:
    cls = type(new)
    if cls is type(old) and old:
        if cls is list and len(new) > len(old) and _same_items(old, new[: len(old)], 0):
            return ["extend", new[len(old) :]]
        if cls is str and new.startswith(old):
            return ["text", new[len(old) :]]
        if cls is dict:
            return _put(old, new) or ["set", new]
    return ["set", new]


def _put(old: dict[Any, Any], new: dict[Any, Any]) -> list[Any] | None:
    """Return the entries that changed, or None when that is no smaller or does not give the new order."""
    if not (_KEYS.issuperset(map(type, old)) and _KEYS.issuperset(map(type, new))):
        return None
    keys = {key: key for key in old}
    if any(key in keys and type(keys[key]) is not type(key) for key in new):
        return None  # 1 became True: a dict keeps the key that it has
    entries = {key: item for key, item in new.items() if key not in old or not same(old[key], item)}
    removed = [key for key in old if key not in new]
    if len(entries) + len(removed) >= len(new):
        return None
    order = [key for key in old if key in new] + [key for key in new if key not in old]
    return ["put", entries, removed] if order == list(new) else None


def _apply_operation(new: dict[str, Any], key: str, operation: list[Any]) -> None:
    match operation:
        case ["set", value]:
            new[key] = value
        case ["last", value]:
            new.pop(key, None)
            new[key] = value
        case ["unset"]:
            del new[key]
        case ["extend", list(tail)] if type(new[key]) is list:
            new[key] = [*new[key], *tail]
        case ["text", str(tail)] if type(new[key]) is str:
            new[key] += tail
        case ["put", dict(entries), list(removed)] if type(new[key]) is dict:
            gone = set(removed)
            if not gone <= new[key].keys():
                raise KeyError(key)
            new[key] = {**{k: item for k, item in new[key].items() if k not in gone}, **entries}
        case _:
            raise ValueError(key)
