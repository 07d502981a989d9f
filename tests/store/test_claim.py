"""Claiming: who gets a thread's lease, and who is told that there is nothing to do."""

from __future__ import annotations

import threading

import pytest

from keepstep.store import claims, leases, threads, workers
from keepstep.store.engine import Store
from keepstep.store.leases import Owner
from tests.steps.driver import Clock
from tests.store.records import CARRIED, OWNER, checkpoint, claimed, created, dump, registered, row


def claim(store, thread_id, version=1, **options):
    return claims.claim_thread(store, thread_id, version, **{"owner": OWNER, "carried": CARRIED, **options})


def test_a_due_thread_is_leased_with_its_head(store):
    thread_id = created(store)
    owner = Owner("worker", 7)

    found = claim(store, thread_id, owner=owner)

    assert found.thread.id == thread_id
    assert (found.thread.seq, found.thread.run_active, found.checkpoints) == (-1, 0, [])
    assert (found.fence.thread_id, found.fence.branch, found.fence.seq, found.fence.run) == (thread_id, 0, 0, None)
    assert found.attempt == (1, 0, 0, None)
    stored = row(store, thread_id)
    assert (stored["lease_nonce"], stored["lease_worker"], stored["lease_child"]) == (found.fence.nonce, "worker", 7)
    assert (stored["status"], stored["version"], stored["starts"]) == ("ready", 1, 1)


def test_the_claim_brings_the_checkpoints_since_the_snapshot(store):
    thread_id = created(store)
    from keepstep.store.checkpoints import commit

    ids = []
    for version in range(1, 5):
        fence = claimed(store, thread_id, version).fence
        new = checkpoint(fence, snapshot=b"snapshot" if fence.seq in (0, 2) else None)
        ids.append(new.id)
        commit(store, fence, new, patience_seconds=1)

    found = claimed(store, thread_id, 5)

    assert [(each.seq, each.id, each.snapshot) for each in found.checkpoints] == [
        (2, ids[2], b"snapshot"),
        (3, ids[3], None),
    ]
    assert {type(each.cursor) for each in found.checkpoints} == {bytes}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("another version", "version = 2"),
        ("not due yet", "due_at = due_at + 3600"),
        ("paused", "control = 'pause'"),
        ("waiting", "status = 'waiting'"),
        ("blocked", "status = 'blocked'"),
        ("failed", "status = 'failed'"),
        ("done", "status = 'done'"),
        ("cancelled", "status = 'cancelled'"),
        ("of another version of the graph", "graph_version = '2'"),
        ("of a graph whose name only ends alike", "agent = 'other-agent'"),
        ("of a version that only begins alike", "graph_version = '11'"),
    ],
)
def test_nothing_to_do(store, name, change):
    thread_id = created(store)
    with store.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE keepstep_thread SET {change}")
    before = dump(store)

    assert claim(store, thread_id) is None
    assert dump(store) == before


def test_a_leased_thread_is_busy(store):
    thread_id = created(store)
    first = claimed(store, thread_id)
    before = dump(store)

    assert claim(store, thread_id, owner=Owner("other", 2)) is None
    assert dump(store) == before
    assert row(store, thread_id)["lease_nonce"] == first.fence.nonce


def test_an_unknown_thread_is_nothing_to_do(store):
    assert claim(store, "01jdz8k3v5w0c9q2m7r4t6y8xa") is None


def test_nonces_are_random(store):
    thread_id = created(store)
    nonces = set()
    for _ in range(20):
        fence = claimed(store, thread_id, row(store, thread_id)["version"]).fence
        nonces.add(fence.nonce)
        leases.postpone(store, fence, failures=0, delay_seconds=0, error="{}")
    assert len(nonces) == 20
    assert min(len(nonce) for nonce in nonces) >= 16  # 96 bits or more


def test_one_that_overstays_its_deadline_is_taken_over_and_counts_as_dead(sqlite_url):
    clock = Clock()
    store = Store.open(sqlite_url, clock=clock)
    registered(store, worker_id=OWNER.worker)
    thread_id = created(store)
    first = claimed(store, thread_id)

    clock.now += 59.9
    assert claim(store, thread_id) is None
    clock.now += 0.1
    second = claim(store, thread_id)

    assert second.attempt == (2, 0, 1, "it overstayed its deadline")
    assert second.fence.nonce != first.fence.nonce
    store.dispose()


def test_the_deadline_on_postgresql_is_the_servers(postgresql_url):
    store = Store.open(postgresql_url, clock=lambda: 0.0)
    registered(store, worker_id=OWNER.worker)
    thread_id = created(store)
    claimed(store, thread_id)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_thread SET lease_deadline = lease_deadline - 60.0")

    assert claim(store, thread_id).attempt == (2, 0, 1, "it overstayed its deadline")
    store.dispose()


