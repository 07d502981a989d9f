"""Admission: which of the rows that are due are nudged next, when there are more of them than the queues should hold.

The rows are the backlog, and the queue of a graph holds a few seconds of work. So a flood of due threads costs the
broker nothing, and who comes next is decided late: first the urgent ones, then every tenant in turn, however much one
of them has waiting; never more of a graph or a tenant than may run at once.

A row that was nudged is left alone for longer each time, up to a minute, so that a backlog is not multiplied by its own
nudges; a commit or a lost lease starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Integer,
    ScalarSelect,
    Select,
    Table,
    Text,
    and_,
    case,
    cast,
    func,
    literal,
    literal_column,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy import Float as FloatType
from sqlalchemy.sql.base import Executable

from keepstep.priority import PRIORITIES
from keepstep.store import limits
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge, nudge_columns, queue_of
from keepstep.store.schema import NEVER, READY, node_run, thread
from keepstep.store.statements import Row, Statement, db_now, param

_Waiting = tuple[str, list[str]]
"""A tenant, and which kinds of its rows are due, the one that has waited longest first."""

_BACKOFF_SECONDS = (2.0, 4.0, 8.0, 16.0, 32.0)
_TENANTS_MAX = 64
"""Tenants with something due that one look goes through; the next look goes on behind them."""
_SEEN_MAX = 2000
"""Tenants that one look asks whether they have something due."""


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


def _waiting(table: Table) -> list[ColumnElement[bool]]:
    return [table.c.status == READY, table.c.queue == param("queue"), table.c.priority == param("priority")]


def _oldest(table: Table, tenant: ColumnElement[str]) -> ScalarSelect[float]:
    is_due = table.c.next_nudge_at <= db_now()
    found = select(table.c.next_nudge_at).where(*_waiting(table), table.c.tenant == tenant, is_due)
    return found.order_by(table.c.next_nudge_at).limit(1).scalar_subquery()


def _walk(table: Table, kind: str) -> Select[Any]:
    """Go from tenant to tenant, two probes of the index each, however many rows each of them has."""

    def behind(tenant: ColumnElement[str]) -> ScalarSelect[str]:
        found = select(table.c.tenant).where(*_waiting(table), table.c.tenant > tenant)
        return found.order_by(table.c.tenant).limit(1).scalar_subquery()

    one = literal_column("1", Integer)
    walk = select(behind(param("after")).label("tenant"), one.label("count")).cte(f"walk_{kind}", recursive=True)
    walk = walk.union_all(
        select(behind(walk.c.tenant), walk.c.count + one).where(
            walk.c.tenant.is_not(None), walk.c.count < literal_column(str(_SEEN_MAX), Integer)
        )
    )
    seen = select(
        literal_column(f"'{kind}'", Text).label("kind"),
        walk.c.tenant,
        _oldest(table, walk.c.tenant).label("oldest"),
        walk.c.count,
    ).subquery(f"seen_{kind}")
    is_last = seen.c.count == literal_column(str(_SEEN_MAX), Integer)
    return select(seen).where(seen.c.tenant.is_not(None), or_(seen.c.oldest.is_not(None), is_last))


_TABLES = {"step": thread, "node": node_run}
_KINDS = {kind: _due(table) for kind, table in _TABLES.items()}


def _walks(_dialect: str) -> Executable:
    both = union_all(*(_walk(table, kind) for kind, table in _TABLES.items())).subquery("both")
    return select(both).order_by(both.c.tenant)


_WALK = Statement(_walks)
_OF_TENANT = Statement(
    lambda _dialect: select(*(_oldest(table, param("tenant")).label(kind) for kind, table in _TABLES.items()))
)


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
    is_full: bool = False
    """Whether what was picked is all that may run under the limits that were looked for."""


class Admission:
    """The looks of one worker; it remembers which tenants' turn is next."""

    def __init__(self, store: Store, carried: Iterable[tuple[str, str]]) -> None:
        self._store = store
        self._lanes = [(graph, queue_of(graph, version)) for graph, version in carried]
        self._after: dict[tuple[str, int], str] = {}

    def look(
        self,
        room: Callable[[str], int],
        running_max: Mapping[str, int],
        *,
        scopes: Iterable[str] | None = None,
        priority_max: int = len(PRIORITIES) - 1,
    ) -> Admitted:
        """Pick what is nudged next, and mark it so.

        `room`: how many more nudges the queue of a graph's version should hold. `running_max`: see `limits`.
        `scopes`: look only for what waits for these limits. `priority_max`: for nothing that is less urgent.
        """
        admitted = Admitted()
        free = limits.free(self._store, running_max) if running_max else {}
        wanted = None if scopes is None else set(scopes)
        for graph, queue in self._lanes:
            if wanted is not None and limits.of_graph(graph) not in wanted and not any(map(limits.tenant_of, wanted)):
                continue
            left = room(queue)
            if left <= 0:
                admitted.more = True
                continue
            for priority in range(priority_max + 1):
                left -= _Lane(self, graph, queue, priority).pick(left, free, wanted, admitted)
                if left <= 0:
                    admitted.more = True
                    break
        admitted.is_full = any(free.get(scope, 1) <= 0 for scope in wanted or ())
        return admitted

    def tenants(self, queue: str, priority: int) -> list[_Waiting]:
        """Return the tenants that have something due there, from the one whose turn it is."""
        after = self._after.get((queue, priority), "")
        found, seen_to = self._walk(queue, priority, after)
        if after and seen_to is None:
            rest, seen_to = self._walk(queue, priority, "")
            known = {tenant for tenant, _ in found}
            found += [each for each in rest if each[0] not in known]
        if len(found) > _TENANTS_MAX:
            del found[_TENANTS_MAX:]
            seen_to = found[-1][0]
        if seen_to is None:
            # One tenant further next time: what does not divide evenly is not always the same one's.
            seen_to = found[0][0] if found else ""
        self.go_on_behind(queue, priority, seen_to)
        return found

    def go_on_behind(self, queue: str, priority: int, tenant: str) -> None:
        """Remember whose turn it was last."""
        self._after[queue, priority] = tenant

    def _walk(self, queue: str, priority: int, after: str) -> tuple[list[_Waiting], str | None]:
        """Return who has something due behind a tenant, and where the walk was cut short, if it was."""
        rows = self._store.rows(_WALK, {"queue": queue, "priority": priority, "after": after})
        # The two kinds are walked apart: what lies behind the shorter walk's end is left to the next. The order is the
        # database's, whose collation need not be Python's.
        seen_to: str | None = None
        kinds: dict[str, list[tuple[float, str]]] = {}
        for kind, tenant, oldest, count in rows:
            if seen_to not in {None, tenant}:
                break
            if oldest is not None:
                kinds.setdefault(tenant, []).append((oldest, kind))
            if count == _SEEN_MAX:
                seen_to = tenant
        return [(tenant, [kind for _, kind in sorted(due)]) for tenant, due in kinds.items()], seen_to

    def tenant(self, queue: str, priority: int, tenant: str) -> list[_Waiting]:
        """Return one tenant when it has something due there."""
        row = self._store.rows(_OF_TENANT, {"queue": queue, "priority": priority, "tenant": tenant})[0]
        due = sorted((oldest, kind) for oldest, kind in zip(row, _TABLES, strict=True) if oldest is not None)
        return [(tenant, [kind for _, kind in due])] if due else []

    def due(self, kind: str, queue: str, priority: int, tenant: str, limit: int) -> tuple[list[Nudge], bool]:
        """Mark a tenant's rows that are due as nudged; return their nudges, and whether there may be more of them."""
        params = {"queue": queue, "priority": priority, "tenant": tenant, "limit": limit}
        rows = self._store.rows(_KINDS[kind], params)
        return [Nudge(kind, *row[:-3]) for row in rows if _is_due(row)], len(rows) == limit


