"""No more of a graph or a tenant runs at once than may, and nobody is forgotten for it."""

from __future__ import annotations

import threading
from typing import Annotated, TypedDict

import pytest

from keepstep import END, START, Graph, Send, append
from keepstep.store import limits
from keepstep.store.admission import withhold


class Log(TypedDict, total=False):
    n: int
    log: Annotated[list, append]


class Meter:
    """Counts who is inside at once."""

    def __init__(self):
        self._lock = threading.Lock()
        self.inside = self.most = self.entered = 0

    def __enter__(self):
        with self._lock:
            self.inside += 1
            self.entered += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_error):
        with self._lock:
            self.inside -= 1


def parts(meter, count, **options):
    graph = Graph("parts", state=Log, types=[Log], **options)

    @graph.node
    def part(state, _ctx):
        with meter:
            return {"log": [state["n"]]}

    graph.route(START, lambda _state: [Send("part", {"n": n}) for n in range(count)], to=["part"])
    graph.edge("part", END)
    return graph


@pytest.mark.parametrize("fan_out", [True, False])
def test_a_fan_out_with_a_limit_of_one_runs_all_its_node_runs_never_two_at_once(deploy, fan_out):
    meter = Meter()
    d = deploy(parts(meter, 6, running_max=1, fan_out=fan_out))
    d.start()
    workers = [d.worker_of(pid=pid) for pid in (2, 3, 4)]

    assert d.drain_together(*workers) == "done"

    assert (meter.entered, meter.most) == (6, 1)
    assert d.values()["log"] == list(range(6))
    assert limits.taken(d.store) == {}


def test_who_ends_lets_in_who_waits(deploy):
    meter = Meter()
    graph = Graph("one", state=Log, running_max=2)

    @graph.node
    def node(state, _ctx):
        with meter:
            return {"log": [state["n"]]}

    graph.edge(START, "node")
    graph.edge("node", END)
    d = deploy(graph)
    for number in range(20):
        d.name = f"t{number}"
        d.start({"n": number})
    workers = [d.worker_of(pid=pid) for pid in (2, 3, 4, 5)]

    # Without a sweep: whoever was held back is let in by one who ends.
    d.drain_together(*workers)
    d.sweep()
    d.drain_together(*workers)

    assert {thread.status for thread in d.reader.threads(limit=50)} == {"done"}
    assert meter.entered == 20
    assert meter.most <= 2


def test_a_tenants_stuck_thread_with_a_limit_of_one_lets_the_others_through_when_it_is_given_up(timed, clock):
    """The row of a thread between two steps, its worker gone, nothing queued; 20 more wait behind it."""
    starts = []
    graph = Graph("steps", state=Log)
    for name in ("a", "b", "c"):

        def body(state, ctx, name=name):
            starts.append((state["n"], name))

        graph.node(body, name=name)
    for source, target in ((START, "a"), ("a", "b"), ("b", "c"), ("c", END)):
        graph.edge(source, target)
    d = timed(graph)
    with d.store.transaction() as transaction:
        limits.put(transaction, "tenant", "default", 1)
    gone = d.worker_of(pid=9, window_seconds=10)
    d.start({"n": -1})
    d.work(d.queue.pop(0))
    d.work(d.queue.pop(0))
    lost = d.queue.pop(0)
    assert gone.running_max() == {"tenant default": 1}
    from keepstep.store import claims

    assert claims.claim_thread(
        gone.store,
        lost.thread_id,
        lost.version,
        owner=gone.owner,
        carried=gone.carried,
        running_max=gone.running_max(),
    )
    for number in range(20):
        d.name = f"behind-{number}"
        d.start({"n": number})
    d.worker.running_max._read_at = None
    d.drain()
    assert starts == [(-1, "a"), (-1, "b")]
    assert d.sweep() == []  # held back, and no room yet

    clock.now += 11
    for _ in range(40):
        d.sweep(takeover=True)
        d.drain()
        clock.now += 3
    assert {thread.status for thread in d.reader.threads(limit=50)} == {"done"}
    assert sorted(starts[2:]) == sorted([(-1, "c"), *((n, name) for n in range(20) for name in "abc")])


def looping(steps):
    """A thread's step notes its number in `steps`."""
    graph = Graph("looping", state=Log, running_max=1)

    @graph.node
    def turn(state, ctx):
        steps.append(ctx.thread)
        return {"n": state["n"] - 1}

    graph.edge(START, "turn")
    graph.route("turn", lambda state: "turn" if state["n"] else END, to=["turn", END])
    return graph


def wait_in_rows(d):
    """Everything that is due waits in its rows, as when there was no room in the queue."""
    withhold(d.store, d.queue)
    d.queue.clear()


@pytest.mark.parametrize(
    ("priority", "order"),
    [
        ("high", ["long", "long", "second", "second", "second", "long", "long"]),
        ("normal", ["long", "long", "second", "long", "second", "long", "second"]),
        ("low", ["long", "long", "long", "long", "second", "second", "second"]),
    ],
)
def test_under_a_limit_a_thread_does_not_keep_its_place_from_step_to_step(deploy, priority, order):
    steps = []
    d = deploy(looping(steps))
    d.name = "long"
    d.start({"n": 4})
    d.work(d.queue.pop(0))
    own = list(d.queue)
    d.queue.clear()
    d.start({"n": 3}, thread="second", priority=priority)
    wait_in_rows(d)
    d.queue += own
    d.drain()  # without a sweep: nobody's turn is lost
    assert steps == order
    assert {thread.status for thread in d.reader.threads(limit=50)} == {"done"}
    assert limits.taken(d.store) == {}


def test_under_a_limit_that_is_not_reached_a_thread_goes_on_beside_who_waits(deploy):
    steps = []
    d = deploy(looping(steps))
    with d.store.transaction() as transaction:
        limits.put(transaction, "graph", "looping", 2)
    d.name = "long"
    d.start({"n": 2})
    first = d.queue.pop(0)
    d.start({"n": 2}, thread="second")
    wait_in_rows(d)
    d.work(first)
    assert len({nudge.thread_id for nudge in d.queue}) == 2


def test_an_operators_limit_stands_over_the_codes(deploy):
    meter = Meter()
    d = deploy(parts(meter, 3, running_max=1))
    assert d.worker.running_max() == {"graph parts": 1}
    with d.store.transaction() as transaction:
        limits.put(transaction, "graph", "parts", 7)
    assert d.worker_of(pid=2).running_max() == {"graph parts": 7}


def test_in_this_process_too():
    meter = Meter()
    assert parts(meter, 4, running_max=1).run({})["log"] == [0, 1, 2, 3]
    assert meter.most == 1
