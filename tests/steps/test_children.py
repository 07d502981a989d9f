"""Children: spawned once, joined without a worker, told once how they ended, cancelled with their parent."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import pytest
from sqlalchemy import text

from keepstep import END, START, Child, ChildFailed, Graph, Retry, Send, append
from keepstep.cli.program import run
from keepstep.crashpoints import Died
from keepstep.errors import InvalidInput, StateError
from keepstep.runtime import children as book
from keepstep.runtime import superstep
from keepstep.store import children, errands, workers

AGAIN = Retry(attempts=3, delay=0)
PLAIN = {"$": "Finding", "v": {"price": {"$": "decimal", "v": "1.50"}}}


@dataclass
class Finding:
    price: Decimal


class Job(TypedDict, total=False):
    topic: str
    finding: Finding
    child: Child
    log: Annotated[list[Any], append]


def specialist(body=None, name="specialist"):
    """A child: finds something out, or fails, or waits, by its topic."""
    graph = Graph(name, state=Job)
    entered = graph.entered = []

    @graph.node
    def work(state, ctx):
        entered.append(ctx.thread)
        if body is not None:
            return body(state, ctx)
        if state["topic"] == "bad":
            message = "no such topic"
            raise ValueError(message)
        if state["topic"] == "slow":
            return {"log": [ctx.wait_signal("go").payload]}
        return {"finding": Finding(Decimal("1.50")), "log": [state["topic"]]}

    graph.edge(START, "work")
    graph.edge("work", END)
    return graph


def lead(body, *, retry=None, fan_out=None, asynchronous=False):
    """A parent of one node; `body(state, ctx)` gives what is logged."""
    graph = Graph("lead", state=Job, fan_out=fan_out)
    graph.entered = []
    if asynchronous:

        @graph.node(name="node", retry=retry)
        async def node_async(state, ctx):
            graph.entered.append(ctx.attempt)
            return {"log": [await body(state, ctx)]}

    else:

        @graph.node(retry=retry)
        def node(state, ctx):
            graph.entered.append(ctx.attempt)
            return {"log": [body(state, ctx)]}

    if fan_out:
        graph.route(START, lambda state: [Send("node", {"topic": topic}) for topic in "ab"], to=["node"])
    else:
        graph.edge(START, "node")
    graph.edge("node", END)
    return graph


def rows(d, columns="state, status, cancel"):
    with d.store.engine.connect() as connection:
        found = connection.execute(text(f"SELECT {columns} FROM keepstep_child ORDER BY created_at, name")).all()
    return [tuple(row) for row in found]


def threads_of(d, graph="specialist"):
    return sorted((thread.name, thread.status) for thread in d.reader.threads(graph=graph))


def errands_are_lost(monkeypatch):
    """From here on every process dies between a transaction and the errands that follow from it."""
    lost = lambda _runtime, nudges: [nudge for nudge in nudges if nudge.kind != "child"]  # noqa: E731
    for module in (book, superstep.children):
        monkeypatch.setattr(module, "attended", lost)
    monkeypatch.setattr("keepstep.runtime.commands.attended", lost)


def later(d):
    """Let the time pass after which an errand is believed lost, and sweep."""
    d.execute("UPDATE keepstep_child SET due_at = 0 WHERE due_at IS NOT NULL")
    return d.sweep()


# --- spawn and join ---


def test_a_parent_waits_for_its_children_holding_nothing_and_gets_their_states_with_their_types(deploy):
    expert = specialist()

    def body(_state, ctx):
        first, second = ctx.spawn(expert, {"topic": "slow"}), ctx.spawn(expert, {"topic": "b"})
        return ctx.join(first, second)

    d = deploy(lead(body), expert)
    d.start()
    assert d.drain() == "waiting"
    row = d.thread.row
    assert (row.lease_worker, row.seq) == (None, 0)
    assert d.checkpoints() == [(0, "input")]
    assert rows(d) == [("started", None, 0), ("delivered", "done", 0)]
    assert [(wait.kind, wait.status) for wait in d.reader.waits("t")] == [("child", "open"), ("child", "answered")]

    slow = d.reader.children("t")[0]
    assert (slow.parent, slow.parent_graph, slow.graph, slow.version, slow.status) == (
        *("t", "lead", "specialist", "1"),
        "waiting",
    )
    d.signal("go", 7, thread=slow.thread)
    assert d.drain() == "done"
    first, second = d.values()["log"][0]
    assert first == {"topic": "slow", "log": [7]}
    assert second == {"topic": "b", "log": ["b"], "finding": Finding(Decimal("1.50"))}
    assert rows(d) == [("delivered", "done", 0)] * 2
    assert d.graphs[0].entered == [1, 2]
    assert [(kin.parent, kin.run) for kin in d.reader.parents(slow.thread)] == [("t", slow.run)]
    assert [(audit.actor, audit.action) for audit in d.reader.audit(slow.thread)] == [
        ("parent", "start"),
        ("producer", "signal"),
    ]


def test_children_that_have_ended_before_the_join_are_there_at_once(deploy):
    expert = specialist()

    def body(_state, ctx):
        child = ctx.spawn(expert, {"topic": "a"})
        ctx.wait_signal("go")
        return ctx.join(child)[0]["topic"]

    d = deploy(lead(body), expert)
    d.start()
    assert d.drain() == "waiting"
    assert rows(d, "state, status, due_at") == [("ended", "done", None)], "nobody asks yet: nothing is left to do"
    d.signal("go")
    assert d.drain() == "done"
    assert d.values()["log"] == ["a"]
    assert rows(d) == [("delivered", "done", 0)]


def test_async_nodes_spawn_and_join(deploy):
    expert = specialist()

    async def body(_state, ctx):
        children = [await ctx.spawn(expert, {"topic": topic}) for topic in "ab"]
        async with asyncio.TaskGroup() as group:
            third = group.create_task(ctx.spawn(expert, {"topic": "c"}))
        states = await ctx.gather(ctx.join(*children), ctx.join(third.result()))
        return [state["topic"] for several in states for state in several]

    d = deploy(lead(body, asynchronous=True), expert)
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [["a", "b", "c"]]
    assert Counter(expert.entered).most_common(1)[0][1] == 1


def test_a_join_is_gathered_with_other_waits(deploy):
    expert = specialist()

    def body(_state, ctx):
        child = ctx.spawn(expert, {"topic": "slow"})
        states, decision = ctx.gather(lambda: ctx.join(child), lambda: ctx.approve("Ship?"))
        return [states[0]["log"], decision.verdict]

    d = deploy(lead(body), expert)
    d.start()
    assert d.drain() == "waiting"
    d.decide()
    assert (d.queue, d.thread.status) == ([], "waiting")
    d.signal("go", 1, thread=d.reader.children("t")[0].thread)
    assert d.drain() == "done"
    assert d.values()["log"] == [[[1], "approve"]]


def test_node_runs_of_a_fan_out_have_children_of_their_own(deploy):
    expert = specialist()
    d = deploy(
        lead(
            lambda state, ctx: ctx.join(ctx.spawn(expert, {"topic": state["topic"]}))[0]["log"],
            fan_out=True,
        ),
        expert,
    )
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [["a"], ["b"]]
    assert rows(d, "run, state") == [("node#0", "delivered"), ("node#1", "delivered")]


def test_a_child_kept_in_the_state_is_joined_by_a_later_node(deploy):
    expert = specialist()
    graph = Graph("lead", state=Job)
    graph.node(lambda _state, ctx: {"child": ctx.spawn(expert, {"topic": "slow"})}, name="begin")
    graph.node(lambda state, ctx: {"log": [ctx.join(state["child"])[0]["log"]]}, name="collect")
    for pair in ((START, "begin"), ("begin", "collect"), ("collect", END)):
        graph.edge(*pair)
    d = deploy(graph, expert)
    d.start()
    assert d.drain() == "waiting"
    d.signal("go", 3, thread=d.reader.children("t")[0].thread)
    assert d.drain() == "done"
    assert d.values()["log"] == [[3]]


def test_children_have_children(deploy):
    expert = specialist()
    middle = specialist(lambda state, ctx: {"log": ctx.join(ctx.spawn(expert, state))[0]["log"]}, name="middle")
    d = deploy(lead(lambda _state, ctx: ctx.join(ctx.spawn(middle, {"topic": "deep"}))[0]["log"]), middle, expert)
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [["deep"]]
    ((name, _),) = threads_of(d)
    assert name.startswith("t/middle-")
    assert "/specialist-" in name


# --- failure policies ---


def failing(expert, on_failure):
    def body(_state, ctx):
        children = [ctx.spawn(expert, {"topic": topic}) for topic in ("a", "bad", "slow")]
        try:
            return [
                (each.child.graph, each.status, each.state, each.error and each.error["message"])
                for each in ctx.join(*children, on_failure=on_failure)
            ]
        except ChildFailed as error:
            return (error.code, error.status, error.thread == children[1].thread, error.error["code"], str(error))

    return lead(body)


@pytest.mark.parametrize("on_failure", ["raise", "return"])
def test_a_failed_and_a_cancelled_child_are_told_as_the_join_wants_it(deploy, on_failure):
    expert = specialist()
    d = deploy(failing(expert, on_failure), expert)
    d.start()
    assert d.drain() == "waiting", "both policies wait for all: what a retry sees must not depend on time"
    slow = d.reader.children("t")[2].thread
    d.control("cancel", thread=slow, reason="no money", by="anna")
    assert d.drain() == "done"
    (told,) = d.values()["log"]
    bad = d.reader.children("t")[1].thread
    if on_failure == "raise":
        text = f"child '{bad}' of graph 'specialist' has failed: no such topic (and 1 others)"
        assert told == ("child_failed", "failed", True, "node_failed", text)
    else:
        finding = Finding(Decimal("1.50"))
        assert told == [
            ("specialist", "done", {"topic": "a", "log": ["a"], "finding": finding}, None),
            ("specialist", "failed", None, "no such topic"),
            ("specialist", "cancelled", None, "no money"),
        ]


def test_a_failure_that_nobody_catches_fails_the_parent_and_costs_no_further_attempt(deploy):
    expert = specialist()
    graph = lead(lambda _state, ctx: ctx.join(ctx.spawn(expert, {"topic": "bad"})), retry=AGAIN)
    d = deploy(graph, expert)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "child_failed"
    assert graph.entered == [1, 2]


def test_a_failed_child_that_is_retried_before_its_parent_was_told_has_not_failed(deploy):
    fixed = []
    expert = specialist(lambda state, _ctx: {"log": [1 // len(fixed) if state["topic"] == "bad" else 0]})

    def body(_state, ctx):
        child = ctx.spawn(expert, {"topic": "bad"})
        ctx.wait_signal("go")
        return ctx.join(child)[0]["log"]

    d = deploy(lead(body), expert)
    d.start()
    d.drain()
    assert rows(d) == [("ended", "failed", 0)]
    fixed.append(True)
    d.control("retry", thread=d.reader.children("t")[0].thread)
    assert rows(d) == [("started", None, 0)]
    d.signal("go")
    assert d.drain() == "done"
    assert (d.values()["log"], rows(d)) == ([[1]], [("delivered", "done", 0)])


def test_a_failed_child_that_is_retried_after_its_parent_was_told_says_nothing_more(deploy):
    fixed = []
    expert = specialist(lambda _state, _ctx: {"log": [1 // len(fixed)]})

    def body(_state, ctx):
        (result,) = ctx.join(ctx.spawn(expert, {"topic": "x"}), on_failure="return")
        ctx.wait_signal("go")
        return result.status

    d = deploy(lead(body), expert)
    d.start()
    assert d.drain() == "waiting"
    fixed.append(True)
    child = d.reader.children("t")[0].thread
    d.control("retry", thread=child)
    d.drain()
    assert d.reader.get(child).status == "done"
    assert rows(d) == [("delivered", "failed", 0)]
    d.signal("go")
    assert d.drain() == "done"
    assert d.values()["log"] == ["failed"]


def test_a_parent_that_fails_leaves_its_children_alone_and_finds_them_when_it_is_retried(deploy):
    expert, broken = specialist(), [True]

    def body(_state, ctx):
        child = ctx.spawn(expert, {"topic": "slow"})
        if broken:
            message = "not yet"
            raise ValueError(message)
        return ctx.join(child)[0]["log"]

    d = deploy(lead(body), expert)
    d.start()
    assert d.drain() == "failed"
    ((child, status),) = threads_of(d)
    assert status == "waiting"
    broken.clear()
    d.control("retry")
    assert d.drain() == "waiting"
    d.signal("go", 2, thread=child)
    assert d.drain() == "done"
    assert (d.values()["log"], len(rows(d))) == ([[2]], 1)


# --- retries ---


def test_a_retry_finds_the_children_of_the_attempt_before_it(deploy):
    expert = specialist()

    def body(_state, ctx):
        same = [ctx.spawn(expert, {"topic": "a"}) for _ in range(2)]
        keyed = ctx.spawn(expert, {"topic": "b"}, key="b", thread="bee")
        assert ctx.spawn(expert, {"topic": "b"}, key="b", thread="bee") == keyed
        if ctx.attempt < 3:
            message = "again"
            raise ValueError(message)
        return [state["topic"] for state in ctx.join(*same, keyed)]

    graph = lead(body, retry=AGAIN)
    d = deploy(graph, expert)
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [["a", "a", "b"]]
    names = [name for name, _ in threads_of(d)]
    assert (len(rows(d)), len(names), names[0]) == (3, 3, "bee")
    assert Counter(expert.entered) == dict.fromkeys(names, 1)


@pytest.mark.parametrize("catches", [False, True], ids=["plain", "caught"])
@pytest.mark.parametrize("again", ["other input", "nothing", "another child first"])
def test_a_retry_that_goes_another_way_is_blocked(timed, again, catches):
    expert = specialist()

    def asks(ctx):
        if ctx.attempt == 1:
            ctx.spawn(expert, {"topic": "a"}, key="k")
            message = "again"
            raise ValueError(message)
        if again != "nothing":
            ctx.spawn(expert, {"topic": "b"}, key="k" if again == "other input" else "other")
        return "went on"

    def body(_state, ctx):
        if not catches or ctx.attempt == 1:
            return asks(ctx)
        try:
            return asks(ctx)
        except Exception:  # noqa: BLE001  as a careless node does
            return "swallowed"

    d = timed(lead(body, retry=AGAIN), expert)
    d.start()
    assert d.drain() == "blocked"
    code, message = d.error
    assert code == "diverged"
    assert "child 't/specialist-" in message
    assert len(rows(d)) == 1


def test_a_payment_is_not_made_by_a_retry_that_has_not_asked_for_its_children_again(deploy):
    expert, paid = specialist(), []

    def pay():
        paid.append(1)

    def body(_state, ctx):
        if ctx.attempt == 1:
            ctx.spawn(expert, {"topic": "a"})
            message = "again"
            raise ValueError(message)
        ctx.effect(pay)

    d = deploy(lead(body, retry=AGAIN), expert)
    d.start()
    assert (d.drain(), d.error[0], paid) == ("blocked", "diverged", [])


def test_one_key_is_one_child(deploy):
    expert = specialist()

    def body(_state, ctx):
        ctx.spawn(expert, {"topic": "a"}, key="k")
        ctx.spawn(expert, {"topic": "b"}, key="k")

    d = deploy(lead(body), expert)
    d.start()
    assert d.drain() == "failed"
    assert d.error == ("conflict", "spawn key 'k' of graph 'specialist' was used for another child of this node")
    assert len(rows(d)) == 1


def test_an_attempt_that_lost_its_lease_spawns_nothing(deploy):
    expert = specialist()

    def body(_state, ctx):
        workers.release_child(other, d.worker.owner.worker, 1, reason="given up")
        ctx.spawn(expert, {"topic": "a"})

    d = deploy(lead(body), expert)
    other = d.open()
    d.start()
    d.work(d.queue.pop(0))
    assert (rows(d), threads_of(d), d.graphs[0].entered) == ([], [], [1])


# --- what a death in between leaves to the sweep ---


@pytest.mark.parametrize("lost", ["start", "telling"])
def test_the_sweep_does_what_a_dead_process_was_about_to(deploy, monkeypatch, lost):
    expert = specialist()
    d = deploy(lead(lambda _state, ctx: ctx.join(ctx.spawn(expert, {"topic": "slow"}))[0]["log"]), expert)
    with monkeypatch.context() as patched:
        if lost == "start":
            errands_are_lost(patched)
        d.start()
        assert d.drain() == "waiting"
    if lost == "start":
        assert (rows(d), threads_of(d)) == ([("wanted", None, 0)], [])
        assert d.sweep() == [], "whoever is about to start it is given time"
        assert [nudge.kind for nudge in later(d)] == ["step"]
        d.drain()
    ((child, status),) = threads_of(d)
    assert status == "waiting"
    with monkeypatch.context() as patched:
        if lost == "telling":
            errands_are_lost(patched)
        d.signal("go", 5, thread=child)
        status = d.drain()
    if lost == "telling":
        assert (status, rows(d)) == ("waiting", [("ended", "done", 0)])
        assert [nudge.kind for nudge in later(d)] == ["step"]
        status = d.drain()
    assert (status, d.values()["log"], expert.entered) == ("done", [[5]], [child, child])
    assert rows(d, "state, due_at") == [("delivered", None)]


def test_a_death_in_the_middle_of_a_spawn_leaves_one_child(deploy, monkeypatch):
    expert, deaths = specialist(), []
    d = deploy(lead(lambda _state, ctx: ctx.join(ctx.spawn(expert, {"topic": "a"}))[0]["log"]), expert)

    def dies(name, _detail=""):
        if name == "after_spawn" and not deaths:
            deaths.append(name)
            raise Died

    monkeypatch.setattr(book, "reach", dies)
    d.start()
    with pytest.raises(Died):
        d.drain()
    assert (rows(d), threads_of(d)) == ([("wanted", None, 0)], [])
    workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9")
    d.execute("UPDATE keepstep_thread SET next_nudge_at = 0")
    d.sweep()
    assert d.drain() == "done"
    assert (d.values()["log"], len(rows(d)), len(expert.entered)) == ([["a"]], 1, 1)


def test_errands_run_twice_are_run_once(deploy):
    expert = specialist()
    d = deploy(lead(lambda _state, ctx: ctx.join(ctx.spawn(expert, {"topic": "a"}))[0]["log"]), expert)
    d.start()
    assert d.drain() == "done"
    (run,) = rows(d, "run_id")
    before = d.dump()
    assert errands.run(d.store, children.nudge(run[0], None)) == []
    assert errands.run(d.store, children.nudge("nobody", None)) == []
    assert d.dump() == before


# --- cancelling ---


def test_cancelling_a_parent_cancels_its_children_and_theirs(deploy):
    expert = specialist()
    middle = specialist(
        lambda state, ctx: {"log": ctx.join(ctx.spawn(expert, {"topic": "slow"}))[0]["log"]}, name="middle"
    )

    def body(_state, ctx):
        ended = ctx.spawn(expert, {"topic": "a"})
        return ctx.join(ended, ctx.spawn(middle, {"topic": "x"}), ctx.spawn(expert, {"topic": "slow"}))

    d = deploy(lead(body), middle, expert)
    d.start()
    assert d.drain() == "waiting"
    d.control("cancel", by="anna")
    assert d.queue == []
    assert {thread.name: thread.status for thread in d.reader.threads() if thread.status != "cancelled"} == {
        d.reader.children("t")[0].thread: "done"
    }
    assert sorted(rows(d)) == [("delivered", "cancelled", 1)] * 3 + [("delivered", "done", 0)]
    child = d.reader.children("t")[1]
    assert d.reader.get(child.thread).error == {
        "code": "cancelled",
        "message": "its parent was cancelled",
        "by": "parent",
    }
    assert [audit.action for audit in d.reader.audit(child.thread)] == ["start", "cancel"]
    assert [wait.status for wait in d.reader.waits(child.thread)] == ["closed"]
    assert rows(d, "due_at") == [(None,)] * 4


def test_a_child_that_was_not_started_is_never_started(deploy, monkeypatch):
    expert = specialist()
    d = deploy(lead(lambda _state, ctx: ctx.join(ctx.spawn(expert, {"topic": "a"}))), expert)
    with monkeypatch.context() as patched:
        errands_are_lost(patched)
        d.start()
        assert d.drain() == "waiting"
        d.control("cancel")
    assert rows(d) == [("delivered", "cancelled", 1)]
    assert (later(d), threads_of(d)) == ([], [])


def test_a_cancel_that_died_half_way_is_finished_by_the_sweep(deploy, monkeypatch):
    expert = specialist()
    d = deploy(lead(lambda _state, ctx: ctx.join(ctx.spawn(expert, {"topic": "slow"}))), expert)
    d.start()
    d.drain()
    with monkeypatch.context() as patched:
        errands_are_lost(patched)
        d.control("cancel")
    assert rows(d) == [("started", None, 1)]
    assert [status for _, status in threads_of(d)] == ["waiting"]
    assert d.sweep() == [], "whoever is about to cancel it is given time"
    later(d)
    assert [status for _, status in threads_of(d)] == ["cancelled"]
    assert rows(d, "state, status, due_at") == [("delivered", "cancelled", None)]


def result_of(expert, **spawned):
    """A parent's body that logs how its one child ended."""

    def body(_state, ctx):
        [result] = ctx.join(ctx.spawn(expert, {"topic": "slow"}, **spawned), on_failure="return")
        return result.state["log"] if result.state else f"{result.status}: {result.error['message']}"

    return body


