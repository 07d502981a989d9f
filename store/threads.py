"""Threads as people and producers act on them: begin, find, pause, resume, cancel, retry."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Integer, case, cast, exists, func, insert, or_, select, update

from keepstep import eventkinds
from keepstep.store import children, events
from keepstep.store.engine import Transaction
from keepstep.store.leases import NUDGE_SECONDS, Nudge, nudge_columns, queue_of, released
from keepstep.store.schema import (
    BLOCKED,
    CANCELLED,
    DONE,
    ENDED,
    FAILED,
    QUEUED,
    READY,
    RUNNING,
    UNDONE,
    WAITING,
    audit,
    checkpoint,
    node_run,
    run,
    thread,
    worker,
)
from keepstep.store.statements import Statement, contains, db_now, one_of, param
from keepstep.store.waits import answer, ask_again, open_for_children, withdraw


class ThreadState(NamedTuple):
    """A thread under its lock, as a command finds it."""

    id: str
    tenant: str
    application: str
    agent: str
    name: str
    status: str
    control: str
    version: int
    run_id: str | None
    run_active: int
    run_steps: int
    branch: int
    seq: int
    fanned: int
    queued: int
    graph_version: str
    queue: str
    priority: int
    error: str | None
    undoing: int


class RunState(NamedTuple):
    """A run as a repeated request finds it."""

    id: str
    thread_id: str
    request_digest: bytes
    status: str


_STATE = [thread.c[name] for name in ThreadState._fields]
_BY_NAME = Statement(
    lambda _dialect: (
        select(*_STATE)
        .where(
            thread.c.tenant == param("tenant"),
            thread.c.application == param("application"),
            thread.c.agent == param("agent"),
            thread.c.name == param("name"),
        )
        .with_for_update()
    )
)
_NAMED = Statement(
    lambda _dialect: (
        select(thread.c.id, thread.c.application, thread.c.agent)
        .where(thread.c.tenant == param("tenant"), or_(thread.c.name == param("name"), thread.c.id == param("name")))
        .order_by(thread.c.application, thread.c.agent)
        .limit(1000)
    )
)
_BY_ID = Statement(lambda _dialect: select(*_STATE).where(thread.c.id == param("id")).with_for_update())
_BY_REQUEST = Statement(
    lambda _dialect: select(*(run.c[name] for name in RunState._fields)).where(
        run.c.tenant == param("tenant"), run.c.request_id == param("request_id")
    )
)
_NEW_THREAD = Statement(
    lambda _dialect: insert(thread).values(
        id=param("id"),
        tenant=param("tenant"),
        application=param("application"),
        agent=param("agent"),
        name=param("name"),
        graph_version=param("graph_version"),
        status=READY,
        seq=-1,
        snapshot_seq=0,
        version=1,
        queue=param("queue"),
        priority=param("priority"),
        due_at=db_now(),
        lease_seconds=param("lease_seconds"),
        next_nudge_at=db_now() + NUDGE_SECONDS,
        runs=1,
        queued=1,
        created_at=db_now(),
        updated_at=db_now(),
    )
)
_ADD_RUN = Statement(
    lambda _dialect: (
        update(thread)
        .where(thread.c.id == param("id"))
        .values(
            runs=thread.c.runs + 1,
            queued=thread.c.queued + 1,
            # A thread whose last run has ended begins at once; one that is under way gets to it later.
            status=case((one_of(thread.c.status, ENDED), READY), else_=thread.c.status),
            run_active=case((one_of(thread.c.status, ENDED), 0), else_=thread.c.run_active),
            control=case((one_of(thread.c.status, ENDED), ""), else_=thread.c.control),
            error=case((one_of(thread.c.status, ENDED), None), else_=thread.c.error),
            fanned=case((one_of(thread.c.status, ENDED), 0), else_=thread.c.fanned),
            pending=case((one_of(thread.c.status, ENDED), 0), else_=thread.c.pending),
            undoing=case((one_of(thread.c.status, ENDED), 0), else_=thread.c.undoing),
            failures=case((one_of(thread.c.status, ENDED), 0), else_=thread.c.failures),
            deaths=case((one_of(thread.c.status, ENDED), 0), else_=thread.c.deaths),
            graph_version=case((one_of(thread.c.status, ENDED), param("graph_version")), else_=thread.c.graph_version),
            queue=param("queue"),
            priority=param("priority"),
            version=thread.c.version + case((one_of(thread.c.status, ENDED), 1), else_=0),
            due_at=case((one_of(thread.c.status, ENDED), db_now()), else_=thread.c.due_at),
            next_nudge_at=case(
                (one_of(thread.c.status, ENDED), db_now() + NUDGE_SECONDS), else_=thread.c.next_nudge_at
            ),
            updated_at=db_now(),
        )
        .returning(thread.c.runs, *nudge_columns(thread))
    )
)
_NEW_RUN = Statement(
    lambda _dialect: insert(run).values(
        id=param("id"),
        tenant=param("tenant"),
        thread_id=param("thread_id"),
        number=param("number"),
        request_id=param("request_id"),
        request_digest=param("request_digest"),
        status=QUEUED,
        input=param("input"),
        step_limit=param("step_limit"),
        spawned=param("spawned"),
        started_by=param("started_by"),
        created_at=db_now(),
    )
)
_ANYBODY_CARRIES = Statement(
    lambda _dialect: (
        select(worker.c.carried)
        .where(worker.c.alive_until > db_now(), contains(worker.c.carried, param("prefix")) > 0)
        .order_by(worker.c.started_at.desc())
        .limit(1)
    )
)
_SOMEBODY_CARRIES = Statement(
    lambda _dialect: (
        select(func.count())
        .select_from(worker)
        .where(worker.c.alive_until > db_now(), contains(worker.c.carried, param("key")) > 0)
    )
)


class RunEnd(NamedTuple):
    """What became of a run whose thread is locked."""

    status: str
    error: str | None
    begun: int
    newest: int
    """1: the thread has been given no other run since."""
    last: tuple[int, int] | None
    """Branch and seq of the checkpoint in which it left its state; None of one that is not done."""


class NewRun(NamedTuple):
    """A run to be accepted."""

    id: str
    request_id: str
    request_digest: bytes
    input: bytes
    step_limit: int | None
    spawned: int = 0
    """1: a parent spawned it, and is to be told its end."""
    started_by: str | None = None
    """Who asked for it."""


def by_name(transaction: Transaction, tenant: str, application: str, agent: str, name: str) -> ThreadState | None:
    """Return a thread by its full name, locked; None when there is none."""
    params = {"tenant": tenant, "application": application, "agent": agent, "name": name}
    row = transaction.row(_BY_NAME, params)
    return None if row is None else ThreadState(*row)


def named(transaction: Transaction, tenant: str, name: str) -> list[tuple[str, str, str]]:
    """Return (id, application, agent) of up to 1,000 threads of a tenant that a name or id may mean."""
    return [(row[0], row[1], row[2]) for row in transaction.rows(_NAMED, {"tenant": tenant, "name": name})]


def by_id(transaction: Transaction, thread_id: str) -> ThreadState | None:
    """Return a thread by its id, locked; None when there is none."""
    row = transaction.row(_BY_ID, {"id": thread_id})
    return None if row is None else ThreadState(*row)


def run_of_request(transaction: Transaction, tenant: str, request_id: str) -> RunState | None:
    """Return the run that a request already started, or None."""
    row = transaction.row(_BY_REQUEST, {"tenant": tenant, "request_id": request_id})
    return None if row is None else RunState(*row)


def version_carried(transaction: Transaction, graph: str) -> str | None:
    """Return the version of a graph that the newest live worker carries, or None when none carries the graph."""
    prefix = f"\n{graph}\x1f"
    row = transaction.row(_ANYBODY_CARRIES, {"prefix": prefix})
    return None if row is None else str(row[0]).split(prefix, 1)[1].split("\n", 1)[0]


def is_carried_by_anybody(transaction: Transaction, key: str) -> bool:
    """Return whether a live worker carries a graph's version (`leases.carried_key`)."""
    return int(transaction.rows(_SOMEBODY_CARRIES, {"key": key})[0][0]) > 0


