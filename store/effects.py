"""The journal of effects: what was begun, what came of it.

An intent is fenced by the thread's (or node run's) lease, locked in the same transaction: a stale owner begins
nothing. A *result* is fenced by its intent's nonce alone: what is known is never thrown away, even when the lease was
lost while the call was under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import and_, case, select, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.sql.base import Executable

from keepstep.store.engine import Store
from keepstep.store.leases import Fence
from keepstep.store.outcomes import hold
from keepstep.store.schema import effect
from keepstep.store.statements import Statement, db_now, param

INTENT, DONE, FAILED = "intent", "done", "failed"


class EffectState(NamedTuple):
    """An effect as the journal has it."""

    call: str
    name: str
    state: str
    at_risk: int
    arguments_digest: bytes
    result: bytes | None
    error: str | None
    nonce: str
    calls: int


@dataclass(frozen=True, slots=True)
class EffectKey:
    """Where an effect stands in the journal: with the step key, its idempotency key."""

    thread_id: str
    step: str
    run: str
    call: str


_OF_RUN = Statement(
    lambda _dialect: (
        select(*(effect.c[name] for name in EffectState._fields))
        .where(
            effect.c.thread_id == param("thread_id"),
            effect.c.step == param("step"),
            effect.c.run == param("run"),
        )
        .order_by(effect.c.started_at, effect.c.call)
    )
)


def _begin(dialect: str) -> Executable:
    insert: Any = postgresql_insert(effect) if dialect == "postgresql" else sqlite_insert(effect)
    values = {
        name: param(name)
        for name in ("thread_id", "step", "run", "call", "tenant", "name", "state", "at_risk", "arguments_digest")
    }
    values |= {"result": param("result"), "error": param("error"), "nonce": param("nonce")}
    insert = insert.values(
        **values,
        calls=1,
        started_at=db_now(),
        deadline=db_now() + param("seconds"),
        ended_at=param("ended") * db_now(),
    )
    again = {
        "state": insert.excluded.state,
        "result": insert.excluded.result,
        "error": insert.excluded.error,
        "nonce": insert.excluded.nonce,
        # The same intent sent again, because the answer to the first was lost, is not another call.
        "calls": effect.c.calls
        + case((and_(effect.c.nonce == insert.excluded.nonce, effect.c.state == INTENT), 0), else_=1),
        "deadline": insert.excluded.deadline,
        "ended_at": insert.excluded.ended_at,
    }
    # A recorded result is final: nothing overwrites it.
    kept: Executable = insert.on_conflict_do_update(
        index_elements=["thread_id", "step", "run", "call"], set_=again, where=effect.c.state != DONE
    ).returning(effect.c.calls)
    return kept


_BEGIN = Statement(_begin)
_END = Statement(
    lambda _dialect: (
        update(effect)
        .where(
            effect.c.thread_id == param("thread_id"),
            effect.c.step == param("step"),
            effect.c.run == param("run"),
            effect.c.call == param("call"),
            effect.c.nonce == param("nonce"),
            effect.c.state == INTENT,
        )
        .values(state=param("state"), result=param("result"), error=param("error"), ended_at=db_now())
        .returning(effect.c.call)
    )
)


def of_run(store: Store, thread_id: str, step: str, run: str) -> list[EffectState]:
    """Return the effects of a node run's earlier attempts, in the order in which they were begun."""
    rows = store.rows(_OF_RUN, {"thread_id": thread_id, "step": step, "run": run})
    return [EffectState(*row) for row in rows]


def begin(
    store: Store,
    fence: Fence,
    key: EffectKey,
    *,
    tenant: str,
    name: str,
    arguments_digest: bytes,
    seconds: float,
) -> None:
    """Record that an effect which is not safe to repeat is about to be performed; raise `StaleLease` when stale."""
    values = {"tenant": tenant, "name": name, "arguments_digest": arguments_digest}
    _write(store, fence, key, {**values, "state": INTENT, "at_risk": 1, "seconds": seconds})


def record(
    store: Store,
    fence: Fence,
    key: EffectKey,
    *,
    tenant: str,
    name: str,
    arguments_digest: bytes,
    result: bytes,
) -> None:
    """Record the result of an effect that is safe to repeat, and so had no intent; raise `StaleLease` when stale."""
    values = {"tenant": tenant, "name": name, "arguments_digest": arguments_digest}
    _write(store, fence, key, {**values, "state": DONE, "result": result, "ended": 1})


_DEFAULTS = {"at_risk": 0, "result": None, "error": None, "seconds": 0.0, "ended": None}


def _write(store: Store, fence: Fence, key: EffectKey, values: dict[str, Any]) -> None:
    place = {"thread_id": key.thread_id, "step": key.step, "run": key.run, "call": key.call}
    with store.transaction() as transaction:
        hold(transaction, fence)
        transaction.rows(_BEGIN, {**place, **_DEFAULTS, **values, "nonce": fence.nonce})


def finish(
    store: Store,
    nonce: str,
    key: EffectKey,
    *,
    state: str,
    result: bytes | None = None,
    error: str | None = None,
) -> bool:
    """Record what came of an intent, fenced by the intent's own nonce; False when another attempt has taken it over."""
    values = {"thread_id": key.thread_id, "step": key.step, "run": key.run, "call": key.call, "nonce": nonce}
    return bool(store.rows(_END, {**values, "state": state, "result": result, "error": error}))
