"""Rates: how often one tenant may call one tool, over all workers, on the database's time.

A row per tenant and tool is a bucket that leaks: `level` is how many calls are in it, each call adds one, and `calls`
of them leak in `per_seconds`. A call is let in while there is room for it. Kept as a level and the time of it, not as
the time at which the bucket is empty: the numbers stay small, so a burst is counted exactly, and a clock that is set
back loses one leak instead of stopping everybody until the old time has come again.

Who is not let in is told when to come back, and takes nothing. `promised` counts those who were told as well, and leaks
as the level does, so each is told a later time than the one before, and a crowd comes back one by one.

Each question is one statement, which decides on one reading of the clock: the row is locked no longer than that, and no
other tenant's or tool's row is touched.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import and_, case, delete, func, select, tuple_
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.sql.base import Executable

from keepstep.store.engine import Store
from keepstep.store.schema import rate
from keepstep.store.statements import Statement, db_now, param

HOLD_SECONDS_MAX = 86400.0
"""A tool is held off at most a day, whatever it asked for."""
TOLD_SECONDS_MAX = 3600.0
"""Beyond its hold nobody is sent away for longer than this, or than one call takes."""

_SET_BACK_SECONDS = 10.0
"""Times further apart than that are not two statements that overtook each other: the clock was set back."""
_CLOSE = 1e-3
"""In calls: who comes back at the very time that was told must not be a rounding too early."""
_IDLE_SECONDS = 60.0


def _insert(dialect: str) -> Any:
    return postgresql_insert(rate) if dialect == "postgresql" else sqlite_insert(rate)


def _take(dialect: str) -> Executable:
    largest, least = (func.greatest, func.least) if dialect == "postgresql" else (func.max, func.min)
    calls, interval = param("calls"), param("interval")
    first = _insert(dialect).values(
        tenant=param("tenant"),
        name=param("name"),
        level=1.0,
        promised=1.0,
        told_seconds=0.0,
        at=db_now(),
        held_until=0.0,
        idle_at=db_now() + interval,
    )
    now = first.excluded.at  # one reading, for everything that follows from it
    leaked = largest(0.0, now - rate.c.at) / interval
    level = largest(0.0, rate.c.level - leaked)
    promised = largest(level, rate.c.promised - leaked)
    held = least(largest(0.0, rate.c.held_until - now), HOLD_SECONDS_MAX)
    is_let_in = and_(held <= 0.0, level + 1 <= calls + _CLOSE)
    promised_after = case(
        (is_let_in, largest(promised, level + 1)),
        else_=least(promised + 1, calls + largest(1.0, TOLD_SECONDS_MAX / interval)),
    )
    found: Executable = first.on_conflict_do_update(
        index_elements=["tenant", "name"],
        set_={
            "level": case((is_let_in, level + 1), else_=level),
            "promised": promised_after,
            "told_seconds": case((is_let_in, 0.0), else_=held + largest(0.0, promised_after - calls) * interval),
            # Statements that waited for each other bring older readings than the one they find.
            "at": case((rate.c.at - now > _SET_BACK_SECONDS, now), else_=largest(rate.c.at, now)),
            "idle_at": largest(now + promised_after * interval, rate.c.held_until),
        },
    ).returning(rate.c.told_seconds)
    return found


def _hold_off(dialect: str) -> Executable:
    largest = func.greatest if dialect == "postgresql" else func.max
    until = db_now() + param("seconds")
    first = _insert(dialect).values(
        tenant=param("tenant"),
        name=param("name"),
        level=0.0,
        promised=0.0,
        told_seconds=0.0,
        at=db_now(),
        held_until=until,
        idle_at=until,
    )
    held: Executable = first.on_conflict_do_update(
        index_elements=["tenant", "name"],
        set_={
            "held_until": largest(rate.c.held_until, first.excluded.held_until),
            "idle_at": largest(rate.c.idle_at, first.excluded.idle_at),
        },
    ).returning(rate.c.name)
    return held


_TAKE = Statement(_take)
_HOLD_OFF = Statement(_hold_off)
# The first condition says nothing, except that the index knows every row which is wanted.
_IS_HELD = and_(rate.c.held_until > 0, rate.c.held_until > db_now())
_HOLD = Statement(
    lambda _dialect: select(rate.c.held_until - db_now()).where(
        rate.c.tenant == param("tenant"), rate.c.name == param("name"), _IS_HELD
    )
)
_HOLDS = Statement(lambda _dialect: select(rate.c.tenant, rate.c.name, rate.c.held_until - db_now()).where(_IS_HELD))
_FORGET_IDLE = Statement(
    lambda _dialect: (
        delete(rate)
        .where(
            tuple_(rate.c.tenant, rate.c.name).in_(
                select(rate.c.tenant, rate.c.name)
                .where(rate.c.idle_at < db_now() - _IDLE_SECONDS)
                .limit(param("limit"))
                .with_for_update(skip_locked=True)
            )
        )
        .returning(rate.c.name)
    )
)


def take(store: Store, *, tenant: str, name: str, calls: int | None, per_seconds: float = 1.0) -> float:
    """Return 0.0 when a tenant may call a tool now, the call counted; else the seconds after which to ask again.

    At most `calls` at once, and `calls` per `per_seconds` from then on. `calls` None: no rate is declared, and only
    `hold_off` is heeded. Who is sent away has taken nothing: it asks again when the seconds have passed, and is told
    a later time than those who were sent away before.
    """
    key = {"tenant": tenant, "name": name}
    if calls is None:
        left = store.rows(_HOLD, key)
        return min(max(0.0, float(left[0][0])), HOLD_SECONDS_MAX) if left else 0.0
    rows = store.rows(_TAKE, {**key, "calls": float(calls), "interval": per_seconds / calls})
    return float(rows[0][0])


def hold_off(store: Store, *, tenant: str, name: str, seconds: float) -> None:
    """Let nobody of this tenant call this tool for some seconds, at most a day; a longer hold is not shortened."""
    bounded = min(max(0.0, seconds), HOLD_SECONDS_MAX)
    store.rows(_HOLD_OFF, {"tenant": tenant, "name": name, "seconds": bounded})


def holds(store: Store) -> dict[tuple[str, str], float]:
    """Return the holds in force: by (tenant, name), the seconds that are left."""
    rows = store.rows(_HOLDS, {})
    return {(str(tenant), str(name)): min(float(left), HOLD_SECONDS_MAX) for tenant, name, left in rows}


def forget_idle(store: Store, *, limit: int) -> int:
    """Delete rows that say nothing any more: empty for a minute, and not held off; return how many, at most `limit`."""
    return len(store.rows(_FORGET_IDLE, {"limit": limit}))
