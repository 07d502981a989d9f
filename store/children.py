"""Child rows: what stands between a parent's thread and the thread of a child that it spawned.

A row is the outbox and the inbox between two threads. It goes from `wanted` (the parent's attempt committed it) over
`started` (the child's thread has its run) and `ended` (that run has ended) to `delivered` (the parent was told, or
nobody is left to be told). Each of these is written by a transaction that locks one thread at most: the parent's, or
the child's. What is left to do between them (`errands`) has a `due_at`.

The functions here are parts of other transactions. A child row is locked after everything of the thread that the
transaction has locked, and before audit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Text as TextType
from sqlalchemy import and_, case, cast, exists, insert, literal, or_, select, update
from sqlalchemy.sql.base import Executable

from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import Nudge
from keepstep.store.schema import CANCELLED, FAILED, QUEUED, RUNNING, checkpoint, child, run
from keepstep.store.statements import Statement, db_now, now_once, one_of, param

WANTED, STARTED, ENDED, DELIVERED = "wanted", "started", "ended", "delivered"

ERRAND_SECONDS = 5.0
"""How long after a transaction that left something to do the sweep may think that nobody does it."""


class ChildState(NamedTuple):
    """A child row."""

    thread_id: str
    step: str
    run: str
    call: str
    tenant: str
    application: str
    agent: str
    graph_version: str | None
    name: str
    run_id: str
    child_id: str | None
    digest: bytes
    priority: int
    lease_seconds: float
    state: str
    cancel: int
    status: str | None
    error: str | None
    branch: int | None
    seq: int | None
    due_at: float | None


_COLUMNS = [child.c[name] for name in ChildState._fields]
_NEW = (
    *("thread_id", "step", "run", "call", "tenant", "application", "agent", "graph_version", "name", "run_id"),
    *("input", "digest", "priority", "lease_seconds"),
)
_INPUT = Statement(lambda _dialect: select(child.c.input).where(child.c.run_id == param("run_id")))
_OF_RUN = Statement(
    lambda _dialect: (
        select(*_COLUMNS)
        .where(child.c.thread_id == param("thread_id"), child.c.step == param("step"), child.c.run == param("run"))
        .order_by(child.c.created_at, child.c.call)
    )
)
_BY_RUN_ID = Statement(lambda _dialect: select(*_COLUMNS).where(child.c.run_id == param("run_id")))
_LOCKED = Statement(lambda _dialect: select(*_COLUMNS).where(child.c.run_id == param("run_id")).with_for_update())
_INSERT = Statement(
    lambda _dialect: insert(child).values(
        **{name: param(name) for name in _NEW},
        state=WANTED,
        due_at=db_now() + ERRAND_SECONDS,
        created_at=db_now(),
    )
)
_START = Statement(
    lambda _dialect: (
        update(child)
        .where(child.c.run_id == param("run_id"), child.c.state == WANTED)
        .values(
            state=STARTED,
            child_id=param("child_id"),
            graph_version=param("graph_version"),
            error=None,
            due_at=None,
            tries=0,
        )
    )
)
_REFUSE = Statement(
    lambda _dialect: (
        update(child)
        .where(child.c.run_id == param("run_id"), child.c.state == WANTED)
        .values(state=ENDED, status=FAILED, error=param("error"), due_at=db_now() + ERRAND_SECONDS, ended_at=db_now())
    )
)
_PUT_OFF = Statement(
    lambda _dialect: (
        update(child).where(child.c.run_id == param("run_id"), child.c.state == WANTED).values(error=param("error"))
    )
)
# Whoever cancelled the parent has closed its waits: nobody is left to be told.
_END = Statement(
    lambda _dialect: (
        update(child)
        .where(child.c.run_id == param("run_id"), child.c.state == STARTED)
        .values(
            state=case((child.c.cancel == 1, DELIVERED), else_=ENDED),
            status=param("status"),
            error=param("error"),
            branch=param("branch"),
            seq=param("seq"),
            due_at=case((child.c.cancel == 1, None), else_=db_now() + ERRAND_SECONDS),
            tries=0,
            ended_at=db_now(),
        )
        .returning(child.c.child_id, child.c.due_at)
    )
)
_REVIVE = Statement(
    lambda _dialect: (
        update(child)
        .where(child.c.run_id == param("run_id"), child.c.state == ENDED)
        .values(state=STARTED, status=None, error=None, branch=None, seq=None, due_at=None, tries=0, ended_at=None)
    )
)


def _delivered() -> Statement:
    return Statement(
        lambda _dialect: (
            update(child)
            .where(child.c.run_id == param("run_id"), child.c.state == ENDED)
            .values(state=DELIVERED, due_at=None, tries=0)
        )
    )


_TAKE, _TELL = _delivered(), _delivered()
_NOBODY_ASKS = Statement(
    lambda _dialect: (
        update(child).where(child.c.run_id == param("run_id"), child.c.state == ENDED).values(due_at=None, tries=0)
    )
)
_FORGET = Statement(
    lambda _dialect: (
        update(child)
        .where(child.c.run_id == param("run_id"), child.c.state == STARTED)
        .values(state=DELIVERED, status=CANCELLED, due_at=None, tries=0, ended_at=db_now())
    )
)
_never_started = child.c.state == WANTED
# One whose end was told, and which somebody has retried since.
_goes_on = and_(
    child.c.state == DELIVERED,
    exists().where(run.c.id == child.c.run_id, one_of(run.c.status, (QUEUED, RUNNING))),
)
_DISOWN = Statement(
    lambda _dialect: (
        update(child)
        .where(child.c.thread_id == param("thread_id"), or_(one_of(child.c.state, (WANTED, STARTED, ENDED)), _goes_on))
        .values(
            # Not of one that has ended: it was not cancelled with its parent.
            cancel=case((one_of(child.c.state, (WANTED, STARTED)), 1), else_=child.c.cancel),
            state=case((child.c.state == STARTED, STARTED), else_=DELIVERED),
            status=case((_never_started, CANCELLED), else_=child.c.status),
            ended_at=case((_never_started, db_now()), else_=child.c.ended_at),
            due_at=case((one_of(child.c.state, (STARTED, DELIVERED)), db_now() + ERRAND_SECONDS), else_=None),
            tries=0,
        )
        .returning(child.c.run_id, child.c.child_id, child.c.due_at)
    )
)
# A step's key ends with the seq after the checkpoint that it began from, and that checkpoint says of which run it is.
_of_parents_run = exists().where(
    checkpoint.c.thread_id == child.c.thread_id,
    checkpoint.c.run_id == param("run_id"),
    child.c.step
    == checkpoint.c.thread_id + "/" + cast(checkpoint.c.branch, TextType) + "/" + cast(checkpoint.c.seq + 1, TextType),
)
_cancelled_with_it = and_(child.c.state == DELIVERED, child.c.cancel == 1, child.c.status == CANCELLED)
_RECLAIM = Statement(
    lambda _dialect: (
        update(child)
        .where(
            child.c.thread_id == param("thread_id"),
            or_(
                and_(child.c.state == STARTED, child.c.cancel == 1),
                and_(_cancelled_with_it, _of_parents_run),
                and_(child.c.state == DELIVERED, child.c.due_at.is_not(None)),
            ),
        )
        .values(
            state=case(
                (and_(_cancelled_with_it, child.c.child_id.is_(None)), WANTED),
                (_cancelled_with_it, STARTED),
                else_=child.c.state,
            ),
            # Its error stays until its thread has been looked at: it may not be possible to take it up again.
            status=case((_cancelled_with_it, None), else_=child.c.status),
            ended_at=case((_cancelled_with_it, None), else_=child.c.ended_at),
            cancel=0,
            due_at=case((child.c.cancel == 1, db_now() + ERRAND_SECONDS), else_=None),
            tries=0,
        )
        .returning(child.c.run_id, child.c.child_id, child.c.due_at)
    )
)
_GOES_ON = Statement(
    lambda _dialect: (
        update(child)
        .where(child.c.run_id == param("run_id"), child.c.state == STARTED, child.c.cancel == 0)
        .values(error=None, due_at=None, tries=0)
    )
)
_SETTLE = Statement(
    lambda _dialect: (
        update(child).where(child.c.run_id == param("run_id"), child.c.state == DELIVERED).values(due_at=None, tries=0)
    )
)


def of_run(store: Store, thread_id: str, step: str, run: str) -> list[ChildState]:
    """Return the children that a node run has spawned, in order."""
    return [ChildState(*row) for row in store.rows(_OF_RUN, {"thread_id": thread_id, "step": step, "run": run})]


def by_run(store: Store, run_id: str) -> ChildState | None:
    """Return the child whose run has an id, None when no run of that id was spawned."""
    rows = store.rows(_BY_RUN_ID, {"run_id": run_id})
    return ChildState(*rows[0]) if rows else None


def locked(transaction: Transaction, run_id: str) -> ChildState | None:
    """Return a child, its row locked."""
    row = transaction.row(_LOCKED, {"run_id": run_id})
    return None if row is None else ChildState(*row)


def nudge(run_id: str, child_id: str | None) -> Nudge:
    """Return the nudge that says that something is left to do between a child and its parent."""
    return Nudge("child", child_id or "", 0, "", 0, run=run_id)


# --- of the parent's transactions ---


def insert_wanted(transaction: Transaction, values: Mapping[str, Any]) -> None:
    """Write down that a child is wanted; the parent's attempt holds its fence."""
    if transaction.row(_BY_RUN_ID, {"run_id": values["run_id"]}) is None:  # not when its answer alone was lost
        transaction.run(_INSERT, values)


