"""The journal of effects: what was begun, what came of it.

An intent is fenced by the thread's (or node run's) lease, locked in the same transaction: a stale owner begins
nothing. A *result* is fenced by its intent's nonce alone: what is known is never thrown away, even when the lease was
lost while the call was under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, case, exists, or_, select, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.sql.base import Executable

from keepstep.errors import StaleLease
from keepstep.store import calls
from keepstep.store.calls import NewAudit
from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import Fence
from keepstep.store.outcomes import hold
from keepstep.store.schema import checkpoint, effect, node_run, thread
from keepstep.store.statements import Statement, db_now, param

INTENT, DONE, FAILED, GIVEN_UP = "intent", "done", "failed", "given_up"


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
    resolved_by: str | None = None
    """Who said what came of it; None when it is known from the call itself."""
    meta: bytes | None = None
    """Of a model call: what is known of it besides its result."""
    artifact: str | None = None
    """Digest of a result that is kept apart."""
    seconds_left: float = 0.0
    """Until the call's deadline: before it, a call that is under way may still happen."""


@dataclass(frozen=True, slots=True)
class EffectKey:
    """Where an effect stands in the journal: with the step key, its idempotency key."""

    thread_id: str
    step: str
    run: str
    call: str

    @property
    def text(self) -> str:
        """The idempotency key."""
        return f"{self.step}/{self.run}/{self.call}"


def is_call() -> list[ColumnElement[bool]]:
    """The condition that a row is that of one call: `thread_id`, `step`, `run`, `call`."""
    return [effect.c[name] == param(name) for name in ("thread_id", "step", "run", "call")]