@pytest.mark.parametrize("lost", [False, True], ids=["at once", "by the sweep"])
@pytest.mark.parametrize("cancelled", ["before it began", "while it waited", "while it was never started"])
def test_a_parent_that_is_taken_up_again_takes_up_the_children_that_were_cancelled_with_it(
    deploy, monkeypatch, lost, cancelled
):
    expert = specialist()
    middle = specialist(lambda _state, ctx: {"log": [result_of(expert)(_state, ctx)]}, name="middle")
    d = deploy(lead(result_of(middle)), middle, expert)
    with monkeypatch.context() as patched:
        if cancelled == "while it was never started":
            errands_are_lost(patched)
        d.start()
        if cancelled == "before it began":
            d.work(d.queue.pop(0))
            d.queue.clear()
        else:
            assert d.drain() == "waiting"
        d.control("cancel")
    assert {(state, status) for state, status, _ in rows(d)} == {("delivered", "cancelled")}
    with monkeypatch.context() as patched:
        if lost:
            errands_are_lost(patched)
        d.control("retry")
    if lost:
        later(d)
        later(d)
    assert d.drain() == "waiting"
    assert rows(d) == [("started", None, 0)] * 2

    [(child, status)] = threads_of(d)
    assert status == "waiting"
    d.send("signal", thread=child, name="go", payload="on")
    assert d.drain() == "done"
    assert d.values()["log"] == [[["on"]]]
    assert rows(d, "state, status, cancel, error, due_at") == [("delivered", "done", 0, None, None)] * 2


