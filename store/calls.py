"""The audit rows of tool calls: one for each call, however often it is tried, in the transaction that says it began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.sql.base import Executable

from keepstep.store.engine import Transaction
from keepstep.store.schema import audit
from keepstep.store.statements import Statement, db_now, param


@dataclass(frozen=True, slots=True)
class NewAudit:
    """What is said of a call."""

    action: str
    actor: str
    key: str
    """Of the call or of what was decided about it: a second row under it is not written."""
    detail: str


def _once(dialect: str) -> Executable:
    insert: Any = postgresql_insert(audit) if dialect == "postgresql" else sqlite_insert(audit)
    names = ("tenant", "thread_id", "actor", "action", "command_id", "detail")
    once: Executable = insert.values(**{name: param(name) for name in names}, at=db_now()).on_conflict_do_nothing(
        index_elements=["tenant", "command_id"]
    )
    return once


_ONCE = Statement(_once)


def record(transaction: Transaction, new: NewAudit, *, tenant: str, thread_id: str) -> None:
    """Say what was called, or refused, unless that is said already."""
    said = {"actor": new.actor, "action": new.action, "command_id": f"{new.action} {new.key}", "detail": new.detail}
    transaction.run(_ONCE, {**said, "tenant": tenant, "thread_id": thread_id})
