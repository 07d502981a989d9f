"""Calls to the outside, as procedures that sync and async nodes share.

A procedure is a generator. Its own code talks to the store; what belongs to the user (the function that acts, the one
that looks up) it hands out as a `Doing`, and is sent what came of it. `perform` and `perform_async` differ only in how
they do that: here, or on the node's event loop with the procedure's own code in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from keepstep.errors import CallTimeout, InvalidInput
from keepstep.runtime.effects import NOT_DONE
from keepstep.runtime.journal import Call, Journal, Lookup, Recorded
from keepstep.runtime.watchdog import CallOverdue, call_alarm

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Doing:
    """A call of the user's code that a procedure asks for."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    """After which it is ended with `CallTimeout`; None: by the node's own time alone."""


Procedure = Generator[Doing, Any, R]


def _nothing() -> None:
    """Do nothing."""


ASKED = Doing(_nothing)
"""Yielded first by a procedure that knows which call it is: whatever is asked for beside it comes to that point, too,
before anything is begun. Else a call that an earlier attempt made would count as passed over by the faster ones."""


# --- procedures ---


def effect(
    journal: Journal,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    key: str | None,
) -> Procedure[Any]:
    """Call a function that reaches outside, once, or return its recorded result."""
    call = journal.identify(function, arguments, named, key)
    try:
        yield ASKED
        begun = journal.reopen(call)
    except BaseException:
        journal.end(call)
        raise
    return (yield from once(journal, begun, Doing(function, arguments, named)))


def once(journal: Journal, begun: Recorded | Lookup | Call, doing: Doing) -> Procedure[Any]:
    """Go on with an effect that was begun: ask the outside, act, and record what came of it."""
    while isinstance(begun, Lookup):
        begun = journal.looked_up(begun, (yield from _asked(journal, begun)))
    if isinstance(begun, Recorded):
        return begun.result
    try:
        result = yield replace(doing, named={**doing.named, **begun.extra})
    except Exception as error:
        lookup = journal.raised(begun, error)
        if lookup is None:
            raise
        answer = yield from _asked(journal, lookup)
        if answer is NOT_DONE:
            journal.not_done(lookup, error)
            raise
        found = journal.looked_up(lookup, answer)
        return (yield from once(journal, found, doing))
    return journal.succeed(begun, result)


def _asked(journal: Journal, lookup: Lookup) -> Procedure[Any]:
    """Ask the outside whether an effect happened."""
    try:
        return (yield Doing(lookup.ask, lookup.arguments, lookup.named))
    except Exception as error:  # noqa: BLE001  a lookup that fails leaves the outcome unknown, however it does
        journal.not_looked_up(lookup, error)


# --- doing them ---


def perform(procedure: Procedure[R]) -> R:
    """Run a procedure in a sync node."""
    handled = sys.exception()
    with contextlib.closing(procedure):
        try:
            doing = next(procedure)
            while True:
                try:
                    result = _done(doing)
                except Exception as error:  # noqa: BLE001  the procedure decides what becomes of it
                    _forget(error, handled)
                    doing = procedure.throw(error)
                else:
                    doing = procedure.send(result)
        except StopIteration as end:
            ended: R = end.value
            return ended


def _forget(error: BaseException, handled: BaseException | None) -> None:
    """Leave out of an error's context what its caller was handling when it called: that says nothing of this call."""
    seen: set[int] = set()
    found: BaseException | None = error if handled is not None else None
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if found.__context__ is handled:
            found.__context__ = None
        found = found.__context__


def _done(doing: Doing) -> Any:
    result = _called(doing)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()  # it has not begun
        name = getattr(doing.function, "__name__", repr(doing.function))
        message = f"{name!r} is async: use it in an async node, or give a plain function"
        raise InvalidInput(message)
    return result


def _called(doing: Doing) -> Any:
    if doing.seconds is None:
        return doing.function(*doing.arguments, **doing.named)
    try:
        with call_alarm(doing.seconds):
            return doing.function(*doing.arguments, **doing.named)
    except CallOverdue:
        raise _overdue(doing) from None


def _overdue(doing: Doing) -> CallTimeout:
    name = getattr(doing.function, "__name__", repr(doing.function))
    return CallTimeout(f"{name!r} ran longer than its timeout of {doing.seconds:g} s")


async def perform_async(procedure: Procedure[R], *, asks_first: bool = False) -> R:
    """Run a procedure in an async node: a plain function in a thread, a coroutine on the node's event loop.

    `asks_first`: it yields `ASKED` before anything else, which all calls that are made at once do before the first goes
    on: they are numbered in the order in which the node made them.
    """
    with contextlib.closing(procedure):
        step: Callable[..., Doing] = procedure.send
        given: Any = None
        if asks_first:
            _check_asked(_advanced(step, given))
            await asyncio.sleep(0)
        while True:
            found = await asyncio.to_thread(_advanced, step, given)
            if isinstance(found, _Ended):
                ended: R = found.value
                return ended
            try:
                step, given = procedure.send, await _awaited(found)
            except Exception as error:  # noqa: BLE001  the procedure decides what becomes of it
                step, given = procedure.throw, error


def _check_asked(found: Doing | _Ended) -> None:
    if found is not ASKED:
        raise TypeError(found)


@dataclass(frozen=True, slots=True)
class _Ended:
    value: Any


def _advanced(step: Callable[..., Doing], given: Any) -> Doing | _Ended:
    try:
        return step(given)
    except StopIteration as end:
        return _Ended(end.value)  # it could not pass through a future


async def _awaited(doing: Doing) -> Any:
    if inspect.iscoroutinefunction(doing.function):
        result = doing.function(*doing.arguments, **doing.named)
    else:
        # A thread cannot be ended: a plain function takes the time it takes, for nothing may act beside its retry.
        result = await asyncio.to_thread(doing.function, *doing.arguments, **doing.named)
    if not inspect.isawaitable(result):
        return result
    limit = asyncio.timeout(doing.seconds)
    try:
        async with limit:
            return await result
    except TimeoutError:
        if limit.expired():
            raise _overdue(doing) from None
        raise