def create(
    transaction: Transaction,
    *,
    thread_id: str,
    tenant: str,
    application: str,
    agent: str,
    name: str,
    graph_version: str,
    priority: int,
    lease_seconds: float,
    first: NewRun,
) -> Nudge:
    """Create a thread with its first run queued; return its nudge."""
    queue = queue_of(agent, graph_version)
    transaction.run(
        _NEW_THREAD,
        {
            "id": thread_id,
            "tenant": tenant,
            "application": application,
            "agent": agent,
            "name": name,
            "graph_version": graph_version,
            "queue": queue,
            "priority": priority,
            "lease_seconds": lease_seconds,
        },
    )
    transaction.run(_NEW_RUN, {**first._asdict(), "tenant": tenant, "thread_id": thread_id, "number": 1})
    return Nudge("step", thread_id, 1, queue, priority)


def add_run(
    transaction: Transaction, found: ThreadState, graph_version: str, new: NewRun, *, priority: int | None
) -> Nudge | None:
    """Queue another run of a thread; return its nudge when it begins at once.

    `priority` is the thread's from now on; None leaves it.
    """
    idle = found.status in ENDED
    place = {
        "graph_version": graph_version,
        "queue": queue_of(found.agent, graph_version if idle else found.graph_version),
        "priority": found.priority if priority is None else priority,
    }
    number, *row = transaction.rows(_ADD_RUN, {"id": found.id, **place})[0]
    params = {**new._asdict(), "tenant": found.tenant, "thread_id": found.id, "number": number}
    transaction.run(_NEW_RUN, params)
    return Nudge("step", *row) if idle else None


