"""Schedules: what gives threads runs by the clock, as people make, change, stop and look at them.

The functions here that take a transaction are parts of a command's. A schedule's row is locked before any thread's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Text, and_, case, cast, delete, insert, or_, select, update

from keepstep.store.engine import Store, Transaction
from keepstep.store.schema import run, schedule, thread
from keepstep.store.statements import Statement, db_now, param


class ScheduleState(NamedTuple):
    """A schedule under its lock."""

    id: str
    tenant: str
    application: str
    name: str
    agent: str
    graph_version: str | None
    thread: str
    input: bytes
    digest: bytes
    cron: str
    timezone: str
    missed: str
    overlap: str
    priority: int | None
    step_limit: int | None
    lease_seconds: float
    paused: int
    updated_by: str | None
    next_at: float | None
    run_id: str | None
    error: str | None
    now: float
    """The database's time."""


class ScheduleView(NamedTuple):
    """A schedule, and what became of its last run."""

    id: str
    tenant: str
    application: str
    name: str
    agent: str
    graph_version: str | None
    thread: str
    input: bytes
    cron: str
    timezone: str
    missed: str
    overlap: str
    priority: int | None
    step_limit: int | None
    paused: int
    created_by: str | None
    updated_by: str | None
    next_at: float | None
    last_tick: float | None
    run_tick: float | None
    run_id: str | None
    skipped_tick: float | None
    error: str | None
    created_at: float
    updated_at: float
    run_status: str | None
    run_thread: str | None
    """The name of the thread that the run belongs to."""
    thread_status: str | None
    """How that is; None when it has gone on to another run."""
    now: float


_SAID = (
    *("agent", "graph_version", "thread", "input", "digest", "cron", "timezone", "missed", "overlap"),
    *("priority", "step_limit", "lease_seconds"),
)
"""What a command says of a schedule."""
STATE = [*(schedule.c[name] for name in ScheduleState._fields[:-1]), db_now()]
_NAMED = and_(
    schedule.c.tenant == param("tenant"),
    schedule.c.application == param("application"),
    schedule.c.name == param("name"),
)
_BY_NAME = Statement(lambda _dialect: select(*STATE).where(_NAMED).with_for_update())
_NOW = Statement(lambda _dialect: select(db_now()))
_INSERT = Statement(
    lambda _dialect: insert(schedule).values(
        id=param("id"),
        tenant=param("tenant"),
        application=param("application"),
        name=param("name"),
        **{name: param(name) for name in _SAID},
        created_by=param("by"),
        updated_by=param("by"),
        next_at=param("next_at"),
        due_at=param("next_at"),
        created_at=db_now(),
        updated_at=db_now(),
    )
)
# After somebody has changed it: its next tick, and nothing that kept it from an earlier one.
_FRESH = {"next_at": param("next_at"), "due_at": param("next_at"), "error": None, "updated_at": db_now()}
_REPLACE = Statement(
    lambda _dialect: (
        update(schedule)
        .where(schedule.c.id == param("id"))
        .values(
            **{name: param(name) for name in _SAID},
            updated_by=param("by"),
            **_FRESH,
        )
    )
)
_SET_PAUSED = Statement(
    lambda _dialect: (
        update(schedule)
        .where(schedule.c.id == param("id"))
        .values(
            paused=param("paused"),
            **_FRESH,
        )
    )
)
_REMOVE = Statement(lambda _dialect: delete(schedule).where(schedule.c.id == param("id")))


def by_name(transaction: Transaction, tenant: str, application: str, name: str) -> ScheduleState | None:
    """Return a schedule, locked; None when there is none of that name."""
    row = transaction.row(_BY_NAME, {"tenant": tenant, "application": application, "name": name})
    return None if row is None else ScheduleState(*row)


def now(transaction: Transaction) -> float:
    """Return the database's time."""
    return float(transaction.rows(_NOW, {})[0][0])


def make(transaction: Transaction, values: Mapping[str, Any]) -> None:
    """Write a schedule down; raises `DuplicateRow` when there is one of its name."""
    transaction.run(_INSERT, values)


def replace(transaction: Transaction, values: Mapping[str, Any]) -> None:
    """Change all that a schedule says. What it has done stays, and it stays paused."""
    transaction.run(_REPLACE, values)


def pause(transaction: Transaction, found: ScheduleState) -> None:
    """Let no tick start a run until the schedule is resumed."""
    transaction.run(_SET_PAUSED, {"id": found.id, "paused": 1, "next_at": None})


def resume(transaction: Transaction, found: ScheduleState, next_at: float | None) -> None:
    """Take the pause away; ticks that came in it are not made up for."""
    transaction.run(_SET_PAUSED, {"id": found.id, "paused": 0, "next_at": next_at})


def remove(transaction: Transaction, found: ScheduleState) -> None:
    """Forget a schedule; the runs that it has started go on."""
    transaction.run(_REMOVE, {"id": found.id})


# --- looking ---

_LIST = Statement(
    lambda _dialect: (
        select(
            *(schedule.c[name] for name in ScheduleView._fields[:-4]),
            run.c.status,
            thread.c.name,
            case((thread.c.run_id == run.c.id, thread.c.status)),
            db_now(),
        )
        .select_from(
            schedule.outerjoin(run, run.c.id == schedule.c.run_id).outerjoin(thread, thread.c.id == run.c.thread_id)
        )
        .where(
            schedule.c.tenant == param("tenant"),
            or_(cast(param("name"), Text).is_(None), schedule.c.name == cast(param("name"), Text)),
        )
        .order_by(schedule.c.name, schedule.c.application)
        .limit(param("limit"))
    )
)


def list_schedules(store: Store, tenant: str, *, name: str | None = None, limit: int) -> list[ScheduleView]:
    """Return schedules of a tenant by name, or those of one name, of which each application may have one."""
    rows = store.rows(_LIST, {"tenant": tenant, "name": name, "limit": limit})
    return [ScheduleView(*row) for row in rows]
