"""Effects as users declare them: what a function does outside, and what may be done when that is not known."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, overload

from keepstep.errors import (
    GraphError,
    InvalidInput,
)
from keepstep.ids import checked_name
from keepstep.runtime import undos
from keepstep.runtime.codec import Codec
from keepstep.runtime.policy import seconds

P = ParamSpec("P")
R = TypeVar("R")

_DECLARED = "__keepstep_effect__"
TOOL = "__keepstep_tool__"
"""What says of an object that it is a tool, which has no other way out than the gateway."""


@dataclass(frozen=True, slots=True)
class EffectDeclaration:
    """What a function says about itself as an effect."""

    name: str
    idempotent: bool
    lookup: Callable[..., Any] | None = None
    settling_seconds: float = 0.0
    undo_name: str | None = None
    """What the journal calls the function that undoes it (see `undos`); None: nothing does."""
    timeout_seconds: float | None = None
    """Of one call; None: the node's own time alone."""
    repeatable: bool = False
    """Whether it is at risk, with an intent, and still called again while nobody knows whether it happened."""
    counted: bool = False
    """Whether failures are recorded, and so how many calls were made, although it may safely happen twice."""


class _NotDone(enum.Enum):
    NOT_DONE = "NOT_DONE"


NOT_DONE = _NotDone.NOT_DONE
"""What a `lookup` returns when the effect has not happened."""


