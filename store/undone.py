"""What came of one undo: one fenced transaction, which is the last of the run when nothing is left to be undone."""

from __future__ import annotations

import json
from collections import Counter

from sqlalchemy import exists, func, select, update

from keepstep.store import threads
from keepstep.store.effects import is_call
from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import NUDGE_SECONDS, Fence, Nudge, fence_params, fenced, nudge_columns, released
from keepstep.store.outcomes import Locked, lock, stopped
from keepstep.store.schema import FAILED, effect, run, thread
from keepstep.store.statements import Statement, db_now, param
from keepstep.store.undoing import Undoable, is_to_be_undone

UNDONE, GIVEN_UP, NOT_DONE = "undone", "given_up", "not_done"

_MARK = Statement(
    lambda _dialect: (
        update(effect)
        .where(
            *is_call(),
        )
        .values(undone=param("undone"))
    )
)
_GO_ON = Statement(
    lambda _dialect: (
        update(thread)
        .where(*fenced(thread), exists().where(*is_to_be_undone(thread.c.id, thread.c.run_id)))
        .values(
            **released(thread),
            error=param("error"),
            starts=0,
            failures=0,
            deaths=0,
            last_death=None,
            version=thread.c.version + 1,
            due_at=db_now(),
            next_nudge_at=db_now() + NUDGE_SECONDS,
            nudges=0,
            updated_at=db_now(),
        )
        .returning(*nudge_columns(thread))
    )
)
_ERROR = Statement(lambda _dialect: select(run.c.error).where(run.c.id == param("run_id")))
_COUNTS = Statement(
    lambda _dialect: (
        select(effect.c.undone, func.count())
        .where(effect.c.thread_id == param("thread_id"), effect.c.run_id == param("run_id"))
        .group_by(effect.c.undone)
    )
)


def went_on(store: Store, fence: Fence, undone: Undoable | None, outcome: str = UNDONE) -> list[Nudge]:
    """Write what came of an undo and go on to the next; after the last the run has failed. Returns the nudges.

    None: nothing was left to be undone. `outcome`: `undone`, `given_up` (a person gave the undo up) or `not_done` (the
    effect had not happened). The failed run has the error it failed with, and how many effects were undone. Raises
    `StaleLease` when the lease is gone.
    """
    with store.transaction() as transaction:
        locked = lock(transaction, fence)
        if undone is not None:
            place = {"step": undone.step, "run": undone.run, "call": undone.call}
            transaction.run(_MARK, {**place, "thread_id": fence.thread_id, "undone": outcome})
        kept = transaction.row(_ERROR, {"run_id": locked.run_id})
        error = str(kept[0]) if kept is not None and kept[0] else "{}"
        row = transaction.row(_GO_ON, {**fence_params(fence), "error": error})
        if row is None:
            text = _with_note(error, _counts(transaction, fence, locked))
            nudges = stopped(transaction, fence, locked, status=FAILED, error=text)
        else:
            nudges = [Nudge("step", *row)]
        if undone is not None:
            _audit(transaction, fence, locked, undone, outcome)
    return nudges


def _counts(transaction: Transaction, fence: Fence, locked: Locked) -> Counter[str]:
    rows = transaction.rows(_COUNTS, {"thread_id": fence.thread_id, "run_id": locked.run_id})
    return Counter({str(undone): int(count) for undone, count in rows if undone is not None})


def _with_note(error: str, counts: Counter[str]) -> str:
    """Return the error that a run failed with, and in it what was undone."""
    parts = json.loads(error)
    done, given_up = counts[UNDONE], counts[GIVEN_UP]
    note = f"{done} effect{' was' if done == 1 else 's were'} undone"
    if given_up:
        note += f", {given_up} {'was' if given_up == 1 else 'were'} left as {'it is' if given_up == 1 else 'they are'}"
    parts["message"] = f"{parts.get('message', '')} ({note}: start it again)"
    return json.dumps({**parts, "undone": done}, ensure_ascii=True)


def _audit(transaction: Transaction, fence: Fence, locked: Locked, undone: Undoable, outcome: str) -> None:
    threads.record_audit(
        transaction,
        tenant=locked.tenant,
        thread_id=fence.thread_id,
        actor="keepstep",
        action="undo",
        detail=json.dumps({"name": undone.name, "effect": undone.key, "outcome": outcome}, ensure_ascii=True),
    )
