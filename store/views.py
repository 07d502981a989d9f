"""What the tables say to people and programs that only look."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Text, cast, exists, func, or_, select

from keepstep.store.claims import CHECKPOINT_COLUMNS, CheckpointRow, checkpoint_row
from keepstep.store.engine import Store
from keepstep.store.schema import (
    BLOCKED,
    FAILED,
    READY,
    approval,
    audit,
    checkpoint,
    child,
    decision,
    effect,
    node_run,
    run,
    thread,
    wait,
)
from keepstep.store.statements import Statement, db_now, one_of, param


class ThreadView(NamedTuple):
    """A thread's present."""

    id: str
    tenant: str
    application: str
    agent: str
    name: str
    graph_version: str
    status: str
    control: str
    error: str | None
    branch: int
    seq: int
    snapshot_seq: int
    checkpoint_id: str | None
    version: int
    due_at: float
    lease_worker: str | None
    lease_child: int | None
    lease_deadline: float | None
    starts: int
    failures: int
    deaths: int
    last_death: str | None
    fanned: int
    pending: int
    undoing: int
    run_id: str | None
    run_steps: int
    step_limit: int | None
    queued: int
    nudges: int
    created_at: float
    updated_at: float


class RunView(NamedTuple):
    """A run of a thread."""

    id: str
    number: int
    request_id: str
    status: str
    steps: int
    error: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None


class NodeRunView(NamedTuple):
    """A fanned-out node run."""

    branch: int
    seq: int
    run: str
    node: str
    position: int
    status: str
    error: str | None
    starts: int
    failures: int
    deaths: int
    last_death: str | None
    lease_worker: str | None
    lease_child: int | None
    started_at: float | None
    ended_at: float | None


class ApprovalView(NamedTuple):
    """An approval and whose it is."""

    id: str
    thread_id: str
    agent: str
    thread: str
    step: str
    run: str
    kind: str
    status: str
    question: bytes
    quorum: int
    on_expiry: str
    assigned: str | None
    """Who is asked now (JSON); None: those whom the question names."""
    escalate_to: str | None
    escalated: int
    """1: it has gone to those already."""
    started_by: str | None
    """Who started the thread's present run."""
    remind_seconds: float | None
    reminders: int
    expires_at: float | None
    created_at: float
    closed_at: float | None


class DecisionView(NamedTuple):
    """A decision on an approval."""

    approval_id: str
    id: str
    by: str
    verdict: str
    payload: bytes
    at: float


class EffectView(NamedTuple):
    """An effect of a thread."""

    thread_id: str
    step: str
    run: str
    call: str
    name: str
    state: str
    at_risk: int
    error: str | None
    calls: int
    started_at: float
    ended_at: float | None
    resolved_by: str | None
    tenant: str
    arguments: bytes | None
    undo: str | None
    """The function that undoes it when its run fails; None: nothing does."""
    undone: str | None
    """What came of undoing it, `undone`, `given_up` or `not_done` (it had not happened); None: it is as it was."""
    arguments_artifact: str | None
    artifact: str | None
    """The digest of a result that is kept apart."""
    meta: Any
    """Of a model call: its payload; from a `Reader` what it says, as plain data."""

    @property
    def key(self) -> str:
        """The idempotency key."""
        return f"{self.step}/{self.run}/{self.call}"


class WaitView(NamedTuple):
    """A wait of a thread."""

    step: str
    run: str
    occurrence: int
    kind: str
    status: str
    approval_id: str | None
    signal_name: str | None
    child: str | None
    """The name of the child's thread."""
    due_at: float | None
    created_at: float
    answered_at: float | None


class AuditView(NamedTuple):
    """Who asked for what."""

    id: int
    actor: str
    action: str
    command_id: str | None
    detail: str | None
    at: float


