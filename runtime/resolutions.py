"""What a person says of an effect whose outcome nobody here knows: it happened, it did not, or give it up."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from keepstep.errors import EffectUnknown, InvalidInput, NotFound, UndoFailed, WrongStatus
from keepstep.runtime.environment import Runtime
from keepstep.store import effects, threads
from keepstep.store.engine import Transaction
from keepstep.store.errortext import error_text
from keepstep.store.leases import Nudge
from keepstep.store.schema import BLOCKED, FAILED
from keepstep.store.threads import ThreadState
from keepstep.store.undoing import SUFFIX

HAPPENED, NOT_HAPPENED, GIVE_UP = "happened", "not_happened", "give_up"


class Resolved(NamedTuple):
    """The thread that goes on."""

    thread: ThreadState
    nudges: list[Nudge]


def resolve(
    runtime: Runtime,
    transaction: Transaction,
    *,
    tenant: str,
    key: str,
    outcome: str,
    result: Any,
    by: str,
    reason: str | None,
) -> Resolved:
    """Write what became of an effect, and let the thread that was blocked by it go on.

    `key` is the effect's idempotency key. `happened`: the node gets `result` as if the call had returned it.
    `not_happened`: the node calls again, under the same key. `give_up`: the node gets `EffectGivenUp`. Of an undo
    (`KEY/undo`): the effect counts as undone, is undone again, or is left as it is. Raises `NotFound` when there is no
    such effect, `WrongStatus` when its outcome is known or its call under way.
    """
    found = threads.by_id(transaction, key.partition("/")[0])
    if found is None or found.tenant != tenant:
        text = f"there is no effect {key!r}"
        raise NotFound(text)
    known = effects.by_key(transaction, found.id, key)
    if known is None:
        others = ", ".join(effects.unknown_of_thread(transaction, found.id)) or "none"
        text = f"thread {found.name!r} has no effect {key!r} (its effects without an outcome: {others})"
        raise NotFound(text)
    _check(transaction, found, known, outcome, result)
    stored = runtime.plain_codec.encode(result, path="$.result") if outcome == HAPPENED else None
    error = error_text({"code": f"resolved_{outcome}", "message": reason or "", "by": by})
    effects.resolve(
        transaction,
        found.id,
        key,
        state={HAPPENED: effects.DONE, NOT_HAPPENED: effects.FAILED, GIVE_UP: effects.GIVEN_UP}[outcome],
        result=stored,
        error=None if outcome == HAPPENED else error,
        by=by,
    )
    return Resolved(found, _going_on(transaction, found, known))


def _going_on(transaction: Transaction, found: ThreadState, known: effects.UnknownEffect) -> list[Nudge]:
    """Run what the effect's outcome has held up again, and nothing else; return the nudges."""
    if found.undoing:
        held_up = found.status == BLOCKED and _code(found) in {EffectUnknown.code, UndoFailed.code}
        return threads.retry(transaction, found, None) if held_up else []
    if not effects.is_pending(transaction, known):
        return []  # it is written down; nobody asks for it any more
    if found.fanned:
        return threads.retry_blocked_run(transaction, found, known.run)
    held_up = found.status == BLOCKED and _code(found) == EffectUnknown.code
    return threads.retry(transaction, found, None) if held_up else []


def _code(found: ThreadState) -> str | None:
    code: str | None = json.loads(found.error or "{}").get("code")
    return code


def _check(
    transaction: Transaction, found: ThreadState, known: effects.UnknownEffect, outcome: str, result: Any
) -> None:
    if known.state != effects.INTENT and not _may_be_said_again(transaction, found, known):
        by = f", as {known.resolved_by} said" if known.resolved_by else ""
        text = f"effect {known.name!r} is {known.state}{by}: its outcome is known, there is nothing to resolve"
        raise WrongStatus(text)
    if effects.is_under_way(transaction, known):
        text = f"effect {known.name!r} is being tried at this moment: wait for what comes of it"
        raise WrongStatus(text)
    if outcome != HAPPENED and result is not None:
        text = "$.result: only what happened has a result"
        raise InvalidInput(text)


def _may_be_said_again(transaction: Transaction, found: ThreadState, known: effects.UnknownEffect) -> bool:
    """Tell whether a person's word may be taken back: as long as no node has gone on from it."""
    if found.undoing:
        return _may_be_said_of_undoing(found, known)
    if known.resolved_by is None or not effects.is_pending(transaction, known):
        return False
    if known.state == effects.GIVEN_UP:
        return found.status in {BLOCKED, FAILED}
    # The result that was given did not fit, and the thread says so.
    return known.state == effects.DONE and found.status == BLOCKED and _code(found) == EffectUnknown.code


def _may_be_said_of_undoing(found: ThreadState, known: effects.UnknownEffect) -> bool:
    """Tell whether a person may say what came of an undo that failed, or say again what an effect had returned."""
    if found.status != BLOCKED:
        return False
    if known.call.endswith(SUFFIX) and _code(found) == UndoFailed.code:
        return known.state == effects.FAILED  # it was undone by hand, or is to be left as it is
    return known.resolved_by is not None and known.state == effects.DONE and _code(found) == EffectUnknown.code