_OF_RUN = Statement(
    lambda _dialect: (
        select(*(effect.c[name] for name in EffectState._fields[:-1]), effect.c.deadline - db_now())
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
    values |= {name: param(name) for name in ("result", "error", "nonce", "arguments", "run_id", "undo")}
    values |= {name: param(name) for name in ("meta", "artifact", "arguments_artifact")}
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
        "meta": insert.excluded.meta,
        "artifact": insert.excluded.artifact,
        "error": insert.excluded.error,
        "nonce": insert.excluded.nonce,
        # The same intent sent again, because the answer to the first was lost, is not another call.
        "calls": effect.c.calls
        + case((and_(effect.c.nonce == insert.excluded.nonce, effect.c.state == INTENT), 0), else_=1),
        "deadline": insert.excluded.deadline,
        "ended_at": insert.excluded.ended_at,
        "resolved_by": None,
        # As the function is declared now: what it does from here on is what may have to be undone.
        "undo": insert.excluded.undo,
    }
    # A recorded result is final, and so is what a person said: nothing overwrites it.
    kept: Executable = insert.on_conflict_do_update(
        index_elements=["thread_id", "step", "run", "call"],
        set_=again,
        where=and_(effect.c.state != DONE, effect.c.state != GIVEN_UP),
    ).returning(effect.c.calls)
    return kept


_BEGIN = Statement(_begin)
_END = Statement(
    lambda _dialect: (
        update(effect)
        .where(
            *is_call(),
            effect.c.nonce == param("nonce"),
            effect.c.state == INTENT,
        )
        .values(
            state=param("state"),
            result=param("result"),
            artifact=param("artifact"),
            error=param("error"),
            ended_at=db_now(),
        )
        .returning(effect.c.call)
    )
)
_STATE_OF = Statement(
    lambda _dialect: select(effect.c.state, effect.c.nonce).where(
        *is_call(),
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
    arguments: bytes | None,
    arguments_artifact: str | None = None,
    seconds: float,
    run_id: str | None = None,
    undo: str | None = None,
    audit: NewAudit | None = None,
) -> bool:
    """Record that an effect which is not safe to repeat is about to be performed; raise `StaleLease` when stale.

    `run_id` is the thread's run, `undo` names the function that undoes the effect when that run fails. False: nothing
    was recorded, because its outcome is known by now.
    """
    values = {"tenant": tenant, "name": name, "arguments_digest": arguments_digest, "arguments": arguments}
    values |= {"run_id": run_id, "undo": undo}
    values["arguments_artifact"] = arguments_artifact
    return _write(store, fence, key, {**values, "state": INTENT, "at_risk": 1, "seconds": seconds}, audit)


def record(
    store: Store,
    fence: Fence,
    key: EffectKey,
    *,
    tenant: str,
    name: str,
    arguments_digest: bytes,
    result: bytes | None,
    artifact: str | None = None,
    run_id: str | None = None,
    audit: NewAudit | None = None,
) -> None:
    """Record the result of an effect that is safe to repeat, and so had no intent; raise `StaleLease` when stale."""
    values: dict[str, Any] = {"tenant": tenant, "name": name, "arguments_digest": arguments_digest}
    values |= {"artifact": artifact, "state": DONE, "result": result, "ended": 1, "run_id": run_id}
    _write(store, fence, key, values, audit)


def count_failure(
    store: Store,
    fence: Fence,
    key: EffectKey,
    *,
    tenant: str,
    name: str,
    arguments_digest: bytes,
    error: str,
    run_id: str | None = None,
) -> None:
    """Record that an effect which is safe to repeat, and so had no intent, failed; raise `StaleLease` when stale."""
    values = {"tenant": tenant, "name": name, "arguments_digest": arguments_digest, "run_id": run_id}
    _write(store, fence, key, {**values, "state": FAILED, "error": error, "ended": 1})


class Kept(NamedTuple):
    """What came of recording a result that was paid for."""

    is_stale: bool
    """The lease is not this attempt's any more: it calls nothing else."""
    before: EffectState | None
    """What another attempt has recorded first, and stands; None: this result does."""


_RECORDED = Statement(
    lambda _dialect: select(*(effect.c[name] for name in EffectState._fields[:-1])).where(
        *is_call(),
    )
)


def keep(
    store: Store,
    fence: Fence,
    key: EffectKey,
    *,
    tenant: str,
    name: str,
    arguments_digest: bytes,
    result: bytes | None,
    artifact: str | None,
    meta: bytes,
) -> Kept:
    """Record a result that was paid for, whoever holds the lease by now; never over one that is recorded."""
    place = _place(key)
    values: dict[str, Any] = {"tenant": tenant, "name": name, "arguments_digest": arguments_digest, "meta": meta}
    values |= {"state": DONE, "result": result, "artifact": artifact, "ended": 1, "nonce": fence.nonce}
    is_stale = False
    with store.transaction() as transaction:
        try:
            hold(transaction, fence)
        except StaleLease:
            is_stale = True
        if transaction.rows(_BEGIN, {**place, **_DEFAULTS, **values}):
            return Kept(is_stale, None)
        row = transaction.row(_RECORDED, place)
        return Kept(is_stale, None if row is None else EffectState(*row))


_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(
        ("arguments", "result", "error", "ended", "meta", "artifact", "arguments_artifact", "run_id", "undo")
    ),
    "at_risk": 0,
    "seconds": 0.0,
}


def _place(key: EffectKey) -> dict[str, Any]:
    return {"thread_id": key.thread_id, "step": key.step, "run": key.run, "call": key.call}


def _write(store: Store, fence: Fence, key: EffectKey, values: dict[str, Any], audit: NewAudit | None = None) -> bool:
    with store.transaction() as transaction:
        hold(transaction, fence)
        written = bool(transaction.rows(_BEGIN, {**_place(key), **_DEFAULTS, **values, "nonce": fence.nonce}))
        if written and audit is not None:
            calls.record(transaction, audit, tenant=values["tenant"], thread_id=key.thread_id)
        return written


def record_within(
    transaction: Transaction,
    fence: Fence,
    key: EffectKey,
    *,
    tenant: str,
    name: str,
    arguments_digest: bytes,
    result: bytes,
) -> bool:
    """Record an effect that is this transaction itself, and is at risk of nothing else; the fence is held already.

    False: it was recorded before, and the transaction must not be committed.
    """
    values = {**_place(key), **_DEFAULTS, "tenant": tenant, "name": name, "arguments_digest": arguments_digest}
    values |= {"state": DONE, "at_risk": 1, "result": result, "ended": 1, "nonce": fence.nonce}
    return bool(transaction.rows(_BEGIN, values))


def is_recorded(store: Store, fence: Fence, key: EffectKey) -> bool:
    """Tell whether this attempt's own transaction was committed, when the answer to its COMMIT was lost.

    It held the leased row, so who holds that now knows that it has ended. Raises `StaleLease` when stale.
    """
    with store.transaction() as transaction:
        hold(transaction, fence)
        row = transaction.row(_STATE_OF, _place(key))
    return row is not None and tuple(row) == (DONE, fence.nonce)


def check_held(store: Store, fence: Fence) -> None:
    """Raise `StaleLease` when the lease is lost."""
    with store.transaction() as transaction:
        hold(transaction, fence)


def finish(
    store: Store,
    nonce: str,
    key: EffectKey,
    *,
    state: str,
    result: bytes | None = None,
    artifact: str | None = None,
    error: str | None = None,
) -> bool:
    """Record what came of an intent, fenced by the intent's own nonce; False when another attempt has taken it over."""
    values = {"thread_id": key.thread_id, "step": key.step, "run": key.run, "call": key.call, "nonce": nonce}
    outcome = {"state": state, "result": result, "artifact": artifact, "error": error}
    return bool(store.rows(_END, {**values, **outcome}))


_RETURNED = Statement(
    lambda _dialect: (
        update(effect)
        .where(
            *is_call(),
            effect.c.nonce == param("nonce"),
            effect.c.state == INTENT,
        )
        .values(deadline=db_now())
        .returning(effect.c.call)
    )
)


def returned(store: Store, nonce: str, key: EffectKey) -> None:
    """Record that a call is over although its outcome is unknown: from now on only the outside may still act on it."""
    place = {"thread_id": key.thread_id, "step": key.step, "run": key.run, "call": key.call}
    store.rows(_RETURNED, {**place, "nonce": nonce})


# --- what a person says of an effect ---


class UnknownEffect(NamedTuple):
    """An effect that somebody says the outcome of."""

    thread_id: str
    step: str
    run: str
    call: str
    name: str
    state: str
    at_risk: int
    nonce: str
    resolved_by: str | None


_KEY = effect.c.step + "/" + effect.c.run + "/" + effect.c.call
_BY_KEY = Statement(
    lambda _dialect: (
        select(*(effect.c[name] for name in UnknownEffect._fields))
        .where(effect.c.thread_id == param("thread_id"), param("key") == _KEY)
        .with_for_update()
    )
)
_UNKNOWN_OF_THREAD = Statement(
    lambda _dialect: (
        select(_KEY)
        .where(effect.c.thread_id == param("thread_id"), effect.c.at_risk == 1, effect.c.state == INTENT)
        .order_by(effect.c.started_at)
        .limit(20)
    )
)
_UNDER_WAY = Statement(
    lambda _dialect: (
        select(thread.c.id)
        .where(
            thread.c.id == param("thread_id"),
            or_(
                thread.c.lease_nonce.is_not(None),
                exists().where(
                    node_run.c.thread_id == param("thread_id"),
                    node_run.c.run == param("run"),
                    node_run.c.lease_nonce.is_not(None),
                ),
            ),
        )
        .limit(1)
    )
)
# An edit writes checkpoints before the step whose key it keeps; the step itself, or a new run, is the end of it.
_IS_PENDING = Statement(
    lambda _dialect: (
        select(thread.c.id)
        .where(
            thread.c.id == param("thread_id"),
            ~exists().where(
                checkpoint.c.thread_id == param("thread_id"),
                checkpoint.c.branch == param("branch"),
                checkpoint.c.seq >= param("seq"),
                checkpoint.c.kind != "edit",
            ),
        )
        .limit(1)
    )
)
_RESOLVE = Statement(
    lambda _dialect: (
        update(effect)
        .where(effect.c.thread_id == param("thread_id"), param("key") == _KEY)
        .values(
            state=param("state"),
            result=param("result"),
            artifact=None,
            error=param("error"),
            resolved_by=param("resolved_by"),
            ended_at=db_now(),
        )
    )
)


def by_key(transaction: Transaction, thread_id: str, key: str) -> UnknownEffect | None:
    """Return an effect by its idempotency key, locked; its thread is locked already."""
    row = transaction.row(_BY_KEY, {"thread_id": thread_id, "key": key})
    return None if row is None else UnknownEffect(*row)


def unknown_of_thread(transaction: Transaction, thread_id: str) -> list[str]:
    """Return the keys of up to 20 effects of a thread that were begun and have no outcome."""
    return [str(row[0]) for row in transaction.rows(_UNKNOWN_OF_THREAD, {"thread_id": thread_id})]


def is_under_way(transaction: Transaction, found: UnknownEffect) -> bool:
    """Tell whether an attempt of the effect's node run holds a lease: what it is about to do is not known here."""
    params = {"thread_id": found.thread_id, "run": found.run}
    return transaction.row(_UNDER_WAY, params) is not None


def is_pending(transaction: Transaction, found: UnknownEffect) -> bool:
    """Tell whether the step that an effect belongs to has not been committed, nor given up for another run."""
    _, branch, seq = found.step.rsplit("/", 2)
    params = {"thread_id": found.thread_id, "branch": int(branch), "seq": int(seq)}
    return transaction.row(_IS_PENDING, params) is not None


def resolve(
    transaction: Transaction, thread_id: str, key: str, *, state: str, result: bytes | None, error: str | None, by: str
) -> None:
    """Write what a person says came of an effect."""
    params = {"thread_id": thread_id, "key": key, "state": state, "result": result, "error": error}
    transaction.run(_RESOLVE, {**params, "resolved_by": by})
