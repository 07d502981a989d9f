"""Commands: what producers and people ask for, accepted by one committed transaction each.

Every command has an id; accepting it writes an audit row under that id, so that the same command twice, as brokers and
resending clients deliver it, is one command.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from keepstep.crashpoints import reach
from keepstep.errors import (
    Conflict,
    DuplicateRow,
    RunInProgress,
    RunUndone,
    TooLarge,
    UnknownGraph,
    WrongStatus,
)
from keepstep.ids import checked_name, new_id
from keepstep.priority import NORMAL, PRIORITIES
from keepstep.runtime import decisions, resolutions, schedules, stateedits
from keepstep.runtime.children import attended
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.decisions import DecideMessage
from keepstep.runtime.environment import Runtime
from keepstep.runtime.meant import one_thread
from keepstep.runtime.principals import Principal
from keepstep.runtime.schedules import Put, ScheduleControlMessage, ScheduleMessage, UnscheduleMessage
from keepstep.store import signals, threads, waits
from keepstep.store.engine import Transaction
from keepstep.store.errortext import error_text
from keepstep.store.leases import Nudge
from keepstep.store.schema import BLOCKED, CANCELLED, ENDED, FAILED, UNDONE, WAITING
from keepstep.store.threads import NewRun, ThreadState

_PATIENCE_SECONDS = 2.0
_RACES_MAX = 3


class StartMessage(Protocol):
    """A request to give a thread a run; fields as in `docs/messages.md`."""

    id: str
    tenant: str
    application: str
    graph: str
    thread: str
    input: Any
    request_id: str | None
    if_running: str
    step_limit: int | None
    priority: str | None
    by: str | None


class SignalMessage(Protocol):
    """A named message to a thread."""

    id: str
    tenant: str
    application: str
    graph: str | None
    thread: str
    name: str
    key: str | None
    payload: Any
    by: str | None


class EditMessage(Protocol):
    """A change of a thread's state by a person."""

    id: str
    tenant: str
    application: str
    graph: str | None
    thread: str
    values: Any
    by: str
    reason: str | None
    expect: int | str | None


class ResolveMessage(Protocol):
    """What a person says of an effect whose outcome is unknown."""

    id: str
    tenant: str
    effect: str
    outcome: str
    result: Any
    by: str
    reason: str | None


