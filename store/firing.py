"""Firing: the ticks of schedules that are due start their runs, each once, whoever comes and dies.

Every worker's sweep comes here. A tick is one transaction under the lock of its schedule's row, which gives the thread
its run, as a start command does, and moves the schedule on to its next tick. A sweep that finds the row locked leaves
it, and one that comes later finds the schedule moved on. The run's request id is made of schedule and tick: whatever
else may happen to the row, a tick has one run.
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

import structlog
from sqlalchemy import Float as FloatType
from sqlalchemy import case, cast, select, update
from sqlalchemy.sql.base import Executable

from keepstep.crashpoints import reach
from keepstep.errors import DatabaseUnavailable, DuplicateRow, UnknownGraph
from keepstep.ids import new_id
from keepstep.priority import NORMAL
from keepstep.store import schedules, threads, ticks
from keepstep.store.engine import Store, Transaction
from keepstep.store.errortext import error_text
from keepstep.store.leases import Nudge, carried_key
from keepstep.store.schedules import ScheduleState
from keepstep.store.schema import QUEUED, RUNNING, run, schedule
from keepstep.store.statements import Statement, db_now, now_once, param
from keepstep.store.threads import NewRun
from keepstep.store.ticks import Due

log = structlog.get_logger("keepstep.store")

_RACES_MAX = 3
_WAIT_SECONDS = 5.0
"""How long a schedule is left alone that could not fire."""


class _Fired(NamedTuple):
    nudges: list[Nudge]
    goes_on: bool
    """Whether another tick is due already."""


_DUE = Statement(
    lambda _dialect: (
        select(schedule.c.id).where(schedule.c.due_at <= now_once()).order_by(schedule.c.due_at).limit(param("limit"))
    )
)


def _lock_unless_busy(dialect: str) -> Executable:
    due = (schedule.c.due_at <= db_now(), schedule.c.next_at <= db_now())
    found = select(*schedules.STATE).where(schedule.c.id == param("id"), *due)
    return found.with_for_update(skip_locked=dialect == "postgresql")


_LOCK_UNLESS_BUSY = Statement(_lock_unless_busy)
_UNDER_WAY = Statement(lambda _dialect: select(run.c.status).where(run.c.id == param("run_id")))
_started = cast(param("run_tick"), FloatType(53)).is_not(None)
_MOVE_ON = Statement(
    lambda _dialect: (
        update(schedule)
        .where(schedule.c.id == param("id"))
        .values(
            next_at=param("next_at"),
            due_at=param("next_at"),
            last_tick=param("last_tick"),
            run_tick=case((_started, cast(param("run_tick"), FloatType(53))), else_=schedule.c.run_tick),
            run_id=case((_started, param("run_id")), else_=schedule.c.run_id),
            skipped_tick=case(
                (cast(param("skipped_tick"), FloatType(53)).is_(None), schedule.c.skipped_tick),
                else_=cast(param("skipped_tick"), FloatType(53)),
            ),
            error=param("error"),
        )
    )
)
_PUT_OFF = Statement(
    lambda _dialect: (
        update(schedule)
        .where(schedule.c.id == param("id"), schedule.c.due_at.is_not(None))
        .values(due_at=db_now() + _WAIT_SECONDS, error=param("error"))
    )
)


def fire_due(store: Store, *, limit: int) -> list[Nudge]:
    """Give the ticks that are due their runs, of at most `limit` schedules; return the nudges of what begins."""
    nudges: list[Nudge] = []
    for (schedule_id,) in store.rows(_DUE, {"limit": limit}):
        try:
            nudges += _fire(store, schedule_id)
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  one that cannot fire must not hold up the others
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            log.warning("schedule_failed", schedule=schedule_id, reason=reason)
            with store.transaction() as transaction:
                transaction.run(
                    _PUT_OFF, {"id": schedule_id, "error": error_text({"code": "error", "message": reason})}
                )
    return nudges


def carried_version(transaction: Transaction, graph: str, version: str | None) -> str | None:
    """Return the version of a graph that a run would begin with: the given one, or what the newest worker carries.

    None when no live worker carries it.
    """
    if version is None:
        return threads.version_carried(transaction, graph)
    return version if threads.is_carried_by_anybody(transaction, carried_key(graph, version)) else None


def not_carried(graph: str, version: str | None) -> str:
    """Return the text that says so."""
    return f"no worker carries a graph named {graph!r}" + ("" if version is None else f" in version {version!r}")


def _fire(store: Store, schedule_id: str) -> list[Nudge]:
    nudges: list[Nudge] = []
    races = 0
    # Those that are caught up with, and what comes due meanwhile; the next sweep goes on.
    for _ in range(ticks.CAUGHT_UP_MAX + _RACES_MAX):
        try:
            with store.transaction() as transaction:
                row = transaction.row(_LOCK_UNLESS_BUSY, {"id": schedule_id})
                if row is None:
                    break
                found = ScheduleState(*row)
                fired = _fire_one(transaction, found)
        except DuplicateRow:
            # Somebody made a thread of that name at this moment: now it is there to be found.
            races += 1
            if races > _RACES_MAX:
                raise
            continue
        if fired.nudges:
            reach("after_tick", found.name)
        nudges += fired.nudges
        if not fired.goes_on:
            break
    return nudges


def _fire_one(transaction: Transaction, found: ScheduleState) -> _Fired:
    """Deal with the first of a schedule's ticks that are due, or with all that are missed."""
    first = found.now if found.next_at is None else found.next_at
    due = ticks.due(found.cron, found.timezone, found.missed, first=first, now=found.now)
    if due.tick is None:
        _skip(transaction, found, due, due.skipped or first, "missed", "the tick was missed: nothing ran")
        return _Fired([], goes_on=False)
    if found.overlap == "skip" and _is_under_way(transaction, found.run_id):
        _skip(transaction, found, due, due.tick, "overlap", "the run of an earlier tick had not ended")
        return _Fired([], _is_due(due.then, found))
    version = carried_version(transaction, found.agent, found.graph_version)
    if version is None:
        message = not_carried(found.agent, found.graph_version)
        transaction.run(
            _PUT_OFF, {"id": found.id, "error": error_text({"code": UnknownGraph.code, "message": message})}
        )
        return _Fired([], goes_on=False)
    run_id, nudges = _started_run(transaction, found, due.tick, version)
    _move_on(transaction, found, due, last_tick=due.tick, run_tick=due.tick, run_id=run_id)
    reach("inside_tick", found.name)
    return _Fired(nudges, _is_due(due.then, found))


