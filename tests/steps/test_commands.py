"""Commands: accepted once, refused with a typed error, and a refusal writes nothing."""

from __future__ import annotations

import threading
from typing import Annotated, TypedDict

import pytest

from keepstep import END, START, Graph, append
from keepstep.errors import (
    Ambiguous,
    Conflict,
    InvalidInput,
    NotFound,
    NotStorable,
    RunInProgress,
    StateError,
    TooLarge,
    UnknownGraph,
    WrongStatus,
)
from keepstep.store.leases import Nudge
from keepstep.store.status import TRANSITIONS


class State(TypedDict, total=False):
    n: int
    log: Annotated[list[int], append]


def counts(name="counts", broken=()):
    """A graph of one node, which logs n, or fails while `broken` is not empty."""
    graph = Graph(name, state=State)

    @graph.node
    def count(state, ctx):
        if broken:
            raise broken[0]
        return {"log": [state["n"]]}

    graph.edge(START, "count")
    graph.edge("count", END)
    return graph


# --- start ---


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"graph": "unheard of"}, UnknownGraph, "'unheard of'"),
        ({"given": {"n": "one"}}, StateError, "$.n"),
        ({"given": {"m": 1}}, StateError, "$.m"),
        ({"given": 7}, StateError, "int"),
        ({"given": {"n": object()}}, NotStorable, "$.input.n"),
        ({"given": {"log": [1] * 300}}, TooLarge, "$.input.log"),
        ({"thread": ""}, InvalidInput, "thread"),
        ({"thread": "a\0b"}, InvalidInput, "thread"),
        ({"thread": "x" * 201}, InvalidInput, "thread"),
        ({"tenant": "a\nb"}, InvalidInput, "tenant"),
        ({"application": "\u200b"}, InvalidInput, "application"),
    ],
)
def test_a_start_that_cannot_be_changes_nothing(deploy, fields, error, text):
    d = deploy(counts(), value_bytes_max=200)
    before = d.dump()
    with pytest.raises(error) as caught:
        d.start(**fields)
    assert text in caught.value.message
    assert (d.dump(), d.queue) == (before, [])


def test_one_request_is_one_run(deploy):
    d = deploy(counts())
    first = d.start({"n": 1}, id="c1", request_id="order-7")
    before = d.dump()

    again = d.start({"n": 1}, id="c1", request_id="order-7")
    resent = d.start({"n": 1}, id="c2", request_id="order-7")

    assert (first.duplicate, again.duplicate, resent.duplicate) == (False, True, True)
    assert {accepted.thread_id for accepted in (first, again, resent)} == {first.thread_id}
    assert resent.run_id == first.run_id
    assert d.dump() == before
    assert len(d.queue) == 1


@pytest.mark.parametrize(
    "change", [{"given": {"n": 2}}, {"thread": "other"}, {"step_limit": 9}, {"given": {"n": True}}]
)
def test_one_request_for_two_things_is_a_conflict(deploy, change):
    d = deploy(counts())
    d.start({"n": 1}, request_id="order-7")
    before = d.dump()
    with pytest.raises(Conflict, match="'order-7'"):
        d.start(**{"given": {"n": 1}, "request_id": "order-7", **change})
    assert d.dump() == before


def test_requests_are_each_tenants_own(deploy):
    d = deploy(counts())
    first = d.start({"n": 1}, request_id="order-7")
    other = d.start({"n": 2}, request_id="order-7", tenant="other")
    assert other.duplicate is False
    assert other.thread_id != first.thread_id


def test_runs_queue_up_and_run_in_order(deploy):
    d = deploy(counts())
    ids = [d.start({"n": n}).run_id for n in range(1, 5)]
    assert d.queue == [Nudge("step", d.thread.id, 1, f"{d.graphs[0].name}@1", 1)]
    assert d.drain() == "done"
    assert d.values() == {"n": 4, "log": [1, 2, 3, 4]}
    assert [(run.id, run.number, run.status, run.steps) for run in d.reader.runs("t")] == [
        (ids[n - 1], n, "done", 1) for n in range(1, 5)
    ]
    assert [kind for _, kind in d.checkpoints()] == ["input", "step"] * 4


def test_a_run_may_be_refused_while_another_has_not_ended(deploy):
    d = deploy(counts())
    d.start({"n": 1})
    before = d.dump()
    with pytest.raises(RunInProgress, match=r"has not ended \(ready\)"):
        d.start({"n": 2}, if_running="reject")
    assert d.dump() == before
    d.drain()
    d.start({"n": 2}, if_running="reject")
    assert d.drain() == "done"
    assert d.values()["log"] == [1, 2]