def take(transaction: Transaction, run_id: str) -> str | None:
    """Return how a child ended, for a wait that is being opened, None while it has not. The parent's lock is held."""
    found = locked(transaction, run_id)
    if found is None or found.state not in {ENDED, DELIVERED}:
        return None
    transaction.run(_TAKE, {"run_id": run_id})
    return found.status


def deliver(transaction: Transaction, run_id: str, *, told: bool) -> None:
    """Write down that a child's end has no more to be told: the parent knows, or it will ask when it joins."""
    transaction.run(_TELL if told else _NOBODY_ASKS, {"run_id": run_id})


def disown(transaction: Transaction, thread_id: str) -> list[Nudge]:
    """Mark the children of a thread that is being cancelled; return the nudges of those that are to be cancelled.

    A child that was not started is none any more. One whose end was told, and which was retried since, goes too.
    """
    rows = transaction.rows(_DISOWN, {"thread_id": thread_id})
    return [nudge(run_id, child_id) for run_id, child_id, due_at in rows if due_at is not None]


def reclaim(transaction: Transaction, thread_id: str, run_id: str | None) -> list[Nudge]:
    """Take back `disown` for a run of a thread; return the nudges of the children that are to be taken up again."""
    rows = transaction.rows(_RECLAIM, {"thread_id": thread_id, "run_id": run_id})
    return [nudge(child_run, child_id) for child_run, child_id, due_at in rows if due_at is not None]