# --- control ---

# A thread whose next run begins.
_FRESH: dict[str, Any] = {
    "status": READY,
    "error": None,
    "run_active": 0,
    "undoing": 0,
    "fanned": 0,
    "pending": 0,
    "starts": 0,
    "failures": 0,
    "deaths": 0,
    "last_death": None,
    "due_at": db_now(),
    "next_nudge_at": db_now() + NUDGE_SECONDS,
    "nudges": 0,
    "updated_at": db_now(),
}
_PAUSE = Statement(
    lambda _dialect: update(thread).where(thread.c.id == param("id")).values(control="pause", updated_at=db_now())
)
_RESUME = Statement(
    lambda _dialect: (
        update(thread)
        .where(thread.c.id == param("id"))
        .values(control="", next_nudge_at=db_now() + NUDGE_SECONDS, nudges=0, updated_at=db_now())
    )
)
_CANCEL = Statement(
    lambda _dialect: (
        update(thread)
        .where(thread.c.id == param("id"))
        .values(
            # Taking the nonce away refuses whatever the running attempt still wants to write or begin.
            **released(thread),
            status=CANCELLED,
            control="cancel",
            error=param("error"),
            version=thread.c.version + 1,
            queued=0,
            updated_at=db_now(),
        )
    )
)
_CANCEL_NODE_RUNS = Statement(
    lambda _dialect: (
        update(node_run)
        .where(
            node_run.c.thread_id == param("id"),
            node_run.c.branch == param("branch"),
            node_run.c.seq == param("seq"),
            one_of(node_run.c.status, (READY, WAITING, BLOCKED)),
        )
        .values(**released(node_run), status=CANCELLED, version=node_run.c.version + 1, ended_at=db_now())
    )
)
_CANCEL_RUNS = Statement(
    lambda _dialect: (
        update(run)
        .where(
            run.c.thread_id == param("id"),
            or_(one_of(run.c.status, (QUEUED, RUNNING)), run.c.id == param("run_id")),
            run.c.status != DONE,
        )
        .values(
            status=CANCELLED,
            ended_at=db_now(),
            steps=case((run.c.id == param("run_id"), param("run_steps")), else_=run.c.steps),
        )
        .returning(run.c.id, run.c.spawned)
    )
)
_CANCEL_RUN = Statement(
    lambda _dialect: (
        update(run)
        .where(run.c.id == param("run_id"))
        .values(
            status=CANCELLED,
            ended_at=db_now(),
            steps=case((cast(param("begun"), Integer) == 1, cast(param("run_steps"), Integer)), else_=run.c.steps),
        )
        .returning(run.c.spawned)
    )
)
_NEXT_BEGINS = Statement(
    lambda _dialect: (
        update(thread)
        .where(thread.c.id == param("id"))
        .values(
            # As after a run that failed: see `outcomes.stop`.
            **released(thread),
            **_FRESH,
            queued=thread.c.queued - 1 + cast(param("begun"), Integer),
            version=thread.c.version + 1,
        )
        .returning(*nudge_columns(thread))
    )
)
_QUEUE_AGAIN = Statement(
    lambda _dialect: (
        update(thread)
        .where(thread.c.id == param("id"))
        .values(**_FRESH, control="", queued=thread.c.queued + 1, version=thread.c.version + 1)
        .returning(*nudge_columns(thread))
    )
)
_QUEUE_RUN_AGAIN = Statement(
    lambda _dialect: update(run).where(run.c.id == param("run_id")).values(status=QUEUED, error=None, ended_at=None)
)
_later = run.alias("later")
_RUN_OF = Statement(
    lambda _dialect: select(
        run.c.status,
        run.c.error,
        case((run.c.started_at.is_(None), 0), else_=1),
        case((exists().where(_later.c.thread_id == run.c.thread_id, _later.c.number > run.c.number), 0), else_=1),
    ).where(run.c.id == param("run_id"))
)
_LAST_OF_RUN = Statement(
    lambda _dialect: (
        select(checkpoint.c.branch, checkpoint.c.seq)
        .select_from(checkpoint.join(run, run.c.thread_id == checkpoint.c.thread_id))
        .where(run.c.id == param("run_id"), checkpoint.c.run_id == run.c.id, checkpoint.c.kind != "edit")
        .order_by(checkpoint.c.branch.desc(), checkpoint.c.seq.desc())
        .limit(1)
    )
)
_RETRY = Statement(
    lambda _dialect: (
        update(thread)
        .where(thread.c.id == param("id"))
        .values(
            status=param("status"),
            control=case((thread.c.control == "cancel", ""), else_=thread.c.control),
            error=None,
            failures=0,
            deaths=0,
            last_death=None,
            pending=param("pending"),
            step_limit=func.coalesce(param("step_limit"), thread.c.step_limit),
            version=thread.c.version + 1,
            due_at=db_now(),
            next_nudge_at=db_now() + NUDGE_SECONDS,
            nudges=0,
            updated_at=db_now(),
        )
        .returning(*nudge_columns(thread))
    )
)


