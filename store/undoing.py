"""Undoing: before a run counts as failed, what it did outside and can be undone is undone, the newest first.

The thread stays `ready` meanwhile and is marked as undoing; a claim then undoes one effect in place of running a step,
under the lease and with the retries, deaths and pauses of any step. Why the run failed stands on its run row until all
is undone. An undo is an effect of its own in the journal, under the key of what it undoes and `/undo`; the effect's own
row says what came of it only once the thread has gone on from there.

The functions here are parts of other transactions, which hold the thread's lock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, exists, func, or_, select, update

from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import NUDGE_SECONDS, Nudge, nudge_columns, released
from keepstep.store.schema import READY, UNDOING, effect, run, thread
from keepstep.store.statements import Statement, db_now, param

DONE, INTENT = "done", "intent"
SUFFIX = "/undo"
"""What follows the key of an effect in the key of its undo."""


class Undoable(NamedTuple):
    """An effect of a failed run that is to be undone."""

    step: str
    run: str
    call: str
    name: str
    state: str
    """`done`, or `intent`: whether it happened has to be found out first."""
    arguments_digest: bytes
    arguments: bytes | None
    undo: str
    """Which function undoes it."""

    @property
    def key(self) -> str:
        """Its idempotency key."""
        return f"{self.step}/{self.run}/{self.call}"


def is_to_be_undone(thread_id: Any, run_id: Any) -> list[ColumnElement[bool]]:
    """The condition that an effect of a run is still to be undone.

    What has no outcome may have happened, so it is among them; what failed, or was given up by a person, is not.
    """
    return [
        effect.c.thread_id == thread_id,
        effect.c.run_id == run_id,
        effect.c.undo.is_not(None),
        effect.c.undone.is_(None),
        or_(effect.c.state == DONE, effect.c.state == INTENT),
    ]


_NEXT = Statement(
    lambda _dialect: (
        select(*(effect.c[name] for name in Undoable._fields))
        .where(*is_to_be_undone(param("thread_id"), param("run_id")))
        .order_by(
            func.coalesce(effect.c.ended_at, effect.c.started_at).desc(),
            effect.c.started_at.desc(),
            func.length(effect.c.step).desc(),
            effect.c.step.desc(),
            effect.c.call.desc(),
        )
        .limit(1)
    )
)
_BEGIN = Statement(
    lambda _dialect: (
        update(thread)
        .where(
            thread.c.id == param("thread_id"),
            # The run that the row names, and not one that ended before.
            thread.c.run_active == 1,
            thread.c.undoing == 0,
            exists().where(*is_to_be_undone(thread.c.id, thread.c.run_id)),
        )
        .values(
            **released(thread),
            status=READY,
            undoing=UNDOING,
            error=param("error"),
            # Its node runs have all ended and none of them runs again.
            fanned=0,
            pending=0,
            starts=0,
            failures=0,
            deaths=0,
            last_death=None,
            lease_seconds=param("lease_seconds"),
            version=thread.c.version + 1,
            due_at=db_now(),
            next_nudge_at=db_now() + NUDGE_SECONDS,
            nudges=0,
            updated_at=db_now(),
        )
        .returning(thread.c.run_id, *nudge_columns(thread))
    )
)
_KEEP_ERROR = Statement(lambda _dialect: update(run).where(run.c.id == param("run_id")).values(error=param("error")))


def next_of(store: Store, thread_id: str, run_id: str) -> Undoable | None:
    """Return the newest effect of a run that is still to be undone, None when none is."""
    rows = store.rows(_NEXT, {"thread_id": thread_id, "run_id": run_id})
    return Undoable(*rows[0]) if rows else None


def is_left(transaction: Transaction, thread_id: str, run_id: str) -> bool:
    """Tell whether a run has effects that are still to be undone."""
    return transaction.row(_NEXT, {"thread_id": thread_id, "run_id": run_id}) is not None


def begin(transaction: Transaction, thread_id: str, *, error: str, lease_seconds: float) -> Nudge | None:
    """Begin to undo what the run of a locked thread did, because of an error; None when there is nothing to undo.

    The lease is given back. `lease_seconds` is how long each undo may take.
    """
    params = {"thread_id": thread_id, "error": error, "lease_seconds": lease_seconds}
    row = transaction.row(_BEGIN, params)
    if row is None:
        return None
    run_id, *place = row
    transaction.run(_KEEP_ERROR, {"run_id": run_id, "error": error})
    return Nudge("step", *place)