def test_children_of_an_earlier_run_are_not_taken_up_again(deploy):
    expert = specialist()
    d = deploy(lead(result_of(expert)), expert)
    for _ in range(2):
        d.start()
        d.drain()
        d.control("cancel")
    d.control("retry")
    assert d.drain() == "waiting"
    assert sorted(status for _, status in threads_of(d)) == ["cancelled", "waiting"]


@pytest.mark.parametrize("then", ["another run", "retried and done", "retried and waiting"])
def test_a_child_that_went_on_after_it_was_cancelled_with_its_parent_is_told_as_it_is(deploy, then):
    expert = specialist()
    d = deploy(lead(result_of(expert, thread="shared")), expert)
    d.start()
    d.drain()
    d.control("cancel")
    if then == "another run":
        d.send("start", graph="specialist", thread="shared", input={"topic": "a"})
    else:
        d.control("retry", thread="shared")
        d.drain()
    if then == "retried and done":
        d.signal("go", 1, thread="shared")
    d.drain()
    d.control("retry")
    status = d.drain()
    if then == "retried and waiting":
        assert (status, rows(d)) == ("waiting", [("started", None, 0)])
        d.signal("go", 1, thread="shared")
        status = d.drain()
    told = "cancelled: its parent was cancelled" if then == "another run" else [1]
    assert (status, d.values()["log"]) == ("done", [told])


