"""Fences: an owner whose lease is gone writes nothing, whatever it still wants to write."""

from __future__ import annotations

import pytest

from keepstep.errors import StaleLease
from keepstep.store import claims, effects, leases, outcomes, threads, undone
from keepstep.store.checkpoints import commit
from keepstep.store.effects import EffectKey
from keepstep.store.events import NewEvent
from keepstep.store.leases import Owner
from keepstep.store.outcomes import NewApproval, NewNodeRun, NewWait
from keepstep.store.undoing import Undoable
from tests.store.records import CARRIED, OWNER, checkpoint, claimed, created, dump

EVENTS = [NewEvent("n", b"event")]
APPROVAL = NewWait(
    0, "approval", b"d", approval=NewApproval("approval", "approve", b"question", 1, "reject"), seconds=9
)
SIGNAL = NewWait(1, "signal", b"d", signal_name="go")
UNDOABLE = Undoable("key", "n", "pay:1", "pay", "done", b"a", None, None, "shop.unpay")
FANNED = [NewNodeRun(f"n#{number}", "key", "n", b"input", 60.0) for number in range(3)]


def _key(fence, call="pay:1"):
    return EffectKey(fence.thread_id, "key", fence.run or "n", call)


def _commit(store, fence):
    commit(store, fence, checkpoint(fence, emitted=EVENTS, signals_of="key"), patience_seconds=0)


def _commit_alone(store, fence):
    commit(store, fence, checkpoint(fence), patience_seconds=0)


def _end(store, fence):
    commit(store, fence, checkpoint(fence, status="done", begins_run=True), patience_seconds=0)


def _park(store, fence):
    outcomes.park(store, fence, step="key", run=fence.run or "n", asked=[APPROVAL, SIGNAL], failures=0, emitted=EVENTS)


def _postpone(store, fence):
    leases.postpone(store, fence, failures=1, delay_seconds=5, error="{}")


def _begin_attempt(store, fence):
    leases.begin_attempt(store, fence, failures=1)


def _stop(store, fence):
    outcomes.stop(store, fence, status="failed", error="{}", emitted=EVENTS)


def _block(store, fence):
    outcomes.stop(store, fence, status="blocked", error="{}")


def _refuse(store, fence):
    outcomes.refuse_run(store, fence, "run", "{}")


def _go_on_undoing(store, fence):
    undone.went_on(store, fence, UNDOABLE)


def _fan_out(store, fence):
    outcomes.fan_out(store, fence, FANNED)


def _finish_node(store, fence):
    outcomes.finish_node(store, fence, status="done", write=b"write", emitted=EVENTS)


def _intend(store, fence):
    effects.begin(
        store, fence, _key(fence), tenant="default", name="pay", arguments_digest=b"a", arguments=None, seconds=9
    )


def _record(store, fence):
    effects.record(store, fence, _key(fence), tenant="default", name="pay", arguments_digest=b"a", result=b"r")


BOTH = [_park, _postpone, _begin_attempt, _intend, _record]
OF_THREADS = [_commit, _commit_alone, _end, _stop, _block, _refuse, _go_on_undoing, _fan_out, *BOTH]
OF_NODE_RUNS = [_finish_node, *BOTH]


@pytest.mark.parametrize("write", OF_THREADS)
def test_a_thread_taken_over_refuses_its_former_owner(store, write):
    thread_id = created(store)
    stale = claimed(store, thread_id).fence
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_thread SET lease_nonce = NULL")
    fresh = claimed(store, thread_id, owner=Owner("other", 2)).fence
    before = dump(store)

    with pytest.raises(StaleLease):
        write(store, stale)
    assert dump(store) == before

    write(store, fresh)
    assert dump(store) != before


@pytest.mark.parametrize("write", OF_THREADS)
def test_a_released_thread_refuses_its_former_owner(store, write):
    stale = claimed(store, created(store)).fence
    leases.postpone(store, stale, failures=0, delay_seconds=0, error="{}")
    before = dump(store)

    with pytest.raises(StaleLease):
        write(store, stale)
    assert dump(store) == before


