"""Effects: done once, or known to be unknown.

Every call to the outside has an idempotency key that is the same on every retry: step key, node run, and the call's own
id. A recorded result is returned and nothing is called. An effect that is safe to repeat (`idempotent`) is called and
its result recorded: one write. Any other is at risk: an intent is recorded first, under the lease, and an intent
without a result whose owner is gone blocks the thread, because nobody here knows whether it happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

from keepstep.crashpoints import reach
from keepstep.errors import (
    Diverged,
    EffectConflict,
    EffectUnknown,
    GraphError,
    InvalidInput,
    NodeTimeout,
    StepError,
    ThreadBlocked,
)
from keepstep.ids import checked_name
from keepstep.runtime.codec import Codec
from keepstep.runtime.outcome import described, error_text
from keepstep.runtime.watchdog import undisturbed
from keepstep.store import effects as journal
from keepstep.store.effects import EffectKey, EffectState
from keepstep.store.engine import Store
from keepstep.store.leases import Fence

P = ParamSpec("P")
R = TypeVar("R")

_DECLARED = "__keepstep_effect__"


@dataclass(frozen=True, slots=True)
class EffectDeclaration:
    """What a function says about itself as an effect."""

    name: str
    idempotent: bool


@overload
def effect(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def effect(*, idempotent: bool = ..., name: str | None = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def effect(
    function: Callable[..., Any] | None = None, /, *, idempotent: bool = False, name: str | None = None
) -> Callable[..., Any]:
    """Declare what a function does outside; call it by `ctx.effect(function, …)`.

    `idempotent=True`: a read, or anything else that may safely happen twice; one journal write, no intent. Otherwise
    the call is at risk: it is never repeated while its outcome is unknown. `name` (default: the function's) is part of
    the idempotency key: keep it when the function is renamed.
    """
    if function is None:
        return lambda decorated: _declared(decorated, idempotent=idempotent, name=name)
    return _declared(function, idempotent=idempotent, name=name)


def _declared(function: Callable[..., Any], *, idempotent: bool, name: str | None) -> Callable[..., Any]:
    known = checked_name("an effect's name", name if name is not None else getattr(function, "__name__", ""))
    if ":" in known:
        message = f"effect name {known!r}: a colon separates name and key, it cannot be part of the name"
        raise GraphError(message)
    setattr(function, _DECLARED, EffectDeclaration(known, idempotent))
    return function


def declaration_of(function: Callable[..., Any]) -> EffectDeclaration:
    """Return what a function declares; one that declares nothing is at risk, under its own name."""
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
def _annotated_types(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return what a function's annotations declare, so that its arguments and result can be stored."""
    with contextlib.suppress(Exception):  # an annotation that cannot be resolved declares nothing
        return tuple(typing.get_type_hints(inspect.unwrap(function)).values())
    return ()


@functools.lru_cache(maxsize=4096)
def _wants_key(function: Callable[..., Any]) -> bool:
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


def _by_name(function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments under their names, so that no two calls look alike; what has no name stands under *.

    What a partial function was given before is among them: it decides what is called as much as the rest.
    """
    if isinstance(function, functools.partial):
        arguments, named = (*function.args, *arguments), {**function.keywords, **named}
        function = function.func
    names = _names(function)
    rest = {"*": list(arguments[len(names) :])} if len(arguments) > len(names) else {}
    together = {**dict(zip(names, arguments, strict=False)), **rest, **named}
    return {name: together[name] for name in sorted(together)}


def _digest(function: Callable[..., Any], values: Mapping[str, Any], codec: Codec, name: str) -> bytes:
    """Return the digest of a call's arguments, and of the object of a bound method when that can be stored."""
    owner = getattr(function, "__self__", None)
    parts = [codec.encode(dict(values), path=f"${name}")]
    if owner is not None and not isinstance(owner, type):
        with contextlib.suppress(InvalidInput):  # a client or a session: which one it is cannot be told
            parts.append(codec.encode(owner, path=f"${name}.self"))
    return hashlib.blake2b(b"\x1f".join(parts), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Recorded:
    """An effect that has happened: its result as it was."""

    result: Any


@dataclass(frozen=True, slots=True)
class Call:
    """An effect to be performed now."""

    key: EffectKey
    declared: EffectDeclaration
    digest: bytes
    codec: Codec
    extra: Mapping[str, Any]
    """The idempotency key, for a function that takes one."""


class Journal:
    """The effects of one attempt of a node run: those its earlier attempts left, and those it asks for."""

    def __init__(
        self,
        store: Store,
        fence: Fence,
        *,
        tenant: str,
        step: str,
        run: str,
        codec: Codec,
        load: bool,
        remaining: Callable[[], float],
    ) -> None:
        self._store = store
        self._fence = fence
        self._tenant = tenant
        self._step = step
        self._run = run
        self._codec = codec
        self._remaining = remaining
        self._found: dict[str, EffectState] | None = None if load else {}
        self._asked: set[str] = set()
        self._under_way: dict[str, EffectDeclaration] = {}
        self._occurrences: dict[str, int] = {}
        self._closed = False
        self._blocked: ThreadBlocked | None = None
        self.beside: Callable[[str], None] = lambda _before: None
        """Checks what else an earlier attempt has done that this one must ask for again (see `check_course`)."""
        self._lock = threading.RLock()

    # --- performing -------------------------------------------------------------------------------------------------

    def begin(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any], key: str | None
    ) -> Recorded | Call:
        """Return an effect's recorded result, or the call to be made, its intent recorded when it is at risk."""
        declared = declaration_of(function)
        codec = self._codec.including(*_annotated_types(function))
        digest = _digest(function, _by_name(function, arguments, named), codec, declared.name)
        call = self._reserved(declared, digest, key)
        begun: Recorded | Call | None = None
        try:
            with undisturbed():
                begun = self._begun(call, declared, digest, codec, key)
        finally:
            if not isinstance(begun, Call):
                with self._lock:
                    self._under_way.pop(call, None)
        if isinstance(begun, Recorded) or not _wants_key(function):
            return begun
        return dataclasses.replace(begun, extra={"idempotency_key": f"{self._step}/{self._run}/{call}"})

    def _begun(
        self, call: str, declared: EffectDeclaration, digest: bytes, codec: Codec, key: str | None
    ) -> Recorded | Call:
        found = self._known().get(call)
        if found is not None and found.state == journal.DONE:
            self._same_call(found, declared, digest, key)
            return Recorded(codec.decode(found.result or b""))
        place = EffectKey(self._fence.thread_id, self._step, self._run, call)
        if found is not None:
            self._same_call(found, declared, digest, key)
            if found.state == journal.INTENT and not declared.idempotent:
                self._unknown(found)
        if not declared.idempotent:
            self.check_course(before=f"effect {declared.name!r}")
            seconds = self._remaining()
            if seconds <= 0:
                message = f"effect {declared.name!r} was not begun: the node's time is over"
                raise NodeTimeout(message)
            reach("before_intent", call)
            self._store.patiently(
                lambda: journal.begin(
                    self._store,
                    self._fence,
                    place,
                    tenant=self._tenant,
                    name=declared.name,
                    arguments_digest=digest,
                    seconds=seconds,
                )
            )
            reach("after_intent", call)
        return Call(place, declared, digest, codec, {})

    def succeed(self, call: Call, result: object) -> Any:
        """Record an effect's result and return it.

        When the result cannot be stored the intent stays without one: it did happen, and a retry must not repeat it.
        """
        reach("after_call", call.key.call)
        with undisturbed():
            self._succeeded(call, result)
        reach("after_result", call.key.call)
        return result

    def _succeeded(self, call: Call, result: object) -> None:
        stored = call.codec.encode(result, path=f"${call.declared.name}.result")
        if call.declared.idempotent:
            self._store.patiently(
                lambda: journal.record(
                    self._store,
                    self._fence,
                    call.key,
                    tenant=self._tenant,
                    name=call.declared.name,
                    arguments_digest=call.digest,
                    result=stored,
                )
            )
        else:
            self._store.patiently(
                lambda: journal.finish(self._store, self._fence.nonce, call.key, state=journal.DONE, result=stored)
            )
        self._ended(call, journal.DONE, stored)

    def fail(self, call: Call, error: BaseException) -> None:
        """Record that an effect failed: a known failure, which a retry of the node may try again."""
        with undisturbed():
            self._failed(call, error)

    def _failed(self, call: Call, error: BaseException) -> None:
        if not call.declared.idempotent:
            text = error_text(described(error))
            self._store.patiently(
                lambda: journal.finish(self._store, self._fence.nonce, call.key, state=journal.FAILED, error=text)
            )
        self._ended(call, journal.FAILED, None)

    def check_settled(self) -> None:
        """Raise `EffectUnknown` when this attempt left an effect at risk without an outcome, whoever caught why."""
        with self._lock:
            left = [call for call, declared in self._under_way.items() if not declared.idempotent]
        if left:
            message = f"effect {left[0]} was begun and its outcome could not be recorded: it may have happened"
            raise EffectUnknown(message)

    def close(self) -> None:
        """Begin nothing more: the node has ended, and whatever it left running must not act beside the next attempt."""
        with self._lock:
            self._closed = True

    def check_course(self, *, before: str) -> None:
        """Raise `Diverged` when an earlier attempt did something at risk that this one has not asked for again.

        Checked before a new effect at risk and when the node ends or parks: the attempt went another way, and what the
        earlier one did may have to be undone by a person.
        """
        with self._lock:
            if self._blocked is not None:
                raise self._blocked  # the node caught it; it is not the node's to decide
            left = [
                state
                for call, state in self._known().items()
                if state.at_risk and state.state != journal.FAILED and call not in self._asked
            ]
        if left:
            message = (
                f"an earlier attempt did {left[0].name!r} ({left[0].call}), which this one has not asked for before "
                f"{before}: the retry goes another way than the attempt before it"
            )
            self._blocked = Diverged(message)
            raise self._blocked
        self.beside(before)

    # --- keys --------------------------------------------------------------------------------------------------------

    def _known(self) -> dict[str, EffectState]:
        with self._lock:
            if self._found is None:
                states = journal.of_run(self._store, self._fence.thread_id, self._step, self._run)
                self._found = {state.call: state for state in states}
            return self._found

    def _reserved(self, declared: EffectDeclaration, digest: bytes, key: str | None) -> str:
        """Return a call's id, under way from now on: two that begin at once must not take each other for the past."""
        with self._lock:
            if self._closed:
                message = f"effect {declared.name!r} was asked for when the node had ended; nothing was called"
                raise StepError(message)
            if key is not None:
                call = f"{declared.name}:{checked_name('an effect key', key)}"
                if call in self._under_way:
                    message = f"effect key {key!r} of {declared.name!r} is being performed by another call of this node"
                    raise EffectConflict(message)
            else:
                base = f"{declared.name}:{digest.hex()[:16]}"
                occurrence = self._occurrences.get(base, 0)
                if occurrence and f"{base}:{occurrence - 1}" in self._under_way:
                    message = (
                        f"effect {declared.name!r} is performed twice at once with equal arguments; which is the first "
                        "depends on timing: give each an explicit key=…"
                    )
                    raise EffectConflict(message)
                self._occurrences[base] = occurrence + 1
                call = f"{base}:{occurrence}"
            self._asked.add(call)
            self._under_way[call] = declared
            return call

    def _ended(self, call: Call, state: str, result: bytes | None) -> None:
        known, name, at_risk = self._known(), call.declared.name, int(not call.declared.idempotent)
        with self._lock:
            self._under_way.pop(call.key.call, None)
            # A second call under the same explicit key in this attempt finds what the first one left.
            known[call.key.call] = EffectState(
                call.key.call, name, state, at_risk, call.digest, result, None, self._fence.nonce, 1
            )

    def _same_call(self, found: EffectState, declared: EffectDeclaration, digest: bytes, key: str | None) -> None:
        if bytes(found.arguments_digest) != digest:
            message = (
                f"effect key {key!r} of {declared.name!r} was used with other arguments before; nothing was called"
            )
            raise EffectConflict(message)

    def _unknown(self, found: EffectState) -> None:
        message = (
            f"effect {found.name!r} ({self._step}/{self._run}/{found.call}) was begun by an attempt that is gone and "
            "left no result: it may have happened"
        )
        self._blocked = EffectUnknown(message)
        raise self._blocked
