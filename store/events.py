"""The log of events: what happened to threads and to their approvals, and what nodes tell the world.

An event is written in the transaction of what it tells, so neither is ever there without the other. Transactions are
committed in another order than their rows are numbered in, so a reader that goes by the rows' ids would miss what was
committed late. Each event is therefore given a position in the log once it is visible, by one process at a time: all
with a smaller position are visible then, and a reader that goes by positions misses nothing. A thread's events have the
order in which they happened, since its transactions take turns.

Past the log, events are published on the broker, at least once each and in its order. Who does that holds a mark, for a
while and not in a transaction: a broker that is slow holds up nobody's commit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Float,
    Text,
    case,
    cast,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.sql.base import Executable

from keepstep.eventkinds import EMITTED, OPENED, REASSIGNED, REMINDED
from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import Fence
from keepstep.store.schema import approval, event, mark, thread
from keepstep.store.statements import Row, Statement, db_now, one_of, param

_BYTES_MAX = 2**62
PLACED, PUBLISHED = "placed", "published"


@dataclass(frozen=True, slots=True)
class NewEvent:
    """Something a node tells the world; published by being committed with its step."""

    run: str
    payload: bytes


class EventView(NamedTuple):
    """An event, with the names of what it is about."""

    id: int
    position: int | None
    tenant: str
    application: str
    agent: str
    thread: str
    thread_id: str
    run_id: str | None
    seq: int
    run: str
    kind: str
    payload: bytes | None
    detail: str | None
    approval_id: str | None
    at: float
    left_out: int
    """1: payload and question are larger than the reader wanted them."""
    question: bytes | None
    """Of an approval that people are told of, as are the following."""
    asks: str | None
    quorum: int | None
    on_expiry: str | None


# --- writing ---

_EMIT = Statement(
    lambda _dialect: insert(event).values(
        tenant=param("tenant"),
        thread_id=param("thread_id"),
        run_id=param("run_id"),
        seq=param("seq"),
        run=param("run"),
        kind=EMITTED,
        payload=param("payload"),
        at=db_now(),
    )
)
_RECORD = Statement(
    lambda _dialect: insert(event).from_select(
        ["tenant", "thread_id", "run_id", "seq", "run", "kind", "approval_id", "detail", "at"],
        select(
            thread.c.tenant,
            thread.c.id,
            func.coalesce(cast(param("run_id"), Text), thread.c.run_id),
            # Of no step: a release that knows of emitted events alone counts what stands in a step for one of them.
            literal(-1),
            cast(param("run"), Text),
            cast(param("kind"), Text),
            cast(param("approval_id"), Text),
            cast(param("detail"), Text),
            db_now(),
        ).where(thread.c.id == param("thread_id")),
    )
)
_COUNT_EMITTED = Statement(
    lambda _dialect: (
        select(func.count())
        .select_from(event)
        .where(
            event.c.thread_id == param("thread_id"),
            event.c.seq >= param("first"),
            event.c.seq <= param("seq"),
            event.c.run == param("run"),
            event.c.kind == EMITTED,
        )
    )
)


def emit(transaction: Transaction, fence: Fence, tenant: str, run_id: str | None, emitted: Sequence[NewEvent]) -> None:
    """Write what a node run tells the world with the outcome that is being written."""
    for new in emitted:
        transaction.run(
            _EMIT,
            {
                "tenant": tenant,
                "thread_id": fence.thread_id,
                "run_id": run_id,
                "seq": fence.seq,
                "run": new.run,
                "payload": new.payload,
            },
        )


def record(
    transaction: Transaction,
    thread_id: str,
    kind: str,
    *,
    run_id: str | None = None,
    run: str = "",
    approval_id: str | None = None,
    **detail: Any,
) -> None:
    """Write what has happened to a thread whose lock is held. `run_id` None: it is about the thread's present run."""
    values = {"thread_id": thread_id, "kind": kind, "run_id": run_id, "run": run, "approval_id": approval_id}
    transaction.run(_RECORD, {**values, "detail": json.dumps(detail) if detail else None})


def record_end(
    transaction: Transaction, thread_id: str, status: str, *, run_id: str | None, error: str | None = None
) -> None:
    """Write that a thread's run is done, failed, cancelled or blocked; `error` is JSON."""
    detail = {} if error is None else {"error": json.loads(error)}
    record(transaction, thread_id, f"thread.{status}", run_id=run_id, **detail)


