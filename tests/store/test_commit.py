"""Committing: all of a checkpoint or nothing, once, also when the answer to a commit is lost."""

from __future__ import annotations

import threading

import pytest

from keepstep.errors import DatabaseUnavailable, StaleLease
from keepstep.store import claims, events, leases, outcomes, threads
from keepstep.store.checkpoints import commit, history
from keepstep.store.engine import Store
from keepstep.store.events import NewEvent
from keepstep.store.outcomes import NewApproval, NewNodeRun, NewWait
from tests.store.records import checkpoint, claimed, created, dump, new_run, row

WAIT = NewWait(0, "approval", b"d", approval=NewApproval("approval", "approve", b"question", 1, "reject"))


def ids(store, thread_id):
    return [each.id for each, _ in history(store, thread_id, 0)]


def test_a_checkpoint_moves_the_head_and_gives_the_lease_back(store):
    fence = claimed(store, created(store)).fence
    new = checkpoint(fence, lease_seconds=12.5, run_steps=3, run_id="r", step_limit=9)

    committed = commit(store, fence, new, patience_seconds=1)

    assert committed == (2, "ready", "", 1, ())
    found = row(store, fence.thread_id)
    assert {
        name: found[name] for name in ("seq", "snapshot_seq", "checkpoint_id", "version", "run_id", "run_steps")
    } == {
        "seq": 0,
        "snapshot_seq": 0,
        "checkpoint_id": new.id,
        "version": 2,
        "run_id": "r",
        "run_steps": 3,
    }
    assert [found[f"lease_{name}"] for name in ("nonce", "worker", "child", "deadline")] == [None] * 4
    assert (found["lease_seconds"], found["step_limit"], found["starts"], found["run_active"]) == (12.5, 9, 0, 1)
    ((stored, at),) = history(store, fence.thread_id, 0)
    assert stored == (0, new.id, None, "r", "step", b"change", b"snapshot", b"cursor", b"meta", b"digest", b"")
    assert found["created_at"] <= at <= found["updated_at"] + 1


def test_keeping_the_lease_lets_the_same_owner_go_on(store):
    fence = claimed(store, created(store)).fence
    commit(store, fence, checkpoint(fence, keep_lease=True, begins_run=True), patience_seconds=1)

    found = row(store, fence.thread_id)
    assert (found["lease_nonce"], found["version"], found["starts"], found["queued"]) == (fence.nonce, 2, 1, 0)
    after = leases.Fence(fence.thread_id, fence.nonce, 0, 1)
    assert commit(store, after, checkpoint(after), patience_seconds=1).version == 3
    assert row(store, fence.thread_id)["lease_nonce"] is None


def test_a_second_commit_of_one_attempt_is_refused(store):
    fence = claimed(store, created(store)).fence
    commit(store, fence, checkpoint(fence), patience_seconds=1)
    before = dump(store)

    with pytest.raises(StaleLease):
        commit(store, fence, checkpoint(fence), patience_seconds=1)
    assert dump(store) == before


def test_a_run_queued_meanwhile_makes_the_ended_thread_ready(store):
    thread_id = created(store)
    fence = claimed(store, thread_id).fence
    commit(store, fence, checkpoint(fence, keep_lease=True, begins_run=True), patience_seconds=1)
    with store.transaction() as transaction:
        assert (
            threads.add_run(transaction, threads.by_id(transaction, thread_id), "1", new_run(), priority=None) is None
        )
    after = leases.Fence(thread_id, fence.nonce, 0, 1)

    assert commit(store, after, checkpoint(after, status="done"), patience_seconds=1) == (3, "ready", "", 1, ())
    assert row(store, thread_id)["run_active"] == 0


def test_a_commit_that_fails_half_way_leaves_nothing(store):
    thread_id = created(store)
    fence = claimed(store, thread_id).fence
    before = dump(store)
    emitted = [NewEvent("n", b"fine"), NewEvent(None, b"event")]  # the second cannot be stored

    with pytest.raises(Exception, match=r"(?i)null"):
        commit(store, fence, checkpoint(fence, status="done", emitted=emitted), patience_seconds=1)
    assert dump(store) == before
    assert commit(store, fence, checkpoint(fence), patience_seconds=1).version == 2


# --- the connection dies during the commit ---

