"""Bounds: steps of a run, sizes of values, what a history costs."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, TypedDict

import pytest

from keepstep import END, START, Graph, Retry, add, append
from keepstep.store import workers


class Loop(TypedDict, total=False):
    rounds: int
    count: Annotated[int, add]


def loop():
    """A graph that goes round as often as the input says, and acts once in each round."""
    graph = Graph("loop", state=Loop, step_limit=25)
    acted = []

    def act(number):
        acted.append(number)

    @graph.node
    def turn(state, ctx):
        ctx.effect(act, state.get("count", 0) + 1)
        return {"count": 1, "rounds": state["rounds"] - 1}

    graph.edge(START, "turn")
    graph.route("turn", lambda state: "turn" if state["rounds"] else END, to=["turn", END])
    graph.acted = acted
    return graph


def test_the_step_limit(deploy):
    graph = loop()
    d = deploy(graph)
    d.start({"rounds": 20})
    assert d.drain() == "done"
    d.start({"rounds": 10})
    assert d.drain() == "done"  # the steps of earlier runs do not count
    assert [run.steps for run in d.reader.runs("t")] == [20, 10]

    graph.acted.clear()
    d.start({"rounds": 10**9})
    for _ in range(5):
        d.work(d.queue.pop(0))
    # A crash in between forgets nothing.
    d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9")
    assert d.drain() == "failed"
    assert d.error == (
        "step_limit",
        "the run reached its limit of 25 steps; its state is kept: retry with a higher step limit",
    )
    assert (d.queue, d.sweep(), d.thread.steps) == ([], [], 25)
    assert d.values()["count"] == 30 + 25
    assert len(graph.acted) == 25

    d.control("retry", step_limit=40)
    assert d.drain() == "failed"
    assert d.error[0] == "step_limit"
    assert "limit of 40 steps" in d.error[1]
    assert d.values()["count"] == 30 + 40
    assert len(graph.acted) == 40

    d.control("retry")
    assert d.drain() == "failed"
    assert (len(graph.acted), d.values()["count"]) == (40, 70)
    assert [(run.status, run.steps) for run in d.reader.runs("t")] == [("done", 20), ("done", 10), ("failed", 40)]


def test_a_run_that_ends_with_the_last_allowed_step_is_done(deploy):
    d = deploy(loop())
    d.start({"rounds": 25})
    assert d.drain() == "done"


def test_a_limit_for_one_run(deploy):
    d = deploy(loop())
    d.start({"rounds": 10}, step_limit=3)
    assert d.drain() == "failed"
    assert d.values()["count"] == 3
    d.start({"rounds": 10})
    assert d.drain() == "done"
    assert d.values()["count"] == 13


# --- sizes ---


class Big(TypedDict, total=False):
    text: str
    image: bytes
    note: str
    count: int
    log: Annotated[list[str], append]


MIB = 1 << 20


@pytest.mark.slow
def test_a_large_state_is_not_stored_again_for_a_small_change(deploy):
    graph = Graph("big", state=Big)

    @graph.node
    def fill(state, ctx):
        return {"text": "x" * (5 * MIB), "image": bytes(3 * MIB), "count": 0}

    @graph.node
    def turn(state, ctx):
        assert (len(state["text"]), len(state["image"])) == (5 * MIB, 3 * MIB)
        return {"count": state["count"] + 1}

    graph.edge(START, "fill")
    graph.edge("fill", "turn")
    graph.route("turn", lambda state: "turn" if state["count"] < 20 else END, to=["turn", END])
    d = deploy(graph)
    d.start()
    assert d.drain() == "done"
    assert d.values()["count"] == 20
    with d.store.engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT coalesce(length(change), 0), coalesce(length(snapshot), 0) FROM keepstep_checkpoint ORDER BY seq"
        ).all()
    changed, whole = [sum(sizes) for sizes in zip(*rows, strict=True)]
    assert len(rows) == 22
    # The large values once as a change; once more, as what is changed outweighs the first, empty state.
    assert 8 * MIB <= changed < 8 * MIB + 4096
    assert whole < 8 * MIB + 4096


def _limited(update):
    graph = Graph("limited", state=Big)
    starts = []

    @graph.node(retry=Retry(attempts=3, delay=0))
    def node(state, ctx):
        starts.append(1)
        return update(ctx)

    graph.edge(START, "node")
    graph.edge("node", END)
    graph.starts = starts
    return graph


def _keep(_ctx, text):
    return {"text": text}


@pytest.mark.parametrize("over", [0, 1])
def test_a_result_of_exactly_the_limit_and_one_byte_more(deploy, over):
    limit = 100_000
    overhead = 5  # msgpack's head of a text of that length
    size = limit - overhead + over
    graph = _limited(lambda _ctx: {"text": "x" * size, "note": "small"})
    d = deploy(graph, value_bytes_max=limit + 15)
    # The codec's own header is the rest.
    d.start()
    status = d.drain()
    found = 0
    while status == "done" and found < 64:
        found += 1
        size += 1
        d.name = f"t{found}"
        d.start()
        status = d.drain()
    assert status == "failed"
    assert d.error == ("too_large", f"$.text: {limit + 16} bytes, the limit is {limit + 15} bytes")
    assert len(graph.starts) == found + 1
    assert d.checkpoints() == [(0, "input")]


def test_an_effects_argument_over_the_limit_is_refused_before_the_call(deploy):
    called = []

    def upload(name, content):
        called.append(name)

    graph = _limited(lambda ctx: ctx.effect(upload, "a", "x" * 1000))
    d = deploy(graph, value_bytes_max=1000)
    d.start()
    assert d.drain() == "failed"
    code, message = d.error
    assert code == "too_large"
    assert message.startswith("$upload.content: 10")
    assert message.endswith("bytes, the limit is 1000 bytes")
    assert (called, len(graph.starts), d.effects()) == ([], 1, [])


def test_a_list_that_grew_past_the_limit_bit_by_bit(deploy):
    graph = Graph("grows", state=Big)
    starts = Counter()

    @graph.node
    def grow(state, ctx):
        starts["grow"] += 1
        return {"log": ["x" * 100]}

    graph.edge(START, "grow")
    graph.edge("grow", "grow")
    d = deploy(graph, value_bytes_max=1000)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "too_large"
    assert d.error[1].startswith("$.log: 1")
    assert d.values()["log"] == ["x" * 100] * 9
    assert starts == {"grow": 10}


def test_a_list_that_grows_costs_what_is_added(deploy):
    graph = Graph("grows", state=Big, step_limit=101)

    @graph.node
    def grow(state, ctx):
        return {"log": ["x" * 1024], "count": state.get("count", 0) + 1}

    graph.edge(START, "grow")
    graph.route("grow", lambda state: "grow" if state["count"] < 100 else END, to=["grow", END])
    d = deploy(graph)
    d.start()
    assert d.drain() == "done"
    with d.store.engine.connect() as connection:
        (total,) = connection.exec_driver_sql(
            "SELECT sum(coalesce(length(change), 0) + coalesce(length(snapshot), 0) + length(cursor) + length(meta))"
            " FROM keepstep_checkpoint"
        ).one()
    assert 100 * 1024 < total < 3 * 100 * 1024
