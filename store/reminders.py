"""Reminders: an approval that nobody has answered is told of again, as often as its node has asked for."""

from __future__ import annotations

from sqlalchemy import select, update

from keepstep import eventkinds
from keepstep.store import events, waits
from keepstep.store.engine import Store
from keepstep.store.schema import approval
from keepstep.store.statements import Statement, db_now, now_once, param

_DUE = Statement(
    lambda _dialect: (
        select(approval.c.id, approval.c.thread_id)
        .where(approval.c.status == "open", approval.c.remind_at.is_not(None), approval.c.remind_at <= now_once())
        .order_by(approval.c.remind_at)
        .limit(param("limit"))
    )
)
_REMIND = Statement(
    lambda _dialect: (
        update(approval)
        .where(approval.c.id == param("id"), approval.c.status == "open", approval.c.remind_at <= db_now())
        # Not from when it was due: what was missed while nothing ran is told once.
        .values(remind_at=db_now() + approval.c.remind_seconds, reminders=approval.c.reminders + 1)
        .returning(approval.c.run, approval.c.reminders, approval.c.assigned, approval.c.expires_at)
    )
)


def remind_due(store: Store, *, limit: int) -> int:
    """Remind of every approval whose time for that has come; return how many were.

    A transaction of its own for each, under the thread's lock; one whose thread is busy is left to the next sweep.
    """
    reminded = 0
    for approval_id, thread_id in store.rows(_DUE, {"limit": limit}):
        with store.transaction() as transaction:
            if not waits.lock_unless_busy(transaction, thread_id):
                continue
            row = transaction.row(_REMIND, {"id": approval_id})
            if row is not None:
                run, count, *asked = row
                said = {**waits.as_asked(*asked), "reminders": count}
                events.record(transaction, thread_id, eventkinds.REMINDED, run=run, approval_id=approval_id, **said)
                reminded += 1
    return reminded
