"""When a worker may take over from others: only after it has itself been seen, without a gap, for one window."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import structlog

from keepstep.errors import DatabaseUnavailable
from keepstep.settings import load
from keepstep.store import claims, sweep, workers
from keepstep.store.admission import Admission
from keepstep.store.engine import Store
from keepstep.store.leases import Owner
from keepstep.tasks import liveness
from keepstep.tasks.liveness import Liveness
from keepstep.tasks.registration import Registration
from tests.store.records import CARRIED, claimed, created, row


class Time:
    """The worker's clock and the database's, moved by hand."""

    def __init__(self) -> None:
        self.here = 1000.0
        self.wall = self.database = 1_700_000_000.0

    def pass_(self, seconds: float) -> None:
        self.here += seconds
        self.database += seconds


@pytest.fixture
def clock(monkeypatch):
    time = Time()
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: time.here, time=lambda: time.wall))
    return time


@pytest.fixture
def fleet(clock, sqlite_url):
    """Make workers of one deployment."""
    settings = load(database=sqlite_url, renew_seconds=3, liveness_window_seconds=10)
    stores = []

    def make():
        store = Store.open(sqlite_url, clock=lambda: clock.database)
        stores.append(store)
        made = Liveness(settings, Registration(settings, store, [("agent", "1")], concurrency=1))
        made._store = store
        return made

    yield make
    for store in stores:
        store.dispose()


@pytest.fixture
def worker(fleet):
    return fleet()


def renewals(worker, clock, count):
    """Renew on time; return whether the worker may take over after each renewal."""
    seen = []
    for _ in range(count):
        clock.pass_(3)
        assert worker.work() == 3
        seen.append(worker.may_take_over)
    return seen


def test_a_new_worker_waits_one_window(worker, clock):
    assert renewals(worker, clock, 5) == [False, False, False, True, True]


def test_a_worker_that_stops_renewing_takes_over_nobody(worker, clock):
    renewals(worker, clock, 4)
    clock.pass_(9.9)
    assert worker.may_take_over
    clock.pass_(0.2)
    assert not worker.may_take_over

    worker.work()

    assert not worker.may_take_over
    assert renewals(worker, clock, 4) == [False, False, False, True]


def test_a_renewal_that_failed_begins_the_window_again(worker, clock, monkeypatch):
    renewals(worker, clock, 4)

    def away(*_args, **_kwargs):
        raise DatabaseUnavailable

    with monkeypatch.context() as patched:
        patched.setattr(workers, "renew", away)
        with pytest.raises(DatabaseUnavailable):
            worker.work()

    assert not worker.may_take_over
    assert renewals(worker, clock, 4) == [False, False, False, True]


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_was_set_begins_the_window_again(worker, clock, jump):
    renewals(worker, clock, 4)
    clock.database += jump

    with structlog.testing.capture_logs() as lines:
        assert renewals(worker, clock, 5) == [False, False, False, False, True]

    assert [line["event"] for line in lines] == ["database_clock_was_set"]


def test_a_worker_that_was_given_up_registers_again_under_its_id(worker, clock):
    renewals(worker, clock, 4)
    worker_id = worker._registration.worker_id
    clock.database += 11
    assert workers.take_over(worker._store) == []
    assert workers.live(worker._store) == []

    with structlog.testing.capture_logs() as lines:
        assert renewals(worker, clock, 5) == [False, False, False, False, True]

    assert [(state.id, state.concurrency) for state in workers.live(worker._store)] == [(worker_id, 1)]
    assert [(line["event"], line["worker_id"]) for line in lines] == [("worker_was_given_up", worker_id)]


@pytest.mark.parametrize("skew", [7.0, -7.0, 0.0])
def test_what_its_clock_said_is_written_at_the_next_renewal(worker, clock, skew):
    clock.wall = clock.database + skew
    worker.work()
    assert [state.clock_skew for state in workers.live(worker._store)] == [None]
    worker.work()
    assert [state.clock_skew for state in workers.live(worker._store)] == [skew]


def test_a_slow_answer_is_no_wrong_clock():
    assert liveness._skew(100.0, before=99.0, after=103.0) == 0.0
    assert liveness._skew(100.0, before=101.0, after=104.0) == 1.0
    assert liveness._skew(100.0, before=90.0, after=98.0) == -2.0


def swept(worker):
    """Sweep as a worker would, and claim what that found: return whose leases were taken."""
    store, worker_id = worker._store, worker._registration.worker_id
    found = sweep.sweep(store, takeover=worker.may_take_over, limit=100, judge=worker_id)
    found += Admission(store, [("agent", "1")]).look(lambda _queue: 100, {}).nudges
    owner = Owner(worker_id, 1)
    return [
        nudge.thread_id
        for nudge in found
        if claims.claim_thread(store, nudge.thread_id, nudge.version, owner=owner, carried=CARRIED)
    ]


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.parametrize("first", range(3))
def test_a_clock_that_was_set_takes_nothing_from_those_who_live(fleet, clock, jump, first):
    """Whoever is the first to see the new time: it finds nobody dead and no lease run out."""
    workers_ = [fleet() for _ in range(3)]
    held = []
    for worker in workers_:
        thread_id = created(worker._store, worker._registration.worker_id)
        owner = Owner(worker._registration.worker_id, 1)
        held.append((thread_id, claimed(worker._store, thread_id, owner=owner).fence.nonce))
    for _ in range(5):
        clock.pass_(3)
        for worker in workers_:
            worker.work()
    assert [worker.may_take_over for worker in workers_] == [True] * 3

    clock.database += jump
    in_turn = workers_[first:] + workers_[:first]
    for worker in in_turn:
        # Before anybody has renewed, and when some have.
        assert [swept(each) for each in workers_] == [[], [], []]
        worker.work()
        assert [swept(each) for each in workers_] == [[], [], []]
    for _ in range(3):  # 3 x 3 s and what has passed are less than the leases' 60 s
        clock.pass_(3)
        for worker in workers_:
            worker.work()
            assert swept(worker) == []

    store = workers_[0]._store
    assert [row(store, thread_id)["lease_nonce"] for thread_id, _ in held] == [nonce for _, nonce in held]
    assert [row(store, thread_id)["deaths"] for thread_id, _ in held] == [0, 0, 0]
    # A node that hangs is found by its deadline all the same, when that has really come.
    for _ in range(20):
        clock.pass_(3)
        for worker in workers_:
            worker.work()
    assert sorted(thread_id for worker in workers_ for thread_id in swept(worker)) == sorted(
        thread_id for thread_id, _ in held
    )
    assert [row(store, thread_id)["last_death"] for thread_id, _ in held] == ["it overstayed its deadline"] * 3


def test_a_thread_that_was_due_when_the_clock_was_set_back_is_due_all_the_same(fleet, clock):
    worker = fleet()
    thread_id = created(worker._store)
    for _ in range(3):
        clock.pass_(3)
        worker.work()
    clock.database -= 3600
    assert swept(worker) == []
    clock.pass_(3)
    worker.work()
    assert swept(worker) == [thread_id]
