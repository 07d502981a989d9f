"""Worker processes: who is believed to be alive, and what becomes of the leases of those who are not.

A worker renews its row from a thread of its own. One that has not renewed for the liveness window is given up: its
leases are released and its row is deleted, which it learns when its next renewal finds no row. It then registers
again under the id that its pool children know; that revives no lease, because a lease is its nonce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Float as FloatType
from sqlalchemy import Table, and_, case, cast, delete, exists, func, insert, literal, or_, select, update
from sqlalchemy import Text as TextType

from keepstep.ids import new_id
from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import NUDGE_SECONDS, Nudge, carried_key, is_carried, nudge_columns, released
from keepstep.store.schema import READY, WAITING, node_run, thread, worker
from keepstep.store.statements import Row, Statement, db_now, param

_LEAVE_PATIENCE_SECONDS = 5.0


class WorkerState(NamedTuple):
    """A worker as the database knows it."""

    id: str
    host: str
    pid: int
    concurrency: int
    carried: str
    release: str
    started_at: float
    alive_until: float
    clock_skew: float | None
    """Seconds by which its clock was ahead of the database's; None: it has not been measured yet."""


def carried_text(graphs: Sequence[tuple[str, str]]) -> str:
    """Return how (graph, version) pairs stand in a worker's row and in its claims."""
    return "".join(carried_key(graph, version) for graph, version in graphs)


_REGISTER = Statement(
    lambda _dialect: insert(worker).values(
        id=param("id"),
        host=param("host"),
        pid=param("pid"),
        concurrency=param("concurrency"),
        carried=param("carried"),
        release=param("release"),
        started_at=db_now(),
        alive_until=db_now() + param("window"),
    )
)
_RENEW = Statement(
    lambda _dialect: (
        update(worker)
        .where(worker.c.id == param("id"))
        .values(alive_until=db_now() + param("window"), clock_skew=param("clock_skew"))
        .returning(db_now())
    )
)


def _move_deadlines(table: Table) -> Statement:
    seconds, longest = cast(param("seconds"), FloatType), db_now() + table.c.lease_seconds
    # One that was taken since the clock was set has the new time already, and cannot be told from one that is older.
    # Set forward, that one gets no more than a whole lease; set back, nobody loses what he may have had.
    moved = table.c.lease_deadline + case((seconds > 0, seconds), else_=0.0)
    return Statement(
        lambda _dialect: (
            update(table)
            .where(table.c.status == READY, table.c.lease_worker == param("worker"))
            # The sweep may have put the row off until the old deadline: it must look again.
            .values(lease_deadline=case((moved < longest, moved), else_=longest), next_nudge_at=db_now())
        )
    )


def _were_due(table: Table) -> Statement:
    return Statement(
        lambda _dialect: (
            update(table)
            .where(
                table.c.status == READY,
                table.c.due_at > db_now(),
                # Taken, or nudged, or to be nudged later than it is due: what is put off is nudged when it is due.
                or_(table.c.lease_nonce.is_not(None), table.c.next_nudge_at > table.c.due_at),
            )
            .values(due_at=db_now(), next_nudge_at=db_now(), nudges=0)
            .returning(table.c.version)
        )
    )


