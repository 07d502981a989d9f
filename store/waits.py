"""Waits and how they are answered: by a decision, a signal or the time.

Whoever answers a wait locks the thread first. When the node run it belongs to has no open wait left, the node run (or
the thread, when the step is not fanned out) becomes ready, in the same transaction: an accepted answer cannot be
separated from its effect by a crash.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from sqlalchemy import Text as TextType
from sqlalchemy import and_, case, cast, exists, func, insert, or_, select, update
from sqlalchemy.sql.base import Executable

from keepstep import eventkinds
from keepstep.store import events
from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import NUDGE_SECONDS, Nudge, nudge_columns
from keepstep.store.schema import READY, WAITING, approval, checkpoint, decision, node_run, run, thread, wait
from keepstep.store.statements import Statement, db_now, now_once, param


class WaitState(NamedTuple):
    """A wait as the node run that asks for it again finds it."""

    occurrence: int
    kind: str
    digest: bytes
    status: str
    approval_id: str | None
    answer: bytes | None
    """None on an answered wait: the time ran out."""


class WaitKey(NamedTuple):
    """Where a wait is, and the node run it holds up."""

    thread_id: str
    step: str
    run: str
    occurrence: int
    branch: int
    seq: int


class ApprovalState(NamedTuple):
    """An approval under its thread's lock."""

    id: str
    tenant: str
    thread_id: str
    kind: str
    status: str
    question: bytes
    quorum: int
    on_expiry: str
    assigned: str | None
    """Who is asked now (JSON), when that is not who was asked at first."""
    escalate_to: str | None
    escalated: int
    expired: int

    def put_to(self, first: list[str]) -> list[str]:
        """Return whom the question itself asks, delegates left out; `first`: those that were asked at first."""
        return list(json.loads(self.escalate_to)) if self.escalated and self.escalate_to is not None else first

    def asked(self, first: list[str]) -> list[str]:
        """Return the people and roles that are asked; `first`: those that were at first."""
        return first if self.assigned is None else list(json.loads(self.assigned))


class DecisionState(NamedTuple):
    """One person's word."""

    id: str
    by: str
    verdict: str
    payload: bytes


_OF_RUN = Statement(
    lambda _dialect: (
        select(*(wait.c[name] for name in WaitState._fields))
        .where(
            wait.c.thread_id == param("thread_id"),
            wait.c.step == param("step"),
            wait.c.run == param("run"),
        )
        .order_by(wait.c.occurrence)
    )
)
_KEY_COLUMNS = [wait.c[name] for name in WaitKey._fields]
_OF_APPROVAL = Statement(lambda _dialect: select(*_KEY_COLUMNS).where(wait.c.approval_id == param("approval_id")))
_THREAD_OF = Statement(
    lambda _dialect: select(approval.c.thread_id).where(
        approval.c.id == param("id"), approval.c.tenant == param("tenant")
    )
)
_LOCK = Statement(
    lambda _dialect: select(thread.c.id, thread.c.status).where(thread.c.id == param("thread_id")).with_for_update()
)
_ANSWER = Statement(
    lambda _dialect: (
        update(wait)
        .where(
            wait.c.thread_id == param("thread_id"),
            wait.c.step == param("step"),
            wait.c.run == param("run"),
            wait.c.occurrence == param("occurrence"),
            wait.c.status == "open",
        )
        .values(status="answered", answer=param("answer"), answered_at=db_now())
    )
)
_STILL_OPEN = Statement(
    lambda _dialect: (
        select(func.count())
        .select_from(wait)
        .where(
            wait.c.thread_id == param("thread_id"),
            wait.c.step == param("step"),
            wait.c.run == param("run"),
            wait.c.status == "open",
        )
    )
)
_WOKEN = {"status": READY, "next_nudge_at": db_now() + NUDGE_SECONDS, "due_at": db_now(), "nudges": 0}
_WAKE_NODE = Statement(
    lambda _dialect: (
        update(node_run)
        .where(
            node_run.c.thread_id == param("thread_id"),
            node_run.c.branch == param("branch"),
            node_run.c.seq == param("seq"),
            node_run.c.run == param("run"),
            node_run.c.status == WAITING,
        )
        .values(**_WOKEN, version=node_run.c.version + 1)
        .returning(*nudge_columns(node_run))
    )
)
_WAKE_THREAD = Statement(
    lambda _dialect: (
        update(thread)
        .where(
            thread.c.id == param("thread_id"),
            thread.c.status == WAITING,
            thread.c.fanned == 0,
            thread.c.branch == param("branch"),
            thread.c.seq + 1 == param("seq"),
        )
        .values(**_WOKEN, version=thread.c.version + 1)
        .returning(*nudge_columns(thread))
    )
)


