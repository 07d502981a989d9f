"""Undoing what a failed run did: one effect per claim, the newest first, each undone once.

An undo is an effect at risk of its own, under the key of what it undoes and `/undo`: its intent is recorded, it is
called, its result is recorded. One whose outcome is unknown is looked up, called again or left to a person as its own
declaration says. What came of it is then written on the effect (`store/undone.py`), which lets the thread go on to the
next one, or fail when there is none.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from keepstep.crashpoints import Died, reach
from keepstep.errors import (
    DatabaseUnavailable,
    EffectGivenUp,
    EffectPending,
    EffectUnknown,
    InvalidInput,
    NodeTimeout,
    StaleLease,
    StepError,
    ThreadBlocked,
    UndoFailed,
    WorkerLost,
)
from keepstep.runtime import undos
from keepstep.runtime.codec import Codec
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.effects import NOT_DONE, annotated_types, declaration_of
from keepstep.runtime.environment import Runtime
from keepstep.runtime.execution import event_loop
from keepstep.runtime.journal import Call, Lookup, Recorded
from keepstep.runtime.masking import Masker
from keepstep.runtime.outcome import NodeOverdue, described
from keepstep.runtime.policy import Retry
from keepstep.runtime.secretbook import SecretBook, taken, with_secrets
from keepstep.runtime.settlement import PATIENCE_SECONDS
from keepstep.runtime.undojournal import UndoJournal
from keepstep.runtime.undos import Undo
from keepstep.runtime.watchdog import alarm
from keepstep.store import leases, outcomes, undoing, undone
from keepstep.store.claims import Claim
from keepstep.store.errortext import error_text
from keepstep.store.leases import Nudge
from keepstep.store.schema import BLOCKED
from keepstep.store.undoing import Undoable
from keepstep.store.undone import GIVEN_UP, UNDONE
from keepstep.store.undone import NOT_DONE as NOT_DONE_OUTSIDE

log = structlog.get_logger("keepstep.step")

RETRY = Retry()
"""How an undo that fails is tried again."""


def undo_next(runtime: Runtime, claim: Claim, graph: CompiledGraph) -> list[Nudge]:
    """Undo the newest effect that is left of a failed run; return the nudges that follow.

    Raises `StaleLease` when the lease was lost, `DatabaseUnavailable` when the database stayed away.
    """
    found = undoing.next_of(runtime.store, claim.thread.id, claim.thread.run_id or "")
    if found is None:  # a person has given up what was left
        return _went_on(runtime, claim, None, UNDONE)
    secrets = SecretBook(runtime.secrets, claim.thread.tenant)
    try:
        _check_deaths(runtime, claim, found)
        came_to = _Undoing(runtime, claim, graph, found, secrets).undo()
    except (StaleLease, DatabaseUnavailable):
        raise
    except EffectGivenUp:
        came_to = GIVEN_UP
    except EffectPending as error:
        text = _described(found, error, secrets.masker)
        return _put_off(runtime, claim, text, error.seconds, claim.attempt.failures)
    except BaseException as error:
        # User code may raise anything; these alone are about the process, not about the undo.
        told_to_stop = isinstance(error, SystemExit) and type(error) is not SystemExit
        if told_to_stop or isinstance(error, KeyboardInterrupt | Died):
            raise
        return _failed(runtime, claim, found, error, secrets.masker)
    reach("after_undo", found.key)
    return _went_on(runtime, claim, found, came_to)


def _check_deaths(runtime: Runtime, claim: Claim, found: Undoable) -> None:
    if claim.attempt.deaths >= runtime.settings.deaths_max:
        message = (
            f"undoing effect {found.name!r} took its process down {claim.attempt.deaths} times (last: "
            f"{claim.attempt.last_death}); retry gives it another chance"
        )
        raise WorkerLost(message)


# --- one undo ---


class _Undoing:
    """One attempt to undo an effect."""

    def __init__(
        self, runtime: Runtime, claim: Claim, graph: CompiledGraph, found: Undoable, secrets: SecretBook
    ) -> None:
        self._runtime = runtime
        self._found = found
        self._tenant = claim.thread.tenant
        self._seconds = runtime.settings.node_timeout_seconds
        self._deadline = time.monotonic() + self._seconds
        self._declared: Undo = undos.find(found.name, found.undo)
        effect, undo = self._declared
        self._book = secrets
        # Of a tool: what it was given then, its undo and its lookups are given now.
        references: Mapping[str, str] = getattr(effect, "references", {})
        self._secrets = {name: secrets.resolve(ref) for name, ref in references.items()}
        self._codec: Codec = runtime.codec(graph).including(*annotated_types(effect), *annotated_types(undo))
        self._journal = UndoJournal(
            runtime.store,
            claim.fence,
            tenant=claim.thread.tenant,
            step=found.step,
            run=found.run,
            codec=self._codec,
            masker=secrets.masker,
            load=True,
            remaining=self._left,
            artifacts=runtime.large_values,
            run_id=claim.thread.run_id,
        )

    def _arguments(self) -> bytes:
        found = self._found
        stored = self._runtime.large_values.fetched(self._tenant, found.arguments, found.arguments_artifact)
        return stored or b""

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def undo(self) -> str:
        """Undo the effect, unless it has not happened; return which of the two it was."""
        grace = self._runtime.settings.timeout_grace_seconds
        with self._runtime.watchdog.watch(self._seconds + grace, self._write_off, self._runtime.end):
            given = with_secrets(self._declared.effect, self._codec.decode(self._arguments()), self._book.resolve)
            happened = self._happened(given)
            if happened is None:
                return NOT_DONE_OUTSIDE
            self._undone(given, happened.result)
        return UNDONE

    def _happened(self, given: Mapping[str, Any]) -> Recorded | None:
        """Return the effect as it happened; None when the outside says that it has not."""
        begun = self._journal.begun(self._found, self._declared.effect, given)
        if not isinstance(begun, Lookup):
            return begun
        answer = self._asked(begun)
        if answer is NOT_DONE:
            self._journal.not_happened(begun)
            return None
        found = self._journal.looked_up(begun, answer)
        return found if isinstance(found, Recorded) else None

    def _undone(self, given: Mapping[str, Any], result: object) -> None:
        undo = self._declared.undo
        key = f"{self._found.key}{undoing.SUFFIX}"
        named = undos.arguments_of(undo, given, result, key)
        reach("before_undo", self._found.key)
        lookup = declaration_of(undo).lookup
        asking = {} if lookup is None else undos.arguments_of(lookup, given, result, key)
        begun: Recorded | Lookup | Call = self._journal.begin_undo(self._found, undo, named, asking)
        while isinstance(begun, Lookup):
            begun = self._journal.looked_up(begun, self._storable(self._asked(begun)))
        if isinstance(begun, Recorded):
            return
        try:
            came_to = self._called(undo, (), named)
        except Exception as error:
            if declaration_of(undo).idempotent:  # whether it arrived or not, it is tried again
                self._journal.fail(begun, error)
                raise
            lost = self._journal.raised(begun, error)
            if lost is None:
                raise
            answer = self._storable(self._asked(lost))
            if answer is NOT_DONE:
                self._journal.not_done(lost, error)
                raise
            self._journal.looked_up(lost, answer)
        else:
            self._journal.succeed(begun, self._storable(came_to))

    def _storable(self, result: object) -> object:
        """Return what an undo gave, None in place of what cannot be stored: that it is undone is what counts."""
        if result is NOT_DONE:
            return result
        try:
            self._codec.encode(result)
        except InvalidInput:
            return None
        return result

    def _asked(self, lookup: Lookup) -> Any:
        try:
            return self._called(lookup.ask, lookup.arguments, lookup.named)
        except Exception as error:  # noqa: BLE001  a lookup that fails leaves the outcome unknown, however it does
            self._journal.not_looked_up(lookup, error)

    def _called(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call the user's function, a coroutine function on this thread's event loop, in the time that is left."""
        with alarm(max(self._left(), 0.001), process_is_ours=self._runtime.end_process is not None):
            result = function(*arguments, **named, **taken(function, self._secrets))
        return event_loop().run(self._awaited(result)) if inspect.isawaitable(result) else result

    async def _awaited(self, result: Any) -> Any:
        limit = asyncio.timeout(self._left())
        try:
            async with limit:
                return await result
        except TimeoutError:
            if limit.expired():
                raise NodeOverdue from None
            raise

    def _write_off(self) -> None:
        # The process is ended: what it began is unknown then, and its death is counted.
        log.error("undo_hung", effect=self._found.key)


