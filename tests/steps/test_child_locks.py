"""Parents and children that park, end and are cancelled at one moment, on PostgreSQL: nothing missed, no deadlock."""

from __future__ import annotations

import contextlib
import threading
from typing import Annotated, TypedDict

import pytest
import sqlalchemy

from keepstep import END, START, Graph, append
from keepstep.errors import WrongStatus
from keepstep.store import checkpoints, children, outcomes
from tests.steps.test_locks import Rival, in_the_middle

ROUNDS = 20


class Log(TypedDict, total=False):
    number: int
    log: Annotated[list, append]


child = Graph("child", state=Log)
child.node(lambda _state, ctx: {"log": [ctx.wait_signal("go").payload]}, name="work")
child.edge(START, "work")
child.edge("work", END)


def parent_of(count):
    graph = Graph("parent", state=Log)

    @graph.node
    def node(_state, ctx):
        spawned = [ctx.spawn(child, {"number": number}) for number in range(count)]
        return {"log": [result.status for result in ctx.join(*spawned, on_failure="return")]}

    graph.edge(START, "node")
    graph.edge("node", END)
    return graph


def query(d, statement, **values):
    with d.store.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sqlalchemy.text(statement), values).all()]


def deadlocks(d):
    """Return how many there were in the database; a connection says so at its end."""
    d.close()
    engine = sqlalchemy.create_engine(d.url)
    with engine.connect() as connection:
        found = connection.execute(
            sqlalchemy.text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        ).scalar_one()
    engine.dispose()
    return found


@pytest.mark.parametrize("first", ["parent parks", "child ends"])
def test_a_child_that_ends_while_its_parent_parks_is_not_missed(served, monkeypatch, first):
    go_on, spawned = threading.Event(), threading.Event()
    graph = Graph("parent", state=Log)

    @graph.node
    def node(_state, ctx):
        one = ctx.spawn(child, {})
        spawned.set()
        assert go_on.wait(20)
        return {"log": ctx.join(one)[0]["log"]}

    graph.edge(START, "node")
    graph.edge("node", END)
    d = served(graph, child)
    other = d.worker_of(pid=2)
    d.start()
    nudge = d.queue.pop(0)
    parks = Rival(d, lambda: d.work(nudge))
    parks._thread.start()
    assert spawned.wait(20)
    d.work(d.queue.pop(0), other)
    d.signal("go", 7, thread=d.reader.threads(graph="child")[0].name, worker=other)
    last = d.queue.pop(0)

    if first == "child ends":

        def then():
            go_on.set()
            parks.comes()

        with monkeypatch.context() as patched:
            in_the_middle(patched, checkpoints.children, "end", then)
            d.work(last, other)
    else:
        ends = Rival(d, lambda: d.work(last, other))
        with monkeypatch.context() as patched:
            in_the_middle(patched, outcomes.children, "take", ends.comes)
            go_on.set()
            parks.ended()
        ends.ended()
    parks.ended()

    assert [each.kind for each in d.queue] == ["step"], "the parent is woken, once"
    assert d.drain() == "done"
    assert d.values()["log"] == [7]


def test_parents_and_children_that_end_and_are_cancelled_at_once_never_lock_each_other_out(served):
    d = served(parent_of(3), child)
    actors = [d.worker_of(pid=10 + number) for number in range(6)]
    outcomes_seen = set()
    for number in range(ROUNDS):
        name = f"p{number}"
        d.start(thread=name)
        while d.queue:
            d.work(d.queue.pop(0))
        kin = d.reader.children(name)
        for each in kin:
            d.signal("go", each.thread, thread=each.thread)
        ends, d.queue[:] = list(d.queue), []
        others = [
            lambda: d.control("cancel", thread=name, worker=actors[0]),  # noqa: B023  they end in this round
            lambda: d.control("cancel", thread=kin[0].thread, worker=actors[1]),  # noqa: B023
            lambda: d.sweep(worker=actors[5]),
        ]
        last_steps = [lambda nudge=nudge, at=at: d.work(nudge, actors[2 + at]) for at, nudge in enumerate(ends)]
        # Now and then one after the other, so that each outcome is seen on every machine.
        for acts in {0: (last_steps, others), 1: (others, last_steps)}.get(number % 5, ([*last_steps, *others],)):
            at_once(acts)
        d.execute("UPDATE keepstep_child SET due_at = 0 WHERE due_at IS NOT NULL")
        d.sweep()
        d.queue.clear()

        assert d.reader.get(name).status == "cancelled"
        for each in d.reader.children(name):
            thread = d.reader.get(each.thread)
            assert each.state == "delivered"
            assert (each.status, thread.status) in {("done", "done"), ("cancelled", "cancelled")}
            outcomes_seen.add(thread.status)
    assert outcomes_seen == {"done", "cancelled"}
    assert query(d, "SELECT count(*) FROM keepstep_wait WHERE status = 'open'") == [(0,)]
    assert query(d, "SELECT count(*) FROM keepstep_thread WHERE lease_nonce IS NOT NULL") == [(0,)]
    assert query(d, "SELECT count(*) FROM keepstep_run WHERE status NOT IN ('done', 'cancelled')") == [(0,)]
    assert deadlocks(d) == 0


