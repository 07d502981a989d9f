"""Admission: which of the rows that are due are nudged next, when there are more of them than the queues should hold.

The rows are the backlog, and the queue of a graph holds a few seconds of work. So a flood of due threads costs the
broker nothing, and who comes next is decided late: first the urgent ones, then every tenant in turn, however much one
of them has waiting; never more of a graph or a tenant than may run at once.

A row that was nudged is left alone for longer each time, up to a minute, so that a backlog is not multiplied by its own
nudges; a commit or a lost lease starts afresh.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Table, and_, case, cast, func, literal, or_, select, update
from sqlalchemy import Float as FloatType
from sqlalchemy.sql.base import Executable

from keepstep.priority import PRIORITIES
from keepstep.store import limits
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge, nudge_columns, queue_of
from keepstep.store.schema import NEVER, READY, node_run, thread
from keepstep.store.statements import Row, Statement, db_now, param

_BACKOFF_SECONDS = (2.0, 4.0, 8.0, 16.0, 32.0)
_TENANTS_MAX = 64
"""Tenants that one look goes through; the next look goes on behind them."""


def _paused(table: Table) -> ColumnElement[bool]:
    if table is thread:
        return thread.c.control != ""
    control = select(thread.c.control).where(thread.c.id == node_run.c.thread_id).scalar_subquery()
    return control != literal("")


def _due(table: Table) -> Statement:
    keys = [thread.c.id] if table is thread else [node_run.c[name] for name in ("thread_id", "branch", "seq", "run")]
    # Ready with nothing to do now: leased to somebody alive, or put off. Look again when that ends.
    busy = and_(table.c.lease_nonce.is_not(None), table.c.lease_deadline > db_now())
    later = func.coalesce(case((busy, table.c.lease_deadline), else_=table.c.due_at), db_now())
    backoff = case(*((table.c.nudges == count, seconds) for count, seconds in enumerate(_BACKOFF_SECONDS)), else_=60.0)
    free = and_(table.c.due_at <= db_now(), or_(table.c.lease_nonce.is_(None), table.c.lease_deadline <= db_now()))
    nudged = and_(free, ~_paused(table))

    def build(dialect: str) -> Executable:
        picked = (
            select(*keys)
            .where(
                table.c.status == READY,
                table.c.queue == param("queue"),
                table.c.priority == param("priority"),
                table.c.tenant == param("tenant"),
                table.c.next_nudge_at <= db_now(),
            )
            .order_by(table.c.next_nudge_at)
            .limit(param("limit"))
        )
        if dialect == "postgresql":
            picked = picked.with_for_update(skip_locked=True, of=table)
        found = picked.cte("found")
        same = and_(*(column == found.c[column.name] for column in keys))
        if dialect == "postgresql":
            matching = update(table).where(same)
        else:
            one = select(literal(1)).select_from(found).where(same).exists()
            matching = update(table).where(one)
        return matching.values(
            # One that is paused is not looked at again: resuming it makes it due.
            next_nudge_at=case((_paused(table), NEVER), (free, db_now() + cast(backoff, FloatType)), else_=later),
            nudges=table.c.nudges + case((nudged, 1), else_=0),
        ).returning(*nudge_columns(table), table.c.due_at, table.c.lease_deadline, table.c.next_nudge_at)

    return Statement(build)


def _next_tenant(table: Table) -> Statement:
    return Statement(
        lambda _dialect: (
            select(table.c.tenant)
            .where(
                table.c.status == READY,
                table.c.queue == param("queue"),
                table.c.priority == param("priority"),
                table.c.tenant > param("after"),
            )
            .order_by(table.c.tenant)
            .limit(1)
        )
    )


_KINDS = {"step": (_next_tenant(thread), _due(thread)), "node": (_next_tenant(node_run), _due(node_run))}


def _due_now(table: Table) -> Statement:
    where = [thread.c.id == param("thread_id")]
    if table is node_run:
        where = [node_run.c[name] == param(name) for name in ("thread_id", "seq", "run")]
    return Statement(
        lambda _dialect: (
            update(table)
            .where(
                *where,
                table.c.version == param("version"),
                table.c.status == READY,
                table.c.lease_nonce.is_(None),
                table.c.due_at <= db_now(),
            )
            .values(next_nudge_at=db_now(), nudges=0)
        )
    )


_DUE_NOW = {"step": _due_now(thread), "node": _due_now(node_run)}


def withhold(store: Store, nudges: Iterable[Nudge]) -> None:
    """Say that nudges were not published after all: the next look may pick what they are about."""
    with store.transaction() as transaction:
        for nudge in sorted(nudges):  # in one order, as two may withhold the same
            transaction.run(_DUE_NOW[nudge.kind], nudge._asdict())


@dataclass(slots=True)
class Admitted:
    """What one look found."""

    nudges: list[Nudge] = field(default_factory=list)
    """To be published now."""
    more: bool = False
    """Whether rows are left that are due, for want of room in a queue."""
    held_back: bool = False
    """Whether rows are left that are due, because as many run as may."""


class Admission:
    """The looks of one worker; it remembers which tenants' turn is next."""

    def __init__(self, store: Store, carried: Iterable[tuple[str, str]]) -> None:
        self._store = store
        self._lanes = [(graph, queue_of(graph, version)) for graph, version in carried]
        self._after: dict[tuple[str, str, int], str] = {}

    def look(
        self,
        room: Callable[[str], int],
        running_max: Mapping[str, int],
        *,
        scopes: Iterable[str] | None = None,
    ) -> Admitted:
        """Pick what is nudged next, and mark it so.

        `room`: how many more nudges the queue of a graph's version should hold. `running_max`: see `limits`.
        `scopes`: look only for what waits for these limits.
        """
        admitted = Admitted()
        free = limits.free(self._store, running_max) if running_max else {}
        wanted = None if scopes is None else set(scopes)
        for graph, queue in self._lanes:
            left = room(queue)
            if left <= 0:
                admitted.more = True
                continue
            for priority, kind in itertools.product(range(len(PRIORITIES)), _KINDS):
                lane = _Lane(self, kind, graph, queue, priority)
                left -= lane.pick(left, free, wanted, admitted)
                if left <= 0:
                    admitted.more = True
                    break
        return admitted

    def tenants(self, kind: str, queue: str, priority: int) -> list[str]:
        """Return the tenants that have rows there, from the one whose turn it is."""
        place = (kind, queue, priority)
        statement, params = _KINDS[kind][0], {"queue": queue, "priority": priority}
        found: list[str] = []
        after = self._after.get(place, "")
        wrapped = not after
        while len(found) < _TENANTS_MAX:
            rows = self._store.rows(statement, {**params, "after": after})
            if not rows:
                if wrapped:
                    break
                after, wrapped = "", True
                continue
            after = str(rows[0][0])
            if after in found:
                break
            found.append(after)
        # One tenant further next time: what does not divide evenly is not always the same one's.
        self._after[place] = found[0] if found else ""
        return found

    def due(self, kind: str, queue: str, priority: int, tenant: str, limit: int) -> tuple[list[Nudge], bool]:
        """Mark a tenant's rows that are due as nudged; return their nudges, and whether there may be more of them."""
        params = {"queue": queue, "priority": priority, "tenant": tenant, "limit": limit}
        rows = self._store.rows(_KINDS[kind][1], params)
        return [Nudge(kind, *row[:-3]) for row in rows if _is_due(row)], len(rows) == limit


