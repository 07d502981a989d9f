"""Children: a supervisor and its specialists. In `graph.run` they run in one process, and the clock jumps for all."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Annotated, Any, TypedDict

import pytest

from keepstep import END, START, ChildFailed, Graph, Retry, append
from keepstep.errors import Diverged, GraphError, Undecided


class Case(TypedDict, total=False):
    name: str
    log: Annotated[list[Any], append]


def one(body, name):
    """A graph of one node."""
    graph = Graph(name, state=Case)

    @graph.node(retry=Retry(attempts=2, delay=0, never=OSError))
    def node(state, ctx):
        return {"log": [body(state, ctx)]}

    graph.edge(START, "node")
    graph.edge("node", END)
    return graph


def supervised(body, **specialists):
    """Run a supervisor whose body is given the specialists' graphs."""
    graphs = [one(each, name) for name, each in specialists.items()]
    return one(lambda _state, ctx: body(ctx, *graphs), "supervisor")


def test_research_coding_and_deployment_one_after_the_other():
    def body(ctx, research, coding, deployment):
        (found,) = ctx.join(ctx.spawn(research, {"name": "leases"}))
        (written,) = ctx.join(ctx.spawn(coding, {"name": found["log"][0]}))
        return ctx.join(ctx.spawn(deployment, {"name": written["log"][0]}))[0]["log"][0]

    supervisor = supervised(
        body,
        research=lambda state, _ctx: f"notes on {state['name']}",
        coding=lambda state, _ctx: f"code from {state['name']}",
        deployment=lambda state, _ctx: f"deployed {state['name']}",
    )
    assert supervisor.run({})["log"] == ["deployed code from notes on leases"]


def test_children_ask_people_and_sleep_and_their_parent_waits_for_no_time_here():
    def body(ctx, slow, careful):
        states = ctx.join(ctx.spawn(slow, {}), ctx.spawn(careful, {}))
        return [state["log"][0] for state in states]

    supervisor = supervised(
        body,
        slow=lambda _state, ctx: ctx.sleep(timedelta(days=30)) or "rested",
        careful=lambda _state, ctx: ctx.approve("Really?").verdict,
    )
    started = time.monotonic()
    assert supervisor.run({}, decisions={"Really?": False})["log"] == [["rested", "reject"]]
    assert time.monotonic() - started < 30


def test_a_failure_of_a_child_is_its_parents_to_deal_with():
    def clumsy(_state, _ctx):
        message = "dropped it"
        raise OSError(message)

    def careless(ctx, child):
        return ctx.join(ctx.spawn(child, {}))

    def careful(ctx, child):
        for attempt in range(2):
            try:
                ctx.join(ctx.spawn(child, {}, key=f"attempt {attempt}"))
            except ChildFailed as failure:
                last = failure
        return (last.status, last.error["type"], last.error["message"])

    assert supervised(careful, clumsy=clumsy).run({})["log"] == [("failed", "OSError", "dropped it")]
    with pytest.raises(ChildFailed, match=r"child 'run/clumsy-[0-9a-f]{10}' of graph 'clumsy' has failed: dropped it"):
        supervised(careless, clumsy=clumsy).run({})


def test_a_child_that_is_blocked_says_why():
    def send():
        pass

    def wavers(_state, ctx):
        if ctx.attempt == 1:
            ctx.effect(send)
            message = "again"
            raise ValueError(message)

    with pytest.raises(Diverged, match="'send'"):
        supervised(lambda ctx, child: ctx.join(ctx.spawn(child, {})), wavers=wavers).run({})


def test_a_graph_that_is_not_here_is_named():
    with pytest.raises(Undecided, match="a child of graph 'elsewhere', which is not here: spawn the Graph itself"):
        supervised(lambda ctx: ctx.join(ctx.spawn("elsewhere", {}))).run({})


def test_two_graphs_of_one_name_are_told_apart():
    twin = one(lambda _state, _ctx: 1, "supervisor")
    with pytest.raises(GraphError, match="two graphs are named 'supervisor', version '1'"):
        supervised(lambda ctx: ctx.spawn(twin, {})).run({})
