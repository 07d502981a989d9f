"""Leases: the right to run a thread's next step, or one node run of it.

A lease is a random nonce on the row plus the worker and pool child that hold it. It ends when its holder writes the
outcome, when the holder is found dead (`workers.release_child`, `sweep`), or when its deadline passes, which is the
node's own timeout plus grace: a node that hangs is taken over although its worker lives. Elapsed time alone takes
nothing from a worker that is alive and within its deadline, so a node of three hours needs no heartbeat of its own.
A deadline is the database's time; when its clock is set, deadlines are set with it (`workers.renew`).

The nonce is never a counter: after a failover to a replica that lost the last commits a counter repeats, and a stale
owner's write would be let in.
"""

from __future__ import annotations

import functools
import os
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Table, and_, case, cast, exists, func, literal, or_, select, update
from sqlalchemy import String as Text
from sqlalchemy import Text as TextType
from sqlalchemy.sql.base import Executable

from keepstep.errors import DatabaseUnavailable, StaleLease
from keepstep.store.engine import Store, Transaction
from keepstep.store.routines import Routine
from keepstep.store.schema import READY, WAITING, checkpoint, node_run, thread, worker
from keepstep.store.statements import Row, Statement, contains, db_now, param

PAUSE = "pause"
_GIVE_BACK_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lease: the worker process's id and the pid of its pool child."""

    worker: str
    child: int


class Fence(msgspec.Struct, frozen=True):
    """What every write of an attempt carries: the row it leased and the nonce it got for it.

    `run` is None for the thread's lease, the node run's name for a fanned-out node run's.
    """

    thread_id: str
    nonce: str
    branch: int
    seq: int
    run: str | None = None


class Nudge(NamedTuple):
    """What should be in the queue: a hint that a thread, or one node run of it, is due at a version."""

    kind: str
    """`step` or `node`."""
    thread_id: str
    version: int
    seq: int = 0
    run: str = ""


class CheckpointRow(NamedTuple):
    """A stored checkpoint; payloads are as the codec wrote them."""

    seq: int
    id: str
    parent_id: str | None
    run_id: str
    kind: str
    change: bytes | None
    snapshot: bytes | None
    cursor: bytes
    meta: bytes
    digest: bytes
    parent_digest: bytes


CHECKPOINT_COLUMNS = [checkpoint.c[name] for name in CheckpointRow._fields]


class ThreadHead(NamedTuple):
    """A thread as the claim found it."""

    id: str
    tenant: str
    application: str
    agent: str
    name: str
    graph_version: str
    control: str
    branch: int
    seq: int
    snapshot_seq: int
    version: int
    fanned: int
    run_id: str | None
    run_active: int
    run_steps: int
    step_limit: int | None


class Attempt(NamedTuple):
    """How often this was tried."""

    starts: int
    failures: int
    deaths: int
    last_death: str | None


class NodeRow(NamedTuple):
    """A fanned-out node run as the claim found it."""

    step: str
    position: int
    node: str
    input: bytes | None


class Claim(NamedTuple):
    """A lease just acquired, with the head it runs from."""

    fence: Fence
    thread: ThreadHead
    attempt: Attempt
    node: NodeRow | None
    checkpoints: list[CheckpointRow]
    """From the last snapshot to the head; empty before the first, and for a Send, which carries its own input."""


_HEAD = [thread.c[name] for name in ThreadHead._fields]
_CHECKPOINT_FIELDS = len(CheckpointRow._fields)


def new_nonce() -> str:
    """Return a nonce nobody had before: 96 random bits."""
    return urlsafe_b64encode(os.urandom(12)).decode()


def carried_key(graph: str, version: str) -> str:
    """Return how a worker row and a claim spell that a graph's version is carried."""
    return f"\n{graph}\x1f{version}\n"


def is_carried() -> ColumnElement[bool]:
    """The condition that this worker carries the thread's graph and version (parameter `carried`)."""
    key = literal("\n", Text) + thread.c.agent + literal("\x1f", Text) + thread.c.graph_version + literal("\n", Text)
    return contains(cast(param("carried"), Text), key) > 0


def _takes(table: Table) -> dict[str, Any]:
    """What acquiring the lease writes; a nonce still there is a holder that overstayed its deadline."""
    overstayed = case((table.c.lease_nonce.is_not(None), 1), else_=0)
    return {
        "lease_nonce": param("nonce"),
        "lease_worker": param("worker"),
        "lease_child": param("child"),
        "lease_deadline": db_now() + table.c.lease_seconds,
        "starts": table.c.starts + 1,
        "deaths": table.c.deaths + overstayed,
        "last_death": case(
            (table.c.lease_nonce.is_not(None), literal("it overstayed its deadline", Text)), else_=table.c.last_death
        ),
    }