def test_a_child_that_somebody_else_cancelled_stays_cancelled_when_its_parent_is_taken_up_again(deploy, monkeypatch):
    expert = specialist()
    d = deploy(lead(result_of(expert)), expert)
    d.start()
    d.drain()
    with monkeypatch.context() as patched:
        errands_are_lost(patched)
        d.control("cancel", thread=d.reader.children("t")[0].thread, reason="no money")
        d.control("cancel")
    d.control("retry")
    assert (d.drain(), d.values()["log"]) == ("done", ["cancelled: no money"])


@pytest.mark.parametrize("begun", [True, False])
def test_a_cancel_of_the_parent_leaves_the_run_behind_the_childs_alone(deploy, begun):
    expert = specialist()
    d = deploy(lead(result_of(expert, thread="shared")), expert)
    d.start()
    d.work(d.queue.pop(0))
    if begun:
        d.drain()
    d.send("start", graph="specialist", thread="shared", input={"topic": "a"})
    d.control("cancel")
    d.drain()
    assert [run.status for run in d.reader.runs("shared")] == ["cancelled", "done"]
    assert d.reader.get("shared").status == "done"
    assert rows(d, "state, status, cancel, due_at") == [("delivered", "cancelled", 1, None)]
    d.control("retry")
    assert (d.drain(), d.values()["log"]) == ("done", ["cancelled: its parent was cancelled"])