@pytest.mark.parametrize("same", ["command", "request", "thread"])
def test_starts_that_arrive_at_once(deploy, same):
    d = deploy(counts())
    runtimes = [d.worker_of(pid=pid) for pid in range(2, 6)]
    barrier, accepted = threading.Barrier(4), []

    def start(number, runtime):
        fields = {"command": {"id": "c1"}, "request": {"request_id": "r1"}, "thread": {}}[same]
        barrier.wait()
        accepted.append(d.start({"n": 1}, worker=runtime, **fields))

    racers = [threading.Thread(target=start, args=pair) for pair in enumerate(runtimes)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(accepted) == 4
    assert len({each.thread_id for each in accepted}) == 1
    fresh = [each for each in accepted if not each.duplicate]
    assert len(fresh) == (4 if same == "thread" else 1)
    assert len(d.queue) == 1
    assert d.drain() == "done"
    assert d.values()["log"] == [1] * len(fresh)


def test_an_input_that_no_longer_fits_when_its_run_begins_fails_that_run_only(deploy):
    """The thread's state has moved on meanwhile, or another worker's graph let it in."""
    d = deploy(counts())
    d.start({"n": 1})
    d.start({"n": 2})
    d.start({"n": 3})
    bad = d.worker.plain_codec.encode({"n": "two"})
    d.execute("UPDATE keepstep_run SET input = :bad WHERE number = 2", bad=bad)
    d.drain()
    assert [run.status for run in d.reader.runs("t")] == ["done", "failed", "done"]
    assert d.thread.status == "done"
    assert d.values()["log"] == [1, 3]


# --- control ---


def test_pause_and_resume(deploy):
    d = deploy(counts())
    d.start({"n": 1})
    d.control("pause")
    assert d.drain() == "ready"
    assert d.thread.paused is True
    assert d.sweep() == []
    d.control("resume")
    assert d.drain() == "done"
    assert [(entry.action, entry.actor) for entry in d.reader.audit("t")] == [
        ("start", "producer"),
        ("pause", "operator"),
        ("resume", "operator"),
    ]


def test_the_step_that_runs_when_the_pause_comes_is_finished(deploy):
    graph = Graph("two", state=State)

    @graph.node
    def first(state, ctx):
        d.control("pause")
        return {"log": [1]}

    @graph.node
    def second(state, ctx):
        return {"log": [2]}

    graph.edge(START, "first")
    graph.edge("first", "second")
    graph.edge("second", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "ready"
    assert d.values()["log"] == [1]
    d.control("resume")
    assert d.drain() == "done"
    assert d.values()["log"] == [1, 2]


def test_cancelling_ends_the_queued_runs_too(deploy):
    d = deploy(counts())
    d.start({"n": 1})
    d.start({"n": 2})
    d.control("cancel", reason="enough", by="anna")
    assert d.drain() == "cancelled"
    assert d.thread.error == {"code": "cancelled", "message": "enough", "by": "anna"}
    assert [run.status for run in d.reader.runs("t")] == ["cancelled", "cancelled"]
    d.start({"n": 3})
    assert d.drain() == "done"
    assert d.values()["log"] == [3]


def test_the_same_control_twice_is_one(deploy):
    d = deploy(counts())
    d.start({"n": 1})
    d.control("cancel", id="c1")
    before = d.dump()
    assert d.control("cancel", id="c1").duplicate is True
    assert d.dump() == before
    with pytest.raises(WrongStatus, match="is cancelled"):
        d.control("cancel", id="c2")
    assert d.dump() == before


def test_names_that_mean_several_threads(deploy):
    d = deploy(counts("first"), counts("second"))
    d.start({"n": 1}, graph="first")
    d.start({"n": 1}, graph="second")
    before = d.dump()
    with pytest.raises(Ambiguous, match="name the graph"):
        d.control("cancel")
    with pytest.raises(NotFound):
        d.control("cancel", thread="nobody")
    with pytest.raises(NotFound):
        d.control("cancel", graph="third")
    with pytest.raises(NotFound):
        d.control("cancel", graph="first", tenant="other")
    assert d.dump() == before
    d.control("cancel", graph="second")
    assert d.reader.get("t", graph="first").status == "ready"
    assert d.reader.get("t", graph="second").status == "cancelled"


# --- the table of statuses ---

_ACTIONS = ("start", "pause", "resume", "cancel", "retry")
_ALLOWED = {
    "ready": {"start": "ready", "pause": "ready", "resume": "ready", "cancel": "cancelled"},
    "waiting": {"start": "waiting", "pause": "waiting", "resume": "waiting", "cancel": "cancelled"},
    "blocked": {
        "start": "blocked",
        "pause": "blocked",
        "resume": "blocked",
        "cancel": "cancelled",
        "retry": "ready",
    },
    "done": {"start": "ready"},
    "failed": {"start": "ready", "cancel": "cancelled", "retry": "ready"},
    "cancelled": {"start": "ready", "retry": "ready"},
}


def _in_status(deploy, status):
    graph = Graph("any", state=State)

    @graph.node
    def count(state, ctx):
        if status in {"waiting", "cancelled"}:
            ctx.approve("Go on?")
        if status == "failed":
            raise ValueError
        return {}

    graph.edge(START, "count")
    if status == "blocked":
        graph.route("count", lambda _state: "nowhere", to=["count"])
    else:
        graph.edge("count", END)
    d = deploy(graph)
    d.start({"n": 1})
    if status != "ready":
        d.drain()
    if status == "cancelled":
        d.control("cancel")
    assert d.thread.status == status
    return d


@pytest.mark.parametrize("status", _ALLOWED)
@pytest.mark.parametrize("action", _ACTIONS)
def test_what_people_may_do_in_each_status(deploy, status, action):
    d = _in_status(deploy, status)
    before = d.dump()
    expected = _ALLOWED[status].get(action)

    def act():
        return d.start({"n": 2}) if action == "start" else d.control(action)

    if expected is None:
        with pytest.raises(WrongStatus, match=f"is {status}"):
            act()
        assert d.dump() == before
        return
    act()
    assert d.thread.status == expected
    assert expected == status or expected in TRANSITIONS[status]


def test_the_table_is_closed():
    assert set(TRANSITIONS) == set(_ALLOWED)
    assert {target for targets in TRANSITIONS.values() for target in targets} == set(_ALLOWED)


def test_a_run_that_was_cancelled_before_it_began_is_started_anew(deploy):
    d = _in_status(deploy, "ready")
    d.control("cancel")
    before = d.dump()
    with pytest.raises(WrongStatus, match="thread 't' was cancelled before its run began: start it again"):
        d.control("retry")
    assert d.dump() == before