def _is_free(table: Table) -> list[ColumnElement[bool]]:
    # A deadline counts by the word of a worker that is seen to live: one that was cut off is given up by the sweep, and
    # after the database's clock was set forward each worker first moves its leases along (`workers.renew`).
    holder = exists().where(worker.c.id == table.c.lease_worker, worker.c.alive_until > db_now())
    return [
        table.c.status == READY,
        table.c.version == param("version"),
        table.c.due_at <= db_now(),
        or_(table.c.lease_nonce.is_(None), and_(table.c.lease_deadline <= db_now(), holder)),
    ]


_ATTEMPT = ("starts", "failures", "deaths", "last_death")


def _claim_thread(dialect: str) -> Executable:
    taken = (
        update(thread)
        .where(thread.c.id == param("thread_id"), *_is_free(thread), thread.c.control != PAUSE, is_carried())
        .values(**_takes(thread))
        .returning(*_HEAD, *(thread.c[name] for name in _ATTEMPT))
    )
    if dialect != "postgresql":
        return taken  # SQLite takes no data-modifying CTE: the same transaction reads the checkpoints next
    claimed = taken.cte("claimed")
    # The claim need not survive a crash of the database: the nonce is random, so losing it harms nobody.
    hasty = select(func.set_config("synchronous_commit", "off", True, type_=TextType).label("mode")).cte("hasty")  # noqa: FBT003  SQL
    held = and_(
        checkpoint.c.thread_id == claimed.c.id,
        checkpoint.c.branch == claimed.c.branch,
        checkpoint.c.seq >= claimed.c.snapshot_seq,
        checkpoint.c.seq <= claimed.c.seq,
    )
    source = claimed.join(hasty, literal(1) == literal(1)).outerjoin(checkpoint, held)
    return select(*claimed.c, hasty.c.mode, *CHECKPOINT_COLUMNS).select_from(source).order_by(checkpoint.c.seq)


def _claim_node(dialect: str) -> Executable:
    owner = exists().where(
        thread.c.id == node_run.c.thread_id,
        thread.c.status == WAITING,
        thread.c.control != PAUSE,
        thread.c.branch == node_run.c.branch,
        thread.c.seq + 1 == node_run.c.seq,
        is_carried(),
    )
    taken = (
        update(node_run)
        .where(
            node_run.c.thread_id == param("thread_id"),
            node_run.c.seq == param("seq"),
            node_run.c.run == param("run"),
            *_is_free(node_run),
            owner,
        )
        .values(**_takes(node_run), started_at=func.coalesce(node_run.c.started_at, db_now()))
        .returning(
            *(node_run.c[name] for name in NodeRow._fields), *(node_run.c[name] for name in _ATTEMPT), node_run.c.branch
        )
    )
    if dialect != "postgresql":
        return taken
    claimed = taken.cte("claimed")
    hasty = select(func.set_config("synchronous_commit", "off", True, type_=TextType).label("mode")).cte("hasty")  # noqa: FBT003  SQL
    head = thread.alias("head")
    held = and_(
        checkpoint.c.thread_id == head.c.id,
        checkpoint.c.branch == head.c.branch,
        checkpoint.c.seq >= head.c.snapshot_seq,
        checkpoint.c.seq <= head.c.seq,
        claimed.c.input.is_(None),
    )
    source = (
        claimed.join(hasty, literal(1) == literal(1))
        .join(head, head.c.id == param("thread_id"))
        .outerjoin(checkpoint, held)
    )
    return (
        select(
            *(head.c[name] for name in ThreadHead._fields),
            *(claimed.c[name] for name in (*NodeRow._fields, *_ATTEMPT)),
            hasty.c.mode,
            *CHECKPOINT_COLUMNS,
        )
        .select_from(source)
        .order_by(checkpoint.c.seq)
    )


_CLAIMS = {"nonce": "text", "worker": "text", "child": "integer", "version": "integer", "carried": "text"}
_CLAIM_THREAD = Routine("claim_thread", _claim_thread, {"thread_id": "text", **_CLAIMS})
_CLAIM_NODE = Routine("claim_node", _claim_node, {"thread_id": "text", "seq": "integer", "run": "text", **_CLAIMS})
ROUTINES = (_CLAIM_THREAD, _CLAIM_NODE)
_READ_HEAD = Statement(lambda _dialect: select(*_HEAD).where(thread.c.id == param("thread_id")))
_READ_RANGE = Statement(
    lambda _dialect: (
        select(*CHECKPOINT_COLUMNS)
        .where(
            checkpoint.c.thread_id == param("thread_id"),
            checkpoint.c.branch == param("branch"),
            checkpoint.c.seq >= param("first"),
            checkpoint.c.seq <= param("last"),
        )
        .order_by(checkpoint.c.seq)
    )
)