class ControlMessage(Protocol):
    """pause, resume, cancel or retry."""

    id: str
    tenant: str
    application: str
    graph: str | None
    thread: str
    action: str
    by: str | None
    reason: str | None
    step_limit: int | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A command whose row is committed."""

    thread_id: str | None
    """None of a command about a schedule."""
    run_id: str | None = None
    duplicate: bool = False
    """It had been accepted before; nothing was changed this time."""
    nudges: list[Nudge] = field(default_factory=list)
    """To be published now."""


def accept(runtime: Runtime, message: Any, principal: Principal | None = None) -> Accepted:
    """Apply a command; return what was accepted, after its commit. `principal`: whose word it is, when it is signed.

    Raises the typed error that its sender is to get: `UnknownGraph`, `StateError`, `NotFound`, `Ambiguous`,
    `Conflict` and its kinds; then nothing was written. Raises `DatabaseUnavailable` when nothing is known yet, and
    `NotCarried` when another worker may be able to accept it.
    """
    handlers: dict[str, Callable[[Runtime, Transaction, Any], Accepted]] = {
        "start": _start,
        "decide": functools.partial(_decide, principal),
        "signal": _signal,
        "control": _control,
        "edit": _edit,
        "resolve": _resolve,
        "schedule": _schedule,
        "unschedule": _unschedule,
        "schedule_control": _schedule_control,
    }
    handler = handlers[message.verb]

    def once() -> Accepted:
        with runtime.store.transaction() as transaction:
            done = threads.audited(transaction, message.tenant, message.id)
            if done is not None:
                thread_id, digest = done
                if digest != _content_digest(message):
                    text = f"command id {message.id!r} was used before for something else"
                    raise Conflict(text)
                return Accepted(thread_id, _run_of(transaction, message), duplicate=True)
            accepted = handler(runtime, transaction, message)
            reach("inside_command", message.verb)
            return accepted

    for _ in range(_RACES_MAX):
        try:
            accepted = runtime.store.patiently(once, seconds=_PATIENCE_SECONDS)
            break
        except DuplicateRow:
            continue  # the same command, or one for the same new thread, came in elsewhere: now it is there to be found
    else:
        accepted = once()
    return replace(accepted, nudges=attended(runtime, accepted.nudges))


def _run_of(transaction: Transaction, message: Any) -> str | None:
    """Return the run that a start has made, for a sender whose first answer was lost."""
    if message.verb != "start":
        return None
    found = threads.run_of_request(transaction, message.tenant, message.request_id or message.id)
    return None if found is None else found.id


def _content_digest(message: Any) -> bytes:
    """Return the digest of what a command says."""
    content = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else vars(message)
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=repr).encode(), digest_size=16).digest()


def _audit(
    transaction: Transaction, message: Any, thread_id: str | None, action: str, actor: str, detail: object
) -> None:
    threads.record_audit(
        transaction,
        tenant=message.tenant,
        thread_id=thread_id,
        actor=actor,
        action=action,
        command_id=message.id,
        command_digest=_content_digest(message),
        detail=json.dumps(detail, ensure_ascii=True, default=str),
    )


# --- start ---


def _start(runtime: Runtime, transaction: Transaction, message: StartMessage) -> Accepted:
    for kind, name in (("thread", message.thread), ("application", message.application), ("tenant", message.tenant)):
        checked_name(kind, name)
    graph = _carried(runtime, message.graph)
    codec = runtime.plain_codec if graph is None else runtime.codec(graph)
    stored = codec.encode(message.input, path="$.input")
    asked = [message.graph, message.thread, message.application, message.input, message.step_limit]
    digest = hashlib.blake2b(codec.encode(asked), digest_size=16).digest()
    request_id = message.request_id or message.id
    earlier = threads.run_of_request(transaction, message.tenant, request_id)
    if earlier is not None:
        if earlier.request_digest != digest:
            text = f"request {request_id!r} was used before for another start"
            raise Conflict(text)
        return Accepted(earlier.thread_id, earlier.id, duplicate=True)
    # Asked only now: what was accepted once stays so, also while nobody carries the graph.
    version = graph.version if graph is not None else threads.version_carried(transaction, message.graph)
    if version is None:
        known = ", ".join(sorted({name for name, _ in runtime.graphs})) or "none"
        text = f"no worker carries a graph named {message.graph!r} (this one carries: {known})"
        raise UnknownGraph(text)
    new = NewRun(new_id(), request_id, digest, stored, message.step_limit, started_by=message.by)
    priority = None if message.priority is None else PRIORITIES.index(message.priority)
    found = threads.by_name(transaction, message.tenant, message.application, message.graph, message.thread)
    if found is None:
        if graph is not None:
            # Not what follows from it: a route is the user's code, which must not hold up who takes in commands.
            graph.schema.initial(message.input)
        thread_id = new_id()
        nudge: Nudge | None = threads.create(
            transaction,
            thread_id=thread_id,
            tenant=message.tenant,
            application=message.application,
            agent=message.graph,
            name=message.thread,
            graph_version=version,
            priority=NORMAL if priority is None else priority,
            lease_seconds=runtime.lease_seconds(runtime.settings.node_timeout_seconds),
            first=new,
        )
    else:
        thread_id = found.id
        if found.status not in ENDED and message.if_running == "reject":
            text = f"thread {message.thread!r} of graph {message.graph!r} has a run that has not ended ({found.status})"
            raise RunInProgress(text)
        if graph is not None:
            graph.schema.fitted(message.input)
        nudge = threads.add_run(transaction, found, version, new, priority=priority)
    _audit(transaction, message, thread_id, "start", message.by or "producer", {"run": new.id})
    return Accepted(thread_id, new.id, nudges=[nudge] if nudge else [])


def _carried(runtime: Runtime, name: str) -> CompiledGraph | None:
    """Return the graph of that name this process carries; of several versions the last one defined."""
    found = [graph for (graph_name, _), graph in runtime.graphs.items() if graph_name == name]
    return found[-1] if found else None


# --- decide ---


def _decide(
    principal: Principal | None, runtime: Runtime, transaction: Transaction, message: DecideMessage
) -> Accepted:
    decided = decisions.decide(runtime, transaction, message, principal)
    if decided.duplicate:
        return Accepted(decided.thread_id, duplicate=True)
    _audit(transaction, message, decided.thread_id, "decide", message.by, decided.detail)
    return Accepted(decided.thread_id, nudges=decided.nudges)


# --- signal ---


def _signal(runtime: Runtime, transaction: Transaction, message: SignalMessage) -> Accepted:
    checked_name("a signal's name", message.name)
    found = one_thread(transaction, message)
    if found.status in ENDED and not found.queued:
        text = f"thread {message.thread!r} is {found.status}: nobody would ever ask for the signal"
        raise WrongStatus(text)
    stored = runtime.plain_codec.encode({"payload": message.payload, "key": message.key}, path="$.payload")
    waiting = waits.wait_for_signal(transaction, found.id, message.name, message.key)
    nudge = None
    if waiting is not None:
        nudge = waits.answer(transaction, waiting, stored)
    else:
        if signals.kept_count(transaction, found.id) >= runtime.settings.signals_kept_max:
            text = f"thread {message.thread!r} has {runtime.settings.signals_kept_max} signals nobody has asked for"
            raise TooLarge(text)
        signals.keep_signal(
            transaction,
            tenant=found.tenant,
            thread_id=found.id,
            name=message.name,
            key=message.key,
            payload=stored,
            ttl_seconds=runtime.settings.signal_ttl_seconds,
        )
    detail = {"name": message.name, "key": message.key, "delivered": waiting is not None}
    _audit(transaction, message, found.id, "signal", message.by or "producer", detail)
    return Accepted(found.id, nudges=[nudge] if nudge else [])


# --- control ---


def _control(_runtime: Runtime, transaction: Transaction, message: ControlMessage) -> Accepted:
    found = one_thread(transaction, message)
    nudges: list[Nudge] = []
    match message.action:
        case "pause":
            _refuse_ended(found, "paused")
            threads.pause(transaction, found)
        case "resume":
            _refuse_ended(found, "resumed")
            nudges = threads.resume(transaction, found)
        case "cancel":
            _refuse_ended(found, "cancelled", but=(FAILED,))
            text = error_text({"code": "cancelled", "message": message.reason or "cancelled", "by": message.by})
            nudges = threads.cancel(transaction, found, text)
        case _:
            nudges = _retry(transaction, found, message)
    _audit(transaction, message, found.id, message.action, message.by or "operator", {"reason": message.reason})
    return Accepted(found.id, found.run_id, nudges=nudges)


def _retry(transaction: Transaction, found: ThreadState, message: ControlMessage) -> list[Nudge]:
    if found.status == WAITING:
        nudges = threads.retry_beside(transaction, found)
        if nudges:
            return nudges
    if found.status not in (FAILED, BLOCKED, CANCELLED):
        text = f"thread {found.name!r} is {found.status}: only what failed, is blocked or was cancelled can be retried"
        raise WrongStatus(text)
    if found.undoing == UNDONE:
        text = f"what the run of thread {found.name!r} did was undone when it failed: give the thread another run"
        raise RunUndone(text)
    if not found.run_active:
        was = "failed" if found.status == FAILED else "was cancelled"
        text = f"thread {found.name!r} {was} before its run began: start it again, with input that fits"
        raise WrongStatus(text)
    return threads.retry(transaction, found, message.step_limit)


def _refuse_ended(found: ThreadState, what: str, *, but: tuple[str, ...] = ()) -> None:
    if found.status in ENDED and found.status not in but:
        text = f"thread {found.name!r} is {found.status} and cannot be {what}"
        raise WrongStatus(text)


# --- edit ---


def _edit(runtime: Runtime, transaction: Transaction, message: EditMessage) -> Accepted:
    found = one_thread(transaction, message)
    edited = stateedits.edit(
        runtime, transaction, found, message.values, by=message.by, reason=message.reason, expect=message.expect
    )
    _audit(transaction, message, found.id, "edit", message.by, edited.detail)
    return Accepted(found.id, found.run_id, nudges=edited.nudges)


# --- resolve ---


def _resolve(runtime: Runtime, transaction: Transaction, message: ResolveMessage) -> Accepted:
    resolved = resolutions.resolve(
        runtime,
        transaction,
        tenant=message.tenant,
        key=message.effect,
        outcome=message.outcome,
        result=message.result,
        by=message.by,
        reason=message.reason,
    )
    detail = {"effect": message.effect, "outcome": message.outcome, "reason": message.reason}
    _audit(transaction, message, resolved.thread.id, "resolve", message.by, detail)
    return Accepted(resolved.thread.id, resolved.thread.run_id, nudges=resolved.nudges)


# --- schedules ---


def _schedule(runtime: Runtime, transaction: Transaction, message: ScheduleMessage) -> Accepted:
    return _scheduled(transaction, message, "schedule", schedules.put(runtime, transaction, message))


def _unschedule(_runtime: Runtime, transaction: Transaction, message: UnscheduleMessage) -> Accepted:
    return _scheduled(transaction, message, "unschedule", schedules.remove(transaction, message))


def _schedule_control(_runtime: Runtime, transaction: Transaction, message: ScheduleControlMessage) -> Accepted:
    return _scheduled(transaction, message, message.action, schedules.control(transaction, message))


def _scheduled(transaction: Transaction, message: Any, action: str, put: Put) -> Accepted:
    # Also when nothing was changed: delivered again, after another command, it must not change that.
    _audit(transaction, message, None, action, message.by or "producer", put.detail)
    return Accepted(None, duplicate=put.unchanged)
