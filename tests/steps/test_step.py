"""One super-step after the other: what is committed, what is nudged, and what is left when something breaks."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Annotated, Any, TypedDict

import pytest

from keepstep import END, START, Goto, Graph, Send, append
from keepstep.errors import DatabaseUnavailable
from keepstep.runtime import superstep
from keepstep.store import checkpoints, claims, workers
from keepstep.store.leases import Nudge

# Large enough that a step's change is stored without the whole state.
LARGE = {"n": 7, "note": "." * 2000}


class State(TypedDict, total=False):
    n: int
    note: str
    items: dict[str, list[int]]
    log: Annotated[list[str], append]


def chain(*names, body=None, asynchronous=False, **options):
    """A graph of nodes one after the other, each logging its name; `body(name, state, ctx)` runs in each."""
    graph = Graph("chain", state=State, **options)

    def add(name, after):
        if asynchronous:

            @graph.node(name=name)
            async def node(state, ctx):
                if body:
                    body(name, state, ctx)
                return {"log": [name]}

        else:

            @graph.node(name=name)
            def node(state, ctx):
                if body:
                    body(name, state, ctx)
                return {"log": [name]}

        graph.edge(after, name)

    for name, after in zip(names, [START, *names], strict=False):
        add(name, after)
    graph.edge(names[-1], END)
    return graph


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_chain_runs_step_by_step(deploy, asynchronous):
    seen = []
    graph = chain("a", "b", "c", body=lambda name, _state, ctx: seen.append((name, ctx.step, ctx.attempt)))
    d = deploy(graph)
    accepted = d.start({"n": 7})

    assert d.queue == [Nudge("step", accepted.thread_id, 1, "chain@1", 1)]
    statuses = []
    while d.queue:
        nudge = d.queue.pop(0)
        assert d.work(nudge) is True
        assert d.work(nudge) is False  # one too many: an older version by now
        statuses.append((nudge.version, d.thread.status, d.thread.seq))

    # The input's checkpoint and the first step are one lease.
    assert statuses == [(1, "ready", 1), (3, "ready", 2), (4, "done", 3)]
    assert d.checkpoints() == [(0, "input"), (1, "step"), (2, "step"), (3, "step")]
    assert d.values() == {"n": 7, "log": ["a", "b", "c"]}
    thread = accepted.thread_id
    assert seen == [("a", f"{thread}/0/1", 1), ("b", f"{thread}/0/2", 1), ("c", f"{thread}/0/3", 1)]
    history = d.reader.history("t")
    ran = [[(node["run"], node["starts"]) for node in each.nodes] for each in history]
    assert ran == [[], [("a", 1)], [("b", 1)], [("c", 1)]]
    assert [each.next for each in history] == [["a"], ["b"], ["c"], []]
    assert [each.changed for each in history] == [["n"], ["log"], ["log"], ["log"]]
    assert [each.parent for each in history] == [None, *(each.id for each in history[:-1])]
    (run,) = d.reader.runs("t")
    assert (run.id, run.status, run.steps, run.error) == (accepted.run_id, "done", 3, None)


def test_what_a_node_does_to_its_state_stays_with_it(deploy):
    graph = Graph("g", state=State)
    given = {"items": {"a": [1, 2]}, "n": 1}

    @graph.node
    def vandal(state, ctx):
        state["items"]["a"].append(3)
        state["items"]["b"] = []
        state["n"] = 99
        state["unknown"] = 1

    @graph.node
    async def witness(state, ctx):
        return {"log": [repr(state)]}

    graph.edge(START, "vandal")
    graph.edge("vandal", "witness")
    graph.edge("witness", END)
    d = deploy(graph)
    d.start(given)

    assert d.drain() == "done"
    assert d.values() == {**given, "log": [repr(given)]}


def test_a_returned_value_is_as_it_was_when_it_was_returned(deploy):
    graph = Graph("g", state=State)
    kept = [1]

    @graph.node
    def lend(state, ctx):
        return {"items": {"a": kept}}

    @graph.node
    def change(state, ctx):
        kept.append(2)

    graph.edge(START, "lend")
    graph.edge("lend", "change")
    graph.edge("change", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "done"
    assert d.values() == {"items": {"a": [1]}}


def test_routes_gotos_and_sends(deploy):
    graph = Graph("g", state=State)

    @graph.node(goto=["left", "right"])
    def choose(state, ctx):
        return Goto("right" if state["n"] else "left", {"log": ["choose"]})

    @graph.node
    def left(state, ctx):
        return {"log": ["left"]}

    @graph.node
    def right(state, ctx):
        return {"log": ["right"]}

    @graph.node
    def part(state, ctx):
        return {"log": [f"part {state}"]}

    graph.edge(START, "choose")
    graph.edge("left", END)
    graph.route("right", lambda state: [Send("part", number) for number in range(state["n"])], to=["part"])
    graph.edge("part", END)
    d = deploy(graph)
    d.start({"n": 2})
    assert d.drain() == "done"
    assert d.values()["log"] == ["choose", "right", "part 0", "part 1"]
    d.name = "other"
    d.start({"n": 0})
    assert d.drain() == "done"
    assert d.values()["log"] == ["choose", "left"]


def test_a_subgraphs_steps_are_the_threads(deploy):
    inner = Graph("inner", state=State)

    @inner.node
    def one(state, ctx):
        return {"log": [f"one of {state['n']}"], "n": state["n"] + 1}

    @inner.node
    async def two(state, ctx):
        return {"log": [f"two of {state['n']}"]}

    inner.edge(START, "one")
    inner.edge("one", "two")
    inner.edge("two", END)
    outer = Graph("outer", state=State)
    outer.node(inner, name="sub")

    @outer.node
    def after(state, ctx):
        return {"log": [f"after {state['n']}"]}

    outer.edge(START, "sub")
    outer.edge("sub", "after")
    outer.edge("after", END)
    d = deploy(outer)
    d.start({"n": 1, "log": ["given"]})
    assert d.drain() == "done"
    assert d.values() == {"n": 2, "log": ["given", "one of 1", "two of 2", "after 2"]}
    assert [[node["run"] for node in each.nodes] for each in d.reader.history("t")] == [
        [],
        ["sub/one"],
        ["sub/two"],
        ["after"],
    ]


def test_a_graph_that_ends_at_once_ends_every_run_that_is_queued(deploy):
    graph = Graph("g", state=State)

    @graph.node
    def never(state, ctx):
        raise AssertionError

    graph.route(START, lambda state: END, to=["never", END])
    graph.edge("never", END)
    d = deploy(graph)
    d.start({"n": 1})
    d.start({"n": 2})
    assert d.drain() == "done"
    assert [run.status for run in d.reader.runs("t")] == ["done", "done"]
    assert d.values() == {"n": 2}


# --- what is not the node's fault ---


def test_a_tampered_history_blocks_before_any_node_runs(deploy):
    started = Counter()
    graph = chain("a", "b", "c", body=lambda name, _state, _ctx: started.update([name]))
    d = deploy(graph)
    d.start(LARGE)
    d.work(d.queue.pop(0))
    d.work(d.queue.pop(0))
    assert started == {"a": 1, "b": 1}
    with d.store.engine.connect() as connection:
        change = bytes(connection.exec_driver_sql("SELECT change FROM keepstep_checkpoint WHERE seq = 1").scalar_one())
    assert change.count(b"a") == 1
    d.execute("UPDATE keepstep_checkpoint SET change = :c WHERE seq = 1", c=change.replace(b"a", b"x"))

    assert d.drain() == "blocked"
    assert d.error[0] == "history_corrupt"
    assert "seq 1" in d.error[1]
    assert started == {"a": 1, "b": 1}

    d.execute("UPDATE keepstep_checkpoint SET change = :c WHERE seq = 1", c=change)
    d.control("retry")
    assert d.drain() == "done"
    assert d.values()["log"] == ["a", "b", "c"]


@pytest.mark.parametrize("column", ["snapshot", "cursor", "meta", "digest", "parent_digest"])
def test_every_part_of_a_checkpoint_is_covered(deploy, column):
    started = Counter()
    d = deploy(chain("a", "b", body=lambda name, _state, _ctx: started.update([name])))
    d.start(LARGE)
    d.work(d.queue.pop(0))
    seq = 1 if column == "parent_digest" else 0
    with d.store.engine.connect() as connection:
        stored = bytes(
            connection.exec_driver_sql(f"SELECT {column} FROM keepstep_checkpoint WHERE seq = {seq}").scalar_one()
        )
    broken = stored[:-1] + bytes([stored[-1] ^ 1])
    d.execute(f"UPDATE keepstep_checkpoint SET {column} = :c WHERE seq = {seq}", c=broken)

    assert d.drain() == "blocked"
    assert d.error[0] == "history_corrupt"
    assert started == {"a": 1}


def test_a_missing_checkpoint_blocks(deploy):
    d = deploy(chain("a", "b", "c"))
    d.start(LARGE)
    d.work(d.queue.pop(0))
    d.work(d.queue.pop(0))
    d.execute("DELETE FROM keepstep_checkpoint WHERE seq = 1")
    assert d.drain() == "blocked"
    assert d.error[0] == "history_corrupt"


def test_a_route_that_fails_fails_the_step_and_a_retry_runs_it_again(deploy):
    graph = Graph("g", state=State)
    works = []

    @graph.node
    def a(state, ctx):
        return {"log": [f"a{ctx.attempt}"]}

    def choose(state):
        return "b" if works else state["missing"]

    @graph.node
    def b(state, ctx):
        return {"log": ["b"]}

    graph.edge(START, "a")
    graph.route("a", choose, to=["b"])
    graph.edge("b", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "step"
    assert "route from 'a'" in d.error[1]
    assert d.checkpoints() == [(0, "input")]
    works.append(1)
    d.control("retry")
    assert d.drain() == "done"
    assert d.values()["log"] == ["a2", "b"]


def test_a_choice_outside_the_route_blocks_for_a_deploy(deploy):
    graph = Graph("g", state=State)

    @graph.node
    def a(state, ctx):
        return None

    graph.edge(START, "a")
    graph.route("a", lambda state: "elsewhere", to=["a", END])
    d = deploy(graph)
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "graph"
    assert "'elsewhere'" in d.error[1]


@pytest.mark.parametrize(
    ("returned", "path"),
    [({"n": "seven"}, "$.n"), ({"unknown": 1}, "$.unknown"), (7, "int"), ({"items": {"a": [1, "x"]}}, "$.items.a")],
)
def test_an_update_that_does_not_fit_is_one_attempt(deploy, returned, path):
    graph = Graph("g", state=State)
    starts = []

    @graph.node
    def a(state, ctx):
        starts.append(1)
        return returned

    graph.edge(START, "a")
    graph.edge("a", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "state"
    assert path in d.error[1]
    assert "'a'" in d.error[1]
    assert len(starts) == 1
    assert d.checkpoints() == [(0, "input")]


# --- two workers ---


def test_a_late_worker_commits_nothing(deploy):
    graph = chain("a", "b", body=lambda name, _state, _ctx: meet(name))
    d = deploy(graph)
    reached, go_on = threading.Event(), threading.Event()
    first = threading.local()

    def meet(name):
        if name == "a" and getattr(first, "is_me", False):
            reached.set()
            assert go_on.wait(20)

    slow = d.worker_of(pid=1)

    def run():
        first.is_me = True
        superstep.run_step(slow, thread_id, 1)

    thread_id = d.start({"n": 1}).thread_id
    d.queue.clear()
    runner = threading.Thread(target=run)
    runner.start()
    assert reached.wait(20)
    assert superstep.run_step(d.worker, thread_id, 2) is False  # leased to somebody alive
    d.queue += workers.release_child(d.store, slow.owner.worker, 1, reason="given up")
    assert d.drain() == "done"
    after = d.dump()
    go_on.set()
    runner.join()

    assert d.dump() == after
    assert d.queue == []
    assert d.values()["log"] == ["a", "b"]
    assert d.checkpoints() == [(0, "input"), (1, "step"), (2, "step")]


def test_a_thread_without_a_message_is_found_by_the_sweep(timed, clock):
    """Recovered rows sit between two steps: ready, leased by nobody or by a worker that is gone, nothing queued."""
    d = timed(chain("a", "b", "c"))
    gone = d.worker_of(pid=9, window_seconds=10)
    d.start({"n": 1})
    d.work(d.queue.pop(0))
    d.work(d.queue.pop(0))
    (lost,) = d.queue
    d.queue.clear()
    assert claims.claim_thread(gone.store, lost.thread_id, lost.version, owner=gone.owner, carried=gone.carried)
    for number in range(20):
        d.name = f"behind-{number}"
        d.start({"n": number})
    d.queue.clear()
    assert d.sweep(takeover=True) == []

    clock.now += 5
    found = d.sweep(takeover=True)
    assert sorted(found) != [lost]
    assert len(found) == 20
    assert d.sweep(takeover=True) == []  # nudged just now: left alone for a while
    d.drain()
    clock.now += 5
    assert d.sweep(takeover=True) == [lost]
    assert d.sweep(takeover=True) == []
    d.name = "t"
    assert d.drain() == "done"
    assert d.values()["log"] == ["a", "b", "c"]
    assert [d.reader.get(f"behind-{number}").status for number in range(20)] == ["done"] * 20


def test_nudges_of_one_version_back_off(timed, clock):
    d = timed(chain("a"))
    d.start({"n": 1})
    lost = d.queue.pop()
    gaps, last = [], clock.now
    while len(gaps) < 9:
        clock.now += 1
        found = d.sweep()
        if found:
            assert found == [lost]
            gaps.append(clock.now - last)
            last = clock.now
    assert gaps == [5, 2, 4, 8, 16, 32, 60, 60, 60]


def test_no_connection_is_held_while_a_node_runs(deploy):
    held = []
    d = deploy(chain("a", "b", body=lambda *_: held.append(d.worker.store.connections_in_use)))
    d.start()
    assert d.drain() == "done"
    assert held == [0, 0]


def test_no_connection_is_held_while_fanned_out_nodes_run(deploy):
    held: list[int] = []
    together = threading.Barrier(4)
    graph = Graph("g", state=State)

    @graph.node
    def part(state, ctx):
        together.wait(20)
        held.append(d.worker.store.connections_in_use)
        together.wait(20)

    graph.route(START, lambda state: [Send("part", n) for n in range(4)], to=["part"])
    graph.edge("part", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "done"
    assert held == [0] * 4


# --- the database goes away in the middle ---


def _statement_before(d: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    def unavailable(*_args, **_options):
        monkeypatch.undo()
        raise DatabaseUnavailable

    monkeypatch.setattr(module, name, unavailable)


def test_a_lease_is_given_back_when_the_database_went_away(deploy, monkeypatch):
    """A worker that lives on does nothing with that lease: nobody may have to wait for its deadline."""
    d = deploy(chain("a", "b"))
    d.start({"n": 1})
    _statement_before(d, monkeypatch, checkpoints, "next_run")
    with pytest.raises(DatabaseUnavailable):
        d.work(d.queue.pop(0))
    assert d.thread.row.lease_worker is None
    assert d.thread.row.deaths == 0


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_claim_whose_answer_was_lost_is_made_again(served, proxied_url, postgresql_proxy, lost):
    starts = Counter()
    d = served(chain("a", "b", body=lambda name, _s, _c: starts.update([name])))
    far = d.worker_of(pid=2, url=proxied_url)
    d.start({"n": 1})
    far.running_max()  # connects, and reads the limits
    getattr(postgresql_proxy, f"lose_{lost}")(far.owner.worker.encode())

    d.work(d.queue.pop(0), far)

    assert postgresql_proxy.lost.is_set()
    assert d.thread.row.lease_worker is None
    assert d.thread.row.deaths == 0
    assert d.thread.seq == 1
    assert d.drain() == "done"
    assert d.values()["log"] == ["a", "b"]
    assert starts == {"a": 1, "b": 1}


def test_a_claim_whose_answer_was_lost_twice_leaves_no_lease(served, proxied_url, postgresql_proxy):
    """Nobody would know of it: the worker lives on, and the thread would wait for the deadline."""
    d = served(chain("a"))
    far = d.worker_of(pid=2, url=proxied_url)
    d.start({"n": 1})
    far.running_max()  # connects, and reads the limits
    for _ in range(2):
        postgresql_proxy.lose_reply(far.owner.worker.encode())

    nudge = d.queue.pop(0)
    with pytest.raises(DatabaseUnavailable):
        d.work(nudge, far)

    assert d.thread.row.lease_worker is None
    d.work(nudge)
    assert d.drain() == "done"


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_commit_whose_answer_was_lost_is_one_checkpoint(served, proxied_url, postgresql_proxy, lost):
    starts = Counter()
    d = served(chain("a", "b", "c", body=lambda name, _s, _c: starts.update([name])))
    far = d.worker_of(pid=2, url=proxied_url)
    d.start({"n": 1})
    for _ in range(3):
        getattr(postgresql_proxy, f"lose_{lost}")(b"FROM keepstep_commit_")
        d.work(d.queue.pop(0), far)
        assert postgresql_proxy.lost.is_set()
    assert d.thread.status == "done"
    assert d.checkpoints() == [(0, "input"), (1, "step"), (2, "step"), (3, "step")]
    assert d.values()["log"] == ["a", "b", "c"]
    assert starts == {"a": 1, "b": 1, "c": 1}
    assert d.thread.row.version == 5