def checkpoint_row(values: Row) -> CheckpointRow:
    """Return a checkpoint from its columns."""
    return CheckpointRow(*values)


def checkpoint_range(
    transaction: Transaction, thread_id: str, branch: int, first: int, last: int
) -> list[CheckpointRow]:
    """Return the checkpoints `first` to `last` of a branch, in order."""
    params = {"thread_id": thread_id, "branch": branch, "first": first, "last": last}
    return [checkpoint_row(row) for row in transaction.rows(_READ_RANGE, params)]


def _checkpoints_of(rows: list[Row], start: int) -> list[CheckpointRow]:
    if rows[0][start] is None:
        return []
    return [checkpoint_row(row[start : start + _CHECKPOINT_FIELDS]) for row in rows]


def _owner_params(owner: Owner, nonce: str) -> dict[str, Any]:
    return {"nonce": nonce, "worker": owner.worker, "child": owner.child}


def _surely(store: Store, thread_id: str, claim: Callable[[str], Claim | None]) -> Claim | None:
    """Claim under a new nonce, and once more when the answer was lost with its connection.

    Then the lease may have been acquired: it is given back first, since nobody else would know of it.
    """
    nonce = new_nonce()
    try:
        return claim(nonce)
    except DatabaseUnavailable:
        give_back(store, thread_id, nonce)
    return claim(new_nonce())


def claim_thread(store: Store, thread_id: str, version: int, *, owner: Owner, carried: str) -> Claim | None:
    """Acquire a thread's lease and load its head, in one round trip; None when there is nothing to do.

    Nothing to do: the thread is not ready, not due, at another version, paused, leased to somebody alive, or of a
    graph that `carried` (see `carried_key`) does not name.
    """
    params = {"thread_id": thread_id, "version": version, "carried": carried}
    return _surely(store, thread_id, lambda nonce: _thread_claimed(store, params, owner, nonce))


def _thread_claimed(store: Store, params: dict[str, Any], owner: Owner, nonce: str) -> Claim | None:
    params = {**params, **_owner_params(owner, nonce)}
    count = len(_HEAD)
    if store.dialect == "postgresql":
        rows = store.rows(_CLAIM_THREAD, params)
        if not rows:
            return None
        head = ThreadHead(*rows[0][:count])
        checkpoints = _checkpoints_of(rows, count + len(_ATTEMPT) + 1)
        attempt = Attempt(*rows[0][count : count + len(_ATTEMPT)])
    else:
        with store.transaction() as transaction:
            row = transaction.row(_CLAIM_THREAD, params)
            if row is None:
                return None
            head, attempt = ThreadHead(*row[:count]), Attempt(*row[count : count + len(_ATTEMPT)])
            checkpoints = checkpoint_range(transaction, head.id, head.branch, head.snapshot_seq, head.seq)
    return Claim(Fence(head.id, nonce, head.branch, head.seq + 1), head, attempt, None, checkpoints)


def claim_node(
    store: Store, thread_id: str, seq: int, run: str, version: int, *, owner: Owner, carried: str
) -> Claim | None:
    """Acquire the lease of one fanned-out node run and load what it needs; None when there is nothing to do."""
    params = {"thread_id": thread_id, "seq": seq, "run": run, "version": version, "carried": carried}
    return _surely(store, thread_id, lambda nonce: _node_claimed(store, params, owner, nonce))


def _node_claimed(store: Store, params: dict[str, Any], owner: Owner, nonce: str) -> Claim | None:
    params = {**params, **_owner_params(owner, nonce)}
    nodes, attempts = len(NodeRow._fields), len(_ATTEMPT)
    if store.dialect == "postgresql":
        rows = store.rows(_CLAIM_NODE, params)
        if not rows:
            return None
        head = ThreadHead(*rows[0][: len(_HEAD)])
        values = rows[0][len(_HEAD) :]
        checkpoints = _checkpoints_of(rows, len(_HEAD) + nodes + attempts + 1)
    else:
        with store.transaction() as transaction:
            found = transaction.row(_CLAIM_NODE, params)
            if found is None:
                return None
            values = found
            head = ThreadHead(*transaction.rows(_READ_HEAD, {"thread_id": params["thread_id"]})[0])
            first = head.snapshot_seq if values[nodes - 1] is None else head.seq + 1
            checkpoints = checkpoint_range(transaction, head.id, head.branch, first, head.seq)
    node = NodeRow(*values[:nodes])
    attempt = Attempt(*values[nodes : nodes + attempts])
    fence = Fence(head.id, nonce, head.branch, params["seq"], params["run"])
    return Claim(fence, head, attempt, node, checkpoints)


