"""Signals: kept until a wait consumes them, bounded in number and in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Text, and_, cast, delete, func, insert, or_, select, update

from keepstep.store.engine import Transaction
from keepstep.store.schema import signal
from keepstep.store.statements import Statement, db_now, param

_KEPT = and_(signal.c.thread_id == param("thread_id"), signal.c.consumed_by.is_(None), signal.c.expires_at > db_now())
_OLDEST = Statement(
    lambda _dialect: (
        select(signal.c.id, signal.c.payload)
        .where(
            _KEPT,
            signal.c.name == param("name"),
            or_(cast(param("key"), Text).is_(None), signal.c.key == cast(param("key"), Text)),
        )
        .order_by(signal.c.id)
        .limit(1)
    )
)
_CONSUME = Statement(
    lambda _dialect: update(signal).where(signal.c.id == param("id")).values(consumed_by=param("consumer"))
)
_COUNT = Statement(lambda _dialect: select(func.count()).select_from(signal).where(_KEPT))
_EXPIRE = Statement(
    lambda _dialect: delete(signal).where(signal.c.thread_id == param("thread_id"), signal.c.expires_at <= db_now())
)
_KEEP = Statement(
    lambda _dialect: insert(signal).values(
        tenant=param("tenant"),
        thread_id=param("thread_id"),
        name=param("name"),
        key=param("key"),
        payload=param("payload"),
        created_at=db_now(),
        expires_at=db_now() + param("ttl"),
    )
)


def take_signal(transaction: Transaction, wanted: Mapping[str, Any], *, consumer: str) -> bytes | None:
    """Consume the oldest kept signal of a thread that fits `wanted` (thread_id, name, key); None when there is none.

    A wait without a key takes any of that name; a wait with a key only that key's. The thread's lock is held.
    """
    row = transaction.row(_OLDEST, wanted)
    if row is None:
        return None
    transaction.run(_CONSUME, {"id": row[0], "consumer": consumer})
    return bytes(row[1])


def keep_signal(
    transaction: Transaction,
    *,
    tenant: str,
    thread_id: str,
    name: str,
    key: str | None,
    payload: bytes,
    ttl_seconds: float,
) -> None:
    """Keep a signal that no wait asked for yet. The thread's lock is held."""
    transaction.run(_EXPIRE, {"thread_id": thread_id})
    values = {"tenant": tenant, "thread_id": thread_id, "name": name, "key": key, "payload": payload}
    transaction.run(_KEEP, {**values, "ttl": ttl_seconds})


def kept_count(transaction: Transaction, thread_id: str) -> int:
    """Return how many signals of the thread nobody has asked for yet."""
    return int(transaction.rows(_COUNT, {"thread_id": thread_id})[0][0])