def emitted_by(store: Store, thread_id: str, step: str, seq: int, run: str) -> int:
    """Return how many events a node run has emitted in the step of a key that will write checkpoint `seq`.

    The key ends with the seq that the step began under; between the two there are edits of the state and nothing else.
    """
    first = int(step.rpartition("/")[2])
    return int(store.rows(_COUNT_EMITTED, {"thread_id": thread_id, "first": first, "seq": seq, "run": run})[0][0])


# --- positions ---

_PENDING = Statement(
    lambda _dialect: select(
        case((exists().where(event.c.position.is_(None)), 1), else_=0),
        select(func.coalesce(func.max(mark.c.position), 0)).where(mark.c.name == PLACED).scalar_subquery()
        - select(func.coalesce(func.max(mark.c.position), 0)).where(mark.c.name == PUBLISHED).scalar_subquery(),
    )
)


def _hold_placed(dialect: str) -> Executable:
    busy = dialect == "postgresql"
    return select(mark.c.position).where(mark.c.name == PLACED).with_for_update(skip_locked=busy)


def _place(_dialect: str) -> Executable:
    order = func.row_number().over(order_by=event.c.id).label("nth")
    unplaced = select(event.c.id, order).where(event.c.position.is_(None)).order_by(event.c.id).limit(param("limit"))
    found = unplaced.subquery("unplaced")
    return (
        update(event)
        .where(event.c.id == found.c.id)
        .values(position=cast(param("last"), mark.c.position.type) + found.c.nth)
    )


_HOLD_PLACED = Statement(_hold_placed)
_PLACE = Statement(_place)
_MOVE_PLACED = Statement(
    lambda _dialect: update(mark).where(mark.c.name == PLACED).values(position=mark.c.position + param("count"))
)


_NOT_FOR_LONG = "SET LOCAL idle_in_transaction_session_timeout = '10s'"


class Pending(NamedTuple):
    """What is left to do with the log."""

    unplaced: bool
    unpublished: int


def pending(store: Store) -> Pending:
    """Return what is left to do with the log: one look, for those who look often."""
    unplaced, unpublished = store.rows(_PENDING, {})[0]
    return Pending(bool(unplaced), int(unpublished))


_LAG = Statement(
    lambda _dialect: select(
        select(db_now() - func.min(event.c.at)).where(event.c.position.is_(None)).scalar_subquery(),
        select(db_now() - func.min(event.c.at))
        .where(event.c.position == select(mark.c.position + 1).where(mark.c.name == PUBLISHED).scalar_subquery())
        .scalar_subquery(),
    )
)


class Lag(NamedTuple):
    """How long, in seconds, the oldest event has waited; None: none waits."""

    unplaced: float | None
    unpublished: float | None


def lag(store: Store) -> Lag:
    """Return how far the log, and what is published of it, is behind what has happened."""
    return Lag(*store.rows(_LAG, {})[0])


def place(store: Store, *, limit: int) -> int:
    """Give the events that are visible and have none a position, up to `limit`; return how many got one.

    One process at a time does, whatever the number that try: the others do nothing.
    """
    with store.transaction() as transaction:
        if store.dialect == "postgresql":
            # One that stands still here must not stop the others for longer than this.
            transaction.cursor.execute(_NOT_FOR_LONG)
        held = transaction.row(_HOLD_PLACED, {})
        if held is None:
            return 0
        count = transaction.run(_PLACE, {"limit": limit, "last": held[0]})
        if count:
            transaction.run(_MOVE_PLACED, {"count": count})
    return count


# --- publishing ---

_HOLD = Statement(
    lambda _dialect: (
        update(mark)
        .where(
            mark.c.name == PUBLISHED,
            or_(
                mark.c.held_until <= db_now(),
                # The clock was set back.
                mark.c.held_until > db_now() + cast(param("seconds"), Float(53)),
                mark.c.holder == cast(param("who"), Text),
            ),
        )
        .values(holder=param("who"), held_until=db_now() + cast(param("seconds"), Float(53)))
        .returning(mark.c.position)
    )
)
_ADVANCE = Statement(
    lambda _dialect: (
        update(mark)
        .where(mark.c.name == PUBLISHED, mark.c.position < param("position"))
        .values(position=param("position"))
        .returning(mark.c.name)
    )
)
_LET_GO = Statement(
    lambda _dialect: (
        update(mark)
        .where(mark.c.name == PUBLISHED, mark.c.holder == param("who"))
        .values(holder=None, held_until=0.0)
        .returning(mark.c.name)
    )
)


