"""Twenty workers, and a database that is away for longer than the window in which they would miss each other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import Annotated, TypedDict

import pytest
import structlog

from keepstep import END, START, Graph, append
from keepstep.runtime import superstep
from keepstep.runtime.environment import Runtime
from keepstep.store import workers
from keepstep.store.admission import withhold
from keepstep.store.engine import Store
from keepstep.store.leases import Owner, queue_of
from keepstep.tasks.liveness import Liveness
from keepstep.tasks.publish import Publisher
from keepstep.tasks.registration import Registration
from keepstep.tasks.room import Room
from keepstep.tasks.service import stop
from keepstep.tasks.sweeper import Sweeper
from tests.conftest import _migrate
from tests.steps.driver import Deployment
from tests.worker.deployment import eventually

WORKERS = 20
WINDOW_SECONDS = 2.5
TIMES = {"renew_seconds": 0.5, "liveness_window_seconds": WINDOW_SECONDS, "sweep_seconds": 0.5}


class Log(TypedDict, total=False):
    log: Annotated[list[str], append]


class Outside:
    """A bank that lets its callers wait."""

    def __init__(self):
        self.paid: Counter[str] = Counter()
        self.calls, self.answers = threading.Semaphore(0), threading.Event()
        self._lock = threading.Lock()

    def pay(self, thread):
        with self._lock:
            self.paid[thread] += 1
        self.calls.release()
        assert self.answers.wait(90)
        return thread


class Member:
    """One worker: its services, and one node that it runs."""

    def __init__(self, d, number):
        settings = d.settings
        graphs = d.worker.graphs
        self.store = Store.open(d.url)
        registration = Registration(settings, self.store, graphs, concurrency=1)
        self.id = registration.worker_id
        liveness = Liveness(settings, registration)
        room = Room(
            Publisher(settings),
            [queue_of(*key) for key in graphs],
            concurrency=1,
            nudges_max=100,
            withheld=lambda nudges: withhold(self.store, nudges),
        )
        sweeper = Sweeper(settings, graphs.values(), self.id, liveness, room)
        self.services = [liveness, sweeper]
        self.liveness = liveness
        self.runtime = Runtime(self.store, graphs, settings, Owner(self.id, number), lambda _nudges: None)

    def runs(self, nudge):
        self._thread = threading.Thread(target=superstep.run_step, args=(self.runtime, nudge.thread_id, nudge.version))
        self._thread.start()

    def ended(self):
        self._thread.join(60)
        return not self._thread.is_alive()


@pytest.mark.kill
@pytest.mark.slow
def test_an_outage_longer_than_the_window_costs_nobody_anything(spare_postgresql):
    url = spare_postgresql.url(spare_postgresql.create_database())
    _migrate(url)
    outside = Outside()
    graph = Graph("pays", state=Log)

    @graph.node(timeout=120)
    def pay(state, ctx):
        return {"log": [ctx.effect(outside.pay, ctx.thread)]}

    graph.edge(START, "pay")
    graph.edge("pay", END)
    d = Deployment(url, graph, database=url, **TIMES)
    with contextlib.ExitStack() as stack, structlog.testing.capture_logs() as lines:
        stack.callback(d.close)
        fleet = [Member(d, number) for number in range(WORKERS)]
        services = [service for member in fleet for service in member.services]
        for service in services:
            service.start()
        stack.callback(stop, services)
        stack.callback(outside.answers.set)
        for number in range(WORKERS):
            d.start(thread=f"t{number}")
        nudges, d.queue[:] = d.queue[:], []
        for member, nudge in zip(fleet, nudges, strict=True):
            member.runs(nudge)
        for _ in fleet:
            assert outside.calls.acquire(timeout=60)
        eventually(lambda: all(member.liveness.may_take_over for member in fleet), what="workers that may judge")
        leases = held(d)
        assert len(leases) == WORKERS

        spare_postgresql.crash()
        crashed = time.monotonic()
        eventually(lambda: time.monotonic() - crashed > WINDOW_SECONDS + 0.5, what="more than a window")
        assert not any(member.liveness.may_take_over for member in fleet)
        spare_postgresql.start()

        # They are all there again, and judge each other again, and have found nobody missing.
        eventually(lambda: all(member.liveness.may_take_over for member in fleet), what="workers that may judge again")
        assert held(d) == leases
        assert [line for line in lines if line["event"] in {"swept", "admitted"}] == []
        assert {worker.id for worker in workers.live(d.store)} >= {member.id for member in fleet}
        # What they had begun before it ends after it.
        outside.answers.set()
        assert all(member.ended() for member in fleet)

        told = Counter(line["event"] for line in lines)
        assert told["worker_was_given_up"] == told["lease_lost"] == told["node_blocked"] == 0
        rows = d.reader.threads(limit=100)
        assert {(row.status, row.steps) for row in rows} == {("done", 1)}
        assert outside.paid == Counter({f"t{number}": 1 for number in range(WORKERS)})
        for number in range(WORKERS):
            d.name = f"t{number}"
            assert d.effects() == [("pay", "done", 1)]
            (_, step) = d.reader.history(d.name)
            assert [node["starts"] for node in step.nodes] == [1]


def held(d):
    with d.store.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT name, lease_nonce, lease_worker, deaths FROM keepstep_thread").all()
    return {name: (nonce, worker, deaths) for name, nonce, worker, deaths in rows if nonce}
