"""Waiting: for people, signals and time. In `graph.run` the answers are given beforehand and the clock jumps."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, TypedDict

import pytest

from keepstep import END, START, Graph
from keepstep.errors import Undecided


class Order(TypedDict, total=False):
    amount: int
    result: Any


def one(body):
    """A graph of one node."""
    graph = Graph("orders", state=Order)
    if hasattr(body, "__code__") and body.__code__.co_flags & 0x80:

        @graph.node(name="node")
        async def node_async(state, ctx):
            return {"result": await body(state, ctx)}

    else:

        @graph.node
        def node(state, ctx):
            return {"result": body(state, ctx)}

    graph.edge(START, "node")
    graph.edge("node", END)
    return graph


def pay(state, ctx):
    decision = ctx.approve("Pay?", arguments={"amount": state["amount"]})
    return f"paid {decision.arguments['amount']}" if decision.approved else "not paid"


def test_a_decision_by_question():
    assert one(pay).run({"amount": 5}, decisions={"Pay?": True})["result"] == "paid 5"
    assert one(pay).run({"amount": 5}, decisions={"Pay?": "reject"})["result"] == "not paid"


def test_an_approver_may_edit_what_is_approved():
    edited = {"verdict": "approve", "arguments": {"amount": 3}}
    assert one(pay).run({"amount": 5}, decisions={"Pay?": edited})["result"] == "paid 3"


def test_decisions_in_order_or_by_a_function():
    def body(state, ctx):
        return [ctx.approve("A?").approved, ctx.ask("B?").answer]

    assert one(body).run({}, decisions=[True, "b"])["result"] == [True, "b"]
    assert one(body).run({}, decisions=lambda approval: approval.kind == "approve" or "b")["result"] == [True, "b"]


def test_a_run_that_nobody_decides_says_what_it_waits_for():
    with pytest.raises(Undecided, match="'Pay\\?'"):
        one(pay).run({"amount": 5})


def test_several_things_at_once():
    def body(state, ctx):
        approved, signal = ctx.gather(lambda: ctx.approve("A?"), lambda: ctx.wait_signal("go"))
        return [approved.verdict, signal.payload]

    assert one(body).run({}, decisions={"A?": True}, signals={"go": 7})["result"] == ["approve", 7]


def test_an_async_node_waits_alike():
    async def body(state, ctx):
        approved, signal = await ctx.gather(ctx.approve("A?"), ctx.wait_signal("go"))
        await ctx.sleep(timedelta(days=1))
        return [approved.verdict, signal.payload]

    assert one(body).run({}, decisions={"A?": True}, signals=[("go", 7)])["result"] == ["approve", 7]


def test_a_month_takes_no_time_here():
    def body(state, ctx):
        before = ctx.now()
        ctx.sleep(timedelta(days=30))
        return ctx.now() >= before

    started = time.monotonic()
    assert one(body).run({})["result"] is True
    assert time.monotonic() - started < 10


def test_time_runs_out_when_nobody_answers():
    def body(state, ctx):
        return [ctx.approve("A?", expires=timedelta(days=2)).verdict, ctx.wait_signal("go", timeout=60)]

    assert one(body).run({})["result"] == ["expired", None]