def hold_publishing(store: Store, holder: str, *, seconds: float) -> int | None:
    """Be the one who publishes for so long; return the position of the last event that is, None when another one does.

    Being late publishes an event twice, never none at all.
    """
    rows = store.rows(_HOLD, {"who": holder, "seconds": seconds})
    return int(rows[0][0]) if rows else None


def published(store: Store, position: int) -> None:
    """Say that the events up to a position are published."""
    store.rows(_ADVANCE, {"position": position})


def let_go(store: Store, holder: str) -> None:
    """Leave publishing to the others."""
    store.rows(_LET_GO, {"who": holder})


# --- reading ---

_IS_OF_PEOPLE = one_of(event.c.kind, (OPENED, REMINDED, REASSIGNED))
_OPENED = {
    "question": approval.c.question,
    "asks": approval.c.kind,
    "quorum": approval.c.quorum,
    "on_expiry": approval.c.on_expiry,
}
_COLUMNS: dict[str, ColumnElement[Any]] = {
    **{column.name: column for column in event.c},
    **{name: case((_IS_OF_PEOPLE, column), else_=None) for name, column in _OPENED.items()},
    "application": thread.c.application,
    "agent": thread.c.agent,
    "thread": thread.c.name,
}
_JOINED = event.join(thread, thread.c.id == event.c.thread_id).outerjoin(approval, approval.c.id == event.c.approval_id)


_BYTES = func.coalesce(func.length(event.c.payload), 0) + func.coalesce(
    case((_IS_OF_PEOPLE, func.length(approval.c.question)), else_=None), 0
)


def _within(name: str) -> ColumnElement[Any]:
    """Return a column of `EventView`; what is large only when the reader has room for it."""
    is_too_large = cast(param("bytes_max"), BigInteger) < _BYTES
    if name == "left_out":
        return case((is_too_large, 1), else_=0)
    column = _COLUMNS[name]
    return case((is_too_large, None), else_=column) if name in ("payload", "question") else column


def _read(*which: ColumnElement[bool], by: ColumnElement[int], latest: bool = False) -> Statement:
    wanted = cast(param("kind"), Text)
    return Statement(
        lambda _dialect: (
            select(*(_within(name) for name in EventView._fields))
            .select_from(_JOINED)
            .where(*which, by > param("after"), or_(wanted.is_(None), event.c.kind.like(wanted)))
            .order_by(by.desc() if latest else by)
            .limit(param("limit"))
        )
    )


_of_thread, _of_tenant = event.c.thread_id == param("thread_id"), event.c.tenant == param("tenant")
_OF_THREAD = {latest: _read(_of_thread, by=event.c.id, latest=latest) for latest in (False, True)}
_OF_TENANT = {latest: _read(_of_tenant, by=event.c.position, latest=latest) for latest in (False, True)}
_OF_ALL = _read(by=event.c.position)


def of_thread(
    store: Store, thread_id: str, *, after: int, limit: int, kind: str | None = None, latest: bool = False
) -> list[EventView]:
    """Return a thread's events past an id, in order: complete, as a thread's transactions take turns.

    `kind` is a pattern of SQL's LIKE; `latest`: the last of them and not the first.
    """
    params = {"thread_id": thread_id, "after": after, "limit": limit, "kind": kind, "bytes_max": _BYTES_MAX}
    return _views(store.rows(_OF_THREAD[latest], params), latest=latest)


def of_tenant(
    store: Store, tenant: str, *, after: int, limit: int, kind: str | None = None, latest: bool = False
) -> list[EventView]:
    """Return a tenant's events past a position in the log, in order: complete up to the last of them."""
    params = {"tenant": tenant, "after": after, "limit": limit, "kind": kind, "bytes_max": _BYTES_MAX}
    return _views(store.rows(_OF_TENANT[latest], params), latest=latest)


def of_all(store: Store, *, after: int, limit: int, bytes_max: int = _BYTES_MAX) -> list[EventView]:
    """Return everybody's events past a position in the log, in order; without what is larger than `bytes_max`."""
    params = {"after": after, "limit": limit, "kind": None, "bytes_max": bytes_max}
    return _views(store.rows(_OF_ALL, params), latest=False)


def _views(rows: list[Row], *, latest: bool) -> list[EventView]:
    found = [EventView(*row) for row in rows]
    return found[::-1] if latest else found
