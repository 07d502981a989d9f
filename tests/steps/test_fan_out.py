"""Several node runs in one super-step: each is durable at once, the join happens once, what failed alone runs again."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Annotated, TypedDict

import pytest

from keepstep import END, START, Graph, Retry, Send, add, append
from keepstep.store import claims, workers
from keepstep.store.leases import Nudge


class State(TypedDict, total=False):
    count: int
    done: bool
    shared: dict[str, int]
    total: Annotated[int, add]
    seen: Annotated[list[int], append]
    joined: int
    told: list[str]


class Recorder:
    """How often each node was entered, from any thread."""

    def __init__(self) -> None:
        self.starts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, name: str) -> int:
        with self._lock:
            self.starts[name] += 1
            return self.starts[name]


def sends(**options):
    """A graph that sends 0 … count-1 to `part` and joins; parts are recorded, `hook(number, ctx)` runs in each."""
    record = Recorder()
    hook = options.pop("hook", None)
    retry = options.pop("retry", None)
    graph = Graph("fan", state=State, **options)

    @graph.node(retry=retry)
    def part(state, ctx):
        record(f"part {state['number']}")
        if hook:
            hook(state["number"], ctx)
        return {"seen": [state["number"]], "total": 1}

    @graph.node
    def join(state, ctx):
        record("join")
        return {"joined": len(state["seen"])}

    graph.route(START, lambda state: [Send("part", {"number": n}) for n in range(state["count"])], to=["part"])
    graph.edge("part", "join")
    graph.edge("join", END)
    return graph, record


def named(*names, body, **options):
    """A graph in which all of `names` are due together; `body(name, state, ctx)` gives the update of each."""
    graph = Graph("together", state=State, **options.pop("graph", {}))
    for name in names:

        @graph.node(name=name, **options)
        def node(state, ctx, name=name):
            return body(name, state, ctx)

        graph.edge(START, name)
        graph.edge(name, "join")

    @graph.node
    def join(state, ctx):
        return {"told": [f"{failure['run']}: {failure['message']}" for failure in ctx.failures]}

    graph.edge("join", END)
    return graph


@pytest.mark.parametrize("fan_out", [True, False, None])
def test_results_come_in_the_order_of_the_sends(deploy, fan_out):
    graph, record = sends(fan_out=fan_out)
    d = deploy(graph)
    d.start({"count": 3})
    assert d.drain() == "done"
    assert d.values() == {"count": 3, "seen": [0, 1, 2], "total": 3, "joined": 3}
    assert record.starts == {"part 0": 1, "part 1": 1, "part 2": 1, "join": 1}
    assert d.checkpoints() == [(0, "input"), (1, "step"), (2, "step")]
    (_, parts, _) = d.reader.history("t")
    assert [(node["run"], node["starts"]) for node in parts.nodes] == [("part#0", 1), ("part#1", 1), ("part#2", 1)]


def test_fanned_out_node_runs_are_nudged_one_by_one(deploy):
    graph, record = sends(fan_out=True)
    d = deploy(graph)
    thread_id = d.start({"count": 3}).thread_id
    d.work(d.queue.pop(0))

    assert d.queue == [Nudge("node", thread_id, 0, f"{graph.name}@1", 1, 1, f"part#{n}") for n in range(3)]
    assert (d.thread.status, d.thread.row.pending, d.thread.row.fanned) == ("waiting", 3, 3)
    last, first, middle = d.queue.pop(), d.queue.pop(0), d.queue.pop(0)
    for nudge in (last, first):
        assert d.work(nudge) is True
        assert d.work(nudge) is False
    assert (d.queue, d.thread.row.pending, record.starts["join"]) == ([], 1, 0)
    assert [run.status for run in d.reader.node_runs("t")] == ["done", "ready", "done"]
    assert d.work(middle) is True
    assert [nudge.kind for nudge in d.queue] == ["step"]
    assert d.drain() == "done"
    assert d.values()["seen"] == [0, 1, 2]


@pytest.mark.parametrize("backwards", [False, True])
def test_the_order_of_finishing_does_not_matter(deploy, backwards):
    graph, _ = sends(fan_out=True)
    d = deploy(graph)
    d.start({"count": 5})
    d.work(d.queue.pop(0))
    if backwards:
        d.queue.reverse()
    assert d.drain() == "done"
    assert d.values()["seen"] == [0, 1, 2, 3, 4]


def test_many_workers_join_once(deploy):
    graph, record = sends(fan_out=True)
    d = deploy(graph)
    runtimes = [d.worker_of(pid=pid) for pid in range(2, 6)]
    d.start({"count": 24})
    assert d.drain_together(*runtimes) == "done"
    assert d.values()["seen"] == list(range(24))
    assert record.starts == {**{f"part {n}": 1 for n in range(24)}, "join": 1}
    assert d.checkpoints() == [(0, "input"), (1, "step"), (2, "step")]
    assert {run.lease_worker for run in d.reader.node_runs("t")} == {None}


def test_two_deliveries_of_one_node_message_at_once_are_one_start(deploy):
    graph, record = sends(fan_out=True)
    d = deploy(graph)
    others = [d.worker_of(pid=2), d.worker_of(pid=3)]
    d.start({"count": 30})
    d.work(d.queue.pop(0))
    nudges, outcomes = d.queue[:], []
    d.queue.clear()
    barrier = threading.Barrier(2)

    def deliver(worker):
        worker.store.rows(claims._READ_HEAD, {"thread_id": d.thread.id})  # connected before the first
        for nudge in nudges:
            barrier.wait(20)
            outcomes.append((nudge.run, d.work(nudge, worker)))

    running = [threading.Thread(target=deliver, args=(worker,)) for worker in others]
    for each in running:
        each.start()
    for each in running:
        each.join()

    assert Counter(outcomes) == {(f"part#{n}", ran): 1 for n in range(30) for ran in (True, False)}
    assert [nudge.kind for nudge in d.queue] == ["step"]
    assert [(run.starts, run.deaths, run.status) for run in d.reader.node_runs("t")] == [(1, 0, "done")] * 30
    assert d.drain() == "done"
    assert record.starts == {**{f"part {n}": 1 for n in range(30)}, "join": 1}
    assert d.values()["seen"] == list(range(30))


@pytest.mark.slow
def test_a_thousand_node_runs_some_of_which_fail_once(deploy):
    def flaky(number, ctx):
        if number % 100 == 7 and ctx.attempt == 1:
            message = "once"
            raise ConnectionError(message)

    graph, record = sends(fan_out=True, hook=flaky, retry=Retry(attempts=2, delay=0))
    d = deploy(graph)
    d.start({"count": 1000})
    assert d.drain() == "done"
    assert d.values()["seen"] == list(range(1000))
    assert record.starts.pop("join") == 1
    assert {name for name, starts in record.starts.items() if starts == 2} == {f"part {n}" for n in range(7, 1000, 100)}
    assert sum(record.starts.values()) == 1010
    assert Counter(run.status for run in d.reader.node_runs("t")) == {"done": 1000}


def test_a_node_run_of_a_dead_worker_runs_elsewhere(deploy):
    reached, killed = threading.Event(), threading.Event()

    def die(number, ctx):
        if number == 1 and ctx.attempt == 1:
            reached.set()
            assert killed.wait(20)

    graph, record = sends(fan_out=True, hook=die)
    d = deploy(graph)
    doomed = d.worker_of(pid=2)
    d.start({"count": 3})
    d.work(d.queue.pop(0))
    victim = d.queue.pop(1)
    running = threading.Thread(target=lambda: d.work(victim, doomed))
    running.start()
    assert reached.wait(20)
    d.queue += workers.release_child(d.store, doomed.owner.worker, 2, reason="signal 9 (SIGKILL)")
    assert d.drain() == "done"
    finished = d.dump()
    killed.set()
    running.join()

    assert d.dump() == finished
    assert record.starts == {"part 0": 1, "part 1": 2, "part 2": 1, "join": 1}
    assert [(run.starts, run.deaths) for run in d.reader.node_runs("t")] == [(1, 0), (2, 1), (1, 0)]


# --- one fails, the others do not ---


@pytest.mark.parametrize("fan_out", [True, False])
def test_only_what_failed_runs_again(deploy, fan_out):
    record, fixed = Recorder(), []

    def body(name, state, ctx):
        record(name)
        if name == "C" and not fixed:
            message = "C broke"
            raise ValueError(message)
        return {"seen": [ord(name)]}

    d = deploy(named("A", "B", "C", body=body, graph={"fan_out": fan_out}))
    d.start()
    assert d.drain() == "failed"
    error = d.thread.error
    assert (error["code"], error["run"], error["type"], error["message"]) == (
        "node_failed",
        "C",
        "ValueError",
        "C broke",
    )
    assert [(run.run, run.status) for run in d.reader.node_runs("t")] == [("A", "done"), ("B", "done"), ("C", "failed")]
    assert d.checkpoints() == [(0, "input")]
    fixed.append(True)
    d.control("retry")
    assert d.thread.status == "waiting"
    assert d.drain() == "done"
    assert record.starts == {"A": 1, "B": 1, "C": 2}
    assert d.values() == {"seen": [65, 66, 67], "told": []}
    assert [run.status for run in d.reader.runs("t")] == ["done"]


def test_one_that_fails_ends_none_that_is_in_the_middle_of_an_effect(deploy):
    record, fixed, paid = Recorder(), [], []
    reached, go_on = threading.Event(), threading.Event()

    def pay():
        paid.append("B")
        reached.set()
        assert go_on.wait(20)
        return "paid"

    def body(name, state, ctx):
        record(name)
        if name == "B":
            ctx.effect(pay)
        if name == "C" and not fixed:
            message = "C broke"
            raise ValueError(message)
        return {"seen": [ord(name)]}

    d = deploy(named("A", "B", "C", body=body, graph={"fan_out": True}))
    other = d.worker_of(pid=2)
    d.start()
    d.work(d.queue.pop(0))
    a, b, c = d.queue
    d.queue.clear()
    running = threading.Thread(target=lambda: d.work(b, other))
    running.start()
    assert reached.wait(20)
    d.work(a)
    d.work(c)
    assert [(run.run, run.status) for run in d.reader.node_runs("t")] == [
        ("A", "done"),
        ("B", "ready"),
        ("C", "failed"),
    ]
    assert d.thread.status == "waiting"
    go_on.set()
    running.join()

    assert d.drain() == "failed"
    assert (d.thread.error["run"], d.thread.error["message"]) == ("C", "C broke")
    assert [(run.run, run.status) for run in d.reader.node_runs("t")] == [("A", "done"), ("B", "done"), ("C", "failed")]
    assert d.effects() == [("pay", "done", 1)]
    fixed.append(True)
    d.control("retry")
    assert d.drain() == "done"
    assert record.starts == {"A": 1, "B": 1, "C": 2}
    assert paid == ["B"]
    assert d.values()["seen"] == [65, 66, 67]


def test_one_that_is_blocked_and_one_that_failed_are_both_tried_again(deploy):
    record, fixed = Recorder(), []

    def body(name, state, ctx):
        record(name)
        if name == "A" and not fixed:
            raise OSError(name)
        return {"seen": [ord(name)]}

    d = deploy(named("A", "B", "C", body=body, graph={"fan_out": True}))
    d.start()
    d.work(d.queue.pop(0))
    d.execute("UPDATE keepstep_node_run SET deaths = 3, last_death = 'signal 9' WHERE run = 'B'")
    assert d.drain() == "blocked"
    assert d.error[0] == "worker_lost"
    assert "node 'B' took its process down 3 times (last: signal 9)" in d.error[1]
    assert record.starts == {"A": 1, "C": 1}
    fixed.append(True)
    d.control("retry")
    assert d.drain() == "done"
    assert record.starts == {"A": 2, "B": 1, "C": 1}
    assert d.values()["seen"] == [65, 66, 67]


@pytest.mark.parametrize("fan_out", [True, False])
def test_the_join_is_told_of_failures_that_are_continued_after(deploy, fan_out):
    def body(name, state, ctx):
        if name == "C":
            message = "C broke"
            raise ValueError(message)
        return {"seen": [ord(name)]}

    d = deploy(named("A", "B", "C", body=body, on_error="continue", graph={"fan_out": fan_out}))
    d.start()
    assert d.drain() == "done"
    assert d.values() == {"seen": [65, 66], "told": ["C: C broke"]}


# --- writes that meet ---


@pytest.mark.parametrize("fan_out", [True, False])
def test_two_writes_of_one_key_are_an_error_that_names_it(deploy, fan_out):
    record = Recorder()

    def body(name, state, ctx):
        record(name)
        return {"done": name == "A"}

    d = deploy(named("A", "B", body=body, graph={"fan_out": fan_out}))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "conflicting_writes"
    assert "'done'" in d.error[1]
    assert "'A'" in d.error[1]
    assert "'B'" in d.error[1]
    assert record.starts == {"A": 1, "B": 1}
    assert d.checkpoints() == [(0, "input")]


def test_what_is_merely_passed_on_is_no_conflict(deploy):
    def body(name, state, ctx):
        return {"shared": state["shared"], "count": state["count"]} | ({"done": True} if name == "A" else {})

    d = deploy(named("A", "B", body=body))
    d.start({"shared": {"a": 1}, "count": 5})
    assert d.drain() == "done"
    assert d.values() == {"shared": {"a": 1}, "count": 5, "done": True, "told": []}


@pytest.mark.parametrize("slow", ["A", "B"])
def test_the_order_of_a_reducer_is_that_of_the_node_runs_also_after_a_retry(deploy, slow):
    def body(name, state, ctx):
        if name == slow and ctx.attempt == 1:
            raise ConnectionError(name)
        return {"seen": [ord(name)]}

    d = deploy(named("A", "B", body=body, retry=Retry(attempts=2, delay=0.05, jitter=0), graph={"fan_out": False}))
    d.start()
    assert d.drain() == "done"
    assert d.values()["seen"] == [65, 66]


def test_subgraphs_that_hand_on_all_they_share_are_no_conflict(deploy):
    inner = Graph("inner", state=State)

    @inner.node
    def look(state, ctx):
        # Of a key with a reducer the unchanged value is an update like any other.
        return {key: state[key] for key in ("shared", "count")}

    inner.edge(START, "look")
    inner.edge("look", END)
    outer = Graph("outer", state=State)
    for name in ("left", "right"):
        outer.node(inner, name=name)
        outer.edge(START, name)
        outer.edge(name, END)
    d = deploy(outer)
    d.start({"shared": {"a": 1}, "count": 3, "total": 100, "seen": [1, 2]})
    assert d.drain() == "done"
    assert d.values() == {"shared": {"a": 1}, "count": 3, "total": 100, "seen": [1, 2]}


def test_two_subgraphs_beside_each_other(deploy):
    inner = Graph("inner", state=State)

    @inner.node
    def one(state, ctx):
        return {"total": 1}

    @inner.node
    def two(state, ctx):
        return {"total": 10}

    inner.edge(START, "one")
    inner.edge("one", "two")
    inner.edge("two", END)
    outer = Graph("outer", state=State, fan_out=True)
    for name in ("left", "right"):
        outer.node(inner, name=name)
        outer.edge(START, name)
        outer.edge(name, END)
    d = deploy(outer)
    d.start({"shared": {"a": 1}, "total": 100})
    assert d.drain() == "done"
    assert d.values() == {"shared": {"a": 1}, "total": 122}
    assert [[node["run"] for node in each.nodes] for each in d.reader.history("t")] == [
        [],
        ["left/one", "right/one"],
        ["left/two", "right/two"],
    ]


# --- people and fanned-out steps ---


def test_cancelling_refuses_what_is_still_running(deploy):
    reached, go_on = threading.Event(), threading.Event()

    def hold(number, ctx):
        if number == 1:
            reached.set()
            assert go_on.wait(20)

    graph, record = sends(fan_out=True, hook=hold)
    d = deploy(graph)
    other = d.worker_of(pid=2)
    d.start({"count": 3})
    d.work(d.queue.pop(0))
    d.work(d.queue.pop(0))
    nudge = d.queue.pop(0)
    running = threading.Thread(target=lambda: d.work(nudge, other))
    running.start()
    assert reached.wait(20)
    d.control("cancel", by="anna", reason="enough")
    cancelled = d.dump()
    go_on.set()
    running.join()

    assert d.drain() == "cancelled"
    assert d.dump() == cancelled
    assert [run.status for run in d.reader.node_runs("t")] == ["done", "cancelled", "cancelled"]
    assert record.starts == {"part 0": 1, "part 1": 1}
    assert d.thread.error == {"code": "cancelled", "message": "enough", "by": "anna"}
    assert [run.status for run in d.reader.runs("t")] == ["cancelled"]


def test_a_pause_holds_what_has_not_begun(deploy):
    graph, record = sends(fan_out=True)
    d = deploy(graph)
    d.start({"count": 2})
    d.work(d.queue.pop(0))
    d.control("pause")
    assert d.drain() == "waiting"
    assert d.sweep() == []
    assert record.starts == {}
    d.control("resume")
    assert [nudge.kind for nudge in d.queue] == ["node", "node"]
    assert d.drain() == "done"
    assert d.values()["joined"] == 2


def test_a_pause_also_holds_the_join(deploy):
    graph, record = sends(fan_out=True)
    d = deploy(graph)
    d.start({"count": 2})
    for _ in range(3):
        d.work(d.queue.pop(0))
    d.control("pause")
    assert d.drain() == "ready"
    assert record.starts == {"part 0": 1, "part 1": 1}
    d.control("resume")
    assert d.drain() == "done"
    assert d.values()["joined"] == 2


def test_each_node_run_waits_for_itself(deploy):
    graph = Graph("asks", state=State, fan_out=True)
    record = Recorder()

    @graph.node
    def part(state, ctx):
        record(f"before {state}")
        decision = ctx.approve(f"part {state}?")
        record(f"after {state}")
        return {"seen": [state], "total": int(decision.approved)}

    graph.route(START, lambda state: [Send("part", n) for n in range(3)], to=["part"])
    graph.edge("part", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "waiting"
    assert [run.status for run in d.reader.node_runs("t")] == ["waiting"] * 3
    approvals = {approval.question: approval for approval in d.approvals()}
    assert [approvals[f"part {n}?"].run for n in range(3)] == ["part#0", "part#1", "part#2"]
    d.decide(approval=approvals["part 1?"].id)
    assert d.drain() == "waiting"
    assert record.starts == {"before 0": 1, "before 1": 2, "before 2": 1, "after 1": 1}
    d.decide("reject", approval=approvals["part 0?"].id)
    d.decide(approval=approvals["part 2?"].id)
    assert d.drain() == "done"
    assert d.values() == {"seen": [0, 1, 2], "total": 2}


def test_a_failed_fanned_out_run_that_is_given_up_for_a_new_one(deploy):
    fixed = []

    def body(name, state, ctx):
        if name == "B" and not fixed:
            raise ValueError(name)
        return {"seen": [ord(name)]}

    d = deploy(named("A", "B", body=body, graph={"fan_out": True}))
    d.start()
    assert d.drain() == "failed"
    fixed.append(True)
    d.start({"count": 1})
    assert d.drain() == "done"
    assert d.values() == {"count": 1, "seen": [65, 66], "told": []}
    assert [run.status for run in d.reader.runs("t")] == ["failed", "done"]


@pytest.mark.parametrize("fan_out", [True, False])
@pytest.mark.parametrize("inside", [False, True])
def test_sends_are_told_of_failures_that_are_continued_after(deploy, fan_out, inside):
    graph = Graph("told", state=State, fan_out=fan_out)

    @graph.node(on_error="continue")
    def breaks(state, ctx):
        message = "broke"
        raise ValueError(message)

    @graph.node
    def part(state, ctx):
        return {"told": [f"{state}: {failure['message']}" for failure in ctx.failures]} if state == 1 else {}

    graph.edge(START, "breaks")
    graph.route("breaks", lambda _state: [Send("part", n) for n in range(3)], to=["part"])
    graph.edge("part", END)
    outer = graph
    if inside:
        outer = Graph("outer", state=State, fan_out=fan_out)
        outer.node(graph, name="within")
        outer.edge(START, "within")
        outer.edge("within", END)
    d = deploy(outer)
    d.start()
    assert d.drain() == "done"
    assert d.values() == {"told": ["1: broke"]}
