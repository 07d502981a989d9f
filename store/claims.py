"""Claims: acquiring a lease and, in the same round trip, loading what it runs from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Table, and_, case, exists, func, literal, select, update
from sqlalchemy import String as Text
from sqlalchemy import Text as TextType
from sqlalchemy.sql.base import Executable

from keepstep.errors import DatabaseUnavailable
from keepstep.store import limits
from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import PAUSE, Fence, Owner, give_back, is_carried, is_takeable, new_nonce
from keepstep.store.routines import Routine
from keepstep.store.schema import READY, WAITING, checkpoint, node_run, thread
from keepstep.store.statements import Row, Statement, db_now, param

_NONE: Mapping[str, int] = MappingProxyType({})


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
    queue: str
    priority: int
    fanned: int
    undoing: int
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
    scopes: tuple[str, ...] = ()
    """The limits that it counts against (see `limits`)."""


_HEAD = [thread.c[name] for name in ThreadHead._fields]
_CHECKPOINT_FIELDS = len(CheckpointRow._fields)


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
    return [
        table.c.status == READY,
        table.c.version == param("version"),
        table.c.due_at <= db_now(),
        is_takeable(table),
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
_WHOSE = Statement(
    lambda _dialect: select(thread.c.agent, thread.c.tenant, thread.c.branch, thread.c.seq).where(
        thread.c.id == param("thread_id")
    )
)


def _held_back(table: Table) -> Statement:
    where = [thread.c.id == param("thread_id")]
    if table is node_run:
        where = [node_run.c[name] == param(name) for name in ("thread_id", "seq", "run")]
    return Statement(
        lambda _dialect: update(table).where(*where, *_is_free(table)).values(next_nudge_at=db_now(), nudges=0)
    )


_HELD_BACK = (_held_back(thread), _held_back(node_run))
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

    Then the lease may have been acquired: it is given back, since nobody else would know of it; the second as well.
    """
    nonce = new_nonce()
    try:
        return claim(nonce)
    except DatabaseUnavailable:
        give_back(store, thread_id, nonce)
    nonce = new_nonce()
    try:
        return claim(nonce)
    except DatabaseUnavailable:
        give_back(store, thread_id, nonce)
        raise


Claiming = Callable[[Store | Transaction, dict[str, Any], str], Claim | None]


def claim_thread(
    store: Store, thread_id: str, version: int, *, owner: Owner, carried: str, running_max: Mapping[str, int] = _NONE
) -> Claim | None:
    """Acquire a thread's lease and load its head, in one round trip; None when there is nothing to do.

    Nothing to do: the thread is not ready, not due, at another version, paused, leased to somebody alive, or of a
    graph that `carried` (see `carried_key`) does not name; or a limit of `running_max` (see `limits`) that applies to
    it has been reached.
    """
    params = {"thread_id": thread_id, "version": version, "carried": carried}
    return _surely(store, thread_id, lambda nonce: _claimed(store, _thread_claimed, params, owner, nonce, running_max))


def claim_node(
    store: Store,
    thread_id: str,
    seq: int,
    run: str,
    version: int,
    *,
    owner: Owner,
    carried: str,
    running_max: Mapping[str, int] = _NONE,
) -> Claim | None:
    """Acquire the lease of one fanned-out node run and load what it needs; None when there is nothing to do."""
    params = {"thread_id": thread_id, "seq": seq, "run": run, "version": version, "carried": carried}
    return _surely(store, thread_id, lambda nonce: _claimed(store, _node_claimed, params, owner, nonce, running_max))


def _claimed(
    store: Store, claiming: Claiming, params: dict[str, Any], owner: Owner, nonce: str, running_max: Mapping[str, int]
) -> Claim | None:
    params = {**params, **_owner_params(owner, nonce)}
    if running_max:
        return _claimed_within(store, claiming, params, nonce, running_max)
    if store.dialect == "postgresql":
        return claiming(store, params, nonce)
    with store.transaction() as transaction:
        return claiming(transaction, params, nonce)


def _claimed_within(
    store: Store, claiming: Claiming, params: dict[str, Any], nonce: str, running_max: Mapping[str, int]
) -> Claim | None:
    """Claim under the limits that apply to the thread, all of them in one transaction."""
    with store.transaction() as transaction:
        whose = transaction.row(_WHOSE, params)
        if whose is None:
            return None
        agent, tenant, branch, seq = whose
        scopes = {
            scope: running_max[scope]
            for scope in (limits.of_graph(agent), limits.of_tenant(tenant))
            if scope in running_max
        }
        run = params.get("run")
        slot = limits.Slot(nonce, params["thread_id"], branch, seq + 1, run or "")
        if scopes and not limits.take(transaction, scopes, slot):
            # Due at once: who ends a step under this limit, or sees room under it, looks for what is.
            transaction.run(_HELD_BACK[run is not None], params)
            return None
        # When there is nothing to do the slot stands for no lease, and is forgotten like all of those.
        claim = claiming(transaction, params, nonce)
        return None if claim is None else claim._replace(scopes=tuple(scopes))


def _thread_claimed(store: Store | Transaction, params: dict[str, Any], nonce: str) -> Claim | None:
    rows = store.rows(_CLAIM_THREAD, params)
    if not rows:
        return None
    count, attempts = len(_HEAD), len(_ATTEMPT)
    head, attempt = ThreadHead(*rows[0][:count]), Attempt(*rows[0][count : count + attempts])
    if isinstance(store, Transaction) and not store.postgresql:
        checkpoints = checkpoint_range(store, head.id, head.branch, head.snapshot_seq, head.seq)
    else:
        checkpoints = _checkpoints_of(rows, count + attempts + 1)
    return Claim(Fence(head.id, nonce, head.branch, head.seq + 1), head, attempt, None, checkpoints)


def _node_claimed(store: Store | Transaction, params: dict[str, Any], nonce: str) -> Claim | None:
    rows = store.rows(_CLAIM_NODE, params)
    if not rows:
        return None
    nodes, attempts = len(NodeRow._fields), len(_ATTEMPT)
    if isinstance(store, Transaction) and not store.postgresql:
        values = rows[0]
        head = ThreadHead(*store.rows(_READ_HEAD, params)[0])
        first = head.snapshot_seq if values[nodes - 1] is None else head.seq + 1
        checkpoints = checkpoint_range(store, head.id, head.branch, first, head.seq)
    else:
        head = ThreadHead(*rows[0][: len(_HEAD)])
        values = rows[0][len(_HEAD) :]
        checkpoints = _checkpoints_of(rows, len(_HEAD) + nodes + attempts + 1)
    node = NodeRow(*values[:nodes])
    attempt = Attempt(*values[nodes : nodes + attempts])
    fence = Fence(head.id, nonce, head.branch, params["seq"], params["run"])
    return Claim(fence, head, attempt, node, checkpoints)
