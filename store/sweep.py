"""The sweep: finding what is due and in nobody's hands, and saying what must be nudged again.

Every worker sweeps, jittered; there is no leader. A row that was nudged is left alone for longer each time, up to a
minute, so that a backlog is not multiplied by its own nudges; a commit or a lost lease starts afresh.
"""

from __future__ import annotations

from sqlalchemy import Float as FloatType
from sqlalchemy import Table, and_, case, cast, func, literal, or_, select, update
from sqlalchemy.sql.base import Executable

from keepstep.store import errands, waits, workers
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge, is_carried
from keepstep.store.schema import READY, WAITING, node_run, thread
from keepstep.store.statements import Row, Statement, db_now, param

_BACKOFF_SECONDS = (2.0, 4.0, 8.0, 16.0, 32.0)


def _due(table: Table) -> Statement:
    thread_id = table.c.id if table is thread else table.c.thread_id
    columns = [thread_id, table.c.version]
    if table is node_run:
        columns += [table.c.seq, table.c.run]
    keys = [thread_id] if table is thread else [thread_id, table.c.branch, table.c.seq, table.c.run]
    # Ready with nothing to do now: leased to somebody alive, or put off. Look again when that ends.
    busy = and_(table.c.lease_nonce.is_not(None), table.c.lease_deadline > db_now())
    later = func.coalesce(case((busy, table.c.lease_deadline), else_=table.c.due_at), db_now())
    backoff = case(*((table.c.nudges == count, seconds) for count, seconds in enumerate(_BACKOFF_SECONDS)), else_=60.0)
    free = and_(table.c.due_at <= db_now(), or_(table.c.lease_nonce.is_(None), table.c.lease_deadline <= db_now()))

    def build(dialect: str) -> Executable:
        picked = (
            select(*keys)
            .select_from(table if table is thread else table.join(thread, thread.c.id == table.c.thread_id))
            .where(
                table.c.status == READY,
                table.c.next_nudge_at <= db_now(),
                thread.c.control == "",
                *([] if table is thread else [thread.c.status == WAITING]),
                is_carried(),
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
            next_nudge_at=case((free, db_now() + cast(backoff, FloatType)), else_=later),
            nudges=table.c.nudges + case((free, 1), else_=0),
        ).returning(*columns, table.c.due_at, table.c.lease_deadline, table.c.next_nudge_at)

    return Statement(build)


_DUE_THREADS = _due(thread)
_DUE_NODE_RUNS = _due(node_run)


def sweep(store: Store, *, carried: str, takeover: bool, limit: int, judge: str | None = None) -> list[Nudge]:
    """Fire what the time has answered, give up dead workers, and return the nudges of what is due in nobody's hands.

    Errands between parents and children that nobody runs any more are run here.

    `carried` limits it to graphs this worker can run (`workers.carried_text`); `takeover` False leaves the leases of
    silent workers alone (see `Liveness`: a worker that was itself cut off must not judge others), and so does `judge`,
    the worker that sweeps, while its own time is over; at most `limit` threads and `limit` node runs are returned.
    """
    nudges = waits.fire_due(store, limit=limit)
    nudges += errands.finish_due(store, limit=limit)
    if takeover:
        nudges += workers.take_over(store, judge=judge)
        nudges += workers.adopt_orphans(store)
    params = {"carried": carried, "limit": limit}
    nudges += [Nudge("step", *row[:2]) for row in store.rows(_DUE_THREADS, params) if _is_due(row)]
    nudges += [Nudge("node", *row[:4]) for row in store.rows(_DUE_NODE_RUNS, params) if _is_due(row)]
    return nudges


def _is_due(row: Row) -> bool:
    # A row with nothing to do now was given the time at which it has. (Not computed by RETURNING: SQLite 3.40 loses
    # its columns there when the expression calls a function of ours.)
    due_at, lease_deadline, next_nudge_at = row[-3:]
    return next_nudge_at not in {due_at, lease_deadline}