def _retry_node_runs(*which: ColumnElement[bool]) -> Statement:
    return Statement(
        lambda _dialect: (
            update(node_run)
            .where(
                node_run.c.thread_id == param("id"),
                node_run.c.branch == param("branch"),
                node_run.c.seq == param("seq"),
                *which,
            )
            .values(
                status=READY,
                error=None,
                failures=0,
                deaths=0,
                last_death=None,
                version=node_run.c.version + 1,
                due_at=db_now(),
                next_nudge_at=db_now() + NUDGE_SECONDS,
                nudges=0,
                ended_at=None,
            )
            .returning(*nudge_columns(node_run))
        )
    )


_RETRY_NODE_RUNS = _retry_node_runs(one_of(node_run.c.status, (FAILED, BLOCKED, CANCELLED)))
_RETRY_BLOCKED_RUN = _retry_node_runs(node_run.c.run == param("run"), node_run.c.status == BLOCKED)
_RETRY_BESIDE = Statement(
    lambda _dialect: (
        update(thread)
        .where(thread.c.id == param("id"))
        .values(pending=thread.c.pending + cast(param("pending"), Integer), updated_at=db_now())
    )
)
_RESUME_RUN = Statement(
    lambda _dialect: (
        update(run)
        .where(run.c.id == param("run_id"), one_of(run.c.status, (FAILED, CANCELLED)))
        .values(status=RUNNING, error=None, ended_at=None)
        .returning(run.c.id, run.c.spawned)
    )
)
_RESUME_UNDOING = Statement(
    lambda _dialect: (
        update(run)
        # Its error is why it failed: the end that it comes to when all is undone.
        .where(run.c.id == param("run_id"), run.c.status == CANCELLED)
        .values(status=RUNNING, ended_at=None)
        .returning(run.c.id, run.c.spawned)
    )
)
_RESUME_NODE_RUNS = Statement(
    lambda _dialect: (
        update(node_run)
        .where(
            node_run.c.thread_id == param("id"),
            node_run.c.branch == param("branch"),
            node_run.c.seq == param("seq"),
            node_run.c.status == READY,
        )
        .values(next_nudge_at=db_now() + NUDGE_SECONDS, nudges=0)
        .returning(*nudge_columns(node_run))
    )
)


def _place(found: ThreadState) -> dict[str, Any]:
    return {"id": found.id, "branch": found.branch, "seq": found.seq + 1, "run_id": found.run_id}