_THREAD_COLUMNS = [thread.c[name] for name in ThreadView._fields]
_FIND = Statement(
    lambda _dialect: (
        select(*_THREAD_COLUMNS)
        .where(thread.c.tenant == param("tenant"), or_(thread.c.name == param("name"), thread.c.id == param("name")))
        .order_by(thread.c.application, thread.c.agent)
        .limit(1000)
    )
)
_LIST = Statement(
    lambda _dialect: (
        select(*_THREAD_COLUMNS)
        .where(
            thread.c.tenant == param("tenant"),
            or_(cast(param("agent"), Text).is_(None), thread.c.agent == cast(param("agent"), Text)),
            or_(cast(param("status"), Text).is_(None), thread.c.status == cast(param("status"), Text)),
            thread.c.id < param("before"),
        )
        .order_by(thread.c.id.desc())
        .limit(param("limit"))
    )
)
_RUNS = Statement(
    lambda _dialect: (
        select(*(run.c[name] for name in RunView._fields))
        .where(run.c.thread_id == param("thread_id"))
        .order_by(run.c.number)
    )
)
_NODE_RUNS = Statement(
    lambda _dialect: (
        select(*(node_run.c[name] for name in NodeRunView._fields))
        .where(node_run.c.thread_id == param("thread_id"))
        .order_by(node_run.c.branch, node_run.c.seq, node_run.c.position)
    )
)
_BESIDE_APPROVALS = {"thread": thread.c.name.label("thread"), "agent": thread.c.agent, "started_by": run.c.started_by}
_APPROVAL_COLUMNS = [
    _BESIDE_APPROVALS[name] if name in _BESIDE_APPROVALS else approval.c[name] for name in ApprovalView._fields
]
_APPROVALS = Statement(
    lambda _dialect: (
        select(*_APPROVAL_COLUMNS)
        .select_from(
            approval.join(thread, thread.c.id == approval.c.thread_id).outerjoin(run, run.c.id == thread.c.run_id)
        )
        .where(
            approval.c.tenant == param("tenant"),
            or_(cast(param("status"), Text).is_(None), approval.c.status == cast(param("status"), Text)),
            or_(cast(param("thread_id"), Text).is_(None), approval.c.thread_id == cast(param("thread_id"), Text)),
            or_(cast(param("graph"), Text).is_(None), thread.c.agent == cast(param("graph"), Text)),
        )
        .order_by(approval.c.created_at, approval.c.id)
        .limit(param("limit"))
    )
)
_DECISIONS = Statement(
    lambda _dialect: (
        select(*(decision.c[name] for name in DecisionView._fields))
        .where(decision.c.approval_id == param("approval_id"), decision.c.tenant == param("tenant"))
        .order_by(decision.c.at, decision.c.id)
    )
)
_EFFECTS = Statement(
    lambda _dialect: (
        select(*(effect.c[name] for name in EffectView._fields))
        .where(effect.c.thread_id == param("thread_id"))
        .order_by(effect.c.started_at, effect.c.step, effect.c.run, effect.c.call)
    )
)
_RESULT = Statement(
    lambda _dialect: select(effect.c.tenant, effect.c.result, effect.c.artifact).where(
        effect.c.thread_id == param("thread_id"),
        param("key") == effect.c.step + "/" + effect.c.run + "/" + effect.c.call,
    )
)
_held = node_run.alias("held")
_UNKNOWN_EFFECTS = Statement(
    lambda _dialect: (
        select(thread.c.agent, thread.c.name, *(effect.c[name] for name in EffectView._fields))
        .select_from(effect.join(thread, thread.c.id == effect.c.thread_id))
        .where(
            effect.c.tenant == param("tenant"),
            effect.c.state == "intent",
            effect.c.at_risk == 1,
            # Of a step that is due the node run finds out for itself, as far as it can.
            or_(
                one_of(thread.c.status, (BLOCKED, FAILED)),
                exists().where(
                    _held.c.thread_id == effect.c.thread_id, _held.c.run == effect.c.run, _held.c.status == BLOCKED
                ),
            ),
        )
        .order_by(effect.c.started_at)
        .limit(param("limit"))
    )
)
_WAITS = Statement(
    lambda _dialect: (
        select(*(child.c.name.label("child") if name == "child" else wait.c[name] for name in WaitView._fields))
        .select_from(wait.outerjoin(child, child.c.run_id == wait.c.child_run))
        .where(wait.c.thread_id == param("thread_id"))
        .order_by(wait.c.created_at, wait.c.step, wait.c.run, wait.c.occurrence)
    )
)
_AUDIT = Statement(
    lambda _dialect: (
        select(*(audit.c[name] for name in AuditView._fields))
        .where(audit.c.thread_id == param("thread_id"))
        .order_by(audit.c.id)
    )
)
_HISTORY = Statement(
    lambda _dialect: (
        select(*CHECKPOINT_COLUMNS, checkpoint.c.created_at)
        .where(
            checkpoint.c.thread_id == param("thread_id"),
            checkpoint.c.branch == param("branch"),
            checkpoint.c.seq >= param("first"),
            checkpoint.c.seq <= param("last"),
        )
        .order_by(checkpoint.c.seq)
    )
)
_SNAPSHOT_BEFORE = Statement(
    lambda _dialect: select(func.max(checkpoint.c.seq)).where(
        checkpoint.c.thread_id == param("thread_id"),
        checkpoint.c.branch == param("branch"),
        checkpoint.c.seq <= param("seq"),
        checkpoint.c.snapshot.is_not(None),
    )
)
_SEQ_AT = Statement(
    lambda _dialect: select(func.max(checkpoint.c.seq)).where(
        checkpoint.c.thread_id == param("thread_id"),
        checkpoint.c.branch == param("branch"),
        checkpoint.c.created_at <= param("at"),
    )
)
_SEQ_OF_ID = Statement(
    lambda _dialect: select(checkpoint.c.seq).where(
        checkpoint.c.thread_id == param("thread_id"),
        checkpoint.c.branch == param("branch"),
        checkpoint.c.id == param("id"),
    )
)
_NEXT_DUE = Statement(
    lambda _dialect: select(func.min(wait.c.due_at)).where(
        wait.c.thread_id == param("thread_id"), wait.c.status == "open"
    )
)
_NEXT_DUE_THREAD = Statement(
    lambda _dialect: select(thread.c.due_at).where(thread.c.id == param("thread_id"), thread.c.status == READY)
)
_NEXT_DUE_NODE = Statement(
    lambda _dialect: select(func.min(node_run.c.due_at)).where(
        node_run.c.thread_id == param("thread_id"), node_run.c.status == READY
    )
)
_COUNTS = Statement(
    lambda _dialect: (
        select(
            thread.c.status,
            thread.c.agent,
            thread.c.graph_version,
            func.count(),
        )
        .where(thread.c.tenant == param("tenant"))
        .group_by(thread.c.status, thread.c.agent, thread.c.graph_version)
        .order_by(thread.c.status, thread.c.agent, thread.c.graph_version)
    )
)
_NOW = Statement(lambda _dialect: select(db_now()))