# --- what the holder of a lease may do with it ---


def fenced(table: Table) -> list[ColumnElement[bool]]:
    """The condition that a row is still leased under the fence's nonce (parameters of `fence_params`)."""
    if table is thread:
        return [thread.c.id == param("f_thread"), thread.c.lease_nonce == param("f_nonce")]
    return [
        node_run.c.thread_id == param("f_thread"),
        node_run.c.branch == param("f_branch"),
        node_run.c.seq == param("f_seq"),
        node_run.c.run == param("f_run"),
        node_run.c.lease_nonce == param("f_nonce"),
    ]


def fence_params(fence: Fence) -> dict[str, Any]:
    """Return the parameters that `fenced` needs."""
    params: dict[str, Any] = {"f_thread": fence.thread_id, "f_nonce": fence.nonce}
    if fence.run is not None:
        params |= {"f_branch": fence.branch, "f_seq": fence.seq, "f_run": fence.run}
    return params


def released(table: Table) -> dict[str, Any]:
    """What giving a lease back writes."""
    return {
        table.c.lease_nonce.name: None,
        table.c.lease_worker.name: None,
        table.c.lease_child.name: None,
        table.c.lease_deadline.name: None,
    }


def _renewed(table: Table) -> Statement:
    return Statement(
        lambda _dialect: (
            update(table)
            .where(*fenced(table))
            .values(
                starts=table.c.starts + 1,
                failures=param("failures"),
                lease_deadline=db_now() + table.c.lease_seconds,
            )
            .returning(table.c.starts)
        )
    )


def _postponed(table: Table) -> Statement:
    return Statement(
        lambda _dialect: (
            update(table)
            .where(*fenced(table))
            .values(
                **released(table),
                failures=param("failures"),
                error=param("error"),
                version=table.c.version + 1,
                due_at=db_now() + param("delay"),
                next_nudge_at=db_now() + param("delay"),
                nudges=0,
            )
            .returning(table.c.version)
        )
    )


def _given_back(table: Table) -> Statement:
    thread_id = table.c.id if table is thread else table.c.thread_id
    return Statement(
        lambda _dialect: (
            update(table)
            .where(thread_id == param("thread_id"), table.c.lease_nonce == param("nonce"))
            .values(**released(table), next_nudge_at=db_now(), nudges=0)
            .returning(table.c.version)
        )
    )


_GIVEN_BACK = (_given_back(thread), _given_back(node_run))
_RENEWED = {None: _renewed(thread), "node": _renewed(node_run)}
_POSTPONED = {None: _postponed(thread), "node": _postponed(node_run)}


def _kind(fence: Fence) -> str | None:
    return None if fence.run is None else "node"


def give_back(store: Store, thread_id: str, nonce: str) -> None:
    """Give a lease back that nobody is going to use, if it is (still) held; the sweep finds what is due at once.

    For when the database went away under a step: its worker lives on, and nobody may have to wait for the deadline.
    Raises `DatabaseUnavailable` when the database stays away.
    """
    params = {"thread_id": thread_id, "nonce": nonce}
    for statement in _GIVEN_BACK:
        store.patiently(functools.partial(store.rows, statement, params), seconds=_GIVE_BACK_PATIENCE_SECONDS)


def begin_attempt(store: Store, fence: Fence, *, failures: int) -> int:
    """Count another attempt of a held lease before its body runs, and push its deadline out; return the start count.

    Raises `StaleLease` when the lease is gone.
    """
    rows = store.rows(_RENEWED[_kind(fence)], {**fence_params(fence), "failures": failures})
    if not rows:
        raise StaleLease
    return int(rows[0][0])


def postpone(store: Store, fence: Fence, *, failures: int, delay_seconds: float, error: str) -> None:
    """Give the lease back and make the row due again after a delay: a durable retry that holds no worker.

    Raises `StaleLease` when the lease is gone.
    """
    params = {**fence_params(fence), "failures": failures, "delay": delay_seconds, "error": error}
    if not store.rows(_POSTPONED[_kind(fence)], params):
        raise StaleLease