def test_a_deadline_does_not_count_while_nobody_has_seen_its_worker(sqlite_url):
    """Its worker may be cut off, or the clock was set: who is lost is for the sweep to say."""
    clock = Clock()
    store = Store.open(sqlite_url, clock=clock)
    worker = registered(store, window_seconds=10)
    thread_id = created(store)
    fence = claimed(store, thread_id, owner=Owner(worker, 7)).fence

    clock.now += 3600
    assert claim(store, thread_id) is None
    assert workers.renew(store, worker, window_seconds=10) == clock.now
    assert claim(store, thread_id).attempt == (2, 0, 1, "it overstayed its deadline")
    assert row(store, thread_id)["lease_nonce"] != fence.nonce
    store.dispose()


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_clock_that_was_set_sets_the_deadlines_of_the_workers_own_leases(sqlite_url, seconds):
    clock = Clock()
    store = Store.open(sqlite_url, clock=clock)
    worker, other = registered(store, window_seconds=10), registered(store, window_seconds=10)
    mine, others = created(store, "mine"), created(store, "others")
    claimed(store, mine, owner=Owner(worker, 7))
    claimed(store, others, owner=Owner(other, 7))
    before = row(store, others)["lease_deadline"]

    clock.now += seconds + 20
    assert workers.renew(store, worker, window_seconds=10, clock_was_set=lambda _now: seconds) == clock.now

    # Set back, it cannot be told how much of the lease had passed: nobody loses what he may have had.
    left = 40 if seconds > 0 else 60
    assert row(store, mine)["lease_deadline"] == clock.now + left
    assert row(store, others)["lease_deadline"] == before
    assert claim(store, mine) is None
    workers.catch_up(store, window_seconds=10)
    clock.now += left
    workers.renew(store, worker, window_seconds=10)
    assert claim(store, mine).attempt == (2, 0, 1, "it overstayed its deadline")
    store.dispose()


def test_a_lease_that_was_taken_since_the_clock_was_set_is_as_long_as_any(sqlite_url):
    clock = Clock()
    store = Store.open(sqlite_url, clock=clock)
    worker = registered(store, window_seconds=10)
    thread_id = created(store)
    clock.now += 3600
    claimed(store, thread_id, owner=Owner(worker, 7))
    clock.now += 2
    workers.renew(store, worker, window_seconds=10, clock_was_set=lambda _now: 3600.0)
    assert row(store, thread_id)["lease_deadline"] == clock.now + 60
    store.dispose()


def test_what_was_due_is_due_at_once_after_the_clock_was_set_back(sqlite_url):
    clock = Clock()
    store = Store.open(sqlite_url, clock=clock)
    gone = registered(store, window_seconds=10)
    due, nudged, retried, held = [created(store, name) for name in ("due", "nudged", "retried", "held")]
    with store.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE keepstep_thread SET due_at = due_at - 20 WHERE id = '{nudged}'")
    leases.postpone(store, claimed(store, retried).fence, failures=1, delay_seconds=100, error="{}")
    claimed(store, held, owner=Owner(gone, 7))
    retry_at = row(store, retried)["due_at"]
    assert retry_at == clock.now + 100

    clock.now -= 3600
    assert claim(store, due) is None
    workers.catch_up(store, window_seconds=10)

    times = {name: row(store, name) for name in (due, nudged, retried, held)}
    assert [(times[name]["due_at"], times[name]["next_nudge_at"]) for name in (due, nudged)] == [(clock.now,) * 2] * 2
    # What somebody has put off comes when the clock says so; what is running is due when its holder is lost.
    assert times[retried]["due_at"] == retry_at
    assert times[held]["due_at"] == clock.now
    assert [worker.alive_until for worker in workers.live(store)] == [clock.now + 10]
    before = dump(store)
    workers.catch_up(store, window_seconds=10)
    assert dump(store) == before
    assert claim(store, due) is not None
    store.dispose()


def test_of_many_at_once_one_gets_it(store):
    thread_id = created(store)
    stores = [Store.open(store.url.render_as_string(hide_password=False)) for _ in range(8)]
    barrier, won = threading.Barrier(len(stores)), []

    def race(own):
        own.rows(claims._READ_HEAD, {"thread_id": thread_id})  # connected before the start
        barrier.wait()
        found = claim(own, thread_id)
        if found is not None:
            won.append(found.fence.nonce)

    racers = [threading.Thread(target=race, args=(own,)) for own in stores]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert won == [row(store, thread_id)["lease_nonce"]]
    assert row(store, thread_id)["starts"] == 1
    for own in stores:
        own.dispose()