def find_threads(store: Store, tenant: str, name: str) -> list[ThreadView]:
    """Return the threads of a tenant that a name or id means, up to 1,000."""
    return [ThreadView(*row) for row in store.rows(_FIND, {"tenant": tenant, "name": name})]


def list_threads(
    store: Store, tenant: str, *, agent: str | None, status: str | None, limit: int, before: str | None = None
) -> list[ThreadView]:
    """Return threads of a tenant, newest first; `before` is the id where an earlier page ended."""
    params = {"tenant": tenant, "agent": agent, "status": status, "limit": limit, "before": before or "~"}
    return [ThreadView(*row) for row in store.rows(_LIST, params)]


def runs(store: Store, thread_id: str) -> list[RunView]:
    """Return a thread's runs in order."""
    return [RunView(*row) for row in store.rows(_RUNS, {"thread_id": thread_id})]


def node_runs(store: Store, thread_id: str) -> list[NodeRunView]:
    """Return the fanned-out node runs of a thread in order."""
    return [NodeRunView(*row) for row in store.rows(_NODE_RUNS, {"thread_id": thread_id})]


def approvals(
    store: Store, tenant: str, *, status: str | None, thread_id: str | None, graph: str | None = None, limit: int
) -> list[ApprovalView]:
    """Return approvals of a tenant, oldest first."""
    params = {"tenant": tenant, "status": status, "thread_id": thread_id, "graph": graph, "limit": limit}
    return [ApprovalView(*row) for row in store.rows(_APPROVALS, params)]


