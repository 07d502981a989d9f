"""Outcomes other than a commit: fanned out, parked, failed, blocked. Each is one fenced transaction.

The lock order is thread, node run, wait, approval, effect, audit, everywhere, so that two of these transactions can
wait for each other but never in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Integer, and_, case, cast, exists, insert, literal, select, update
from sqlalchemy import Text as TextType

from keepstep import eventkinds
from keepstep.errors import StaleLease
from keepstep.store import children, events, undoing, waits
from keepstep.store.engine import Store, Transaction
from keepstep.store.events import NewEvent
from keepstep.store.leases import NUDGE_SECONDS, Fence, Nudge, fence_params, fenced, nudge_columns, released
from keepstep.store.schema import (
    FAILED,
    READY,
    UNDOING,
    UNDONE,
    WAITING,
    approval,
    node_run,
    run,
    thread,
    wait,
)
from keepstep.store.signals import take_signal
from keepstep.store.statements import Statement, db_now, param


@dataclass(frozen=True, slots=True)
class NewNodeRun:
    """A node run to be fanned out."""

    run: str
    step: str
    node: str
    input: bytes | None
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class NewApproval:
    """A question to people, opened by a park."""

    id: str
    kind: str
    question: bytes
    quorum: int
    on_expiry: str
    escalate_to: str | None = None
    """People and roles (JSON)."""
    remind_seconds: float | None = None
    """How long between two reminders while it is open; None: there are none."""


@dataclass(frozen=True, slots=True)
class NewWait:
    """What a park waits for. `seconds` is the timer, the time-out or the expiry, from now; None: for ever."""

    occurrence: int
    kind: str
    digest: bytes
    approval: NewApproval | None = None
    signal_name: str | None = None
    signal_key: str | None = None
    child_run: str | None = None
    seconds: float | None = None


class NodeRunState(NamedTuple):
    """A node run as the join sees it."""

    run: str
    node: str
    position: int
    status: str
    write: bytes | None
    error: str | None
    starts: int


# --- locking ---

_LOCK_THREAD = Statement(
    lambda _dialect: (
        select(*(thread.c[name] for name in Locked._fields)).where(thread.c.id == param("f_thread")).with_for_update()
    )
)
_HOLDS_THREAD = Statement(lambda _dialect: select(thread.c.id).where(*fenced(thread)).with_for_update())
_HOLDS_NODE = Statement(lambda _dialect: select(node_run.c.run).where(*fenced(node_run)).with_for_update())


class Locked(NamedTuple):
    """The thread under its lock."""

    tenant: str
    run_id: str | None
    status: str
    run_steps: int
    queue: str
    priority: int


def lock(transaction: Transaction, fence: Fence) -> Locked:
    """Lock the thread, then the node run, and check that the fence still holds; raise `StaleLease` when not."""
    row = transaction.row(_LOCK_THREAD, fence_params(fence))
    if row is None:
        raise StaleLease
    hold(transaction, fence)
    return Locked(*row)


def hold(transaction: Transaction, fence: Fence) -> None:
    """Lock the leased row alone and check that the fence still holds; raise `StaleLease` when not.

    Without the lock the check would be write skew: a takeover could come between it and the write that it guards.
    """
    holds = _HOLDS_THREAD if fence.run is None else _HOLDS_NODE
    if transaction.row(holds, fence_params(fence)) is None:
        raise StaleLease


# --- fan-out and join ---

_INSERT_NODE_RUN = Statement(
    lambda _dialect: insert(node_run).values(
        thread_id=param("thread_id"),
        branch=param("branch"),
        seq=param("seq"),
        run=param("run"),
        tenant=param("tenant"),
        step=param("step"),
        position=param("position"),
        node=param("node"),
        input=param("input"),
        status=READY,
        version=0,
        queue=param("queue"),
        priority=param("priority"),
        due_at=db_now(),
        lease_seconds=param("lease_seconds"),
        next_nudge_at=db_now() + NUDGE_SECONDS,
        created_at=db_now(),
    )
)
_FAN_OUT = Statement(
    lambda _dialect: (
        update(thread)
        .where(*fenced(thread))
        .values(
            **released(thread),
            status=WAITING,
            fanned=param("count"),
            pending=param("count"),
            version=thread.c.version + 1,
            updated_at=db_now(),
        )
    )
)
_FINISH_NODE = Statement(
    lambda _dialect: (
        update(node_run)
        .where(*fenced(node_run))
        .values(
            **released(node_run),
            status=param("status"),
            write=param("write"),
            error=param("error"),
            failures=param("failures"),
            version=node_run.c.version + 1,
            ended_at=db_now(),
        )
    )
)
_COUNT_DOWN = Statement(
    lambda _dialect: (
        update(thread)
        .where(thread.c.id == param("f_thread"))
        .values(
            pending=thread.c.pending - 1,
            status=case((and_(thread.c.pending == 1, thread.c.status == WAITING), READY), else_=thread.c.status),
            version=thread.c.version + case((thread.c.pending == 1, 1), else_=0),
            due_at=db_now(),
            next_nudge_at=db_now() + NUDGE_SECONDS,
            nudges=0,
        )
        .returning(thread.c.pending, thread.c.status, *nudge_columns(thread))
    )
)
_NODE_RUNS = Statement(
    lambda _dialect: (
        select(*(node_run.c[name] for name in NodeRunState._fields))
        .where(
            node_run.c.thread_id == param("thread_id"),
            node_run.c.branch == param("branch"),
            node_run.c.seq == param("seq"),
        )
        .order_by(node_run.c.position)
    )
)


def fan_out(store: Store, fence: Fence, runs: Sequence[NewNodeRun]) -> list[Nudge]:
    """Give every node run of the step a row of its own and release the thread; return their nudges.

    Raises `StaleLease` when the lease is gone.
    """
    with store.transaction() as transaction:
        locked = lock(transaction, fence)
        key = {"thread_id": fence.thread_id, "branch": fence.branch, "seq": fence.seq, "tenant": locked.tenant}
        key |= {"queue": locked.queue, "priority": locked.priority}
        for position, new in enumerate(runs):
            values = {"run": new.run, "step": new.step, "node": new.node, "input": new.input, "position": position}
            transaction.run(_INSERT_NODE_RUN, {**key, **values, "lease_seconds": new.lease_seconds})
        transaction.run(_FAN_OUT, {**fence_params(fence), "count": len(runs)})
    place = (locked.queue, locked.priority, fence.seq)
    return [Nudge("node", fence.thread_id, 0, *place, new.run) for new in runs]


def finish_node(
    store: Store,
    fence: Fence,
    *,
    status: str,
    write: bytes | None = None,
    error: str | None = None,
    failures: int = 0,
    emitted: Sequence[NewEvent] = (),
) -> Nudge | None:
    """Record the end of a fanned-out node run; return the step's nudge when it was the last, else None.

    Which one is last is decided under the thread's lock, so it is exactly one. Raises `StaleLease` when the lease is
    gone.
    """
    with store.transaction() as transaction:
        locked = lock(transaction, fence)
        key = fence_params(fence)
        values = {"status": status, "write": write, "error": error, "failures": failures}
        transaction.run(_FINISH_NODE, {**key, **values})
        events.emit(transaction, fence, locked.tenant, locked.run_id, emitted)
        pending, thread_status, *row = transaction.rows(_COUNT_DOWN, key)[0]
    return Nudge("step", *row) if pending == 0 and thread_status == READY else None


def node_runs(store: Store, thread_id: str, branch: int, seq: int) -> list[NodeRunState]:
    """Return the node runs of a fanned-out step, in the order in which the step planned them."""
    rows = store.rows(_NODE_RUNS, {"thread_id": thread_id, "branch": branch, "seq": seq})
    return [NodeRunState(*row) for row in rows]


# --- parking ---

_INSERT_APPROVAL = Statement(
    lambda _dialect: (
        insert(approval)
        .values(
            id=param("id"),
            tenant=param("tenant"),
            thread_id=param("thread_id"),
            step=param("step"),
            run=param("run"),
            occurrence=param("occurrence"),
            kind=param("kind"),
            status="open",
            question=param("question"),
            quorum=param("quorum"),
            on_expiry=param("on_expiry"),
            escalate_to=param("escalate_to"),
            expires_seconds=param("seconds"),
            expires_at=db_now() + param("seconds"),
            remind_seconds=param("remind_seconds"),
            remind_at=db_now() + param("remind_seconds"),
            created_at=db_now(),
        )
        .returning(approval.c.expires_at)
    )
)
_INSERT_WAIT = Statement(
    lambda _dialect: insert(wait).values(
        thread_id=param("thread_id"),
        step=param("step"),
        run=param("run"),
        occurrence=param("occurrence"),
        tenant=param("tenant"),
        branch=param("branch"),
        seq=param("seq"),
        kind=param("kind"),
        digest=param("digest"),
        status=param("status"),
        answer=param("answer"),
        approval_id=param("approval_id"),
        signal_name=param("signal_name"),
        signal_key=param("signal_key"),
        child_run=param("child_run"),
        due_at=db_now() + param("seconds"),
        created_at=db_now(),
    )
)


def _parked(table: Any) -> Statement:
    waits = exists().where(
        wait.c.thread_id == param("f_thread"),
        wait.c.step == param("step"),
        wait.c.run == param("run"),
        wait.c.status == "open",
    )
    return Statement(
        lambda _dialect: (
            update(table)
            .where(*fenced(table))
            .values(
                **released(table),
                # Nothing is open any more when a signal that came early has answered the wait: go on at once.
                status=case((waits, WAITING), else_=READY),
                failures=param("failures"),
                version=table.c.version + 1,
                due_at=db_now(),
                next_nudge_at=db_now() + NUDGE_SECONDS,
                nudges=0,
            )
            .returning(table.c.status, *nudge_columns(table))
        )
    )


_PARK = {False: _parked(thread), True: _parked(node_run)}


def park(
    store: Store,
    fence: Fence,
    *,
    step: str,
    run: str,
    asked: Sequence[NewWait],
    failures: int,
    emitted: Sequence[NewEvent] = (),
) -> list[Nudge]:
    """Park a node run on waits: rows only, no worker; return its nudge when all of them are answered already.

    Other node runs that wait for a child whose end this is told are told, too: returns their nudges.
    `asked` are those asked for the first time. A signal, and the end of a child, is delivered under the thread's lock
    and this looks for early ones under the same lock, so none falls between. Approvals become visible by this commit
    and not before. Writes no checkpoint and leaves the step key alone. Raises `StaleLease` when the lease is gone.
    """
    with store.transaction() as transaction:
        locked = lock(transaction, fence)
        place = {"thread_id": fence.thread_id, "step": step, "run": run, "tenant": locked.tenant}
        nudges: list[Nudge] = []
        for new in asked:
            nudges += _open(transaction, {**place, "branch": fence.branch, "seq": fence.seq}, new)
        for new in asked:
            if new.approval is not None:
                _ask(transaction, place, new, new.approval)
        events.emit(transaction, fence, locked.tenant, locked.run_id, emitted)
        fanned = fence.run is not None
        params = {**fence_params(fence), "step": step, "run": run, "failures": failures}
        status, *row = transaction.rows(_PARK[fanned], params)[0]
        if status == WAITING:
            found = waits.open_of_run(transaction, fence.thread_id, step, run)
            events.record(transaction, fence.thread_id, eventkinds.THREAD_WAITING, run=run, waits=found)
    return nudges if status == WAITING else [Nudge("node" if fanned else "step", *row), *nudges]


def _open(transaction: Transaction, place: dict[str, Any], new: NewWait) -> list[Nudge]:
    early, nudges = None, []
    if new.signal_name is not None:
        wanted = {"thread_id": place["thread_id"], "name": new.signal_name, "key": new.signal_key}
        early = take_signal(transaction, wanted, consumer=f"{place['step']}/{place['run']}#{new.occurrence}")
    if new.child_run is not None:
        others = waits.of_child(transaction, place["thread_id"], new.child_run)
        ended = children.take(transaction, new.child_run)
        if ended is not None:
            early = ended.encode()
            # Nobody comes to tell them any more.
            nudges = [nudge for key in others if (nudge := waits.answer(transaction, key, early))]
    transaction.run(
        _INSERT_WAIT,
        {
            **place,
            "occurrence": new.occurrence,
            "seconds": new.seconds,
            "kind": new.kind,
            "digest": new.digest,
            "status": "open" if early is None else "answered",
            "answer": early,
            "approval_id": new.approval.id if new.approval else None,
            "signal_name": new.signal_name,
            "signal_key": new.signal_key,
            "child_run": new.child_run,
        },
    )
    return nudges


def _ask(transaction: Transaction, place: dict[str, Any], new: NewWait, asked: NewApproval) -> None:
    values = {"occurrence": new.occurrence, "seconds": new.seconds, "id": asked.id, "kind": asked.kind}
    payload = {
        "question": asked.question,
        "quorum": asked.quorum,
        "on_expiry": asked.on_expiry,
        "escalate_to": asked.escalate_to,
        "remind_seconds": asked.remind_seconds,
    }
    [(expires_at,)] = transaction.rows(_INSERT_APPROVAL, {**place, **values, **payload})
    events.record(
        transaction,
        place["thread_id"],
        eventkinds.OPENED,
        run=place["run"],
        approval_id=asked.id,
        **waits.as_asked(None, expires_at),
    )


# --- ending badly ---

_FAILS = cast(param("status"), TextType) == FAILED
_NEXT_BEGINS = and_(_FAILS, thread.c.queued > 0)
_STOP = Statement(
    lambda _dialect: (
        update(thread)
        .where(*fenced(thread))
        .values(
            **released(thread),
            # A run that failed holds up none that is queued behind it: the next begins from the state it left.
            status=case((_NEXT_BEGINS, READY), else_=cast(param("status"), TextType)),
            run_active=case((_NEXT_BEGINS, 0), else_=thread.c.run_active),
            undoing=case(
                (_NEXT_BEGINS, 0), (and_(_FAILS, thread.c.undoing == UNDOING), UNDONE), else_=thread.c.undoing
            ),
            fanned=case((_NEXT_BEGINS, 0), else_=thread.c.fanned),
            pending=case((_NEXT_BEGINS, 0), else_=thread.c.pending),
            starts=case((_NEXT_BEGINS, 0), else_=thread.c.starts),
            deaths=case((_NEXT_BEGINS, 0), else_=thread.c.deaths),
            error=param("error"),
            failures=case((_NEXT_BEGINS, 0), else_=cast(param("failures"), Integer)),
            version=thread.c.version + 1,
            due_at=db_now(),
            next_nudge_at=db_now() + NUDGE_SECONDS,
            nudges=0,
            updated_at=db_now(),
        )
        .returning(thread.c.status, *nudge_columns(thread))
    )
)
_STOP_RUN = Statement(
    lambda _dialect: (
        update(run)
        .where(run.c.id == param("run_id"), literal(FAILED, TextType) == param("status"))
        .values(status=param("status"), error=param("error"), steps=param("run_steps"), ended_at=db_now())
        .returning(run.c.spawned)
    )
)


def _run_failed(transaction: Transaction, params: Mapping[str, Any]) -> list[Nudge]:
    """End a run, if it is to be; return the nudge that its parent be told, if it has one."""
    row = transaction.row(_STOP_RUN, params)
    if row is None or not row[0]:
        return []
    return children.end(transaction, params["run_id"], FAILED, error=params["error"])


def stop(
    store: Store,
    fence: Fence,
    *,
    status: str,
    error: str,
    failures: int = 0,
    emitted: Sequence[NewEvent] = (),
    undo_lease_seconds: float = 0.0,
) -> list[Nudge]:
    """End the thread's step as `failed` or `blocked`, state and pending writes kept; return the nudges that follow.

    A run that is queued behind a failed one begins; behind a blocked one it waits. The parent of a failed run is told.
    A run that did what is to be undone has not failed before it is (see `undoing`): then the thread is ready for that,
    and each undo has `undo_lease_seconds`. Raises `StaleLease` when stale.
    """
    with store.transaction() as transaction:
        locked = lock(transaction, fence)
        events.emit(transaction, fence, locked.tenant, locked.run_id, emitted)
        if status == FAILED:
            begun = undoing.begin(transaction, fence.thread_id, error=error, lease_seconds=undo_lease_seconds)
            if begun is not None:
                return [begun]
        return stopped(transaction, fence, locked, status=status, error=error, failures=failures)


def stopped(
    transaction: Transaction, fence: Fence, locked: Locked, *, status: str, error: str, failures: int = 0
) -> list[Nudge]:
    """Write the end of a locked thread's step as `failed` or `blocked`; return the nudges that follow."""
    params = {**fence_params(fence), "status": status, "error": error, "failures": failures}
    after, *row = transaction.rows(_STOP, params)[0]
    ended = {"run_id": locked.run_id, "status": status, "error": error, "run_steps": locked.run_steps}
    told = _run_failed(transaction, ended)
    events.record_end(transaction, fence.thread_id, status, run_id=locked.run_id, error=error)
    return [Nudge("step", *row), *told] if after == READY else told