# --- leases of those who are gone ---


def test_a_dead_childs_leases_are_released_and_counted(store):
    worker = registered(store)
    mine, sisters = created(store, "mine"), created(store, "sisters")
    claimed(store, mine, owner=Owner(worker, 7))
    kept = claimed(store, sisters, owner=Owner(worker, 8))

    nudges = workers.release_child(store, worker, 7, reason="signal 9 (SIGKILL)")

    assert nudges == [("step", mine, 1, "agent@1", 1, 0, "")]
    assert row(store, sisters)["lease_nonce"] == kept.fence.nonce
    assert claimed(store, mine).attempt == (2, 0, 1, "signal 9 (SIGKILL)")
    assert workers.release_child(store, worker, 7, reason="again") == []


def test_leaving_in_good_order_counts_no_death(store):
    worker = registered(store)
    thread_id = created(store)
    claimed(store, thread_id, owner=Owner(worker, 7))

    assert workers.leave(store, worker) == [("step", thread_id, 1, "agent@1", 1, 0, "")]
    assert workers.live(store) == []
    assert claimed(store, thread_id).attempt == (2, 0, 0, None)


def test_what_is_handed_over_counts_as_no_death(store):
    worker = registered(store)
    mine, sisters = created(store, "mine"), created(store, "sisters")
    claimed(store, mine, owner=Owner(worker, 7))
    kept = claimed(store, sisters, owner=Owner(worker, 8))

    assert [nudge.thread_id for nudge in workers.hand_over(store, worker, 7)] == [mine]
    assert row(store, sisters)["lease_nonce"] == kept.fence.nonce
    assert [found.id for found in workers.live(store)] == [worker]
    assert claimed(store, mine).attempt == (2, 0, 0, None)


def test_a_silent_worker_is_given_up_once(sqlite_url):
    clock = Clock()
    store = Store.open(sqlite_url, clock=clock)
    thread_id = created(store)
    silent, alive = registered(store, window_seconds=10), registered(store, window_seconds=100)
    claimed(store, thread_id, owner=Owner(silent, 7))

    clock.now += 9.9
    assert workers.take_over(store) == []
    clock.now += 0.1
    assert workers.take_over(store) == [("step", thread_id, 1, "agent@1", 1, 0, "")]
    assert workers.take_over(store) == []

    assert [worker.id for worker in workers.live(store)] == [alive]
    assert claimed(store, thread_id).attempt == (2, 0, 1, "its worker was lost")
    assert workers.renew(store, silent, window_seconds=10) is None
    assert workers.renew(store, alive, window_seconds=10) == clock.now
    assert registered(store, worker_id=silent) == silent
    store.dispose()


def test_a_worker_whose_own_time_is_over_gives_up_nobody(store):
    thread_id = created(store)
    silent, judge = registered(store, window_seconds=-5), registered(store, window_seconds=-5)
    claimed(store, thread_id, owner=Owner(silent, 7))

    assert workers.take_over(store, judge=judge) == []
    assert workers.renew(store, judge, window_seconds=100) is not None
    assert workers.take_over(store, judge=judge) == [("step", thread_id, 1, "agent@1", 1, 0, "")]


def test_a_worker_that_renewed_just_in_time_keeps_its_leases(sqlite_url):
    clock = Clock()
    store = Store.open(sqlite_url, clock=clock)
    worker = registered(store, window_seconds=10)
    fence = claimed(store, created(store), owner=Owner(worker, 7)).fence
    clock.now += 11
    assert workers.renew(store, worker, window_seconds=10) == clock.now

    assert workers.take_over(store) == []
    assert row(store, fence.thread_id)["lease_nonce"] == fence.nonce
    store.dispose()


def test_a_lease_taken_in_the_moment_its_worker_was_given_up_is_found(store):
    worker = registered(store)
    mine, orphan = created(store, "mine"), created(store, "orphan")
    claimed(store, mine, owner=Owner(worker, 7))
    claimed(store, orphan, owner=Owner("no row", 7))

    assert workers.adopt_orphans(store) == [("step", orphan, 1, "agent@1", 1, 0, "")]
    assert workers.adopt_orphans(store) == []
    assert claimed(store, orphan).attempt == (2, 0, 1, "its worker was lost")


def test_a_pause_is_not_a_lease(store):
    thread_id = created(store)
    with store.transaction() as transaction:
        threads.pause(transaction, threads.by_id(transaction, thread_id))
    assert claim(store, thread_id) is None
    with store.transaction() as transaction:
        nudges = threads.resume(transaction, threads.by_id(transaction, thread_id))
    assert nudges == [("step", thread_id, 1, "agent@1", 1, 0, "")]
    assert claim(store, thread_id) is not None
