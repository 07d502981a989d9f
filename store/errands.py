"""Errands: what is left to do between a parent's thread and a child's, each a transaction that locks one of them.

A parent's attempt writes down that it wants a child (`spawn`), and that is all that it must not lose. Starting the
child's thread, telling the parent how the child ended, cancelling the child of a cancelled parent, and taking it up
again with its parent come after, in transactions of their own: at once by the process that committed what they follow
from, else by the sweep. Each looks at the child's row under its lock and does nothing when that was done already, so
that two may run the same errand.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import structlog

from keepstep.crashpoints import reach
from keepstep.errors import DatabaseUnavailable, DuplicateRow, RunInProgress, UnknownGraph
from keepstep.ids import new_id
from keepstep.store import children, threads, waits
from keepstep.store.children import ChildState
from keepstep.store.engine import Store, Transaction
from keepstep.store.errortext import error_text
from keepstep.store.leases import Fence, Nudge
from keepstep.store.outcomes import hold
from keepstep.store.schema import CANCELLED, DONE, ENDED, QUEUED, RUNNING
from keepstep.store.threads import NewRun, ThreadState

log = structlog.get_logger("keepstep.store")

_RACES_MAX = 3


class NewChild(NamedTuple):
    """A child that an attempt asks for; the ids and the place of the attempt are filled in by `spawn`."""

    step: str
    run: str
    call: str
    tenant: str
    application: str
    agent: str
    graph_version: str | None
    name: str
    run_id: str
    input: bytes
    digest: bytes
    priority: int
    lease_seconds: float


def spawn(store: Store, fence: Fence, new: NewChild) -> None:
    """Write down that a child is wanted, under the parent's lease; raise `StaleLease` when that is gone.

    Safe to run twice: the run's id tells that it is the same.
    """
    with store.transaction() as transaction:
        hold(transaction, fence)
        children.insert_wanted(transaction, {**new._asdict(), "thread_id": fence.thread_id})


def run(store: Store, nudge: Nudge) -> list[Nudge]:
    """Do what is left to do for the child that a nudge names; return the nudges of what follows."""
    for _ in range(_RACES_MAX):
        try:
            return _run(store, nudge.run)
        except DuplicateRow:
            continue  # somebody made a thread of the child's name at this moment: now it is there to be found
    return []


def finish_due(store: Store, *, limit: int) -> list[Nudge]:
    """Run the errands that nobody runs: their process died; return the nudges of what follows."""
    nudges: list[Nudge] = []
    todo = [children.nudge(run_id, None) for run_id in children.due(store, limit=limit)]
    for _ in range(2 * limit):
        if not todo:
            break
        nudge = todo.pop(0)
        try:
            followed = run(store, nudge)
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  one that cannot be done must not hold up the others
            log.warning("errand_failed", run=nudge.run, error=type(error).__name__, reason=str(error)[:500])
            continue
        todo += [each for each in followed if each.kind == "child"]
        nudges += [each for each in followed if each.kind != "child"]
    return nudges


def _run(store: Store, run_id: str) -> list[Nudge]:
    found = children.by_run(store, run_id)
    if found is None:
        return []
    match found.state:
        case children.WANTED:
            return _start(store, found)
        case children.STARTED if found.cancel:
            return _cancel(store, found)
        case children.STARTED if found.due_at is not None:
            return _take_up(store, found)
        case children.ENDED:
            return _deliver(store, found)
        case children.DELIVERED if found.due_at is not None:
            return _cancel(store, found)
    return []


# --- starting ---


def _start(store: Store, wanted: ChildState) -> list[Nudge]:
    with store.transaction() as transaction:
        existing = threads.by_name(transaction, wanted.tenant, wanted.application, wanted.agent, wanted.name)
        found = children.locked(transaction, wanted.run_id)
        if found is None or found.state != children.WANTED:
            return []
        # Of a graph that the parent knows by its name alone, whatever version is carried now.
        version = found.graph_version or threads.version_carried(transaction, found.agent)
        if version is None:
            message = f"no worker carries a graph named {found.agent!r}"
            children.put_off(transaction, found.run_id, error_text({"code": UnknownGraph.code, "message": message}))
            return []
        nudges = _given_run(transaction, existing, found, version)
    reach("after_child_start", wanted.name)
    return nudges


def _given_run(transaction: Transaction, existing: ThreadState | None, found: ChildState, version: str) -> list[Nudge]:
    given = children.input_of(transaction, found.run_id)
    # A question that a child asks is its parent's starter's own.
    by = waits.step_started_by(transaction, found.step)
    new = NewRun(found.run_id, f"spawn {found.run_id}", found.digest, given, None, spawned=1, started_by=by)
    if existing is None:
        thread_id = new_id()
        nudges = [
            threads.create(
                transaction,
                thread_id=thread_id,
                tenant=found.tenant,
                application=found.application,
                agent=found.agent,
                name=found.name,
                graph_version=version,
                priority=found.priority,
                lease_seconds=found.lease_seconds,
                first=new,
            )
        ]
    elif existing.status in ENDED and not existing.queued:
        thread_id = existing.id
        nudges = [each for each in (threads.add_run(transaction, existing, version, new, priority=None),) if each]
    else:
        message = f"thread {found.name!r} of graph {found.agent!r} has a run that has not ended ({existing.status})"
        children.refuse(transaction, found.run_id, error_text({"code": RunInProgress.code, "message": message}))
        return [children.nudge(found.run_id, None)]
    children.start(transaction, found.run_id, thread_id, version)
    _audit(transaction, found, thread_id, "start", {"run": found.run_id, "parent": found.thread_id})
    return nudges


# --- telling the parent ---


def _deliver(store: Store, ended: ChildState) -> list[Nudge]:
    reach("before_deliver", ended.name)
    with store.transaction() as transaction:
        waits.lock_thread(transaction, ended.thread_id)
        keys = waits.of_child(transaction, ended.thread_id, ended.run_id)
        found = children.locked(transaction, ended.run_id)
        if found is None or found.state != children.ENDED:
            return []
        woken = [waits.answer(transaction, key, (found.status or "").encode()) for key in keys]
        children.deliver(transaction, found.run_id, told=bool(keys))
    reach("after_deliver", ended.name)
    return [nudge for nudge in woken if nudge is not None]


# --- cancelling ---


def _cancel(store: Store, disowned: ChildState) -> list[Nudge]:
    reach("before_child_cancel", disowned.name)
    with store.transaction() as transaction:
        thread = threads.by_id(transaction, disowned.child_id or "")
        found = children.locked(transaction, disowned.run_id)
        if found is None or not _is_to_be_cancelled(found):
            return []
        if thread is None:
            children.forget(transaction, found.run_id)
            children.settle(transaction, found.run_id)
            return []
        at = threads.run_of(transaction, found.run_id)
        nudges = []
        if at.status in (QUEUED, RUNNING):
            error = error_text({"code": "cancelled", "message": "its parent was cancelled", "by": "parent"})
            nudges = threads.cancel_run(transaction, thread, found.run_id, error)
            _audit(transaction, found, thread.id, "cancel", {"reason": "its parent was cancelled"})
        elif found.state == children.STARTED:  # it was to be taken up again, and had not been yet
            children.end(transaction, found.run_id, at.status, error=found.error or at.error)
        children.settle(transaction, found.run_id)
    reach("after_child_cancel", disowned.name)
    return nudges


def _is_to_be_cancelled(found: ChildState) -> bool:
    if found.state == children.STARTED:
        return bool(found.cancel)
    return found.state == children.DELIVERED and found.due_at is not None


# --- taking up again ---


def _take_up(store: Store, reclaimed: ChildState) -> list[Nudge]:
    """Continue a child that was cancelled with its parent, which is taken up again; else its parent is told its end."""
    with store.transaction() as transaction:
        thread = threads.by_id(transaction, reclaimed.child_id or "")
        found = children.locked(transaction, reclaimed.run_id)
        if found is None or found.state != children.STARTED or found.cancel or found.due_at is None:
            return []
        if thread is None:
            return children.end(transaction, found.run_id, CANCELLED, error=found.error)
        at = threads.run_of(transaction, found.run_id)
        if at.status in (QUEUED, RUNNING):  # it had not been cancelled yet, or somebody has retried it
            children.goes_on(transaction, found.run_id)
            return []
        nudges = threads.take_up(transaction, thread, found.run_id, at)
        if not nudges:  # its thread has another run now, or somebody has retried it and it has ended
            branch, seq = at.last or (None, None)
            error = at.error if at.error or at.status == DONE else found.error
            return children.end(transaction, found.run_id, at.status, error=error, branch=branch, seq=seq)
        children.goes_on(transaction, found.run_id)
        _audit(transaction, found, thread.id, "retry", {"reason": "its parent was taken up again"})
    return nudges


def _audit(transaction: Transaction, found: ChildState, thread_id: str, action: str, detail: object) -> None:
    threads.record_audit(
        transaction,
        tenant=found.tenant,
        thread_id=thread_id,
        actor="parent",
        action=action,
        detail=json.dumps(detail),
    )
