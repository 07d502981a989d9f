"""The audit of commands that were refused since their sender may not: once for each, and so many for a thread."""

from __future__ import annotations

from sqlalchemy import func, select

from keepstep.store import calls
from keepstep.store.calls import NewAudit
from keepstep.store.engine import Transaction
from keepstep.store.schema import audit
from keepstep.store.statements import Statement, param

ACTION = "refused"
_OF_SENDER_MAX = 100
"""Whoever reaches the broker can have rows written: a thread's audit must stay readable, whoever floods it."""

_COUNT = Statement(
    lambda _dialect: (
        select(func.count())
        .select_from(audit)
        .where(
            audit.c.thread_id == param("thread_id"),
            audit.c.action == param("action"),
            audit.c.actor == param("actor"),
        )
    )
)


def record(transaction: Transaction, *, tenant: str, thread_id: str, actor: str, command_id: str, detail: str) -> bool:
    """Say what was refused; False when the thread has so many of this actor's rows that no more are written."""
    found = {"thread_id": thread_id, "action": ACTION, "actor": actor}
    if transaction.rows(_COUNT, found)[0][0] >= _OF_SENDER_MAX:
        return False
    # Ids are their senders' to choose: one that somebody else has used must hide nobody's word.
    key = f"{thread_id} {actor} {command_id}"
    calls.record(transaction, NewAudit(ACTION, actor, key, detail), tenant=tenant, thread_id=thread_id)
    return True