@pytest.mark.parametrize("lost", [False, True], ids=["at once", "by the sweep"])
def test_a_child_that_was_told_and_is_retried_is_cancelled_with_its_parent(deploy, monkeypatch, lost):
    fixed = []

    def fails_once(_state, ctx):
        if not fixed:
            message = "not yet"
            raise ValueError(message)
        ctx.wait_signal("go")

    expert = specialist(fails_once)

    def body(_state, ctx):
        ctx.join(ctx.spawn(expert, {"topic": "x"}), on_failure="return")
        ctx.wait_signal("go")

    d = deploy(lead(body), expert)
    d.start()
    assert d.drain() == "waiting"
    fixed.append(True)
    child = d.reader.children("t")[0].thread
    d.control("retry", thread=child)
    d.drain()
    assert d.reader.get(child).status == "waiting"
    with monkeypatch.context() as patched:
        if lost:
            errands_are_lost(patched)
        d.control("cancel")
    if lost:
        later(d)
    assert d.reader.get(child).status == "cancelled"
    assert rows(d, "state, status, cancel, due_at") == [("delivered", "failed", 0, None)]


def test_two_node_runs_that_join_one_child_are_both_told(deploy, monkeypatch):
    expert = specialist()
    graph = Graph("lead", state=Job, fan_out=True)
    graph.node(lambda _state, ctx: {"child": ctx.spawn(expert, {"topic": "slow"})}, name="begin")
    for name in ("early", "late"):
        graph.node(lambda state, ctx, name=name: {"log": [(name, ctx.join(state["child"])[0]["log"])]}, name=name)
        graph.edge("begin", name)
        graph.edge(name, END)
    graph.edge(START, "begin")
    d = deploy(graph, expert)
    d.start()
    held = []
    while d.queue:
        nudge = d.queue.pop(0)
        if nudge.run == "late":
            held.append(nudge)
        else:
            d.work(nudge)
    with monkeypatch.context() as patched:
        errands_are_lost(patched)  # `early` has parked, and has not been told when `late` parks
        d.signal("go", 1, thread=d.reader.children("t")[0].thread)
        d.drain()
        d.queue += held
        assert d.drain() == "done"
    assert d.values()["log"] == [("early", [1]), ("late", [1])]
    assert rows(d, "state, status, due_at") == [("delivered", "done", None)]


