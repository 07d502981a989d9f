"""What is wrong with a deployment, as far as its rows can tell. Bounded reads that lock and change nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Text as TextType
from sqlalchemy import and_, exists, func, literal, or_, select, union_all

from keepstep.store.engine import Store
from keepstep.store.schema import BLOCKED, READY, WAITING, node_run, thread, worker
from keepstep.store.statements import Statement, db_now, param


class Backlog(NamedTuple):
    """What of a tenant and a graph's version is due and in nobody's hands: threads, or node runs."""

    of_node_runs: bool
    tenant: str
    agent: str
    graph_version: str
    due: int
    late: int
    """Those of them that have been due for longer than was asked about."""
    oldest_seconds: float


class LapsedWorker(NamedTuple):
    """A worker that has not renewed in time and was not given up yet."""

    id: str
    host: str
    pid: int
    silent_seconds: float
    """Since its time was over."""
    leases: int


class Deadly(NamedTuple):
    """A step, or one node run of it, that has taken its process down and is due again."""

    thread: str
    agent: str
    run: str
    """Empty: the thread's step itself."""
    deaths: int
    last_death: str | None


class BlockedThread(NamedTuple):
    """A thread that waits for an operator."""

    name: str
    agent: str
    error: str | None


def _free(table: Any) -> Any:
    return and_(
        table.c.status == READY,
        thread.c.control == "",
        table.c.due_at <= db_now(),
        or_(table.c.lease_nonce.is_(None), table.c.lease_deadline <= db_now()),
    )


def _backlog(table: Any) -> Statement:
    source: Any = thread if table is thread else node_run.join(thread, thread.c.id == node_run.c.thread_id)
    condition = _free(table) if table is thread else and_(_free(table), thread.c.status == WAITING)
    keys = (thread.c.tenant, thread.c.agent, thread.c.graph_version)
    late = func.count().filter(table.c.due_at <= db_now() - param("late"))
    return Statement(
        lambda _dialect: (
            select(*keys, func.count(), late, func.max(db_now() - table.c.due_at))
            .select_from(source)
            .where(condition)
            .group_by(*keys)
            .order_by(*keys)
            .limit(param("limit"))
        )
    )


_BACKLOGS = (_backlog(thread), _backlog(node_run))


def _held_by(owner: Any) -> Any:
    def count(table: Any) -> Any:
        held = and_(table.c.status == READY, table.c.lease_worker == owner)
        return select(func.count()).select_from(table).where(held).correlate(worker).scalar_subquery()

    return count(thread) + count(node_run)


_LAPSED = Statement(
    lambda _dialect: (
        select(worker.c.id, worker.c.host, worker.c.pid, db_now() - worker.c.alive_until, _held_by(worker.c.id))
        .where(worker.c.alive_until <= db_now())
        .order_by(worker.c.alive_until)
        .limit(param("limit"))
    )
)


def _orphans(table: Any) -> Any:
    known = exists().where(worker.c.id == table.c.lease_worker)
    return (
        select(func.count())
        .select_from(table)
        .where(table.c.status == READY, table.c.lease_worker.is_not(None), ~known)
        .scalar_subquery()
    )


_ORPHANS = Statement(lambda _dialect: select(_orphans(thread) + _orphans(node_run)))
_DEADLY = Statement(
    lambda _dialect: (
        union_all(
            select(thread.c.name, thread.c.agent, literal("", TextType), thread.c.deaths, thread.c.last_death).where(
                thread.c.tenant == param("tenant"), thread.c.status == READY, thread.c.deaths > 0
            ),
            select(thread.c.name, thread.c.agent, node_run.c.run, node_run.c.deaths, node_run.c.last_death)
            .select_from(node_run.join(thread, thread.c.id == node_run.c.thread_id))
            .where(
                thread.c.tenant == param("tenant"),
                thread.c.status == WAITING,
                node_run.c.status == READY,
                node_run.c.deaths > 0,
            ),
        )
        .order_by("deaths", "name")
        .limit(param("limit"))
    )
)
_BLOCKED = Statement(
    lambda _dialect: (
        select(thread.c.name, thread.c.agent, thread.c.error)
        .where(thread.c.tenant == param("tenant"), thread.c.status == BLOCKED)
        .order_by(thread.c.updated_at.desc())
        .limit(param("limit"))
    )
)
_OF_HOST = Statement(
    lambda _dialect: (
        select(func.count()).select_from(worker).where(worker.c.host == param("host"), worker.c.alive_until > db_now())
    )
)


def backlogs(store: Store, *, late_seconds: float, limit: int) -> list[Backlog]:
    """Return the threads, then the node runs, that are due and in nobody's hands, by tenant, graph and version.

    Paused threads and those that were put off are not among them. `late_seconds`: what `Backlog.late` counts from.
    """
    return [
        Backlog(of_node_runs, *row)
        for of_node_runs, statement in zip((False, True), _BACKLOGS, strict=True)
        for row in store.rows(statement, {"late": late_seconds, "limit": limit})
    ]


def lapsed(store: Store, *, limit: int) -> list[LapsedWorker]:
    """Return workers whose time is over, those that have been silent longest first."""
    return [LapsedWorker(*row) for row in store.rows(_LAPSED, {"limit": limit})]


def orphaned_leases(store: Store) -> int:
    """Return how many leases are held by workers that have no row any more."""
    return int(store.rows(_ORPHANS, {})[0][0])


def deadly(store: Store, tenant: str, *, limit: int) -> list[Deadly]:
    """Return steps and node runs of a tenant that have taken a process down and will be entered again."""
    return [Deadly(*row) for row in store.rows(_DEADLY, {"tenant": tenant, "limit": limit})]


def blocked(store: Store, tenant: str, *, limit: int) -> list[BlockedThread]:
    """Return blocked threads of a tenant, those that were blocked last first."""
    return [BlockedThread(*row) for row in store.rows(_BLOCKED, {"tenant": tenant, "limit": limit})]


def live_of_host(store: Store, host: str) -> int:
    """Return how many workers of a host are believed to be alive."""
    return int(store.rows(_OF_HOST, {"host": host})[0][0])