# --- what came of it ---


def _went_on(runtime: Runtime, claim: Claim, found: Undoable | None, came_to: str) -> list[Nudge]:
    return runtime.store.patiently(
        lambda: undone.went_on(runtime.store, claim.fence, found, came_to), seconds=PATIENCE_SECONDS
    )


def _put_off(runtime: Runtime, claim: Claim, error: Mapping[str, Any], seconds: float, failures: int) -> list[Nudge]:
    text = error_text(error)
    runtime.store.patiently(
        lambda: leases.postpone(runtime.store, claim.fence, failures=failures, delay_seconds=seconds, error=text),
        seconds=PATIENCE_SECONDS,
    )
    return []


def _failed(runtime: Runtime, claim: Claim, found: Undoable, error: BaseException, masker: Masker) -> list[Nudge]:
    """Try it again later, or block the thread: it has not failed, and not everything is as it was."""
    failures = claim.attempt.failures + 1
    cause = _cause(runtime, found, error)
    asking_failed = cause.asking_failed if isinstance(cause, EffectUnknown) else None
    retriable = asking_failed if isinstance(cause, ThreadBlocked) else cause
    if retriable is not None and RETRY.allows(retriable, failures):
        text = _described(found, cause, masker)
        return _put_off(runtime, claim, text, RETRY.wait(failures, random.random), failures)
    if not isinstance(cause, ThreadBlocked):
        if runtime.on_failure is not None:
            runtime.on_failure(cause)
        text = described(cause, masker=masker)
        message = (
            f"effect {found.name!r} ({found.key}) could not be undone after {failures} attempt"
            f"{'' if failures == 1 else 's'}: {text['type']}: {text['message']}"
        )
        cause = UndoFailed(message)
    described_error = _described(found, cause, masker)
    log.warning(
        "undo_blocked", thread=claim.thread.name, effect=found.key, error=type(cause).__name__, message=str(cause)[:500]
    )
    return runtime.store.patiently(
        lambda: outcomes.stop(
            runtime.store, claim.fence, status=BLOCKED, error=error_text(described_error), failures=failures
        ),
        seconds=PATIENCE_SECONDS,
    )


def _cause(runtime: Runtime, found: Undoable, error: BaseException) -> Exception:
    if isinstance(error, NodeOverdue):
        seconds = runtime.settings.node_timeout_seconds
        return NodeTimeout(f"undoing effect {found.name!r} took longer than {seconds:g} s")
    if isinstance(error, SystemExit):
        return StepError("the undo called sys.exit()")
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def _described(found: Undoable, error: BaseException, masker: Masker) -> dict[str, Any]:
    text = described(error, masker=masker, undoes=found.key)
    if text["code"] == "node_failed":
        text["code"] = UndoFailed.code
    return text