def pause(transaction: Transaction, found: ThreadState) -> None:
    """Let the running step finish and take no other."""
    transaction.run(_PAUSE, {"id": found.id})
    if found.control != "pause":
        events.record(transaction, found.id, eventkinds.PAUSED)


def resume(transaction: Transaction, found: ThreadState) -> list[Nudge]:
    """Take the pause away; return the nudges of what is due."""
    transaction.run(_RESUME, {"id": found.id})
    if found.control == "pause":
        events.record(transaction, found.id, eventkinds.RESUMED)
    if found.status == READY:
        return [Nudge("step", found.id, found.version, found.queue, found.priority)]
    return [Nudge("node", *row) for row in transaction.rows(_RESUME_NODE_RUNS, _place(found))]


def cancel(transaction: Transaction, found: ThreadState, error: str) -> list[Nudge]:
    """End the thread's run and those queued behind it; what the running attempt still wants to do is refused.

    Its children are to be cancelled after it, and its parent is to be told: returns the nudges for that.
    """
    place = _place(found)
    transaction.run(_CANCEL, {"id": found.id, "error": error})
    transaction.run(_CANCEL_NODE_RUNS, place)
    withdraw(transaction, found.id)
    # A run that ended before the one that is queued stays as it ended.
    under_way = found.run_id if found.run_active else None
    ended = transaction.rows(_CANCEL_RUNS, {**place, "run_id": under_way, "run_steps": found.run_steps})
    nudges = children.disown(transaction, found.id)
    for run_id, spawned in ended:
        events.record_end(transaction, found.id, CANCELLED, run_id=run_id, error=error)
        if spawned:
            nudges += children.end(transaction, run_id, CANCELLED, error=error)
    return nudges


def cancel_run(transaction: Transaction, found: ThreadState, run_id: str, error: str) -> list[Nudge]:
    """End one run of a thread, which is under way or the next to begin; return the nudges that follow, as `cancel`.

    The run that is queued behind it begins.
    """
    begun = int(found.run_id == run_id)
    if found.queued == 1 - begun:
        return cancel(transaction, found, error)
    params = {**_place(found), "run_id": run_id, "run_steps": found.run_steps, "begun": begun}
    row = transaction.rows(_NEXT_BEGINS, params)[0]
    transaction.run(_CANCEL_NODE_RUNS, params)
    withdraw(transaction, found.id)
    ended = transaction.rows(_CANCEL_RUN, params)
    events.record_end(transaction, found.id, CANCELLED, run_id=run_id, error=error)
    nudges = children.disown(transaction, found.id)
    if ended[0][0]:
        nudges += children.end(transaction, run_id, CANCELLED, error=error)
    return [Nudge("step", *row), *nudges]


def run_of(transaction: Transaction, run_id: str) -> RunEnd:
    """Return what became of a run that exists; its thread is locked."""
    status, error, begun, newest = transaction.rows(_RUN_OF, {"run_id": run_id})[0]
    last = transaction.row(_LAST_OF_RUN, {"run_id": run_id}) if status == DONE else None
    return RunEnd(status, error, begun, newest, None if last is None else (int(last[0]), int(last[1])))


def take_up(transaction: Transaction, found: ThreadState, run_id: str, at: RunEnd) -> list[Nudge]:
    """Continue a run that was cancelled, or queue it again when it had not begun; return the nudges that follow.

    None follow, and nothing is written, when the thread has gone on to something else.
    """
    if found.status != CANCELLED or at.status != CANCELLED or found.undoing == UNDONE:
        return []
    if found.run_id == run_id and found.run_active:
        return retry(transaction, found, None)
    if at.begun or not at.newest:
        return []
    transaction.run(_QUEUE_RUN_AGAIN, {"run_id": run_id})
    events.record(transaction, found.id, eventkinds.RETRIED, run_id=run_id)
    return [Nudge("step", *transaction.rows(_QUEUE_AGAIN, {"id": found.id})[0])]


def _take_up_children(transaction: Transaction, found: ThreadState) -> list[Nudge]:
    """Have the children that were cancelled with a run taken up again; hear of those that had ended before.

    Returns the nudges of those that are to be taken up.
    """
    nudges = children.reclaim(transaction, found.id, found.run_id)
    for key, child_run in open_for_children(transaction, found.id):
        status = children.take(transaction, child_run)
        if status is not None:
            answer(transaction, key, status.encode())
    return nudges