_SHAPES = {
    "alone": {},
    "with company": {"emitted": [NewEvent("n", b"event")], "signals_of": "key"},
    "at the end": {"status": "done"},
    "keeping the lease": {"keep_lease": True, "begins_run": True},
}
_TOLD = {"with company": ["node.emitted"], "at the end": ["thread.done"], "keeping the lease": ["thread.started"]}


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("needle", [b"FROM keepstep_commit_", b"COMMIT"])
def test_the_outcome_is_found_out(postgresql_url, proxied_url, postgresql_proxy, shape, lost, needle):
    if needle == b"COMMIT" and shape == "alone":
        needle = b"FROM keepstep_commit_"
    direct, proxied = Store.open(postgresql_url), Store.open(proxied_url)
    thread_id = created(direct)
    fence = claimed(proxied, thread_id).fence
    new = checkpoint(fence, **_SHAPES[shape])
    getattr(postgresql_proxy, f"lose_{lost}")(needle)

    committed = commit(proxied, fence, new, patience_seconds=10)

    assert postgresql_proxy.lost.is_set()
    kept = bool(new.keep_lease)
    queued = 0 if kept else 1
    # The run that create() queued is still there when this commit ends one: the thread stays ready for it.
    assert committed == (2, "ready", "", queued, ())
    found = row(direct, thread_id)
    assert ids(direct, thread_id) == [new.id]
    assert (found["seq"], found["version"], found["queued"]) == (0, 2, queued)
    assert (found["lease_nonce"] == fence.nonce) is kept
    assert [each.kind for each in events.of_thread(direct, thread_id, after=0, limit=10)] == _TOLD.get(shape, [])
    direct.dispose()
    proxied.dispose()


def test_a_database_that_stays_away_is_told_after_some_patience(postgresql_url, proxied_url, postgresql_proxy):
    direct, proxied = Store.open(postgresql_url), Store.open(proxied_url)
    fence = claimed(proxied, created(direct)).fence
    postgresql_proxy.refuse()

    with pytest.raises(DatabaseUnavailable):
        commit(proxied, fence, checkpoint(fence), patience_seconds=0.2)
    postgresql_proxy.accept()
    assert commit(proxied, fence, checkpoint(fence), patience_seconds=5).version == 2
    direct.dispose()
    proxied.dispose()


def test_a_lost_answer_does_not_hide_that_the_lease_was_lost(postgresql_url, proxied_url, postgresql_proxy):
    direct, proxied = Store.open(postgresql_url), Store.open(proxied_url)
    fence = claimed(proxied, created(direct)).fence
    leases.postpone(direct, fence, failures=0, delay_seconds=0, error="{}")
    before = dump(direct)
    postgresql_proxy.lose_reply(b"FROM keepstep_commit_")

    with pytest.raises(StaleLease):
        commit(proxied, fence, checkpoint(fence), patience_seconds=5)
    assert postgresql_proxy.lost.is_set()
    assert dump(direct) == before
    direct.dispose()
    proxied.dispose()


@pytest.mark.parametrize(
    ("needle", "write"),
    [
        (
            b"INSERT INTO keepstep_wait",
            lambda store, fence: outcomes.park(store, fence, step="key", run="n", asked=[WAIT], failures=0),
        ),
        (
            b"INSERT INTO keepstep_node_run",
            lambda store, fence: outcomes.fan_out(store, fence, [NewNodeRun("n#0", "key", "n", None, 9.0)]),
        ),
        (b"the error", lambda store, fence: outcomes.stop(store, fence, status="failed", error='"the error"')),
    ],
)
def test_other_outcomes_cut_half_way_leave_nothing(postgresql_url, proxied_url, postgresql_proxy, needle, write):
    direct, proxied = Store.open(postgresql_url), Store.open(proxied_url)
    fence = claimed(proxied, created(direct)).fence
    before = dump(direct)
    postgresql_proxy.lose_reply(needle)

    with pytest.raises(DatabaseUnavailable):
        write(proxied, fence)
    assert dump(direct) == before
    write(proxied, fence)
    assert dump(direct) != before
    direct.dispose()
    proxied.dispose()


# --- the last of many ---


def test_exactly_one_of_many_node_runs_is_the_last(store):
    thread_id = created(store)
    count = 12
    outcomes.fan_out(
        store,
        claimed(store, thread_id).fence,
        [NewNodeRun(f"n#{number}", "key", "n", b"input", 60.0) for number in range(count)],
    )
    from tests.store.records import CARRIED, OWNER

    stores = [Store.open(store.url.render_as_string(hide_password=False)) for _ in range(count)]
    fences = [
        claims.claim_node(own, thread_id, 0, f"n#{number}", 0, owner=OWNER, carried=CARRIED).fence
        for number, own in enumerate(stores)
    ]
    barrier, nudges = threading.Barrier(count), []

    def finish(own, fence):
        barrier.wait()
        nudges.append(own.patiently(lambda: outcomes.finish_node(own, fence, status="done", write=b"w")))

    finishers = [threading.Thread(target=finish, args=pair) for pair in zip(stores, fences, strict=True)]
    for each in finishers:
        each.start()
    for each in finishers:
        each.join()

    assert len(nudges) == count
    assert [nudge for nudge in nudges if nudge] == [("step", thread_id, 3, "agent@1", 1, 0, "")]
    found = row(store, thread_id)
    assert (found["status"], found["pending"], found["fanned"], found["version"]) == ("ready", 0, count, 3)
    states = outcomes.node_runs(store, thread_id, 0, 0)
    assert [(state.run, state.status, state.write) for state in states] == [
        (f"n#{number}", "done", b"w") for number in range(count)
    ]
    for own in stores:
        own.dispose()
