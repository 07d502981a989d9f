"""The audit of commands that were refused since their sender may not: once for each, and so many for a thread."""

from __future__ import annotations

from sqlalchemy import func, select

from keepstep.store import calls
from keepstep.store.calls import NewAudit
from keepstep.store.engine import Transaction
from keepstep.store.schema import audit
from keepstep.store.statements import Statement, param

ACTION = "refused"
_OF_THREAD_MAX = 100
"""Whoever reaches the broker can have rows written: a thread's audit must stay readable."""

_COUNT = Statement(
    lambda _dialect: (
        select(func.count())
        .select_from(audit)
        .where(audit.c.thread_id == param("thread_id"), audit.c.action == param("action"))
    )
)


def record(transaction: Transaction, *, tenant: str, thread_id: str, actor: str, command_id: str, detail: str) -> bool:
    """Say what was refused; False when the thread has so many of these rows that no more are written."""
    if transaction.rows(_COUNT, {"thread_id": thread_id, "action": ACTION})[0][0] >= _OF_THREAD_MAX:
        return False
    calls.record(transaction, NewAudit(ACTION, actor, command_id, detail), tenant=tenant, thread_id=thread_id)
    return True