def _started_run(transaction: Transaction, found: ScheduleState, tick: float, version: str) -> tuple[str, list[Nudge]]:
    """Give the thread of a tick its run, unless it has that; return the run's id and the nudge of what begins."""
    request_id = f"schedule {found.id} {ticks.text(tick)}"
    earlier = threads.run_of_request(transaction, found.tenant, request_id)
    if earlier is not None:
        return earlier.id, []
    digest = hashlib.blake2b(request_id.encode(), digest_size=16).digest()
    new = NewRun(new_id(), request_id, digest, found.input, found.step_limit, started_by=found.updated_by)
    name = ticks.thread_name(found.thread, tick)
    existing = threads.by_name(transaction, found.tenant, found.application, found.agent, name)
    nudge: Nudge | None
    if existing is None:
        thread_id = new_id()
        nudge = threads.create(
            transaction,
            thread_id=thread_id,
            tenant=found.tenant,
            application=found.application,
            agent=found.agent,
            name=name,
            graph_version=version,
            priority=NORMAL if found.priority is None else found.priority,
            lease_seconds=found.lease_seconds,
            first=new,
        )
    else:
        thread_id = existing.id
        nudge = threads.add_run(transaction, existing, version, new, priority=found.priority)
    _audit(transaction, found, thread_id, "start", {"run": new.id, "tick": ticks.text(tick)})
    return new.id, [] if nudge is None else [nudge]


def _is_due(tick: float | None, found: ScheduleState) -> bool:
    return tick is not None and tick <= found.now


def _is_under_way(transaction: Transaction, run_id: str | None) -> bool:
    row = None if run_id is None else transaction.row(_UNDER_WAY, {"run_id": run_id})
    return row is not None and row[0] in (QUEUED, RUNNING)


def _skip(transaction: Transaction, found: ScheduleState, due: Due, tick: float, code: str, message: str) -> None:
    """Let a tick start no run, and say why."""
    log.info("tick_skipped", schedule=found.name, tick=ticks.text(tick), reason=message)
    _move_on(
        transaction,
        found,
        due._replace(skipped=tick),
        last_tick=tick,
        error=error_text({"code": code, "message": message}),
    )


def _move_on(
    transaction: Transaction,
    found: ScheduleState,
    due: Due,
    *,
    last_tick: float,
    run_tick: float | None = None,
    run_id: str | None = None,
    error: str | None = None,
) -> None:
    """Write down what became of the ticks up to `last_tick`, and which is the next."""
    values = {"next_at": due.then, "last_tick": last_tick, "run_tick": run_tick, "run_id": run_id, "error": error}
    transaction.run(_MOVE_ON, {"id": found.id, "skipped_tick": due.skipped, **values})
    if due.skipped is not None:
        span = {"from": ticks.text(found.next_at or due.skipped), "to": ticks.text(due.skipped)}
        _audit(transaction, found, None, "skip", span)


def _audit(
    transaction: Transaction, found: ScheduleState, thread_id: str | None, action: str, detail: dict[str, str]
) -> None:
    threads.record_audit(
        transaction,
        tenant=found.tenant,
        thread_id=thread_id,
        actor="schedule",
        action=action,
        detail=json.dumps({"schedule": found.name, **detail}, ensure_ascii=True),
    )
