"""Which function undoes which effect: what `@effect(undo=…)` has declared in this process.

A failed run may be undone by another process than the one that ran it, so the journal names the function and the worker
finds it here. Nothing is imported by a name that was found in data: the modules that a worker loads have declared it,
or it is not there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keepstep.errors import GraphError, UndoUnavailable

_OWN = ("result", "idempotency_key")


class Undo(NamedTuple):
    """An effect's function and the one that undoes it."""

    effect: Callable[..., Any]
    undo: Callable[..., Any]


_declared: dict[str, dict[str, Undo]] = {}


def check(name: str, function: Callable[..., Any], undo: Callable[..., Any]) -> None:
    """Raise `GraphError` when an undo cannot be called with what there is when the run has failed.

    That is the effect's arguments, its `result` and an `idempotency_key`, all by name.
    """
    if not callable(undo) or "<lambda>" in _reference(undo):
        message = f"effect {name!r}: undo must be a function with a name, by which a worker finds it; not {undo!r}"
        raise GraphError(message)
    with contextlib.suppress(TypeError, ValueError):  # one that cannot be looked at is called as it stands
        known = inspect.signature(function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        for each in inspect.signature(undo).parameters.values():
            if each.kind is each.POSITIONAL_ONLY:
                message = f"effect {name!r}: its undo takes {each.name!r} by position; it is called by name"
                raise GraphError(message)
            needed = each.default is each.empty and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
            if needed and each.name not in (*known, *_OWN) and not takes_any:
                message = (
                    f"effect {name!r}: its undo needs {each.name!r}, which is neither an argument of the effect nor "
                    "its result or idempotency_key"
                )
                raise GraphError(message)


def declare(name: str, function: Callable[..., Any], undo: Callable[..., Any]) -> str:
    """Remember what undoes the effect of a name; return what the journal calls that."""
    text = _reference(undo)
    _declared.setdefault(name, {})[text] = Undo(function, undo)
    return text


def find(name: str, reference: str) -> Undo:
    """Return what undoes an effect of a name; raise `UndoUnavailable` when this process does not know it.

    `reference` tells several effects of one name apart; a function that was moved or renamed is found all the same, as
    long as it is the only one.
    """
    known = _declared.get(name, {})
    found = known.get(reference) or (next(iter(known.values())) if len(known) == 1 else None)
    if found is None:
        has = f"declares {', '.join(sorted(known))}" if known else "declares no such effect"
        message = (
            f"effect {name!r} is to be undone by {reference}, and this worker {has}: declare it by @effect(undo=…) at "
            "the top of a module that the worker loads, then retry"
        )
        raise UndoUnavailable(message)
    return found


def arguments_of(undo: Callable[..., Any], given: Mapping[str, Any], result: object, key: str) -> dict[str, Any]:
    """Return what an undo is called with: those of the effect's arguments, its result and the key that it takes."""
    parameters = inspect.signature(undo).parameters.values()
    own = dict(zip(_OWN, (result, key), strict=True))
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return {**{name: value for name, value in given.items() if name != "*"}, **own}
    together = {**given, **own}
    return {each.name: together[each.name] for each in parameters if each.name in together}


def _reference(undo: Callable[..., Any]) -> str:
    whole = undo.func if isinstance(undo, functools.partial) else undo
    name = getattr(whole, "__qualname__", type(whole).__qualname__)
    return f"{getattr(whole, '__module__', '')}.{name}"
