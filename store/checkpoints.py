"""Commit: a checkpoint, the thread's new head and the lease given back, in one transaction, all or nothing.

The hot path is one statement on PostgreSQL: a fenced UPDATE of the thread, whose row the INSERT of the checkpoint
selects from. When the nonce is no longer the thread's, the UPDATE finds nothing and so nothing is inserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import BigInteger, Integer, LargeBinary, and_, case, cast, delete, func, insert, or_, select, update
from sqlalchemy.sql.base import Executable

from keepstep import eventkinds
from keepstep.crashpoints import armed, reach
from keepstep.errors import DatabaseUnavailable, StaleLease
from keepstep.store import children, events, undoing
from keepstep.store.claims import CHECKPOINT_COLUMNS, CheckpointRow, checkpoint_row
from keepstep.store.engine import Store, Transaction
from keepstep.store.events import NewEvent
from keepstep.store.leases import Fence, Nudge, fence_params, fenced
from keepstep.store.routines import Routine
from keepstep.store.schema import DONE, FAILED, QUEUED, READY, RUNNING, checkpoint, run, signal, thread, wait
from keepstep.store.statements import Statement, db_now, param


class NewCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint about to be committed, and what the thread is after it."""

    seq: int
    id: str
    parent_id: str | None
    tenant: str
    run_id: str
    kind: str
    change: bytes | None
    snapshot: bytes | None
    cursor: bytes
    meta: bytes
    digest: bytes
    parent_digest: bytes
    status: str
    """`ready`: a step is due; `done` or `failed`: the run has ended."""
    run_steps: int
    lease_seconds: float
    """How long the next step may take."""
    nudge_seconds: float
    """When the sweep may think that the nudge for the next step was lost."""
    step_limit: int | None = None
    keep_lease: bool = False
    """The same attempt goes on with the next step: the nonce stays."""
    error: str | None = None
    emitted: Sequence[NewEvent] = ()
    begins_run: bool = False
    signals_of: str | None = None
    """The step whose consumed signals and waits are settled by this commit; None when it had none."""
    undo_lease_seconds: float = 0.0
    """How long each undo may take, of a run that fails with this commit."""


class Committed(NamedTuple):
    """The thread just after a commit."""

    version: int
    status: str
    control: str
    queued: int
    told: tuple[Nudge, ...] = ()
    """That the parent of a run that has ended be told."""


_OF_THREAD = ("version", "status", "control", "queued")
_VALUES = ("seq", "id", "parent_id", "tenant", "run_id", "kind", "change", "snapshot", "cursor", "meta", "digest")


def _head_update() -> Any:
    keep = param("keep_lease") == 1
    ended = or_(param("status") == DONE, param("status") == FAILED)
    next_begins = and_(ended, thread.c.queued > cast(param("begins"), Integer))
    kept = {name: case((keep, thread.c[name]), else_=None) for name in ("lease_nonce", "lease_worker", "lease_child")}
    return (
        update(thread)
        # The parent must still be the head: a nonce that was kept for the next step also fits a commit sent twice.
        .where(*fenced(thread), thread.c.seq == param("seq") - 1)
        .values(
            **kept,
            lease_deadline=case((keep, db_now() + param("lease_seconds")), else_=None),
            lease_seconds=param("lease_seconds"),
            # A run that was queued meanwhile begins as soon as this one has ended.
            status=case((next_begins, READY), else_=param("status")),
            error=param("error"),
            seq=param("seq"),
            checkpoint_id=param("id"),
            snapshot_seq=case(
                (cast(param("snapshot"), LargeBinary).is_(None), thread.c.snapshot_seq), else_=param("seq")
            ),
            version=thread.c.version + 1,
            due_at=db_now(),
            starts=cast(param("keep_lease"), Integer),
            failures=0,
            deaths=0,
            last_death=None,
            # In whole seconds: an update that leaves every indexed column as it was costs PostgreSQL no index entry.
            next_nudge_at=cast(db_now() + param("nudge_seconds"), BigInteger),
            nudges=0,
            fanned=0,
            pending=0,
            run_id=param("run_id"),
            run_active=case((or_(param("status") == DONE, next_begins), 0), else_=1),
            run_steps=param("run_steps"),
            step_limit=cast(param("step_limit"), Integer),
            queued=thread.c.queued - cast(param("begins"), Integer),
            updated_at=db_now(),
        )
        .returning(
            thread.c.id,
            thread.c.branch,
            *(thread.c[name] for name in _OF_THREAD),
        )
    )