@dataclass(slots=True)
class _Lane:
    """The rows of one kind, queue and priority, in one look."""

    admission: Admission
    kind: str
    graph: str
    queue: str
    priority: int

    def pick(self, room: int, free: dict[str, int], wanted: set[str] | None, admitted: Admitted) -> int:
        """Add what is due, each tenant in turn, to what was admitted; return how many there were."""
        of_graph = limits.of_graph(self.graph)
        tenants = [
            tenant
            for tenant in self.admission.tenants(self.kind, self.queue, self.priority)
            if wanted is None or wanted & {of_graph, limits.of_tenant(tenant)}
        ]
        picked = 0
        while tenants and picked < room:
            share = max(1, (room - picked) // len(tenants))
            going_on = []
            for tenant in tenants:
                scopes = [scope for scope in (of_graph, limits.of_tenant(tenant)) if scope in free]
                most = min([share, room - picked, *(free[scope] for scope in scopes)])
                if most <= 0:
                    admitted.held_back |= picked < room
                    continue
                nudges, more = self.admission.due(self.kind, self.queue, self.priority, tenant, most)
                admitted.nudges += nudges
                picked += len(nudges)
                for scope in scopes:
                    free[scope] -= len(nudges)
                if more:
                    going_on.append(tenant)
            tenants = going_on
        return picked


def _is_due(row: Row) -> bool:
    # A row with nothing to do now was given the time at which it has. (Not computed by RETURNING: SQLite 3.40 loses
    # its columns there when the expression calls a function of ours.)
    due_at, lease_deadline, next_nudge_at = row[-3:]
    return next_nudge_at not in {due_at, lease_deadline, NEVER}