_OPEN_OF_RUN = Statement(
    lambda _dialect: (
        select(wait.c.kind, wait.c.approval_id, wait.c.signal_name, wait.c.signal_key, wait.c.due_at)
        .where(
            wait.c.thread_id == param("thread_id"),
            wait.c.step == param("step"),
            wait.c.run == param("run"),
            wait.c.status == "open",
        )
        .order_by(wait.c.occurrence)
    )
)


def open_of_run(transaction: Transaction, thread_id: str, step: str, run: str) -> list[dict[str, Any]]:
    """Return what a node run waits for: {kind, approval, signal, key, due_at}, without what says nothing."""
    rows = transaction.rows(_OPEN_OF_RUN, {"thread_id": thread_id, "step": step, "run": run})
    names = ("kind", "approval", "signal", "key", "due_at")
    return [{name: value for name, value in zip(names, row, strict=True) if value is not None} for row in rows]


def of_run(store: Store, thread_id: str, step: str, run: str) -> list[WaitState]:
    """Return the waits a node run has asked for, in the order it asked."""
    rows = store.rows(_OF_RUN, {"thread_id": thread_id, "step": step, "run": run})
    return [WaitState(*row) for row in rows]


def lock_thread(transaction: Transaction, thread_id: str) -> str | None:
    """Lock a thread; return its status, or None when there is no such thread."""
    row = transaction.row(_LOCK, {"thread_id": thread_id})
    return None if row is None else str(row[1])


def answer(transaction: Transaction, key: WaitKey, payload: bytes | None) -> Nudge | None:
    """Answer an open wait; return the nudge of what it woke, None when something else is still waited for.

    The thread's lock is held. `payload` None says that the time ran out.
    """
    params = {**key._asdict(), "answer": payload}
    if transaction.run(_ANSWER, params) == 0:
        return None
    if transaction.rows(_STILL_OPEN, params)[0][0]:
        return None
    woken = transaction.row(_WAKE_NODE, params)
    if woken is not None:
        return Nudge("node", *woken)
    woken = transaction.row(_WAKE_THREAD, params)
    return None if woken is None else Nudge("step", *woken)


# --- approvals ---

_APPROVAL = Statement(
    lambda _dialect: (
        select(
            *(approval.c[name] for name in ApprovalState._fields if name != "expired"),
            case((approval.c.expires_at <= db_now(), 1), else_=0),
        )
        .where(approval.c.id == param("id"))
        .with_for_update()
    )
)
_OPEN_OF_THREAD = Statement(
    lambda _dialect: (
        select(approval.c.id)
        .where(approval.c.thread_id == param("thread_id"), approval.c.status == "open")
        .order_by(approval.c.created_at, approval.c.id)
        .limit(20)
    )
)
_DECISIONS = Statement(
    lambda _dialect: (
        select(*(decision.c[name] for name in DecisionState._fields))
        .where(decision.c.approval_id == param("id"))
        .order_by(decision.c.at, decision.c.id)
    )
)
_RECORD = Statement(
    lambda _dialect: insert(decision).values(
        approval_id=param("approval_id"),
        id=param("id"),
        tenant=param("tenant"),
        by=param("by"),
        verdict=param("verdict"),
        payload=param("payload"),
        at=db_now(),
    )
)
_CLOSE = Statement(
    lambda _dialect: (
        update(approval)
        .where(approval.c.id == param("id"), approval.c.status == "open")
        .values(status=param("status"), closed_at=db_now())
    )
)