def test_a_parent_that_is_taken_up_again_in_time_keeps_its_children(deploy, monkeypatch):
    expert = specialist()
    d = deploy(lead(lambda _state, ctx: ctx.join(ctx.spawn(expert, {"topic": "slow"}))[0]["log"]), expert)
    d.start()
    d.drain()
    with monkeypatch.context() as patched:
        errands_are_lost(patched)
        d.control("cancel")
    d.control("retry")
    assert rows(d) == [("started", None, 0)]
    later(d)
    assert d.drain() == "waiting"

    [(child, status)] = threads_of(d)
    assert status == "waiting"
    d.send("signal", thread=child, name="go", payload="on")
    assert d.drain() == "done"
    assert d.values()["log"] == [["on"]]


def test_a_crowd_of_children_is_cancelled_without_holding_up_the_one_who_asked(deploy):
    expert, count = specialist(), book._AT_ONCE_MAX + 5

    def body(_state, ctx):
        return ctx.join(*(ctx.spawn(expert, {"topic": "slow", "log": [number]}) for number in range(count)))

    d = deploy(lead(body), expert)
    d.start()
    d.drain()
    d.control("cancel")
    assert Counter(status for _, status in threads_of(d)) == {"cancelled": book._AT_ONCE_MAX, "waiting": 5}
    later(d)
    assert Counter(status for _, status in threads_of(d)) == {"cancelled": count}