@pytest.mark.parametrize("write", OF_THREADS)
def test_a_cancelled_thread_refuses_its_running_owner(store, write):
    stale = claimed(store, created(store)).fence
    with store.transaction() as transaction:
        threads.cancel(transaction, threads.by_id(transaction, stale.thread_id), "{}")
    before = dump(store)

    with pytest.raises(StaleLease):
        write(store, stale)
    assert dump(store) == before


def _node_claimed(store, thread_id):
    claim = claims.claim_node(store, thread_id, 0, "n#1", 0, owner=OWNER, carried=CARRIED)
    assert claim is not None
    return claim.fence


@pytest.mark.parametrize("write", OF_NODE_RUNS)
def test_a_node_run_taken_over_refuses_its_former_owner(store, write):
    thread_id = created(store)
    outcomes.fan_out(store, claimed(store, thread_id).fence, FANNED)
    stale = _node_claimed(store, thread_id)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_node_run SET lease_nonce = NULL")
    fresh = _node_claimed(store, thread_id)
    before = dump(store)

    with pytest.raises(StaleLease):
        write(store, stale)
    assert dump(store) == before

    write(store, fresh)
    assert dump(store) != before


@pytest.mark.parametrize("write", OF_NODE_RUNS)
def test_a_node_run_of_a_cancelled_thread_refuses_its_running_owner(store, write):
    thread_id = created(store)
    outcomes.fan_out(store, claimed(store, thread_id).fence, FANNED)
    stale = _node_claimed(store, thread_id)
    with store.transaction() as transaction:
        threads.cancel(transaction, threads.by_id(transaction, thread_id), "{}")
    before = dump(store)

    with pytest.raises(StaleLease):
        write(store, stale)
    assert dump(store) == before


def test_one_owner_of_a_node_run_cannot_write_as_another(store):
    thread_id = created(store)
    outcomes.fan_out(store, claimed(store, thread_id).fence, FANNED)
    mine = _node_claimed(store, thread_id)
    other = leases.Fence(thread_id, mine.nonce, mine.branch, mine.seq, "n#2")
    before = dump(store)

    for write in OF_NODE_RUNS:
        with pytest.raises(StaleLease):
            write(store, other)
    assert dump(store) == before


# --- the one exception: what is known is never thrown away ---


def test_a_result_is_recorded_although_the_lease_was_lost(store):
    stale = claimed(store, created(store)).fence
    _intend(store, stale)
    leases.postpone(store, stale, failures=0, delay_seconds=0, error="{}")

    assert effects.finish(store, stale.nonce, _key(stale), state="done", result=b"receipt") is True

    (state,) = effects.of_run(store, stale.thread_id, "key", "n")
    assert (state.state, state.result, state.calls, state.nonce) == ("done", b"receipt", 1, stale.nonce)


def test_a_result_of_an_intent_that_another_attempt_took_over_is_refused(store):
    stale = claimed(store, created(store)).fence
    _intend(store, stale)
    leases.postpone(store, stale, failures=0, delay_seconds=0, error="{}")
    fresh = claimed(store, stale.thread_id, 2).fence
    _intend(store, fresh)
    before = dump(store)

    assert effects.finish(store, stale.nonce, _key(stale), state="done", result=b"late") is False
    assert dump(store) == before


def test_a_recorded_result_is_final(store):
    fence = claimed(store, created(store)).fence
    _intend(store, fence)
    effects.finish(store, fence.nonce, _key(fence), state="done", result=b"receipt")
    before = dump(store)

    assert effects.finish(store, fence.nonce, _key(fence), state="failed", error="{}") is False
    _intend(store, fence)
    _record(store, fence)
    assert dump(store) == before


def test_an_attempt_is_counted_and_its_deadline_pushed_out(store):
    fence = claimed(store, created(store)).fence
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_thread SET lease_deadline = 0")

    assert leases.begin_attempt(store, fence, failures=1) == 2
    assert leases.begin_attempt(store, fence, failures=2) == 3
    with store.engine.connect() as connection:
        starts, failures, left = connection.exec_driver_sql(
            "SELECT starts, failures, lease_deadline - created_at FROM keepstep_thread"
        ).one()
    assert (starts, failures) == (3, 2)
    assert 60 <= left < 90