_MOVE_DEADLINES = [_move_deadlines(thread), _move_deadlines(node_run)]
_WERE_DUE = [_were_due(thread), _were_due(node_run)]
_LAPSE = Statement(
    lambda _dialect: (
        update(worker)
        .where(worker.c.alive_until > db_now() + 2 * cast(param("window"), FloatType))
        .values(alive_until=db_now() + param("window"))
        .returning(worker.c.id)
    )
)
_FOREIGN = Statement(
    lambda _dialect: select(thread.c.agent, thread.c.graph_version).where(
        thread.c.id == param("thread_id"), or_(thread.c.status == READY, thread.c.status == WAITING), ~is_carried()
    )
)
_LIVE = Statement(
    lambda _dialect: (
        select(*(worker.c[name] for name in WorkerState._fields))
        .where(worker.c.alive_until > db_now())
        .order_by(worker.c.started_at)
    )
)
_judge = worker.alias("judge")
# Whoever finds its own time over as well was cut off, or the database's clock was set: it says nothing of the others.
_MAY_JUDGE = or_(
    cast(param("judge"), TextType).is_(None),
    exists().where(_judge.c.id == param("judge"), _judge.c.alive_until > db_now()),
)
_GONE = Statement(lambda _dialect: select(worker.c.id).where(worker.c.alive_until <= db_now(), _MAY_JUDGE))
_FORGET = Statement(lambda _dialect: delete(worker).where(worker.c.id == param("worker")))
_FORGET_GONE = Statement(
    lambda _dialect: (
        delete(worker)
        .where(worker.c.id == param("worker"), worker.c.alive_until <= db_now(), _MAY_JUDGE)
        .returning(worker.c.id)
    )
)


def _release(table: Table, *, child: bool) -> Statement:
    held = [table.c.status == READY, table.c.lease_worker == param("worker")]
    if child:
        held.append(table.c.lease_child == param("child"))
    return Statement(
        lambda _dialect: (
            update(table)
            .where(*held)
            .values(
                **released(table),
                deaths=table.c.deaths + param("deaths"),
                last_death=func.coalesce(param("reason"), table.c.last_death),
                next_nudge_at=db_now() + NUDGE_SECONDS,
                nudges=0,
            )
            .returning(*nudge_columns(table))
        )
    )


_RELEASE_CHILD = [_release(thread, child=True), _release(node_run, child=True)]
_RELEASE_ALL = [_release(thread, child=False), _release(node_run, child=False)]


def register(
    store: Store,
    *,
    host: str,
    pid: int,
    concurrency: int,
    graphs: Sequence[tuple[str, str]],
    release: str,
    window_seconds: float,
    worker_id: str | None = None,
) -> str:
    """Register a worker process; return its id: a new one, or the one it had before it was given up."""
    worker_id = worker_id or new_id()
    values = {"id": worker_id, "host": host, "pid": pid, "concurrency": concurrency, "release": release}
    with store.transaction() as transaction:
        transaction.run(_REGISTER, {**values, "carried": carried_text(graphs), "window": window_seconds})
    return worker_id


def renew(
    store: Store,
    worker_id: str,
    *,
    window_seconds: float,
    clock_skew: float | None = None,
    clock_was_set: Callable[[float], float] | None = None,
) -> float | None:
    """Say that a worker is alive; return the database's time, or None when it was given up meanwhile.

    `clock_skew` is what it measured from the time that its last renewal returned.

    `clock_was_set` says from the database's time by how many seconds that was set since the last renewal, 0 if it was
    not. The deadlines of the worker's leases then follow, in the same transaction: nobody finds this worker
    alive and its leases run out.
    """
    with store.transaction() as transaction:
        row = transaction.row(_RENEW, {"id": worker_id, "window": window_seconds, "clock_skew": clock_skew})
        if row is None:
            return None
        database_time = float(row[0])
        seconds = 0.0 if clock_was_set is None else clock_was_set(database_time)
        if seconds:
            for statement in _MOVE_DEADLINES:
                transaction.run(statement, {"worker": worker_id, "seconds": seconds})
    return database_time


def catch_up(store: Store, *, window_seconds: float) -> None:
    """Repair what a database clock that was set back has left in the future; safe to do any number of times.

    What was due is due at once, and not when the clock is there again. A worker that died is missed after a window.
    Times that somebody chose (timers, time-outs, retry delays) are the database's, and come when its clock says so.
    """
    for statement in _WERE_DUE:
        store.rows(statement, {})
    store.rows(_LAPSE, {"window": window_seconds})


def foreign(store: Store, thread_id: str, *, carried: str) -> tuple[str, str] | None:
    """Return graph and version of a thread that goes on and is of none of those carried, None for any other thread."""
    rows = store.rows(_FOREIGN, {"thread_id": thread_id, "carried": carried})
    return (str(rows[0][0]), str(rows[0][1])) if rows else None


