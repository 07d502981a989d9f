"""Rows of an operator's edit of a thread's state: a checkpoint between two steps, under the thread's lock.

The step that is pending keeps its key, and so its effects and its waits. What else names the checkpoint that it will
write, the rows of its node runs and of its waits, moves on with the head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Text, case, literal, or_, select, update

from keepstep.store.checkpoints import NewCheckpoint, insert_checkpoint
from keepstep.store.claims import CheckpointRow, checkpoint_range
from keepstep.store.engine import Transaction
from keepstep.store.leases import NUDGE_SECONDS, PAUSE, Nudge, is_takeable, nudge_columns, released
from keepstep.store.schema import READY, node_run, thread, wait
from keepstep.store.statements import Statement, db_now, param
from keepstep.store.threads import ThreadState


class EditedHead(NamedTuple):
    """What an edit needs to know of a locked thread besides its state."""

    snapshot_seq: int
    checkpoint_id: str | None
    is_held: int
    """Whether somebody holds the thread's lease; one that has outlived its deadline does not count."""
    lease_worker: str | None


def _is_held(table: Any) -> Any:
    return ~is_takeable(table)


_HEAD = Statement(
    lambda _dialect: select(
        thread.c.snapshot_seq,
        thread.c.checkpoint_id,
        case((_is_held(thread), 1), else_=0),
        thread.c.lease_worker,
    ).where(thread.c.id == param("thread_id"))
)


def _of_step() -> list[Any]:
    return [
        node_run.c.thread_id == param("thread_id"),
        node_run.c.branch == param("branch"),
        node_run.c.seq == param("seq"),
    ]


# Locked in their order, and looked at only then: a claim that came first shows its lease, a later one finds them moved.
_NODE_RUNS = Statement(
    lambda _dialect: (
        select(node_run.c.run, case((_is_held(node_run), 1), else_=0))
        .where(*_of_step())
        .order_by(node_run.c.position)
        .with_for_update()
    )
)


def _overstayed(table: Any) -> dict[str, Any]:
    """What ends a lease that has outlived its deadline, as the next claim would."""
    stands = table.c.lease_nonce.is_not(None)
    return {
        **released(table),
        "deaths": table.c.deaths + case((stands, 1), else_=0),
        "last_death": case((stands, literal("it overstayed its deadline", Text)), else_=table.c.last_death),
    }


def _nudged(table: Any) -> dict[str, Any]:
    soon = db_now() + NUDGE_SECONDS
    return {"next_nudge_at": case((table.c.due_at > soon, table.c.due_at), else_=soon), "nudges": 0}


_MOVE_HEAD = Statement(
    lambda _dialect: (
        update(thread)
        .where(thread.c.id == param("thread_id"))
        .values(
            **_overstayed(thread),
            **_nudged(thread),
            seq=param("seq"),
            checkpoint_id=param("id"),
            snapshot_seq=param("snapshot_seq"),
            version=thread.c.version + 1,
            updated_at=db_now(),
        )
        .returning(*nudge_columns(thread))
    )
)
_MOVE_NODE_RUNS = Statement(
    lambda _dialect: (
        update(node_run)
        .where(*_of_step())
        .values(**_overstayed(node_run), **_nudged(node_run), seq=node_run.c.seq + 1)
        .returning(node_run.c.status, *nudge_columns(node_run))
    )
)
_MOVE_WAITS = Statement(
    lambda _dialect: (
        update(wait)
        .where(
            wait.c.thread_id == param("thread_id"),
            wait.c.step == param("step"),
            # What a cancel closed has no answer: a retry opens it again.
            or_(wait.c.status == "open", wait.c.status == "answered", wait.c.answered_at.is_(None)),
        )
        .values(seq=param("due_seq"))
    )
)


def head(transaction: Transaction, found: ThreadState) -> EditedHead:
    """Return what else there is to know of a thread that is locked."""
    return EditedHead(*transaction.rows(_HEAD, {"thread_id": found.id})[0])


def chain(transaction: Transaction, found: ThreadState, at: EditedHead) -> list[CheckpointRow]:
    """Return a locked thread's checkpoints from the last snapshot to the head."""
    return checkpoint_range(transaction, found.id, found.branch, at.snapshot_seq, found.seq)


def running_node_runs(transaction: Transaction, found: ThreadState) -> list[str]:
    """Lock the node runs of a locked thread's fanned-out step; return those that somebody holds a lease on."""
    rows = transaction.rows(_NODE_RUNS, {"thread_id": found.id, "branch": found.branch, "seq": found.seq + 1})
    return [str(run) for run, is_held in rows if is_held]


def write(
    transaction: Transaction, found: ThreadState, at: EditedHead, new: NewCheckpoint, *, step: str
) -> list[Nudge]:
    """Make a checkpoint the head of a locked thread in whose step nobody is; return the nudges of what is due.

    `step` is the key of the step that is pending, which stays as it is. The thread's version moves, so that a claim
    that was under way finds it has come too late.
    """
    insert_checkpoint(transaction, found.id, found.branch, new)
    place = {"thread_id": found.id, "branch": found.branch, "seq": found.seq + 1}
    values = {"id": new.id, "snapshot_seq": at.snapshot_seq if new.snapshot is None else new.seq}
    moved_head = transaction.rows(_MOVE_HEAD, {**place, **values, "seq": new.seq})[0]
    moved = transaction.rows(_MOVE_NODE_RUNS, place) if found.fanned else []
    transaction.run(_MOVE_WAITS, {"thread_id": found.id, "step": step, "due_seq": new.seq + 1})
    if found.control == PAUSE:
        return []
    if found.status == READY:
        return [Nudge("step", *moved_head)]
    return [Nudge("node", *row) for status, *row in moved if status == READY]
