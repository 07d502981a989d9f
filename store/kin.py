"""What the tables say of parents and their children to people and programs that only look."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import func, or_, select

from keepstep.store.engine import Store
from keepstep.store.schema import child, thread
from keepstep.store.statements import Statement, db_now, param


class KinView(NamedTuple):
    """A child, its parent, and how its thread is."""

    parent_id: str
    parent_agent: str
    parent: str
    step: str
    run: str
    agent: str
    graph_version: str | None
    name: str
    run_id: str
    child_id: str | None
    state: str
    cancel: int
    status: str | None
    error: str | None
    thread_status: str | None
    created_at: float
    ended_at: float | None


_parent = thread.alias("parent")
_COLUMNS = [
    *(child.c.thread_id, _parent.c.agent, _parent.c.name.label("parent"), child.c.step, child.c.run, child.c.agent),
    *(child.c.graph_version, child.c.name, child.c.run_id, child.c.child_id, child.c.state, child.c.cancel),
    *(child.c.status, child.c.error, thread.c.status.label("thread_status"), child.c.created_at, child.c.ended_at),
]
_KIN = child.join(_parent, _parent.c.id == child.c.thread_id).outerjoin(thread, thread.c.id == child.c.child_id)
_CHILDREN = Statement(
    lambda _dialect: (
        select(*_COLUMNS)
        .select_from(_KIN)
        .where(child.c.thread_id == param("thread_id"))
        .order_by(child.c.created_at, child.c.run_id)
    )
)
_PARENTS = Statement(
    lambda _dialect: (
        select(*_COLUMNS)
        .select_from(_KIN)
        .where(child.c.child_id == param("thread_id"))
        .order_by(child.c.created_at, child.c.run_id)
    )
)
_UNSTARTED = Statement(
    lambda _dialect: (
        select(child.c.agent, func.count())
        .where(
            child.c.tenant == param("tenant"),
            child.c.due_at.is_not(None),  # as the index says it
            child.c.state == "wanted",
            child.c.created_at <= db_now() - param("overdue"),
        )
        .group_by(child.c.agent)
        .order_by(child.c.agent)
    )
)
_NEXT_ERRAND = Statement(
    lambda _dialect: select(func.min(child.c.due_at)).where(
        child.c.thread_id == param("thread_id"),
        child.c.due_at.is_not(None),
        or_(child.c.state != "wanted", child.c.error.is_(None)),  # not one whose graph nobody carries
    )
)


def children(store: Store, thread_id: str) -> list[KinView]:
    """Return the children that a thread has spawned, in order."""
    return [KinView(*row) for row in store.rows(_CHILDREN, {"thread_id": thread_id})]


def unstarted(store: Store, tenant: str, *, overdue_seconds: float) -> list[tuple[str, int]]:
    """Return (graph, children) of those that have waited to be started for too long."""
    rows = store.rows(_UNSTARTED, {"tenant": tenant, "overdue": overdue_seconds})
    return [(row[0], int(row[1])) for row in rows]


def parents(store: Store, thread_id: str) -> list[KinView]:
    """Return by whom the runs of a thread were spawned, in order."""
    return [KinView(*row) for row in store.rows(_PARENTS, {"thread_id": thread_id})]


def next_errand(store: Store, thread_id: str) -> float | None:
    """Return when the sweep will run an errand of a thread's children, None when none is left to do."""
    found = store.rows(_NEXT_ERRAND, {"thread_id": thread_id})[0][0]
    return None if found is None else float(found)