def decisions(store: Store, tenant: str, approval_id: str) -> list[DecisionView]:
    """Return the decisions on an approval in order."""
    return [DecisionView(*row) for row in store.rows(_DECISIONS, {"approval_id": approval_id, "tenant": tenant})]


def effects(store: Store, thread_id: str) -> list[EffectView]:
    """Return a thread's journal in order."""
    return [EffectView(*row) for row in store.rows(_EFFECTS, {"thread_id": thread_id})]


def result_of(store: Store, thread_id: str, key: str) -> tuple[str, bytes | None, str | None] | None:
    """Return an effect's tenant, its result and the digest of one that is kept apart; None: there is no such effect."""
    row = store.rows(_RESULT, {"thread_id": thread_id, "key": key})
    return (row[0][0], row[0][1], row[0][2]) if row else None


def unknown_effects(store: Store, tenant: str, *, limit: int) -> list[tuple[str, str, EffectView]]:
    """Return a tenant's effects that have no outcome and hold somebody up, oldest first.

    Each with the graph and the name of its thread.
    """
    rows = store.rows(_UNKNOWN_EFFECTS, {"tenant": tenant, "limit": limit})
    return [(row[0], row[1], EffectView(*row[2:])) for row in rows]


def waits(store: Store, thread_id: str) -> list[WaitView]:
    """Return a thread's waits in order."""
    return [WaitView(*row) for row in store.rows(_WAITS, {"thread_id": thread_id})]


def audits(store: Store, thread_id: str) -> list[AuditView]:
    """Return who asked for what of a thread, in order."""
    return [AuditView(*row) for row in store.rows(_AUDIT, {"thread_id": thread_id})]


def history(store: Store, thread_id: str, branch: int, first: int, last: int) -> list[tuple[CheckpointRow, float]]:
    """Return checkpoints of a branch in order, each with the time of its commit."""
    params = {"thread_id": thread_id, "branch": branch, "first": first, "last": last}
    return [(checkpoint_row(row[:-1]), row[-1]) for row in store.rows(_HISTORY, params)]


def snapshot_before(store: Store, thread_id: str, branch: int, seq: int) -> int | None:
    """Return the seq of the last snapshot at or before a checkpoint."""
    found = store.rows(_SNAPSHOT_BEFORE, {"thread_id": thread_id, "branch": branch, "seq": seq})[0][0]
    return None if found is None else int(found)


def seq_at(store: Store, thread_id: str, branch: int, at: float) -> int | None:
    """Return the seq of the last checkpoint committed at or before a time."""
    found = store.rows(_SEQ_AT, {"thread_id": thread_id, "branch": branch, "at": at})[0][0]
    return None if found is None else int(found)


def seq_of(store: Store, thread_id: str, branch: int, checkpoint_id: str) -> int | None:
    """Return the seq of a checkpoint by its id."""
    rows = store.rows(_SEQ_OF_ID, {"thread_id": thread_id, "branch": branch, "id": checkpoint_id})
    return int(rows[0][0]) if rows else None


def next_due(store: Store, thread_id: str) -> float | None:
    """Return when the time will answer something that a thread waits for, None when it waits for no time."""
    statements = (_NEXT_DUE, _NEXT_DUE_NODE, _NEXT_DUE_THREAD)
    found = [row[0] for statement in statements for row in store.rows(statement, {"thread_id": thread_id})]
    times = [float(each) for each in found if each is not None]
    return min(times) if times else None


def counts(store: Store, tenant: str) -> list[tuple[str, str, str, int]]:
    """Return (status, graph, version, threads) of a tenant."""
    rows = store.rows(_COUNTS, {"tenant": tenant})
    return [(row[0], row[1], row[2], int(row[3])) for row in rows]


def now(store: Store) -> float:
    """Return the database's time."""
    return float(store.rows(_NOW, {})[0][0])
