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
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Table, and_, cast, exists, literal, or_, select, update
from sqlalchemy import String as Text

from keepstep.errors import StaleLease
from keepstep.store.engine import Store
from keepstep.store.schema import node_run, thread, worker
from keepstep.store.statements import Statement, contains, db_now, param

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


NUDGE_SECONDS = 5.0
"""How long after a nudge was published the sweep may think it lost."""


class Nudge(NamedTuple):
    """What should be in the queue: a hint that a thread, or one node run of it, is due at a version."""

    kind: str
    """`step` or `node`; `child` when something is left to do for the child of run `run` (see `errands`)."""
    thread_id: str
    version: int
    queue: str
    """The graph and version that it is for (`queue_of`)."""
    priority: int
    seq: int = 0
    run: str = ""


def nudge_columns(table: Table) -> list[ColumnElement[Any]]:
    """Return the columns of a thread or node run from which its nudge is made, after the kind."""
    if table is thread:
        return [thread.c.id, thread.c.version, thread.c.queue, thread.c.priority]
    names = ("thread_id", "version", "queue", "priority", "seq", "run")
    return [node_run.c[name] for name in names]


def new_nonce() -> str:
    """Return a nonce nobody had before: 96 random bits."""
    return urlsafe_b64encode(os.urandom(12)).decode()


def carried_key(graph: str, version: str) -> str:
    """Return how a worker row and a claim spell that a graph's version is carried."""
    return f"\n{graph}\x1f{version}\n"


def queue_of(graph: str, version: str) -> str:
    """Return the queue of a graph's version: its nudges are never taken by a worker that does not carry it."""
    return f"{graph.replace('%', '%25').replace('@', '%40')}@{version}"


def is_takeable(table: Table) -> ColumnElement[bool]:
    """The condition that nobody holds a row's lease, or somebody who has overstayed its deadline.

    A deadline counts by the word of a worker that is seen to live: one that was cut off is given up by the sweep, and
    after the database's clock was set forward each worker first moves its leases along (`workers.renew`).
    """
    holder = exists().where(worker.c.id == table.c.lease_worker, worker.c.alive_until > db_now())
    return or_(table.c.lease_nonce.is_(None), and_(table.c.lease_deadline <= db_now(), holder))


def is_carried() -> ColumnElement[bool]:
    """The condition that this worker carries the thread's graph and version (parameter `carried`)."""
    key = literal("\n", Text) + thread.c.agent + literal("\x1f", Text) + thread.c.graph_version + literal("\n", Text)
    return contains(cast(param("carried"), Text), key) > 0


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


def _held(table: Table) -> Statement:
    return Statement(lambda _dialect: select(literal(1)).select_from(table).where(*fenced(table)))


_GIVEN_BACK = (_given_back(thread), _given_back(node_run))
_RENEWED = {None: _renewed(thread), "node": _renewed(node_run)}
_POSTPONED = {None: _postponed(thread), "node": _postponed(node_run)}
_HELD = {None: _held(thread), "node": _held(node_run)}


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


def is_held(store: Store, fence: Fence) -> bool:
    """Tell whether a lease is still held; a look, which keeps nobody from taking it a moment later."""
    return bool(store.rows(_HELD[_kind(fence)], fence_params(fence)))


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
