"""Effects: done once, or known to be unknown.

Every call to the outside has an idempotency key that is the same on every retry: step key, node run, and the call's own
id. A recorded result is returned and nothing is called. An effect that is safe to repeat (`idempotent`) is called and
its result recorded: one write. Any other is at risk: an intent is recorded first, under the lease, and of an intent
without a result whose owner is gone nobody here knows whether it happened. Then the outside is asked, when the effect
says how (`lookup`); otherwise the thread blocks until a person says.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from pydantic import ValidationError

from keepstep.crashpoints import reach
from keepstep.errors import (
    ArtifactCorrupt,
    Diverged,
    EffectConflict,
    EffectGivenUp,
    EffectPending,
    EffectUnknown,
    InvalidInput,
    NodeTimeout,
    PutOff,
    StaleLease,
    ThreadBlocked,
)
from keepstep.runtime.callids import CallIds
from keepstep.runtime.codec import Codec
from keepstep.runtime.effects import (
    NOT_DONE,
    EffectDeclaration,
    all_arguments,
    annotated_types,
    arguments_digest,
    by_name,
    declaration_of,
    result_type,
    wants_key,
)
from keepstep.runtime.faults import text_of
from keepstep.runtime.fields import fitted, problems_of
from keepstep.runtime.lostanswers import is_lost
from keepstep.runtime.masking import Masker
from keepstep.runtime.outcome import described
from keepstep.runtime.secretbook import by_reference, check_annotated
from keepstep.runtime.watchdog import undisturbed
from keepstep.store import effects as journal
from keepstep.store.artifacts import LargeValues
from keepstep.store.calls import NewAudit
from keepstep.store.effects import EffectKey, EffectState
from keepstep.store.engine import Store
from keepstep.store.errortext import error_text
from keepstep.store.leases import Fence
from keepstep.store.undoing import SUFFIX

_MAY_HAVE_HAPPENED = "may_have_happened"


@dataclass(frozen=True, slots=True)
class Recorded:
    """An effect that has happened: its result as it was."""

    result: Any
    meta: Any = None
    """Of a model call: what is known of it besides its result."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """An effect that may have happened: the outside is to be asked before anything else."""

    call: Call
    found: EffectState
    ask: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    """What to ask with: what the effect would be called with, those of a partial function among them."""


@dataclass(frozen=True, slots=True)
class Call:
    """An effect to be performed now."""

    key: EffectKey
    declared: EffectDeclaration
    digest: bytes
    codec: Codec
    extra: Mapping[str, Any]
    """The idempotency key, for a function that takes one."""
    arguments: bytes | None = None
    """Of an effect at risk, for whoever may have to find out whether it happened."""
    returns: Any = None
    """What the function's annotation says it returns; None: nothing."""
    explicit_key: str | None = None
    asking: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), MappingProxyType({}))
    """The arguments, positional and named, of its lookup."""
    audit: NewAudit | None = None
    """Written with the intent, or with the result of a call that has none."""


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
        masker: Masker,
        load: bool,
        remaining: Callable[[], float],
        artifacts: LargeValues,
        run_id: str | None = None,
    ) -> None:
        """`run` is the node run, `run_id` the thread's run; `remaining` says how many seconds the attempt has left."""
        self._store = store
        self._fence = fence
        self._tenant = tenant
        self._step = step
        self._run = run
        self._run_id = run_id
        self._codec = codec
        self.masker = masker
        """Knows the secrets that this attempt has resolved."""
        self._remaining = remaining
        self._large = artifacts
        self._is_stale = False
        self._found: dict[str, EffectState] | None = None if load else {}
        self._opened: set[str] = set()
        self._doubtful: set[str] = set()
        """Repeatable calls that may have happened before they were known to have failed."""
        self._ids: CallIds[EffectDeclaration] = CallIds("an effect key", EffectConflict)
        self._blocked: ThreadBlocked | PutOff | None = None
        self.beside: Callable[[str], None] = lambda _before: None
        """Checks what else an earlier attempt has done that this one must ask for again (see `check_course`)."""
        self._lock = threading.RLock()

    # --- performing -------------------------------------------------------------------------------------------------

    def begin(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        key: str | None,
        declared: EffectDeclaration | None = None,
    ) -> Recorded | Lookup | Call:
        """Return an effect's recorded result, or the call to be made, its intent recorded when it is at risk.

        A `Lookup` is to be asked first, and its answer given to `looked_up`, which returns one of the other two.
        `declared`: what the effect is, unless the function says it itself.
        """
        return self.open(self.identify(function, arguments, named, key, declared=declared))

    def identify(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        key: str | None,
        *,
        declared: EffectDeclaration | None = None,
    ) -> Call:
        """Return which call it is, under way from now on until it is opened and has ended, or is released."""
        declared = declared or declaration_of(function)
        codec = self._codec.including(*annotated_types(function))
        given_by_name = by_name(function, arguments, named)
        if declared.undo_name is not None:
            check_annotated(function, declared.name, given_by_name)
        values = by_reference(given_by_name)
        digest = arguments_digest(function, values, codec, declared.name)
        self.masker.refuse(key, f"${declared.name}, the key")
        if key is not None and key.endswith(SUFFIX):
            message = f"effect {declared.name!r}: key {key!r} ends with {SUFFIX!r}, as the keys of undos do"
            raise InvalidInput(message)
        id_ = self._ids.reserve(f"effect {declared.name!r}", declared.name, digest, key, declared)
        extra = {"idempotency_key": f"{self._step}/{self._run}/{id_}"}
        given, given_named = all_arguments(function, arguments, named)
        ask = declared.lookup
        return Call(
            EffectKey(self._fence.thread_id, self._step, self._run, id_),
            declared,
            digest,
            codec,
            extra if wants_key(function) else {},
            None if declared.idempotent else codec.encode(values, path=f"${declared.name}"),
            result_type(function),
            key,
            (given, given_named if ask is None or not wants_key(ask) else {**given_named, **extra}),
        )

    def open(self, call: Call) -> Recorded | Lookup | Call:
        """Begin a call that was identified; see `begin`."""
        self._opened.add(call.key.call)
        return self._kept_under_way(call, lambda: self._begun(call))

    def reopen(self, call: Call) -> Recorded | Lookup | Call:
        """Begin a call again that this attempt has made and that failed."""
        self._ids.resume(call.key.call, call.declared)
        return self.open(call)

    def release(self, call: Call) -> None:
        """Give up a call that was identified, unless it was opened: then it is under way until its outcome is known."""
        if call.key.call not in self._opened:
            self._ids.end(call.key.call)

    def amended(self, call: Call, function: Callable[..., Any], named: Mapping[str, Any]) -> Call:
        """Return a call with other arguments in the place of those that it was identified by."""
        values = by_reference(by_name(function, (), named))
        extra = {name: value for name, value in call.asking[1].items() if name == "idempotency_key"}
        return replace(
            call,
            digest=arguments_digest(function, values, call.codec, call.declared.name),
            arguments=None if call.declared.idempotent else call.codec.encode(values, path=f"${call.declared.name}"),
            asking=((), {**named, **extra}),
        )

    def state_of(self, call: Call) -> EffectState | None:
        """Return what is known of a call: from earlier attempts, and from this one."""
        return self.state(call.key.call)

    def state(self, call: str) -> EffectState | None:
        """Return what is known of the call of an id."""
        with undisturbed():
            return self._known().get(call)

    def put_off(self, message: str, seconds: float) -> NoReturn:
        """Put the node run off, whatever the node makes of it: nothing at risk is begun any more."""
        self.hold_up(PutOff(message, seconds=seconds))

    def _kept_under_way(self, call: Call, begin: Callable[[], Recorded | Lookup | Call]) -> Recorded | Lookup | Call:
        """Begin a call; unless it is to be made now, it is no longer under way."""
        begun: Recorded | Lookup | Call | None = None
        try:
            with undisturbed():
                begun = begin()
        finally:
            if begun is None or isinstance(begun, Recorded):
                self._ids.end(call.key.call)
        return begun

    def _begun(self, call: Call) -> Recorded | Lookup | Call:
        declared = call.declared
        found = self._known().get(call.key.call)
        if found is not None:
            self._same_call(found, declared, call.digest, call.explicit_key)
            if found.state == journal.DONE:
                return self._recorded(call, found)
            _check_given_up(found)
            if declared.repeatable and (found.state == journal.INTENT or may_have_happened(found)):
                self._doubtful.add(call.key.call)
            elif found.state == journal.INTENT and not declared.idempotent:
                if declared.lookup is None:
                    self._unknown(found)
                return Lookup(call, found, declared.lookup, *call.asking)
        return self._intended(call)

    def _said_meanwhile(self, call: Call) -> Recorded | Lookup | Call:
        """Go on from what a person has said of an effect while this attempt was about to act on it."""
        with self._lock:
            self._found = None
        return self._begun(call)

    def _intended(self, call: Call) -> Recorded | Lookup | Call:
        """Record the intent of a call that is at risk: from then on it may have happened."""
        declared = call.declared
        if declared.idempotent:
            return call
        self.check_course(before=f"effect {declared.name!r}")
        remaining = self._remaining()
        if remaining <= 0:
            message = f"effect {declared.name!r} was not begun: the node's time is over"
            raise NodeTimeout(message)
        if declared.timeout_seconds is not None:
            remaining = min(remaining, declared.timeout_seconds)
        reach("before_intent", call.key.call)
        begun = self._store.patiently(
            lambda: journal.begin(
                self._store,
                self._fence,
                call.key,
                **self._about(call),
                **self._large.placed(self._tenant, call.arguments, "arguments", "arguments_artifact"),
                seconds=remaining,
                audit=call.audit,
                run_id=self._run_id,
                undo=declared.undo_name,
            )
        )
        if not begun:
            return self._said_meanwhile(call)
        self._begun_now(call)
        reach("after_intent", call.key.call)
        return call

    def _begun_now(self, call: Call) -> None:
        """Remember an intent: until its outcome is recorded, what an earlier call of it came to is not known of it."""
        known, name = self._known(), call.declared.name
        with self._lock:
            before = known.get(call.key.call)
            calls = 0 if before is None else before.calls
            known[call.key.call] = EffectState(
                call.key.call, name, journal.INTENT, 1, call.digest, None, None, self._fence.nonce, calls
            )

    def _recorded(self, call: Call, found: EffectState) -> Recorded:
        try:
            result = self._large.fetched(self._tenant, found.result, found.artifact) or b""
        except ArtifactCorrupt as error:
            self._blocked = error
            raise
        if found.resolved_by is None:
            return Recorded(call.codec.decode(result), None if found.meta is None else call.codec.decode(found.meta))
        # A person wrote it as JSON: it becomes what the function would have returned.
        given = call.codec.decode(result)
        try:
            where = f"the result of {found.name!r}"
            return Recorded(given if call.returns is None else fitted(where, call.returns, given))
        except ValidationError as error:
            problem = next(iter(problems_of(error, "$")))
            message = (
                f"effect {found.name!r} ({self._step}/{self._run}/{found.call}): the result that {found.resolved_by} "
                f"gave is not what it returns: {problem}; resolve it again"
            )
            self._blocked = EffectUnknown(message)
            raise self._blocked from None

    # --- asking the outside -----------------------------------------------------------------------------------------

    def looked_up(self, lookup: Lookup, answer: object) -> Recorded | Lookup | Call:
        """Go on with what the outside answered: the result, or `NOT_DONE`.

        Raises `EffectPending` when it has not happened and still may.
        """
        return self._kept_under_way(lookup.call, lambda: self._answered(lookup, answer))

    def _answered(self, lookup: Lookup, answer: object) -> Recorded | Lookup | Call:
        call, found = lookup.call, lookup.found
        if answer is NOT_DONE:
            left = found.seconds_left + call.declared.settling_seconds
            if left > 0:
                self._still_may(found, left)
            return self._intended(call)
        answer = self.masker.value(answer)
        stored = call.codec.encode(answer, path=f"${call.declared.name}.result")
        recorded = self._store.patiently(
            lambda: journal.finish(self._store, found.nonce, call.key, state=journal.DONE, **self._placed(stored))
        )
        if not recorded:
            return self._said_meanwhile(call)
        self._ended(call, journal.DONE, stored)
        return Recorded(answer)

    def _still_may(self, found: EffectState, seconds: float) -> NoReturn:
        message = f"effect {found.name!r} has not happened and still may: asked again in {seconds:.0f} s"
        self.hold_up(EffectPending(message, seconds=seconds))

    def not_looked_up(self, lookup: Lookup, error: Exception) -> NoReturn:
        """Give up on a lookup that failed: whether the effect happened stays unknown."""
        self._ids.end(lookup.call.key.call)
        text = self.masker.text(f"{type(error).__name__}: {error}")[:300]
        message = f"{self._told(lookup.found)}, and asking the outside failed: {text}"
        unknown = EffectUnknown(message)
        unknown.asking_failed = error
        self._blocked = unknown
        raise unknown from error

    # --- what came of it --------------------------------------------------------------------------------------------

    def succeed(self, call: Call, result: object) -> Any:
        """Record an effect's result and return it; secrets in it are masked now, as they would be on a retry.

        When the result cannot be stored the intent stays without one: it did happen, and a retry must not repeat it.
        """
        reach("after_call", call.key.call)
        result = self.masker.value(result)
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
                    **self._about(call),
                    audit=call.audit,
                    run_id=self._run_id,
                    **self._placed(stored),
                )
            )
        else:
            self._store.patiently(
                lambda: journal.finish(
                    self._store, self._fence.nonce, call.key, state=journal.DONE, **self._placed(stored)
                )
            )
        self._ended(call, journal.DONE, stored)

    def _about(self, call: Call) -> dict[str, Any]:
        """Return what every row about a call says of it."""
        return {"tenant": self._tenant, "name": call.declared.name, "arguments_digest": call.digest}

    def _placed(self, result: bytes) -> dict[str, Any]:
        return self._large.placed(self._tenant, result, "result", "artifact")

    def keep(self, call: Call, result: bytes, meta: bytes) -> Recorded | None:
        """Record the result of a call that was paid for, even if the lease is lost; None when it is recorded.

        When another attempt's is there already, that one stands, and is returned.
        """
        kept = self._store.patiently(
            lambda: journal.keep(
                self._store,
                self._fence,
                call.key,
                **self._about(call),
                meta=meta,
                **self._placed(result),
            )
        )
        self._is_stale = self._is_stale or kept.is_stale
        self._ended(call, journal.DONE, result, meta)
        if kept.before is None or kept.before.state != journal.DONE or kept.before.nonce == self._fence.nonce:
            return None
        with self._lock:
            self._known()[call.key.call] = kept.before
        return self._recorded(call, kept.before)

    def check_lease(self, call: Call) -> None:
        """Raise `StaleLease` when the lease is known to be lost: what another attempt pays for is not paid twice."""
        if self._is_stale:
            self._ids.end(call.key.call)
            raise StaleLease

    def raised(self, call: Call, error: Exception) -> Lookup | None:
        """Record what an error of the call means: None when it failed, and a retry of the node may try again.

        When its answer was lost it may have happened: a `Lookup` to be asked is returned where there is one (its answer
        goes to `looked_up`, `NOT_DONE` to `not_done`), else `EffectUnknown` is raised.
        """
        with undisturbed():
            if call.declared.repeatable and is_lost(error):
                self._doubtful.add(call.key.call)
            if call.declared.idempotent or call.declared.repeatable or not is_lost(error):
                self._failed(call, error)
                return None
            self._lost(call)
        found = self._known()[call.key.call]
        if call.declared.lookup is not None:
            return Lookup(call, found, call.declared.lookup, *call.asking)
        text = text_of(error, self.masker.text)[:300]
        message = f"{self._told(found)} (its answer was lost: {type(error).__name__}: {text})"
        self._blocked = EffectUnknown(message)
        raise self._blocked from error

    def fail(self, call: Call, error: BaseException) -> None:
        """Record that an effect failed: a known failure, which a retry of the node may try again."""
        with undisturbed():
            self._failed(call, error)

    def not_done(self, lookup: Lookup, error: Exception) -> None:
        """Record that a call whose answer was lost failed; raise `EffectPending` while the outside may catch up."""
        left = lookup.call.declared.settling_seconds
        if left > 0:
            self._still_may(lookup.found, left)
        self.fail(lookup.call, error)

    def _lost(self, call: Call) -> None:
        """Leave the intent without an outcome; the call itself is over, so that asking about it need not wait."""
        self._store.patiently(lambda: journal.returned(self._store, self._fence.nonce, call.key))
        with self._lock:
            self._ids.end(call.key.call)
            self._known()[call.key.call] = EffectState(
                call.key.call, call.declared.name, journal.INTENT, 1, call.digest, None, None, self._fence.nonce, 1
            )

    def _failed(self, call: Call, error: BaseException) -> None:
        doubt = {_MAY_HAVE_HAPPENED: True} if call.key.call in self._doubtful else {}
        text = error_text({**described(error, masker=self.masker), **doubt})
        if call.declared.counted and call.declared.idempotent:
            self._store.patiently(
                lambda: journal.count_failure(
                    self._store,
                    self._fence,
                    call.key,
                    **self._about(call),
                    error=text,
                    run_id=self._run_id,
                )
            )
        if not call.declared.idempotent:
            self._store.patiently(
                lambda: journal.finish(self._store, self._fence.nonce, call.key, state=journal.FAILED, error=text)
            )
        self._ended(call, journal.FAILED, None, error=text)

    def check_settled(self) -> None:
        """Raise `EffectUnknown` when this attempt left an effect at risk without an outcome, whoever caught why."""
        left = [call for call, declared in list(self._ids.under_way.items()) if not declared.idempotent]
        if left:
            message = f"effect {left[0]} was begun and its outcome could not be recorded: it may have happened"
            raise EffectUnknown(message)

    def close(self) -> None:
        """Begin nothing more: the node has ended."""
        self._ids.close()

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
                if state.at_risk and state.state != journal.FAILED and call not in self._ids.asked
            ]
        if left:
            message = (
                f"an earlier attempt did {left[0].name!r} ({left[0].call}), which this one has not asked for before "
                f"{before}: the retry goes another way than the attempt before it"
            )
            self.hold_up(Diverged(message))
        self.beside(before)

    # --- transactions (`transactions.py`): effects that are their own record ------------------------------------------

    def reserve(self, declared: EffectDeclaration, digest: bytes, key: str | None) -> Call:
        """Return a call under way, which `end`, `fail` or `ended` ends; nothing is recorded of it."""
        id_ = self._ids.reserve(f"ctx.{declared.name}", declared.name, digest, key, declared)
        place = EffectKey(self._fence.thread_id, self._step, self._run, id_)
        return Call(place, declared, digest, self._codec, {}, explicit_key=key)

    def found(self, call: Call) -> EffectState | None:
        """Return what is recorded of a call; raise `EffectConflict` when it is another one."""
        found = self._known().get(call.key.call)
        if found is not None:
            self._same_call(found, call.declared, call.digest, call.explicit_key)
            _check_given_up(found)
        return found

    def intend(self, call: Call) -> bool:
        """Record the intent of a call, also over one that an earlier attempt left; False: its outcome is known now."""
        return isinstance(self._intended(call), Call)

    def ended(self, call: Call, result: bytes) -> None:
        """Say that a call's result is recorded."""
        self._ended(call, journal.DONE, result)

    def end(self, call: Call) -> None:
        """Say that a call is not under way any more, whatever became of it."""
        self._ids.end(call.key.call)

    def hold_up(self, error: ThreadBlocked | PutOff) -> NoReturn:
        """Raise an error that is not the node's to decide, now and when the node has ended."""
        self._blocked = error
        raise error

    # --- keys --------------------------------------------------------------------------------------------------------

    def _known(self) -> dict[str, EffectState]:
        with self._lock:
            if self._found is None:
                states = journal.of_run(self._store, self._fence.thread_id, self._step, self._run)
                self._found = {state.call: state for state in states}
            return self._found

    def _ended(
        self, call: Call, state: str, result: bytes | None, meta: bytes | None = None, error: str | None = None
    ) -> None:
        known, name, at_risk = self._known(), call.declared.name, int(not call.declared.idempotent)
        with self._lock:
            self._ids.end(call.key.call)
            calls = 1 if call.key.call not in known else known[call.key.call].calls + 1
            # A second call under the same explicit key in this attempt finds what the first one left.
            known[call.key.call] = EffectState(
                call.key.call, name, state, at_risk, call.digest, result, error, self._fence.nonce, calls, meta=meta
            )

    def _same_call(self, found: EffectState, declared: EffectDeclaration, digest: bytes, key: str | None) -> None:
        if bytes(found.arguments_digest) != digest:
            message = (
                f"effect key {key!r} of {declared.name!r} was used with other arguments before; nothing was called"
            )
            raise EffectConflict(message)

    def _unknown(self, found: EffectState) -> NoReturn:
        self.hold_up(EffectUnknown(self._told(found)))

    def _told(self, found: EffectState) -> str:
        by = "this attempt" if found.nonce == self._fence.nonce else "an attempt that is gone"
        return (
            f"effect {found.name!r} ({self._step}/{self._run}/{found.call}) was begun by {by} and left no result: it "
            "may have happened"
        )


def may_have_happened(found: EffectState) -> bool:
    """Tell whether a call that failed last, and is repeatable, may have happened in a call before."""
    with contextlib.suppress(ValueError):
        return found.error is not None and bool(json.loads(found.error).get(_MAY_HAVE_HAPPENED))
    return False


def _check_given_up(found: EffectState) -> None:
    if found.state == journal.GIVEN_UP:
        message = f"effect {found.name!r} was given up by {found.resolved_by}: {_reason(found)}"
        raise EffectGivenUp(message)


def _reason(found: EffectState) -> str:
    with contextlib.suppress(ValueError):
        return str(json.loads(found.error or "{}").get("message", "")) or "no reason given"
    return "no reason given"