@dataclass(slots=True)
class _Lane:
    """The rows of one queue and priority, in one look."""

    admission: Admission
    graph: str
    queue: str
    priority: int

    def pick(self, room: int, free: dict[str, int], wanted: set[str] | None, admitted: Admitted) -> int:
        """Add what is due, each tenant in turn, to what was admitted; return how many there were."""
        of_graph = limits.of_graph(self.graph)
        in_turn = wanted is None or of_graph in wanted
        tenants = self.admission.tenants(self.queue, self.priority) if in_turn else self._of_tenants(wanted or ())
        last = tenants[-1][0] if tenants else ""
        served: str | None = None
        picked, is_first = 0, True
        while tenants and picked < room:
            share = max(1, (room - picked) // len(tenants))
            going_on = []
            for tenant, kinds in tenants:
                scopes = [scope for scope in (of_graph, limits.of_tenant(tenant)) if scope in free]
                most = min([share, room - picked, *(free[scope] for scope in scopes)])
                if most <= 0:
                    admitted.held_back |= picked < room
                    continue
                count, left = self._due(tenant, kinds, most, admitted)
                picked += count
                for scope in scopes:
                    free[scope] -= count
                if left:
                    going_on.append((tenant, left))
                served = tenant if is_first else served
            is_used_up = picked >= room or free.get(of_graph, 1) <= 0
            if is_first and in_turn and is_used_up and served not in {None, last}:
                self.admission.go_on_behind(self.queue, self.priority, str(served))
            tenants, is_first = going_on, False
        return picked

    def _of_tenants(self, wanted: Iterable[str]) -> list[_Waiting]:
        names = filter(None, map(limits.tenant_of, sorted(wanted)))
        return [each for name in names for each in self.admission.tenant(self.queue, self.priority, name)]

    def _due(self, tenant: str, kinds: list[str], most: int, admitted: Admitted) -> tuple[int, list[str]]:
        """Share a tenant's part of the room between its steps and node runs; return how many, and what has more."""
        picked, left = 0, []
        for waiting, kind in zip(range(len(kinds), 0, -1), kinds, strict=True):
            share = -(-(most - picked) // waiting)
            if share <= 0:
                left.append(kind)
                continue
            nudges, more = self.admission.due(kind, self.queue, self.priority, tenant, share)
            admitted.nudges += nudges
            picked += len(nudges)
            if more:
                left.append(kind)
        return picked, left


def _is_due(row: Row) -> bool:
    # A row with nothing to do now was given the time at which it has. (Not computed by RETURNING: SQLite 3.40 loses
    # its columns there when the expression calls a function of ours.)
    due_at, lease_deadline, next_nudge_at = row[-3:]
    return next_nudge_at not in {due_at, lease_deadline, NEVER}
