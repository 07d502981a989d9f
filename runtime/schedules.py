"""What a schedule may say, and what people ask of one: made, changed, paused, resumed, removed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from keepstep.errors import InvalidSchedule, NotFound, UnknownGraph
from keepstep.ids import checked_name, new_id
from keepstep.priority import PRIORITIES
from keepstep.runtime.codec import view
from keepstep.store import firing, schedules, threads, ticks
from keepstep.store.schedules import ScheduleState, ScheduleView

if TYPE_CHECKING:
    from keepstep.runtime.compiled import CompiledGraph
    from keepstep.runtime.environment import Runtime
    from keepstep.store.engine import Transaction


class ScheduleMessage(Protocol):
    """A schedule to be made, or changed to this; fields as in `docs/messages.md`."""

    id: str
    tenant: str
    application: str
    name: str
    graph: str
    version: str | None
    thread: str | None
    input: Any
    cron: str
    timezone: str
    missed: str
    overlap: str
    priority: str | None
    step_limit: int | None
    by: str | None


class UnscheduleMessage(Protocol):
    """A schedule to be removed."""

    id: str
    tenant: str
    application: str
    name: str
    by: str | None
    reason: str | None


class ScheduleControlMessage(Protocol):
    """A schedule to be paused or resumed."""

    id: str
    tenant: str
    application: str
    name: str
    action: str
    by: str | None
    reason: str | None


class Put(NamedTuple):
    """What a command has done to a schedule."""

    detail: dict[str, Any]
    """For the audit."""
    unchanged: bool = False
    """It was as it is to be."""


@dataclass(frozen=True)
class Schedule:
    """A schedule as people see it."""

    id: str
    name: str
    application: str
    graph: str
    version: str | None
    """Of the graph; None: the one that a worker carries at the tick."""
    thread: str
    """The name of the thread that each tick gives a run; with `{tick}` in it each tick has a thread of its own."""
    input: Any
    cron: str
    timezone: str
    missed: str
    overlap: str
    priority: str | None
    step_limit: int | None
    paused: bool
    next_at: datetime | None
    """The next tick; None while it is paused, and when none comes any more."""
    last_tick: datetime | None
    """The last tick that has been dealt with."""
    outcome: str | None
    """What became of it: `skipped`, or how its run is: `queued`, `running`, `waiting`, `blocked`, `done`, …"""
    run: str | None
    """The last run that it started, of the tick `run_tick`."""
    run_tick: datetime | None
    run_thread: str | None
    """The name of that run's thread."""
    skipped_tick: datetime | None
    """The last tick that started no run."""
    error: dict[str, Any] | None
    """{code, message} of why it waits, or why the last tick started no run."""
    created_by: str | None
    updated_by: str | None
    created_at: datetime
    updated_at: datetime


def put(runtime: Runtime, transaction: Transaction, message: ScheduleMessage) -> Put:
    """Make the schedule that a message says, or change the one of its name to it.

    Raises `InvalidSchedule`, `StateError` for input that the graph cannot take, and `UnknownGraph`.
    """
    for kind, name in (("schedule", message.name), ("application", message.application), ("tenant", message.tenant)):
        checked_name(kind, name)
    found = schedules.by_name(transaction, message.tenant, message.application, message.name)
    now = schedules.now(transaction) if found is None else found.now
    said = _said(runtime, message, now)
    if found is not None and found.digest == said["digest"]:
        return Put({"schedule": message.name, "unchanged": True}, unchanged=True)
    if firing.carried_version(transaction, message.graph, message.version) is None:
        raise UnknownGraph(firing.not_carried(message.graph, message.version))
    graph = _carried(runtime, message.graph, message.version)
    if graph is not None:
        _check_input(transaction, graph, message, said["thread"])
    detail = {
        "schedule": message.name,
        **{name: said[name] for name in ("cron", "timezone", "thread", "missed", "overlap")},
        "graph": message.graph,
    }
    values = {**said, "by": message.by, "next_at": ticks.after(message.cron, message.timezone, now)}
    if found is not None and found.paused:
        values["next_at"] = None
    elif found is not None and (found.cron, found.timezone) == (message.cron, message.timezone):
        # A tick that has come and has not fired yet is not lost to a change of something else.
        values["next_at"] = found.next_at
    if values["next_at"] is not None:
        detail["next"] = ticks.text(values["next_at"])
    if found is None:
        names = {"tenant": message.tenant, "application": message.application, "name": message.name}
        schedules.make(transaction, {**values, **names, "id": new_id()})
        return Put(detail)
    schedules.replace(transaction, {**values, "id": found.id})
    return Put(detail)


def remove(transaction: Transaction, message: UnscheduleMessage) -> Put:
    """Remove a schedule; raise `NotFound` when there is none."""
    schedules.remove(transaction, _found(transaction, message))
    return Put({"schedule": message.name, "reason": message.reason})