_REFUSE_RUN = Statement(
    lambda _dialect: (
        update(thread)
        .where(*fenced(thread))
        .values(
            **released(thread),
            # The run behind it begins: what is wrong with this one is said on its own row.
            status=case((thread.c.queued > 1, READY), else_=FAILED),
            error=param("error"),
            run_id=param("run_id"),
            run_active=0,
            run_steps=0,
            queued=thread.c.queued - 1,
            version=thread.c.version + 1,
            due_at=db_now(),
            next_nudge_at=db_now() + NUDGE_SECONDS,
            nudges=0,
            updated_at=db_now(),
        )
        .returning(thread.c.status, *nudge_columns(thread))
    )
)


def refuse_run(store: Store, fence: Fence, run_id: str, error: str) -> list[Nudge]:
    """End a queued run that cannot begin, because its input does not fit; return the nudges that follow, as `stop`.

    Raises `StaleLease` when the lease is gone.
    """
    with store.transaction() as transaction:
        lock(transaction, fence)
        params = {"run_id": run_id, "status": FAILED, "error": error, "run_steps": 0}
        status, *row = transaction.rows(_REFUSE_RUN, {**fence_params(fence), **params})[0]
        told = _run_failed(transaction, params)
        events.record_end(transaction, fence.thread_id, FAILED, run_id=run_id, error=error)
    return [Nudge("step", *row), *told] if status == READY else told
