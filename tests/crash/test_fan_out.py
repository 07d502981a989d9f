"""A thousand node runs of one super-step over several workers, some of which fail and one of which is killed."""

from __future__ import annotations

import threading

import pytest

from tests.crash import evidence
from tests.crash.conftest import on_each_broker
from tests.worker.deployment import eventually

GUESTS = 1000
CHILDREN = 2


class Connections:
    """The most connections that workers had to the database at any look."""

    def __init__(self, deployment):
        self._deployment = deployment
        self._stop = threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._look)

    def _look(self):
        while not self._stop.wait(0.05):
            [(number,)] = self._deployment.query(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name = 'keepstep'"
            )
            self.most = max(self.most, number)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


@pytest.mark.kill
@pytest.mark.slow
def test_a_thousand_node_runs_are_joined_once_in_order(deploy, postgresql_url, redis_url, outside):
    thread = "crowd"
    deployment = deploy(postgresql_url, redis_url, renew_seconds=0.5, liveness_window_seconds=3.0)
    victim, *others = [deployment.worker(concurrency=CHILDREN) for _ in range(3)]

    with Connections(deployment) as connections:
        deployment.start("crowd", thread, seats=GUESTS)
        outside.heard(thread, 2 * GUESTS * 40 // 100)
        victim.kill()
        deployment.ended(thread, seconds=100)

    calls = outside.calls(thread)
    assert {name: calls.pop(name) for name in ("enter-invite", "enter-toast")} == {"enter-invite": 1, "enter-toast": 1}
    entered = {number: calls.pop(f"enter-guest{number}") for number in range(GUESTS)}
    late = {number for number in range(GUESTS) if number % 100 == 50}
    again = {number for number, times in entered.items() if times != (2 if number in late else 1)}
    # What was running in the killed worker runs once more; nothing else does.
    assert len(again) <= CHILDREN
    assert {entered[number] for number in again} <= {2, 3}
    # Each was asked for once; of the killed worker's perhaps again, with the same key.
    twice = {name for name, times in calls.items() if times != 1}
    assert twice <= {f"guest{number}" for number in again}
    assert {calls[name] for name in twice} <= {2}
    assert all(len(outside.keys(thread, f"guest{number}")) == 1 for number in range(GUESTS))

    found = evidence.state(deployment, thread)
    assert found == {"seats": GUESTS, "log": [f"guest{number} of {thread}" for number in range(GUESTS)]}
    assert [len(runs) for _, runs in evidence.history(deployment, thread)] == [0, 1, GUESTS, 1]
    assert evidence.count(deployment, "node_run", thread, "x.status = 'done'") == GUESTS
    # For each child one; for the main process those of registration, liveness, sweep, commands and children.
    assert connections.most <= 3 * (CHILDREN + 5)
    assert [worker.process.poll() for worker in others] == [None, None]


@pytest.mark.parametrize("seats", [0, 1, 2])
def test_a_small_fan_out(served, outside, seats):
    thread = f"crowd-of-{seats}"
    served.worker(concurrency=2)

    served.start("crowd", thread, seats=seats)
    served.ended(thread)

    guests = [f"guest{number}" for number in range(seats)]
    expected = {"enter-invite": 1, **{f"enter-{guest}": 1 for guest in guests}, **dict.fromkeys(guests, 1)}
    assert outside.calls(thread) == expected | ({"enter-toast": 1} if seats else {})
    steps = [{}, {"invite": 1}, {f"guest#{number}": 1 for number in range(seats)}, {"toast": 1}]
    assert [runs for _, runs in evidence.history(served, thread)] == steps[: 4 if seats else 2]
    # One node run needs no row of its own.
    assert evidence.count(served, "node_run", thread) == (seats if seats > 1 else 0)


@on_each_broker
def test_a_worker_lost_with_its_part_of_a_fan_out_delays_only_that_part(served, outside):
    thread = "held-crowd"
    outside.hold("walk", thread)
    victim = served.worker(concurrency=1)
    served.start("crowd", thread, seats=4)
    outside.called("walk", thread)
    served.worker(concurrency=1)

    eventually(
        lambda: evidence.count(served, "node_run", thread, "x.status = 'done'") == 3, seconds=60, what="the other parts"
    )
    victim.kill()
    outside.called("walk", thread, 2)
    outside.let_go("walk", thread)
    served.ended(thread, seconds=60)

    assert outside.calls(thread) == {
        **{f"{what}{number}": 1 for number in range(4) for what in ("guest", "enter-guest")},
        "enter-guest1": 2,
        "walk": 2,
        "enter-invite": 1,
        "enter-toast": 1,
    }
    assert evidence.state(served, thread)["log"] == [f"guest{number} of {thread}" for number in range(4)]