_ASSIGN = Statement(
    lambda _dialect: (
        update(approval)
        .where(approval.c.id == param("id"))
        .values(assigned=param("assigned"))
        .returning(approval.c.assigned, approval.c.expires_at)
    )
)
_STARTED_BY = Statement(
    lambda _dialect: (
        select(run.c.started_by)
        .select_from(thread.join(run, run.c.id == thread.c.run_id))
        .where(thread.c.id == param("thread_id"))
    )
)


# The step that writes a checkpoint is of the run whose checkpoint it begins from.
_STEP_STARTED_BY = Statement(
    lambda _dialect: (
        select(run.c.started_by)
        .select_from(checkpoint.join(run, run.c.id == checkpoint.c.run_id))
        .where(
            checkpoint.c.thread_id == param("thread_id"),
            checkpoint.c.branch == param("branch"),
            checkpoint.c.seq == param("before"),
        )
    )
)


def as_asked(assigned: str | None, expires_at: float | None) -> dict[str, Any]:
    """Return who is asked by now, when others are than at first, and until when, as an event tells it."""
    asked = {} if assigned is None else {"to": json.loads(assigned)}
    return {**asked, "expires_at": expires_at}


def assign(transaction: Transaction, found: ApprovalState, asked: list[str], *, by: str) -> None:
    """Ask others from now on, because somebody says so. The approval is locked."""
    [row] = transaction.rows(_ASSIGN, {"id": found.id, "assigned": json.dumps(asked)})
    said = {**as_asked(*row), "by": by}
    events.record(transaction, found.thread_id, eventkinds.REASSIGNED, approval_id=found.id, **said)


def started_by(transaction: Transaction, thread_id: str) -> str | None:
    """Return who asked for a thread's present run; None when nobody said so."""
    row = transaction.row(_STARTED_BY, {"thread_id": thread_id})
    return None if row is None else row[0]


def step_started_by(transaction: Transaction, step: str) -> str | None:
    """Return who asked for the run that a step, by its key, belongs to: the thread may have gone on to another."""
    thread_id, branch, seq = step.rsplit("/", 2)
    row = transaction.row(_STEP_STARTED_BY, {"thread_id": thread_id, "branch": int(branch), "before": int(seq) - 1})
    return None if row is None else row[0]


def thread_of_approval(transaction: Transaction, approval_id: str, tenant: str) -> str | None:
    """Return the id of the thread that an approval of the tenant belongs to, or None. Nothing is locked.

    Who is to decide the approval locks its thread first.
    """
    row = transaction.row(_THREAD_OF, {"id": approval_id, "tenant": tenant})
    return None if row is None else str(row[0])


def lock_approval(transaction: Transaction, approval_id: str) -> ApprovalState:
    """Return an approval that exists, locked; its thread is locked already."""
    return ApprovalState(*transaction.rows(_APPROVAL, {"id": approval_id})[0])


def open_approvals(transaction: Transaction, thread_id: str) -> list[str]:
    """Return the ids of up to 20 open approvals of a thread, oldest first."""
    return [row[0] for row in transaction.rows(_OPEN_OF_THREAD, {"thread_id": thread_id})]


def decisions(transaction: Transaction, approval_id: str) -> list[DecisionState]:
    """Return the decisions on an approval, oldest first."""
    return [DecisionState(*row) for row in transaction.rows(_DECISIONS, {"id": approval_id})]


def record_decision(transaction: Transaction, approval_id: str, tenant: str, new: DecisionState) -> None:
    """Record one person's decision."""
    transaction.run(_RECORD, {"approval_id": approval_id, "tenant": tenant, **new._asdict()})


def close_approval(
    transaction: Transaction, approval_id: str, status: str, payload: bytes | None, *, by: str | None
) -> Nudge | None:
    """Close an open approval and answer its wait; return the nudge of what it woke.

    `by` is whose word closed it, None when it was the time.
    """
    transaction.run(_CLOSE, {"id": approval_id, "status": status})
    key = WaitKey(*transaction.rows(_OF_APPROVAL, {"approval_id": approval_id})[0])
    said = {"status": status} if by is None else {"status": status, "by": by}
    events.record(transaction, key.thread_id, eventkinds.CLOSED, run=key.run, approval_id=approval_id, **said)
    return answer(transaction, key, payload)