def test_children_that_end_while_their_parent_is_cancelled_and_taken_up_again_are_all_told(served):
    d = served(parent_of(3), child)
    actors = [d.worker_of(pid=10 + number) for number in range(5)]
    for number in range(ROUNDS // 2):
        name = f"p{number}"
        d.start(thread=name)
        while d.queue:
            d.work(d.queue.pop(0))
        for each in d.reader.children(name):
            d.signal("go", each.thread, thread=each.thread)
        ends, d.queue[:] = list(d.queue), []

        def back_and_forth(name=name):
            d.control("cancel", thread=name, worker=actors[0])
            d.control("retry", thread=name, worker=actors[0])

        last_steps = [lambda nudge=nudge, at=at: d.work(nudge, actors[2 + at]) for at, nudge in enumerate(ends)]
        at_once([back_and_forth, *last_steps, lambda: d.sweep(worker=actors[1])])
        for _ in range(3):
            d.execute("UPDATE keepstep_child SET due_at = 0 WHERE due_at IS NOT NULL")
            d.execute("UPDATE keepstep_thread SET next_nudge_at = 0 WHERE status = 'ready'")
            d.sweep()
            while d.queue:
                d.work(d.queue.pop(0))

        assert d.reader.get(name).status == "done"
        assert [(each.state, each.status) for each in d.reader.children(name)] == [("delivered", "done")] * 3
    assert deadlocks(d) == 0


def test_a_parent_that_is_cancelled_while_it_spawns_leaves_nothing_that_runs(served):
    graph, begun = Graph("parent", state=Log), threading.Event()

    @graph.node
    def node(_state, ctx):
        spawned = [ctx.spawn(child, {"number": 0})]
        begun.set()
        return ctx.join(*spawned, *(ctx.spawn(child, {"number": number}) for number in range(1, 4)))

    graph.edge(START, "node")
    graph.edge("node", END)
    d = served(graph, child)
    actors = [d.worker_of(pid=10 + number) for number in range(3)]
    spawned = 0

    def cancel():
        assert begun.wait(20)
        d.control("cancel", thread=name, worker=actors[1])

    for number in range(ROUNDS):
        name = f"p{number}"
        d.start(thread=name)
        nudge = d.queue.pop(0)
        begun.clear()
        at_once(
            [
                lambda: d.work(nudge, actors[0]),  # noqa: B023  they end in this round
                cancel,
                lambda: d.sweep(worker=actors[2]),
            ]
        )
        d.execute("UPDATE keepstep_child SET due_at = 0 WHERE due_at IS NOT NULL")
        d.sweep()
        while d.queue:
            d.work(d.queue.pop(0))

        assert d.reader.get(name).status == "cancelled"
        for each in d.reader.children(name):
            spawned += 1
            assert (each.state, each.status) == ("delivered", "cancelled")
            assert each.id is None or d.reader.get(each.id).status == "cancelled"
    threads = query(d, "SELECT count(*) FROM keepstep_thread WHERE agent = 'child' AND status != 'cancelled'")
    assert threads == [(0,)]
    assert ROUNDS <= spawned <= 4 * ROUNDS
    assert deadlocks(d) == 0


def test_a_parent_whose_children_end_all_at_once_goes_on_once(served):
    d = served(parent_of(4), child)
    actors = [d.worker_of(pid=10 + number) for number in range(5)]
    for number in range(ROUNDS):
        name = f"p{number}"
        d.start(thread=name)
        while d.queue:
            d.work(d.queue.pop(0))
        kin = d.reader.children(name)
        for each in kin[1:]:
            d.signal("go", each.thread, thread=each.thread)
        ends, d.queue[:] = list(d.queue), []
        at_once(
            [
                lambda: d.control("cancel", thread=kin[0].thread, worker=actors[4]),  # noqa: B023  they end in this round
                *(lambda nudge=nudge, at=at: d.work(nudge, actors[at]) for at, nudge in enumerate(ends)),
            ]
        )

        assert [each.kind for each in d.queue] == ["step"], "woken by the last of them, once"
        while d.queue:
            d.work(d.queue.pop(0))
        assert d.reader.state(name)["log"] == ["cancelled", "done", "done", "done"]
        assert {each.state for each in d.reader.children(name)} == {children.DELIVERED}
    assert deadlocks(d) == 0


def at_once(acts):
    """Do several things at one moment, each in a thread of its own; raise what they raised."""
    together, errors = threading.Barrier(len(acts)), []

    def one(act):
        together.wait(20)
        try:
            with contextlib.suppress(WrongStatus):  # it has ended before it could be cancelled
                act()
        except BaseException as error:  # noqa: BLE001  shown by the test's own thread
            errors.append(error)

    running = [threading.Thread(target=one, args=(act,)) for act in acts]
    for each in running:
        each.start()
    for each in running:
        each.join(60)
    if errors:
        raise errors[0]