def live(store: Store) -> list[WorkerState]:
    """Return the workers that are believed to be alive, oldest first."""
    return [WorkerState(*row) for row in store.rows(_LIVE, {})]


def release_child(store: Store, worker_id: str, child: int, *, reason: str) -> list[Nudge]:
    """Release what a dead pool child held, counting its death; return the nudges."""

    def release() -> list[Nudge]:
        with store.transaction() as transaction:
            return _released(transaction, _RELEASE_CHILD, worker_id, deaths=1, reason=reason, child=child)

    return store.patiently(release)


def hand_over(store: Store, worker_id: str, child: int) -> list[Nudge]:
    """Release what a process holds that is about to be ended for another's fault; it counts as no death."""

    def release() -> list[Nudge]:
        with store.transaction() as transaction:
            return _released(transaction, _RELEASE_CHILD, worker_id, deaths=0, reason=None, child=child)

    return store.patiently(release, seconds=_LEAVE_PATIENCE_SECONDS)


def leave(store: Store, worker_id: str) -> list[Nudge]:
    """Deregister a worker that stops in good order; what it still holds is handed over and counts as no death."""

    def release() -> list[Nudge]:
        with store.transaction() as transaction:
            nudges = _released(transaction, _RELEASE_ALL, worker_id, deaths=0, reason=None)
            transaction.run(_FORGET, {"worker": worker_id})
        return nudges

    return store.patiently(release, seconds=_LEAVE_PATIENCE_SECONDS)


def take_over(store: Store, *, judge: str | None = None) -> list[Nudge]:
    """Give up every worker whose time is over, releasing what it held; return the nudges.

    `judge` is the worker that asks: it gives up nobody while its own time is over, too. None: somebody beside them.
    """
    nudges: list[Nudge] = []
    for (worker_id,) in store.rows(_GONE, {"judge": judge}):
        with store.transaction() as transaction:
            # Deleting the row first decides between two sweeps, and between a sweep and a renewal.
            if transaction.rows(_FORGET_GONE, {"worker": worker_id, "judge": judge}):
                reason = "its worker was lost"
                nudges += _released(transaction, _RELEASE_ALL, worker_id, deaths=1, reason=reason)
    return nudges


def _released(
    transaction: Transaction,
    statements: Sequence[Statement],
    worker_id: str,
    *,
    deaths: int,
    reason: str | None,
    child: int = 0,
) -> list[Nudge]:
    params: dict[str, Any] = {"worker": worker_id, "child": child, "deaths": deaths, "reason": reason}
    of_threads, of_node_runs = statements
    nudges = [Nudge("step", *row) for row in transaction.rows(of_threads, params)]
    nudges += [Nudge("node", *row) for row in transaction.rows(of_node_runs, params)]
    return nudges


# A lease whose worker has no row: it was taken in the moment in which the worker was given up.
def _orphaned(table: Table) -> Statement:
    known = exists().where(worker.c.id == table.c.lease_worker)
    return Statement(
        lambda _dialect: (
            update(table)
            .where(and_(table.c.status == READY, table.c.lease_worker.is_not(None), ~known))
            .values(
                **released(table),
                last_death=literal("its worker was lost", TextType),
                deaths=table.c.deaths + 1,
                next_nudge_at=db_now() + NUDGE_SECONDS,
                nudges=0,
            )
            .returning(*nudge_columns(table))
        )
    )


_ORPHANED = [_orphaned(thread), _orphaned(node_run)]


def adopt_orphans(store: Store) -> list[Nudge]:
    """Release leases whose worker is no longer registered at all; return the nudges."""
    of_threads, of_node_runs = _ORPHANED
    rows: list[Row] = store.rows(of_threads, {})
    return [Nudge("step", *row) for row in rows] + [Nudge("node", *row) for row in store.rows(of_node_runs, {})]