@overload
def effect(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def effect(
    *,
    idempotent: bool = ...,
    lookup: Callable[..., Any] | None = ...,
    settling: float | timedelta = ...,
    undo: Callable[..., Any] | None = ...,
    name: str | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def effect(
    function: Callable[..., Any] | None = None,
    /,
    *,
    idempotent: bool = False,
    lookup: Callable[..., Any] | None = None,
    settling: float | timedelta = 0.0,
    undo: Callable[..., Any] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Declare what a function does outside; call it by `ctx.effect(function, …)`.

    `idempotent=True`: a read, or anything else that may safely happen twice; one journal write, no intent. Otherwise
    the call is at risk: it is never repeated while its outcome is unknown. `lookup` finds out: it is called with the
    effect's own arguments (and its `idempotency_key`, if it takes one) and returns the result, or `NOT_DONE`; a
    `NOT_DONE` counts only once the call's deadline has passed and `settling` (seconds or timedelta) after it, in which
    the outside may still catch up. `undo` takes it back when the run fails: it is called once, with those of the
    effect's arguments that it takes, and with `result` and `idempotency_key` (its own) if it takes them; it may be
    declared as an effect itself (`idempotent`, `lookup`). `name` (default: the function's) is part of the idempotency
    key: keep it when the function is renamed.
    """
    settling_seconds = seconds("settling", settling, zero=True)
    if function is None:
        return lambda decorated: _declared(
            decorated, name, idempotent=idempotent, lookup=lookup, settling_seconds=settling_seconds, undo=undo
        )
    return _declared(function, name, idempotent=idempotent, lookup=lookup, settling_seconds=settling_seconds, undo=undo)


def _declared(
    function: Callable[..., Any],
    name: str | None,
    *,
    idempotent: bool,
    lookup: Callable[..., Any] | None,
    settling_seconds: float,
    undo: Callable[..., Any] | None,
) -> Callable[..., Any]:
    if idempotent and lookup is not None:
        message = "an effect is idempotent or has a lookup: what may be repeated need not be asked about"
        raise GraphError(message)
    known = checked_name("an effect's name", name if name is not None else getattr(function, "__name__", ""))
    if ":" in known:
        message = f"effect name {known!r}: a colon separates name and key, it cannot be part of the name"
        raise GraphError(message)
    undo_name = None if undo is None else _undo_declared(known, function, undo, idempotent=idempotent)
    setattr(function, _DECLARED, EffectDeclaration(known, idempotent, lookup, settling_seconds, undo_name))
    return function


def redeclare(function: Callable[..., Any], declaration: EffectDeclaration) -> None:
    """Let a function that was declared say something else about itself as an effect."""
    setattr(function, _DECLARED, declaration)


def _undo_declared(name: str, function: Callable[..., Any], undo: Callable[..., Any], *, idempotent: bool) -> str:
    if idempotent:
        message = (
            f"effect {name!r} is idempotent and has an undo: of what may be repeated nothing says how often it was done"
        )
        raise GraphError(message)
    undos.check(name, function, undo)
    if declaration_of(undo).undo_name is not None:
        message = f"effect {name!r}: its undo has an undo itself; what is undone stays undone"
        raise GraphError(message)
    return undos.declare(name, function, undo)


def declaration_of(function: Callable[..., Any]) -> EffectDeclaration:
    """Return what a function declares; one that declares nothing is at risk, under its own name."""
    if getattr(function, TOOL, False):
        message = f"{getattr(function, '__name__', function)!r} is a tool: call it by ctx.call"
        raise InvalidInput(message)
    found = getattr(function, _DECLARED, None)
    if isinstance(found, EffectDeclaration):
        return found
    inner = function.func if isinstance(function, functools.partial) else function
    found = getattr(inner, _DECLARED, None)
    if isinstance(found, EffectDeclaration):
        return found
    name = getattr(inner, "__name__", "")
    if not name or name == "<lambda>":
        message = (
            "ctx.effect needs a named function: its name is part of the idempotency key; use def or @effect(name=…)"
        )
        raise InvalidInput(message)
    return EffectDeclaration(checked_name("an effect's name", name), idempotent=False)


@functools.lru_cache(maxsize=4096)
def annotated_types(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return what a function's annotations declare, so that its arguments and result can be stored."""
    with contextlib.suppress(Exception):  # an annotation that cannot be resolved declares nothing
        return tuple(typing.get_type_hints(inspect.unwrap(_whole(function))).values())
    return ()


@functools.lru_cache(maxsize=4096)
def result_type(function: Callable[..., Any]) -> Any:
    """Return what a function's annotation says it returns; None when it says nothing that can be resolved."""
    with contextlib.suppress(Exception):
        return typing.get_type_hints(inspect.unwrap(_whole(function))).get("return")
    return None


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a partial one is a part of."""
    return function.func if isinstance(function, functools.partial) else function


def all_arguments(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with those that a partial function was given before."""
    if isinstance(function, functools.partial):
        return (*function.args, *arguments), {**function.keywords, **named}
    return arguments, dict(named)


@functools.lru_cache(maxsize=4096)
def wants_key(function: Callable[..., Any]) -> bool:
    """Tell whether a function takes the call's idempotency key."""
    with contextlib.suppress(TypeError, ValueError):
        return "idempotency_key" in inspect.signature(function).parameters
    return False


@functools.lru_cache(maxsize=4096)
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names under which positional arguments may also be given; none when some may not."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
        if all(parameter.kind is not parameter.POSITIONAL_ONLY for parameter in parameters):
            return tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
    return ()


def by_name(function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments under their names, so that no two calls look alike; what has no name stands under *.

    What a partial function was given before is among them: it decides what is called as much as the rest.
    """
    arguments, named = all_arguments(function, arguments, named)
    names = _names(_whole(function))
    rest = {"*": list(arguments[len(names) :])} if len(arguments) > len(names) else {}
    together = {**dict(zip(names, arguments, strict=False)), **rest, **named}
    return {name: together[name] for name in sorted(together)}


def arguments_digest(function: Callable[..., Any], values: Mapping[str, Any], codec: Codec, name: str) -> bytes:
    """Return the digest of a call's arguments, and of the object of a bound method when that can be stored."""
    owner = getattr(function, "__self__", None)
    parts = [codec.encode(dict(values), path=f"${name}")]
    if owner is not None and not isinstance(owner, type):
        with contextlib.suppress(InvalidInput):  # a client or a session: which one it is cannot be told
            parts.append(codec.encode(owner, path=f"${name}.self"))
    return hashlib.blake2b(b"\x1f".join(parts), digest_size=16).digest()
