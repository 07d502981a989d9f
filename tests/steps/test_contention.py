"""PostgreSQL refuses a transaction because of another: it is run again where that is safe, and nothing is twice."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Annotated, TypedDict

import pytest
import sqlalchemy

from keepstep import END, START, Graph, Send, append


class Log(TypedDict, total=False):
    n: int
    log: Annotated[list[int], append]


def parts(count, body):
    graph = Graph("parts", state=Log, types=[Log], fan_out=True)
    graph.node(body, name="part")
    graph.route(START, lambda _state: [Send("part", {"n": n}) for n in range(count)], to=["part"])
    graph.edge("part", END)
    return graph


@pytest.fixture
def configured(served):
    """A deployment on a database with a setting of its own."""

    def deploy(setting, value, *graphs):
        d = served(*graphs)
        name = d.store.engine.url.database
        with d.store.engine.connect() as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET {setting} = '{value}'")
        # The connections made from now on have it.
        d.store.dispose()
        return d

    return deploy


def test_on_a_serializable_database_workers_that_get_in_each_others_way_begin_again(configured):
    """Every node run counts its thread's pending ones down: each such transaction is in the way of all others."""
    paid = Counter()

    def part(state, ctx):
        ctx.effect(paid.update, [state["n"]], key="pay")
        return {"log": [state["n"]]}

    d = configured("default_transaction_isolation", "serializable", parts(24, part))
    d.start()
    workers = [d.worker_of(pid=pid) for pid in range(2, 8)]
    with d.store.engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW transaction_isolation").scalar_one() == "serializable"
        before = connection.exec_driver_sql(_ROLLBACKS).scalar_one()

    assert d.drain_together(*workers) == "done"

    assert d.values()["log"] == list(range(24))
    assert paid == dict.fromkeys(range(24), 1)
    assert [(node["starts"]) for node in d.reader.history("t")[-1].nodes] == [1] * 24
    with d.store.engine.connect() as connection:
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
    for worker in workers:
        worker.store.dispose()  # a server process hands in its numbers when it ends
    assert _grown(d, before) > 0, "nobody got in anybody's way: nothing was tested"


_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
_ROLLBACKS = "SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()"


def _grown(d, before):
    engine = sqlalchemy.create_engine(d.url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            return connection.exec_driver_sql(_ROLLBACKS).scalar_one() - before
    finally:
        engine.dispose()


class Holder:
    """Somebody who holds a lock on the thread's row for a while."""

    def __init__(self, d):
        self._engine = sqlalchemy.create_engine(d.url)
        self._connection = self._engine.connect()
        self._connection.exec_driver_sql("SELECT 1 FROM keepstep_thread FOR UPDATE")
        self._timer = threading.Timer(0.5, self.let_go)

    def for_a_while(self):
        self._timer.start()

    def let_go(self):
        self._connection.rollback()
        self._connection.close()
        self._engine.dispose()


@pytest.mark.parametrize("during", ["claim", "effect", "commit"])
def test_a_lock_that_is_not_had_in_time_is_waited_for_again(configured, during):
    holders, entered, paid = [], [], []

    def hold():
        holder = Holder(d)
        holder.for_a_while()
        holders.append(holder)

    def pay():
        paid.append(1)

    def part(state, ctx):
        entered.append(1)
        if during == "effect":
            hold()
        ctx.effect(pay)
        if during == "commit":
            hold()
        return {"log": [1]}

    graph = Graph("one", state=Log)
    graph.node(part, name="part")
    graph.edge(START, "part")
    graph.edge("part", END)
    d = configured("lock_timeout", "100ms", graph)
    d.start()
    if during == "claim":
        hold()
    assert d.drain() == "done"
    assert len(holders) == 1
    assert (entered, paid) == ([1], [1])
    assert [node["starts"] for node in d.reader.history("t")[-1].nodes] == [1]
    assert d.thread.row.deaths == 0


def test_the_victim_of_a_deadlock_begins_again(configured):
    """Somebody outside takes our locks in the other order: the node run's first, then the thread's."""
    d = configured("deadlock_timeout", "50ms", parts(1 + 1, lambda state, _ctx: {"log": [state["n"]]}))
    d.start()
    d.work(d.queue.pop(0))
    engine = sqlalchemy.create_engine(d.url)
    with engine.connect() as connection:
        # Ours is the one that finds the deadlock, and so its victim.
        connection.exec_driver_sql("SET deadlock_timeout = '60s'")
        connection.exec_driver_sql("SELECT 1 FROM keepstep_node_run WHERE run = 'part#0' FOR UPDATE")
        worker = threading.Thread(target=d.drain)
        worker.start()
        while not _waits(d):
            assert worker.is_alive()
        connection.exec_driver_sql("SELECT 1 FROM keepstep_thread FOR UPDATE")
        connection.rollback()
    engine.dispose()
    worker.join(30)
    assert d.drain() == "done"
    assert d.values()["log"] == [0, 1]


def _waits(d):
    engine = sqlalchemy.create_engine(d.url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            waiting = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return connection.exec_driver_sql(waiting).scalar_one()
    finally:
        engine.dispose()