def _commit(dialect: str) -> Executable:
    head = _head_update()
    if dialect != "postgresql":
        return head  # type: ignore[no-any-return]  # see _head_update
    moved = head.cte("moved")
    names = [*_VALUES, "parent_digest"]
    values = [cast(param(name), checkpoint.c[name].type) for name in names]
    written = (
        insert(checkpoint)
        .from_select(
            ["thread_id", "branch", *names, "created_at"], select(moved.c.id, moved.c.branch, *values, db_now())
        )
        .cte("written")
    )
    return select(*(moved.c[name] for name in _OF_THREAD), moved.c.branch).add_cte(written)


_COMMIT = Routine(
    "commit",
    _commit,
    {
        **dict.fromkeys(("f_thread", "f_nonce", "status", "error"), "text"),
        **dict.fromkeys(("id", "parent_id", "tenant", "run_id", "kind"), "text"),
        **dict.fromkeys(("change", "snapshot", "cursor", "meta", "digest", "parent_digest"), "bytea"),
        **dict.fromkeys(("seq", "run_steps", "step_limit", "keep_lease", "begins"), "integer"),
        **dict.fromkeys(("lease_seconds", "nudge_seconds"), "double precision"),
    },
)
ROUTINES = (_COMMIT,)
_INSERT_CHECKPOINT = Statement(
    lambda _dialect: insert(checkpoint).values(
        thread_id=param("thread_id"),
        branch=param("branch"),
        **{name: param(name) for name in (*_VALUES, "parent_digest")},
        created_at=db_now(),
    )
)
_RUN_BEGINS = Statement(
    lambda _dialect: update(run).where(run.c.id == param("run_id")).values(status=RUNNING, started_at=db_now())
)
_RUN_ENDS = Statement(
    lambda _dialect: (
        update(run)
        .where(run.c.id == param("run_id"))
        .values(status=param("status"), error=param("error"), steps=param("run_steps"), ended_at=db_now())
        .returning(run.c.spawned)
    )
)
_SETTLE_WAITS = Statement(
    lambda _dialect: (
        update(wait)
        .where(wait.c.thread_id == param("thread_id"), wait.c.step == param("step"), wait.c.status == "answered")
        .values(status="closed")
    )
)
_DROP_SIGNALS = Statement(
    lambda _dialect: delete(signal).where(
        signal.c.thread_id == param("thread_id"), func.coalesce(signal.c.consumed_by, "") != ""
    )
)
_BY_ID = Statement(
    lambda _dialect: (
        select(thread.c.version, thread.c.status, thread.c.control, thread.c.queued)
        .select_from(thread.join(checkpoint, checkpoint.c.thread_id == thread.c.id))
        .where(
            thread.c.id == param("thread_id"),
            checkpoint.c.branch == param("branch"),
            checkpoint.c.seq == param("seq"),
            checkpoint.c.id == param("id"),
        )
    )
)
_NEXT_RUN = Statement(
    lambda _dialect: (
        select(run.c.id, run.c.input, run.c.step_limit, run.c.number)
        .where(run.c.thread_id == param("thread_id"), run.c.status == QUEUED)
        .order_by(run.c.number)
        .limit(1)
    )
)
_CURSOR = Statement(
    lambda _dialect: select(checkpoint.c.cursor).where(
        checkpoint.c.thread_id == param("thread_id"),
        checkpoint.c.branch == param("branch"),
        checkpoint.c.seq == param("seq"),
    )
)
_HISTORY = Statement(
    lambda _dialect: (
        select(*CHECKPOINT_COLUMNS, checkpoint.c.created_at)
        .where(checkpoint.c.thread_id == param("thread_id"), checkpoint.c.branch == param("branch"))
        .order_by(checkpoint.c.seq)
    )
)


class QueuedRun(NamedTuple):
    """A run that waits to begin."""

    id: str
    input: bytes
    step_limit: int | None
    number: int


def commit(store: Store, fence: Fence, new: NewCheckpoint, *, patience_seconds: float) -> Committed:
    """Commit a checkpoint under the thread's lease; return the thread after it.

    A connection that dies during the commit leaves its outcome unknown. Then the same statement, with the same
    checkpoint id, is sent again on a new connection: if the first landed, the head has moved on and the statement does
    nothing, and the id is found in the history; if it did not, it lands now. Raises `StaleLease` when the lease is
    gone and the checkpoint is not there, `DatabaseUnavailable` after `patience_seconds`.
    """
    params = {
        **fence_params(fence),
        **{name: getattr(new, name) for name in (*_VALUES, "parent_digest")},
        "status": new.status,
        "error": new.error,
        "run_steps": new.run_steps,
        "step_limit": new.step_limit,
        "lease_seconds": new.lease_seconds,
        "nudge_seconds": new.nudge_seconds,
        "keep_lease": int(new.keep_lease),
        "begins": int(new.begins_run),
    }
    # One statement has no inside: where a test wants to die in there, it is taken apart.
    lone = not (armed("inside_commit") or new.emitted or new.begins_run or new.status != READY or new.signals_of)
    once = _commit_alone if lone and store.dialect == "postgresql" else _commit_with_company
    try:
        committed = once(store, fence, new, params)
    except DatabaseUnavailable:
        committed = store.patiently(lambda: _again(store, fence, new, params), seconds=patience_seconds)
    if committed is None:
        raise StaleLease
    return committed