def test_a_running_child_is_told_nothing_and_writes_nothing_when_its_parent_is_cancelled(deploy):
    paid = []

    def pay():
        paid.append(1)

    def works(_state, ctx):
        d.control("cancel", worker=person)
        ctx.effect(pay)

    expert = specialist(works)
    d = deploy(lead(lambda _state, ctx: ctx.join(ctx.spawn(expert, {"topic": "a"}))), expert)
    person = d.worker_of(pid=2)
    d.start()
    assert d.drain() == "cancelled"
    assert ([status for _, status in threads_of(d)], paid) == (["cancelled"], [])


# --- names and graphs ---


def test_a_graph_known_by_its_name_gives_plain_values_and_is_waited_for_visibly(deploy):
    expert = specialist()
    parent = lead(lambda _state, ctx: ctx.join(ctx.spawn("specialist", {"topic": "a"}))[0])
    d = deploy(parent)
    d.start()
    assert d.drain() == "waiting"
    (child,) = d.reader.children("t")
    assert (child.state, child.status, child.error) == (
        "wanted",
        None,
        {"code": "unknown_graph", "message": "no worker carries a graph named 'specialist'"},
    )
    assert later(d) == []
    other = deploy(expert, url=d.url)
    later(d)
    while d.queue:
        nudge = d.queue.pop(0)
        d.work(nudge, d.worker if nudge.thread_id == d.thread.id else other.worker)
        d.queue += [other.queue.pop() for _ in other.queue[:]]
    assert d.thread.status == "done"
    (told,) = d.values()["log"]
    assert told == {"topic": "a", "log": ["a"], "finding": PLAIN}