# --- signals and time ---

_FOR_SIGNAL = Statement(
    lambda _dialect: (
        select(*_KEY_COLUMNS)
        .where(
            wait.c.thread_id == param("thread_id"),
            wait.c.kind == "signal",
            wait.c.status == "open",
            wait.c.signal_name == param("name"),
            or_(wait.c.signal_key.is_(None), wait.c.signal_key == cast(param("key"), TextType)),
        )
        .order_by(wait.c.created_at, wait.c.run, wait.c.occurrence)
        .limit(1)
    )
)


def wait_for_signal(transaction: Transaction, thread_id: str, name: str, key: str | None) -> WaitKey | None:
    """Return the oldest open wait that a signal answers. The thread's lock is held."""
    row = transaction.row(_FOR_SIGNAL, {"thread_id": thread_id, "name": name, "key": key})
    return None if row is None else WaitKey(*row)


_FOR_CHILDREN = Statement(
    lambda _dialect: select(*_KEY_COLUMNS, wait.c.child_run).where(
        wait.c.thread_id == param("thread_id"), wait.c.status == "open", wait.c.child_run.is_not(None)
    )
)
_OF_CHILD = Statement(
    lambda _dialect: (
        select(*_KEY_COLUMNS)
        .where(
            wait.c.thread_id == param("thread_id"),
            wait.c.child_run == param("child_run"),
            wait.c.child_run.is_not(None),  # as the index says it
            wait.c.status == "open",
        )
        .order_by(wait.c.step, wait.c.run, wait.c.occurrence)
        .with_for_update()
    )
)


def open_for_children(transaction: Transaction, thread_id: str) -> list[tuple[WaitKey, str]]:
    """Return the open waits for the ends of children, each with the child's run id. The thread's lock is held."""
    rows = transaction.rows(_FOR_CHILDREN, {"thread_id": thread_id})
    return [(WaitKey(*row[:-1]), str(row[-1])) for row in rows]


def of_child(transaction: Transaction, thread_id: str, run_id: str) -> list[WaitKey]:
    """Return the open waits for the end of a child. The thread's lock is held."""
    rows = transaction.rows(_OF_CHILD, {"thread_id": thread_id, "child_run": run_id})
    return [WaitKey(*row) for row in rows]


_DUE = Statement(
    lambda _dialect: (
        select(wait.c.thread_id)
        .where(wait.c.status == "open", wait.c.due_at <= now_once())
        .order_by(wait.c.due_at)
        .limit(param("limit"))
    )
)


def _lock_unless_busy(dialect: str) -> Executable:
    busy = dialect == "postgresql"
    return select(thread.c.id).where(thread.c.id == param("thread_id")).with_for_update(skip_locked=busy)


_LOCK_UNLESS_BUSY = Statement(_lock_unless_busy)
_DUE_OF_THREAD = Statement(
    lambda _dialect: select(*_KEY_COLUMNS, wait.c.approval_id).where(
        and_(wait.c.thread_id == param("thread_id"), wait.c.status == "open", wait.c.due_at <= db_now())
    )
)


_ESCALATE = Statement(
    lambda _dialect: (
        update(approval)
        .where(
            approval.c.id == param("id"),
            approval.c.status == "open",
            approval.c.on_expiry == "escalate",
            approval.c.escalated == 0,
        )
        .values(assigned=approval.c.escalate_to, escalated=1, expires_at=db_now() + approval.c.expires_seconds)
        .returning(approval.c.expires_at, approval.c.thread_id, approval.c.assigned)
    )
)
_MOVE_DUE = Statement(
    lambda _dialect: update(wait).where(wait.c.approval_id == param("approval_id")).values(due_at=param("due_at"))
)