def control(transaction: Transaction, message: ScheduleControlMessage) -> Put:
    """Pause or resume a schedule; raise `NotFound` when there is none."""
    found = _found(transaction, message)
    detail = {"schedule": message.name, "reason": message.reason}
    pauses = message.action == "pause"
    if pauses == bool(found.paused):
        return Put(detail, unchanged=True)
    if pauses:
        schedules.pause(transaction, found)
    else:
        schedules.resume(transaction, found, ticks.after(found.cron, found.timezone, found.now))
    return Put(detail)


def _found(transaction: Transaction, message: UnscheduleMessage | ScheduleControlMessage) -> ScheduleState:
    found = schedules.by_name(transaction, message.tenant, message.application, message.name)
    if found is None:
        text = f"there is no schedule {message.name!r} in application {message.application!r}"
        raise NotFound(text)
    return found


def _said(runtime: Runtime, message: ScheduleMessage, now: float) -> dict[str, Any]:
    """Return the columns that hold what a message says."""
    ticks.check(message.cron, message.timezone, now)
    priority = None if message.priority is None else PRIORITIES.index(message.priority)
    said = {
        "agent": message.graph,
        "graph_version": message.version,
        "thread": _thread(message, now),
        "cron": message.cron,
        "timezone": message.timezone,
        "missed": message.missed,
        "overlap": message.overlap,
        "priority": priority,
        "step_limit": message.step_limit,
    }
    graph = _carried(runtime, message.graph, message.version)
    codec = runtime.plain_codec if graph is None else runtime.codec(graph)
    content = json.dumps([said, message.input], sort_keys=True, default=repr)
    return {
        **said,
        "input": codec.encode(message.input, path="$.input"),
        "digest": hashlib.blake2b(content.encode(), digest_size=16).digest(),
        "lease_seconds": runtime.lease_seconds(runtime.settings.node_timeout_seconds),
    }


def _thread(message: ScheduleMessage, now: float) -> str:
    """Return the name of the threads, in which `{tick}` stands for the tick; raise for one that could not be used."""
    template = f"{message.name}-{ticks.IN_NAME}" if message.thread is None else message.thread
    if any(brace in template.replace(ticks.IN_NAME, "") for brace in "{}"):
        text = f"$.thread: of what stands in braces only {ticks.IN_NAME} is known, the tick's time"
        raise InvalidSchedule(text)
    checked_name("$.thread, with the tick's time in it,", ticks.thread_name(template, now))
    return template


def _carried(runtime: Runtime, name: str, version: str | None) -> CompiledGraph | None:
    """Return the graph that this process carries; of several versions the last one defined."""
    fits = [graph for key, graph in runtime.graphs.items() if key[0] == name and version in (None, key[1])]
    return fits[-1] if fits else None


def _check_input(transaction: Transaction, graph: CompiledGraph, message: ScheduleMessage, thread: str) -> None:
    """Raise `StateError` unless a run of the graph can begin with the input: a thread's first one, or a further one."""
    if ticks.IN_NAME not in thread:
        place = (message.tenant, message.application, message.graph, thread)
        if threads.by_name(transaction, *place) is not None:
            graph.schema.fitted(message.input)
            return
    graph.schema.initial(message.input)


# --- looking ---


def schedule_of(row: ScheduleView) -> Schedule:
    """Return a schedule as people see it."""
    return Schedule(
        id=row.id,
        name=row.name,
        application=row.application,
        graph=row.agent,
        version=row.graph_version,
        thread=row.thread,
        input=view(row.input),
        cron=row.cron,
        timezone=row.timezone,
        missed=row.missed,
        overlap=row.overlap,
        priority=None if row.priority is None else PRIORITIES[row.priority],
        step_limit=row.step_limit,
        paused=bool(row.paused),
        next_at=_time(row.next_at),
        last_tick=_time(row.last_tick),
        outcome=_outcome(row),
        run=row.run_id,
        run_tick=_time(row.run_tick),
        run_thread=row.run_thread,
        skipped_tick=_time(row.skipped_tick),
        error=None if row.error is None else json.loads(row.error),
        created_by=row.created_by,
        updated_by=row.updated_by,
        created_at=datetime.fromtimestamp(row.created_at, UTC),
        updated_at=datetime.fromtimestamp(row.updated_at, UTC),
    )


def _outcome(row: ScheduleView) -> str | None:
    if row.last_tick is None:
        return None
    if row.last_tick != row.run_tick:
        return "skipped"
    # Of a run that is under way its thread says more: that it waits, or is blocked.
    parked = row.run_status == "running" and row.thread_status in {"waiting", "blocked"}
    return row.thread_status if parked else row.run_status


def _time(value: float | None) -> datetime | None:
    return None if value is None else datetime.fromtimestamp(value, UTC)
