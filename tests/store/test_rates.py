"""Rates: exactly the calls that are allowed, whoever asks; pauses that a tool asked for; rows that go away."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from keepstep.runtime.rates import Rate, Rates
from keepstep.store import rates, sweep
from keepstep.store.engine import Store
from tests.steps.driver import Clock

TOOL = {"tenant": "acme", "name": "search"}
HOURLY = {**TOOL, "calls": 5, "per_seconds": 3600.0}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timed(sqlite_url, clock):
    """A store whose time is the test's."""
    opened = Store.open(sqlite_url, clock=clock)
    yield opened
    opened.dispose()


def later(store, seconds):
    """Let time pass for every row, on databases whose clock cannot be set."""
    held = "CASE WHEN held_until > 0 THEN held_until - {0} ELSE 0 END"
    with store.engine.begin() as connection:
        connection.exec_driver_sql(
            f"UPDATE keepstep_rate SET at = at - {seconds}, idle_at = idle_at - {seconds}, "
            f"held_until = {held.format(seconds)}"
        )


def rows(store):
    with store.engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT tenant, name FROM keepstep_rate ORDER BY tenant, name")
        return [tuple(row) for row in found]


# --- the rate ---


def test_so_many_calls_and_no_more_until_their_time_has_passed(store):
    assert [rates.take(store, **HOURLY) for _ in range(5)] == [0.0] * 5
    assert rates.take(store, **HOURLY) == pytest.approx(720, abs=5)
    later(store, 721)
    assert rates.take(store, **HOURLY) == 0.0
    assert rates.take(store, **HOURLY) > 0.0
    later(store, 100_000)  # a long pause saves up no more than the burst
    assert [rates.take(store, **HOURLY) == 0.0 for _ in range(7)] == [True] * 5 + [False] * 2


def test_a_crowd_is_told_one_time_each_and_each_is_let_in_at_its_own(timed, clock):
    rate = {**TOOL, "calls": 2, "per_seconds": 1.0}
    began = clock.now
    assert [rates.take(timed, **rate) for _ in range(2)] == [0.0, 0.0]
    told = [rates.take(timed, **rate) for _ in range(6)]
    assert told == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    for seconds in told:
        clock.now = began + seconds
        assert rates.take(timed, **rate) == 0.0
    assert rates.take(timed, **rate) == pytest.approx(0.5)


def test_whose_place_somebody_else_took_is_told_the_next_one(timed, clock):
    rate = {**TOOL, "calls": 1, "per_seconds": 10.0}
    assert [rates.take(timed, **rate) for _ in range(3)] == pytest.approx([0.0, 10.0, 20.0])
    clock.now += 10
    assert rates.take(timed, **rate) == 0.0  # a newcomer
    assert rates.take(timed, **rate) == pytest.approx(20.0)  # 20 s was promised before


def test_over_a_long_time_the_rate_is_kept(timed, clock):
    rate = {**TOOL, "calls": 3, "per_seconds": 1.0}
    let_in = 0
    for _ in range(10_000):
        let_in += rates.take(timed, **rate) == 0.0
        clock.now += 0.01
    assert let_in == 3 + 3 * 100 - 1  # the burst, and three in each of 99.99 seconds


def test_nobody_is_sent_away_for_longer_than_an_hour(timed):
    rate = {**TOOL, "calls": 1, "per_seconds": 60.0}
    told = [rates.take(timed, **rate) for _ in range(100)]
    assert told[59:62] == pytest.approx([3540.0, 3600.0, 3600.0])
    assert max(told) == pytest.approx(3600.0)


def test_a_clock_that_is_set_back_stops_nobody_for_long(timed, clock):
    rate = {**TOOL, "calls": 2, "per_seconds": 10.0}
    assert [rates.take(timed, **rate) for _ in range(2)] == [0.0, 0.0]
    clock.now -= 86_400
    assert rates.take(timed, **rate) == pytest.approx(5.0)
    clock.now += 5
    assert rates.take(timed, **rate) == 0.0


def test_another_rate_for_the_same_tool_holds_from_then_on(timed, clock):
    assert [rates.take(timed, **TOOL, calls=10, per_seconds=10.0) for _ in range(10)] == [0.0] * 10
    assert rates.take(timed, **TOOL, calls=11, per_seconds=11.0) == 0.0
    assert rates.take(timed, **TOOL, calls=2, per_seconds=2.0) > 0.0


def test_another_tenant_and_another_tool_are_not_touched(store):
    assert [rates.take(store, **{**HOURLY, "calls": 1}) == 0.0 for _ in range(2)] == [True, False]
    assert rates.take(store, **{**HOURLY, "tenant": "other"}) == 0.0
    assert rates.take(store, **{**HOURLY, "name": "fetch"}) == 0.0


def test_a_row_in_use_holds_up_nobody_else(postgresql_url):
    store = Store.open(postgresql_url)
    rates.take(store, **HOURLY)
    with store.engine.connect() as connection, connection.begin():
        connection.exec_driver_sql("SELECT * FROM keepstep_rate FOR UPDATE")
        assert rates.take(store, **{**HOURLY, "tenant": "other"}) == 0.0
    store.dispose()


def test_threads_that_race_get_exactly_what_is_allowed(store_url):
    rate = {**TOOL, "calls": 25, "per_seconds": 86_400.0}
    together, told = threading.Barrier(8), []

    def ask():
        store = Store.open(store_url)
        together.wait(60)
        told.extend(rates.take(store, **rate) for _ in range(10))
        store.dispose()

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()

    assert len(told) == 80
    assert told.count(0.0) == 25