def _escalated(transaction: Transaction, approval_id: str) -> bool:
    """Ask those whom a question goes to when nobody has answered it, for as long again; False when it does not."""
    row = transaction.row(_ESCALATE, {"id": approval_id})
    if row is None:
        return False
    due_at, thread_id, assigned = row
    transaction.run(_MOVE_DUE, {"approval_id": approval_id, "due_at": due_at})
    said = as_asked(assigned, due_at)
    events.record(transaction, thread_id, eventkinds.REASSIGNED, approval_id=approval_id, **said)
    return True


def lock_unless_busy(transaction: Transaction, thread_id: str) -> bool:
    """Lock a thread, unless somebody else has it locked; say whether it is (PostgreSQL: without waiting)."""
    return transaction.row(_LOCK_UNLESS_BUSY, {"thread_id": thread_id}) is not None


def fire_due(store: Store, *, limit: int) -> list[Nudge]:
    """Answer every wait whose time has come; return the nudges of what they woke.

    One transaction per thread, so that two threads are never locked together. A thread that somebody else has locked
    is left to them or to the next sweep.
    """
    nudges = []
    for thread_id in dict.fromkeys(row[0] for row in store.rows(_DUE, {"limit": limit})):
        with store.transaction() as transaction:
            if not lock_unless_busy(transaction, thread_id):
                continue
            for row in transaction.rows(_DUE_OF_THREAD, {"thread_id": thread_id}):
                key, approval_id = WaitKey(*row[:-1]), row[-1]
                if approval_id is None:
                    nudge = answer(transaction, key, None)
                elif _escalated(transaction, approval_id):
                    continue
                else:
                    nudge = close_approval(transaction, approval_id, "expired", None, by=None)
                if nudge is not None:
                    nudges.append(nudge)
    return nudges


_CLOSE_WAITS = Statement(
    lambda _dialect: (
        update(wait).where(wait.c.thread_id == param("thread_id"), wait.c.status == "open").values(status="closed")
    )
)
_WITHDRAW = Statement(
    lambda _dialect: (
        update(approval)
        .where(approval.c.thread_id == param("thread_id"), approval.c.status == "open")
        .values(status="withdrawn", closed_at=db_now())
        .returning(approval.c.id, approval.c.run)
    )
)


def withdraw(transaction: Transaction, thread_id: str) -> None:
    """Close every open wait and approval of a thread that ends. The thread's lock is held."""
    transaction.run(_CLOSE_WAITS, {"thread_id": thread_id})
    for approval_id, run_name in transaction.rows(_WITHDRAW, {"thread_id": thread_id}):
        events.record(
            transaction, thread_id, eventkinds.CLOSED, run=run_name, approval_id=approval_id, status="withdrawn"
        )


# Only what a cancel closed has no answer.
_REOPEN_WAITS = Statement(
    lambda _dialect: (
        update(wait)
        .where(
            wait.c.thread_id == param("thread_id"),
            wait.c.branch == param("branch"),
            wait.c.seq == param("seq"),
            wait.c.status == "closed",
            wait.c.answered_at.is_(None),
        )
        .values(status="open")
    )
)
_REOPEN_APPROVALS = Statement(
    lambda _dialect: (
        update(approval)
        .where(
            approval.c.thread_id == param("thread_id"),
            approval.c.status == "withdrawn",
            exists().where(wait.c.approval_id == approval.c.id, wait.c.status == "open"),
        )
        .values(status="open", closed_at=None, remind_at=db_now() + approval.c.remind_seconds)
        .returning(approval.c.id, approval.c.run, approval.c.assigned, approval.c.expires_at)
    )
)


def ask_again(transaction: Transaction, thread_id: str, branch: int, seq: int) -> None:
    """Take `withdraw` back for the step under way, when its run is not cancelled any more. The thread is locked."""
    params = {"thread_id": thread_id, "branch": branch, "seq": seq}
    transaction.run(_REOPEN_WAITS, params)
    for approval_id, run_name, *asked in transaction.rows(_REOPEN_APPROVALS, params):
        said = as_asked(*asked)
        events.record(transaction, thread_id, eventkinds.OPENED, run=run_name, approval_id=approval_id, **said)