def _again(store: Store, fence: Fence, new: NewCheckpoint, params: dict[str, Any]) -> Committed | None:
    committed = _commit_with_company(store, fence, new, params)
    if committed is not None:
        return committed
    key = {"thread_id": fence.thread_id, "branch": fence.branch, "seq": new.seq, "id": new.id}
    rows = store.rows(_BY_ID, key)
    return Committed(*rows[0]) if rows else None


def _commit_alone(store: Store, _fence: Fence, _new: NewCheckpoint, params: dict[str, Any]) -> Committed | None:
    rows = store.rows(_COMMIT, params)
    return Committed(*rows[0][:4]) if rows else None


def _commit_with_company(store: Store, fence: Fence, new: NewCheckpoint, params: dict[str, Any]) -> Committed | None:
    with store.transaction() as transaction:
        # The run has not failed before what it did is undone: the lease keeps that as it is.
        is_undone = new.status == FAILED and undoing.is_left(transaction, fence.thread_id, new.run_id)
        row = transaction.row(_COMMIT, {**params, "status": READY} if is_undone else params)
        if row is None:
            return None
        if store.dialect == "postgresql":
            committed = Committed(*row[:4])
        else:
            committed = Committed(*row[2:6])
            insert_checkpoint(transaction, fence.thread_id, fence.branch, new)
        run_params = {"run_id": new.run_id, "status": new.status, "error": new.error, "run_steps": new.run_steps}
        if new.begins_run:
            transaction.run(_RUN_BEGINS, run_params)
            events.record(transaction, fence.thread_id, eventkinds.STARTED, run_id=new.run_id)
        events.emit(transaction, fence, new.tenant, new.run_id, new.emitted)
        if is_undone:
            begun = undoing.begin(
                transaction, fence.thread_id, error=new.error or "{}", lease_seconds=new.undo_lease_seconds
            )
            committed = committed._replace(version=committed.version if begun is None else begun.version)
        elif new.status != READY:
            ended = transaction.row(_RUN_ENDS, run_params)
            if ended is not None and ended[0]:
                told = children.end(
                    transaction, new.run_id, new.status, error=new.error, branch=fence.branch, seq=new.seq
                )
                committed = committed._replace(told=tuple(told))
            events.record_end(transaction, fence.thread_id, new.status, run_id=new.run_id, error=new.error)
        if new.signals_of:
            transaction.run(_SETTLE_WAITS, {"thread_id": fence.thread_id, "step": new.signals_of})
            transaction.run(_DROP_SIGNALS, {"thread_id": fence.thread_id})
        reach("inside_commit", f"{new.kind}/{new.seq}")
    return committed


def insert_checkpoint(transaction: Transaction, thread_id: str, branch: int, new: NewCheckpoint) -> None:
    """Write a checkpoint's row; making it the thread's head is the caller's."""
    values = {name: getattr(new, name) for name in (*_VALUES, "parent_digest")}
    transaction.run(_INSERT_CHECKPOINT, {**values, "thread_id": thread_id, "branch": branch})


def next_run(store: Store, thread_id: str) -> QueuedRun | None:
    """Return the run that begins next, or None when none is queued."""
    rows = store.rows(_NEXT_RUN, {"thread_id": thread_id})
    return QueuedRun(*rows[0]) if rows else None


def cursor_of(store: Store, thread_id: str, branch: int, seq: int) -> bytes:
    """Return the cursor of a checkpoint that exists."""
    return bytes(store.rows(_CURSOR, {"thread_id": thread_id, "branch": branch, "seq": seq})[0][0])


def history(store: Store, thread_id: str, branch: int) -> list[tuple[CheckpointRow, float]]:
    """Return all checkpoints of a branch in order, each with the time it was committed."""
    rows = store.rows(_HISTORY, {"thread_id": thread_id, "branch": branch})
    return [(checkpoint_row(row[:-1]), row[-1]) for row in rows]


__all__ = [
    "Committed",
    "NewCheckpoint",
    "QueuedRun",
    "commit",
    "history",
    "insert_checkpoint",
    "next_run",
]