ASK = """
import sys
from keepstep.store import rates
from keepstep.store.engine import Store
store = Store.open(sys.argv[1])
print(sum(rates.take(store, tenant="acme", name="search", calls=25, per_seconds=86400.0) == 0.0 for _ in range(20)))
"""


def test_processes_that_race_get_exactly_what_is_allowed(store_url):
    asking = [
        subprocess.Popen([sys.executable, "-c", ASK, store_url], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    let_in = [int(each.communicate(timeout=120)[0]) for each in asking]
    assert sum(let_in) == 25


# --- pauses ---


def test_a_pause_holds_for_this_tenant_and_this_tool_alone(store):
    rates.hold_off(store, **TOOL, seconds=30)
    assert rates.take(store, **TOOL, calls=None) == pytest.approx(30, abs=5)
    assert rates.take(store, **HOURLY) == pytest.approx(30, abs=5)
    assert rates.take(store, tenant="other", name="search", calls=None) == 0.0
    assert rates.take(store, tenant="acme", name="fetch", calls=None) == 0.0
    later(store, 31)
    assert rates.take(store, **TOOL, calls=None) == 0.0
    assert [rates.take(store, **HOURLY) for _ in range(5)] == [0.0] * 5  # who was held off has taken nothing


def test_a_pause_is_never_shortened_and_bounded_to_a_day(timed, clock):
    rates.hold_off(timed, **TOOL, seconds=60)
    rates.hold_off(timed, **TOOL, seconds=5)
    assert rates.take(timed, **TOOL, calls=None) == 60.0
    rates.hold_off(timed, **TOOL, seconds=90)
    assert rates.take(timed, **TOOL, calls=None) == 90.0
    rates.hold_off(timed, **TOOL, seconds=1e9)
    assert rates.take(timed, **TOOL, calls=None) == 86_400.0
    clock.now -= 86_400
    assert rates.take(timed, **TOOL, calls=None) == 86_400.0


def test_after_a_pause_a_crowd_comes_back_at_the_rate(timed, clock):
    rate = {**TOOL, "calls": 2, "per_seconds": 4.0}
    rates.hold_off(timed, **TOOL, seconds=10)
    told = [rates.take(timed, **rate) for _ in range(5)]
    assert told == pytest.approx([10, 10, 12, 14, 16])
    began = clock.now
    for seconds in told:
        clock.now = began + seconds
        assert rates.take(timed, **rate) == 0.0


class Counting(Store):
    """A store that counts its statements."""

    statements = 0

    def rows(self, statement, params):
        self.statements += 1
        return super().rows(statement, params)


def test_a_tool_without_a_rate_costs_a_statement_a_second_at_most(sqlite_url):
    store, monotonic = Counting.open(sqlite_url), Clock()
    asking = Rates(store, clock=monotonic)
    assert {asking.take("acme", "search", None) for _ in range(1000)} == {0.0}
    assert store.statements == 1
    monotonic.now += 1
    assert {asking.take("acme", f"tool{number}", None) for number in range(1000)} == {0.0}
    assert store.statements == 2
    store.dispose()


def test_another_process_heeds_a_pause_within_a_second(store_url):
    mine, other = Store.open(store_url), Store.open(store_url)
    monotonic = Clock()
    here, there = Rates(mine, clock=monotonic), Rates(other, clock=monotonic)
    assert (here.take("acme", "search", None), there.take("acme", "search", None)) == (0.0, 0.0)

    here.hold_off("acme", "search", 20)

    assert here.take("acme", "search", None) == pytest.approx(20, abs=0.01)  # at once, where it was met
    monotonic.now += 1
    assert there.take("acme", "search", None) == pytest.approx(20, abs=2)
    assert there.take("other", "search", None) == 0.0
    assert there.take("acme", "search", Rate.parse("5/h")) == pytest.approx(20, abs=2)
    monotonic.now += 21
    later(mine, 21)
    assert (here.take("acme", "search", None), there.take("acme", "search", None)) == (0.0, 0.0)
    for store in (mine, other):
        store.dispose()


# --- rows that go away ---


def test_rows_that_say_nothing_any_more_are_swept(store):
    rates.take(store, **{**TOOL, "name": "quick"}, calls=10, per_seconds=1.0)
    for _ in range(2):
        rates.take(store, **{**TOOL, "name": "slow"}, calls=1, per_seconds=3600.0)
    rates.hold_off(store, **{**TOOL, "name": "held"}, seconds=600)
    rates.take(store, **{**TOOL, "name": "held"}, calls=10, per_seconds=1.0)
    sweep.sweep(store, takeover=False, limit=100)
    assert rows(store) == [("acme", "held"), ("acme", "quick"), ("acme", "slow")]
    later(store, 70)
    sweep.sweep(store, takeover=False, limit=100)
    assert rows(store) == [("acme", "held"), ("acme", "slow")]
    later(store, 600)
    sweep.sweep(store, takeover=False, limit=100)
    assert rows(store) == [("acme", "slow")]
    later(store, 3600)
    sweep.sweep(store, takeover=False, limit=100)
    assert rows(store) == [("acme", "slow")]  # what was promised counts as what was taken
    later(store, 3600)
    sweep.sweep(store, takeover=False, limit=100)
    assert rows(store) == []


def test_a_sweep_takes_no_more_than_its_batch(store):
    for number in range(5):
        rates.take(store, tenant="acme", name=f"tool{number}", calls=1, per_seconds=1.0)
    later(store, 100)
    assert [rates.forget_idle(store, limit=2) for _ in range(4)] == [2, 2, 1, 0]