# --- of the child's transactions ---


def goes_on(transaction: Transaction, run_id: str) -> None:
    """Write down that a child whose parent was taken up again is under way."""
    transaction.run(_GOES_ON, {"run_id": run_id})


def settle(transaction: Transaction, run_id: str) -> None:
    """Write down that nothing is left to do for a child whose end was told."""
    transaction.run(_SETTLE, {"run_id": run_id})


def input_of(transaction: Transaction, run_id: str) -> bytes:
    """Return what a child's run is given."""
    return bytes(transaction.rows(_INPUT, {"run_id": run_id})[0][0])


def start(transaction: Transaction, run_id: str, child_id: str, graph_version: str) -> None:
    """Write down that the child's thread has its run; they are made in the same transaction."""
    transaction.run(_START, {"run_id": run_id, "child_id": child_id, "graph_version": graph_version})


def refuse(transaction: Transaction, run_id: str, error: str) -> None:
    """Write down that a child cannot be started: it has failed."""
    transaction.run(_REFUSE, {"run_id": run_id, "error": error})


def put_off(transaction: Transaction, run_id: str, error: str) -> None:
    """Write down why a child cannot be started yet."""
    transaction.run(_PUT_OFF, {"run_id": run_id, "error": error})


def end(
    transaction: Transaction,
    run_id: str,
    status: str,
    *,
    error: str | None = None,
    branch: int | None = None,
    seq: int | None = None,
) -> list[Nudge]:
    """Write down how a child's run ended, in the transaction that ends it; return the nudge that its parent be told.

    Of a run that has ended before, and was retried after its parent was told, nothing is written.
    """
    values = {"run_id": run_id, "status": status, "error": error, "branch": branch, "seq": seq}
    row = transaction.row(_END, values)
    return [] if row is None or row[1] is None else [nudge(run_id, row[0])]


def revive(transaction: Transaction, run_id: str) -> None:
    """Take back the end of a run that is retried, unless the parent was told."""
    transaction.run(_REVIVE, {"run_id": run_id})


def forget(transaction: Transaction, run_id: str) -> None:
    """Let go of a child whose thread is no longer there."""
    transaction.run(_FORGET, {"run_id": run_id})


# --- of the sweep ---

_BACKOFF_SECONDS = (2.0, 4.0, 8.0, 16.0, 32.0)


def _due(dialect: str) -> Executable:
    backoff = case(*((child.c.tries == count, seconds) for count, seconds in enumerate(_BACKOFF_SECONDS)), else_=60.0)
    picked = select(child.c.run_id).where(child.c.due_at <= now_once()).order_by(child.c.due_at).limit(param("limit"))
    if dialect == "postgresql":
        picked = picked.with_for_update(skip_locked=True)
    found = picked.cte("found")
    same = child.c.run_id == found.c.run_id
    matching = (
        update(child).where(same)
        if dialect == "postgresql"
        else update(child).where(select(literal(1)).select_from(found).where(same).exists())
    )
    return matching.values(due_at=db_now() + backoff, tries=child.c.tries + 1).returning(child.c.run_id)


_DUE = Statement(_due)


def due(store: Store, *, limit: int) -> list[str]:
    """Return the run ids of children with something left to do that nobody does; they are left alone for a while."""
    return [row[0] for row in store.rows(_DUE, {"limit": limit})]