def retry(transaction: Transaction, found: ThreadState, step_limit: int | None) -> list[Nudge]:
    """Continue a failed, blocked or cancelled run: only what has not ended well runs again; return the nudges.

    What a cancelled run had asked is asked again, under the same ids; the children cancelled with it go on, too. Of one
    that is being undone the undoing goes on, and nothing else.
    """
    place = _place(found)
    events.record(transaction, found.id, eventkinds.RETRIED)
    if found.undoing:
        retried = transaction.rows(_RETRY, {"id": found.id, "status": READY, "pending": 0, "step_limit": None})[0]
        for run_id, spawned in transaction.rows(_RESUME_UNDOING, place):
            if spawned:
                children.revive(transaction, run_id)
        return [Nudge("step", *retried)]
    again = transaction.rows(_RETRY_NODE_RUNS, place) if found.fanned else []
    status = WAITING if again else READY
    params = {"id": found.id, "status": status, "pending": len(again), "step_limit": step_limit}
    retried = transaction.rows(_RETRY, params)[0]
    kin: list[Nudge] = []
    if found.status == CANCELLED:
        ask_again(transaction, found.id, found.branch, found.seq + 1)
        kin = _take_up_children(transaction, found)
    for run_id, spawned in transaction.rows(_RESUME_RUN, place):
        if spawned:
            children.revive(transaction, run_id)
    return [*([Nudge("node", *row) for row in again] if again else [Nudge("step", *retried)]), *kin]


def retry_blocked_run(transaction: Transaction, found: ThreadState, run: str) -> list[Nudge]:
    """Run one blocked node run of a fan-out again, and none beside it; return its nudge."""
    rows = transaction.rows(_RETRY_BLOCKED_RUN, {**_place(found), "run": run})
    if rows:
        events.record(transaction, found.id, eventkinds.RETRIED, run=run)
    if rows and found.status == BLOCKED:
        transaction.run(_RETRY, {"id": found.id, "status": WAITING, "pending": 1, "step_limit": None})
    elif rows:
        transaction.run(_RETRY_BESIDE, {"id": found.id, "pending": 1})
    return [Nudge("node", *row) for row in rows]


def retry_beside(transaction: Transaction, found: ThreadState) -> list[Nudge]:
    """Run the node runs of a fan-out again that have failed, while others are under way; return the nudges."""
    again = transaction.rows(_RETRY_NODE_RUNS, _place(found)) if found.fanned else []
    if again:
        transaction.run(_RETRY_BESIDE, {"id": found.id, "pending": len(again)})
        events.record(transaction, found.id, eventkinds.RETRIED)
    return [Nudge("node", *row) for row in again]


# --- audit ---

_AUDITED = Statement(
    lambda _dialect: select(audit.c.thread_id, audit.c.command_digest).where(
        audit.c.tenant == param("tenant"), audit.c.command_id == param("command_id")
    )
)
_AUDIT = Statement(
    lambda _dialect: insert(audit).values(
        tenant=param("tenant"),
        thread_id=param("thread_id"),
        actor=param("actor"),
        action=param("action"),
        command_id=param("command_id"),
        command_digest=param("command_digest"),
        detail=param("detail"),
        at=db_now(),
    )
)


def audited(transaction: Transaction, tenant: str, command_id: str) -> tuple[str | None, bytes] | None:
    """Return the thread that a command was already applied to, if it is about one, and the digest of what it said.

    None when the command is new.
    """
    row = transaction.row(_AUDITED, {"tenant": tenant, "command_id": command_id})
    return None if row is None else (row[0], bytes(row[1] or b""))


def record_audit(
    transaction: Transaction,
    *,
    tenant: str,
    thread_id: str | None,
    actor: str,
    action: str,
    command_id: str | None = None,
    command_digest: bytes | None = None,
    detail: str | None = None,
) -> None:
    """Say who asked for what. Its unique command id makes the command idempotent."""
    transaction.run(
        _AUDIT,
        {
            "tenant": tenant,
            "thread_id": thread_id,
            "actor": actor,
            "action": action,
            "command_id": command_id,
            "command_digest": command_digest,
            "detail": detail,
        },
    )