def test_a_thread_that_is_there_is_given_another_run_unless_one_has_not_ended(deploy):
    expert = specialist()

    def body(state, ctx):
        child = ctx.spawn(expert, {"topic": state["topic"]}, thread="memory")
        (result,) = ctx.join(child, on_failure="return")
        return result.state["log"] if result.state else result.error["code"]

    d = deploy(lead(body), expert)
    for topic in ("a", "b"):
        d.start({"topic": topic})
        assert d.drain() == "done"
    assert d.values()["log"] == [["a"], ["a", "b"]]
    d.send("start", graph="specialist", thread="memory", input={"topic": "slow"})
    d.drain()
    d.start({"topic": "c"})
    assert d.drain() == "done"
    assert d.values()["log"][2] == "run_in_progress"
    assert d.reader.get("memory").status == "waiting"
    assert [kin.status for kin in d.reader.parents("memory")] == ["done", "done"]


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda ctx, expert: ctx.spawn(expert, {"topics": 1}), StateError, "topics"),
        (lambda ctx, expert: ctx.spawn(expert, {"topic": 1}, thread="x"), StateError, "topic"),
        (lambda ctx, expert: ctx.spawn(expert, {}, thread=""), InvalidInput, "a thread's name"),
        (lambda ctx, expert: ctx.spawn(expert, {}, key="\n"), InvalidInput, "a spawn key"),
        (lambda ctx, expert: ctx.spawn(7, {}), InvalidInput, "a graph's name"),
        (lambda ctx, expert: ctx.spawn("specialist", {"topic": object()}), InvalidInput, "$.input.topic"),
        (lambda ctx, expert: ctx.join("child"), InvalidInput, "ctx.join takes the children that ctx.spawn returned"),
        (lambda ctx, expert: ctx.join(Child("g", "n", "r")), InvalidInput, "has no child 'n' of graph 'g'"),
        (lambda ctx, expert: ctx.join(on_failure="ignore"), InvalidInput, "on_failure must be one of raise, return"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(timed, act, error, says):
    expert, seen = specialist(), []

    def body(_state, ctx):
        with pytest.raises(error) as raised:
            act(ctx, expert)
        seen.append(raised.value.message)
        return ctx.join()

    d = timed(lead(body), expert)
    d.start()
    assert (d.drain(), d.values()["log"], rows(d)) == ("done", [[]], [])
    assert says in seen[0]


def test_a_child_of_another_thread_is_nobodys_to_join(deploy):
    expert, kept = specialist(), []

    def body(state, ctx):
        if state["topic"] == "spawn":
            kept.append(ctx.spawn(expert, {"topic": "a"}))
            return None
        return ctx.join(*kept)

    d = deploy(lead(body), expert)
    d.start({"topic": "spawn"})
    d.drain()
    d.start({"topic": "join"}, thread="thief")
    d.drain()
    thief = d.reader.get("thief")
    assert (thief.status, thief.error["code"]) == ("failed", "invalid_input")


# --- looking ---


def test_the_command_line_shows_parent_and_children(timed, sqlite_url, monkeypatch, capsys):
    expert = specialist()

    def body(_state, ctx):
        return ctx.join(*(ctx.spawn(name, {"topic": topic}) for name, topic in (("nobody", "x"), (expert, "slow"))))

    d = timed(lead(body), expert, specialist(name="other"))
    d.start()
    d.drain()
    monkeypatch.setenv("KEEPSTEP_DATABASE", sqlite_url)
    unknown, child = d.reader.children("t")

    assert run(["show", "t"]) == 0
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"node child {unknown.thread}" in told
    assert "Children (0 of 2 ended, the last 2)" in told
    assert f"{unknown.thread} nobody wanted node unknown_graph: no worker carries a graph named 'nobody'" in told
    assert f"{child.thread} specialist waiting node" in told
    assert run(["show", child.thread]) == 0
    assert "parent t (lead)" in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert run(["show", child.thread, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (parent,) = document["parents"]
    assert (parent["parent"], parent["run"], parent["state"], document["children"]) == ("t", child.run, "started", [])
    assert run(["threads"]) == 0
    assert f"waits for child {unknown.thread}" in " ".join(capsys.readouterr().out.split())

    d.execute("UPDATE keepstep_child SET created_at = 0")
    run(["doctor", "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    text = "1 children of nobody are wanted and not started: no live worker carries a graph of that name"
    assert [check["text"] for check in checks if "children" in check["text"]] == [text]
