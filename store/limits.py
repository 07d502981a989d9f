"""Limits: how many steps and node runs of one graph, or of one tenant, may run at once over all workers.

A limit is a row, or stands in a graph's code. A claim under a limit takes a **slot** for each one that applies, in its
own transaction and under a lock of the limit, so that two claims never count past each other. Nobody gives a slot back:
it counts for as long as the lease that it was taken with stands, so every way in which a lease ends frees it. A lease
that has overstayed its deadline counts no more either: only the next claim ends it, and that claim needs a slot.

Only claims to which a limit applies pay for any of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import and_, delete, exists, func, insert, not_, or_, select

from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import is_takeable
from keepstep.store.schema import limit, node_run, slot, thread
from keepstep.store.statements import Statement, db_now, param

GRAPH, TENANT = "graph", "tenant"


class Limit(NamedTuple):
    """A limit that somebody set, and how much of it is used."""

    kind: str
    """`graph` or `tenant`."""
    name: str
    running_max: int


class Slot(NamedTuple):
    """The lease that a slot belongs to."""

    nonce: str
    thread_id: str
    branch: int
    seq: int
    run: str
    """The node run's name; empty for the thread's own lease."""


def of_graph(name: str) -> str:
    """Return how limits and slots name a graph."""
    return f"{GRAPH} {name}"


def of_tenant(name: str) -> str:
    """Return how limits and slots name a tenant."""
    return f"{TENANT} {name}"


def tenant_of(scope: str) -> str | None:
    """Return the tenant that a limit is of; None for a graph's."""
    kind, _, name = scope.partition(" ")
    return name if kind == TENANT else None


_ALL = Statement(
    lambda _dialect: select(limit.c.kind, limit.c.name, limit.c.running_max).order_by(limit.c.kind, limit.c.name)
)
_SET = Statement(
    lambda _dialect: insert(limit).values(
        kind=param("kind"), name=param("name"), running_max=param("running_max"), updated_at=db_now()
    )
)
_DROP = Statement(lambda _dialect: delete(limit).where(limit.c.kind == param("kind"), limit.c.name == param("name")))
_LOCK = Statement(lambda _dialect: select(func.pg_advisory_xact_lock(func.hashtextextended(param("scope"), 0))))
_STANDS = or_(
    and_(
        slot.c.run == "",
        exists().where(
            thread.c.id == slot.c.thread_id, thread.c.lease_nonce == slot.c.nonce, not_(is_takeable(thread))
        ),
    ),
    exists().where(
        node_run.c.thread_id == slot.c.thread_id,
        node_run.c.branch == slot.c.branch,
        node_run.c.seq == slot.c.seq,
        node_run.c.run == slot.c.run,
        node_run.c.lease_nonce == slot.c.nonce,
        not_(is_takeable(node_run)),
    ),
)
_FORGET_FREED = Statement(lambda _dialect: delete(slot).where(slot.c.scope == param("scope"), ~_STANDS))
_COUNT = Statement(lambda _dialect: select(func.count()).select_from(slot).where(slot.c.scope == param("scope")))
_TAKE = Statement(
    lambda _dialect: insert(slot).values(
        scope=param("scope"), taken_at=db_now(), **{name: param(name) for name in Slot._fields}
    )
)
_TAKEN = Statement(lambda _dialect: select(slot.c.scope, func.count()).where(_STANDS).group_by(slot.c.scope))


def all_limits(store: Store) -> list[Limit]:
    """Return the limits that somebody set."""
    return [Limit(*row) for row in store.rows(_ALL, {})]


def put(transaction: Transaction, kind: str, name: str, running_max: int | None) -> None:
    """Set a limit, or take it away (None). Claims heed it within a second."""
    params = {"kind": kind, "name": name, "running_max": running_max}
    transaction.run(_DROP, params)
    if running_max is not None:
        transaction.run(_SET, params)


def take(transaction: Transaction, running_max: Mapping[str, int], wanted: Slot) -> bool:
    """Take a slot of each limit for a lease about to be acquired; return False when one of them has none left.

    `running_max` is by `of_graph` and `of_tenant`. The lease must be acquired in the same transaction.
    """
    for scope in sorted(running_max):
        if transaction.postgresql:  # SQLite has one writer anyway
            transaction.rows(_LOCK, {"scope": scope})
        transaction.run(_FORGET_FREED, {"scope": scope})
        if transaction.rows(_COUNT, {"scope": scope})[0][0] >= running_max[scope]:
            return False
    for scope in sorted(running_max):
        transaction.run(_TAKE, {"scope": scope, **wanted._asdict()})
    return True


def taken(store: Store) -> dict[str, int]:
    """Return how many slots of each limit are taken now."""
    return {str(scope): int(count) for scope, count in store.rows(_TAKEN, {})}


def free(store: Store, running_max: Mapping[str, int]) -> dict[str, int]:
    """Return how many more may run now under each limit."""
    used = taken(store)
    return {scope: max(0, most - used.get(scope, 0)) for scope, most in running_max.items()}
