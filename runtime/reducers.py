"""Reducers: how the updates of one key become one value, and what of a value is new."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from datetime import datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec
from pydantic import BaseModel

from keepstep.runtime.codec import private_copy

Reducer = Callable[[Any, Any], Any]


def add(old: Any, new: Any) -> Any:
    """Reduce by `old + new`: numbers are summed, lists and texts joined. Nothing there yet (None): `new`."""
    return new if old is None else old + new


def append(old: list[Any] | None, new: Any) -> list[Any]:
    """Reduce to a longer list: a list is added item by item, anything else as one item.

    An item that is itself a list must be wrapped: `[[1, 2]]`. Nothing there yet (None): an empty list.
    """
    return [*(old or ()), *new] if isinstance(new, list) else [*(old or ()), new]


def folded(reducer: Reducer, old: object, updates: Iterable[Any], *, absent: bool) -> Any:
    """Return `old` with every update reduced into it, in order; `absent` says that there is no `old` yet.

    The first update of an absent key is its value (with `append`: as a list). Neither `old` nor an update is changed,
    whatever the reducer does to its arguments, so that a step that is joined again meets the same values.
    """
    if reducer is append or (reducer in _SUMS and type(old) is list):
        return _extended([] if absent or old is None else old, updates, items=reducer is append)
    rest = iter(updates)
    value = private_copy(next(rest) if absent else old)
    for update in rest:
        value = reducer(value, private_copy(update))
    return value


def _extended(old: object, updates: Iterable[Any], *, items: bool) -> list[Any]:
    # One list for all updates: a fan-in of n appends then costs n, not n squared.
    grown: list[Any] = list(old)  # type: ignore[call-overload]  # a list, or what the schema let pass as one
    for update in updates:
        if items and not isinstance(update, list):
            grown.append(update)
        elif isinstance(update, list):
            grown.extend(update)
        else:
            message = f"can only add a list to a list, not {type(update).__name__}"
            raise TypeError(message)
    return grown


_SUMS: tuple[Reducer, ...] = (add, operator.add)


def difference(reducer: Reducer, old: object, new: object) -> Any:
    """Return the update that `reducer` turns from `old` into `new`, for a holder that knows whole values only.

    A list (with `add` also a text or tuple) that grew at its end: its tail. With `add` a number: by how much it
    changed. Otherwise `new` itself goes through the reducer.
    """
    if isinstance(old, list) and isinstance(new, list):
        return new[len(old) :] if same(new[: len(old)], old) else new
    if reducer not in _SUMS or type(old) is not type(new):
        return new
    if isinstance(old, str | bytes | tuple):
        return new[len(old) :] if new[: len(old)] == old else new  # type: ignore[index]  # same type as old
    if isinstance(old, int | float | Decimal | timedelta) and not isinstance(old, bool):
        return new - old  # type: ignore[operator]  # same type as old
    return new


_PLAIN = (str, int, bool, bytes, type(None))
# Equal is not the same for these: -0.0 and 0.0, NaN, 1.0 and 1.00, one instant in two zones, fold.
_BY_REPR = (float, complex, Decimal, datetime, time)


def same(one: object, other: object) -> bool:
    """Tell whether two state values are the same exactly: equal, of the same types, down to the last item.

    1, True and 1.0 differ, so do 0.0 and -0.0; NaN is the same as NaN. Dictionaries in another order differ.
    """
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _PLAIN:
        return one == other
    if isinstance(one, _BY_REPR):
        return repr(one) == repr(other)
    return _same_parts(one, other)


def _same_parts(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(key, other_key) and same(value, other_value)
            for (key, value), (other_key, other_value) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return one == other and {(type(item), repr(item)) for item in one} == {(type(i), repr(i)) for i in other}
    if isinstance(one, BaseModel):
        return same(one.__dict__, other.__dict__) and same(one.model_extra, other.model_extra)
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name, None), getattr(other, f.name, None)) for f in dataclasses.fields(one))
    return bool(one == other)
