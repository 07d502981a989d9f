"""Failing: retries, time limits, and what is done outside only once."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypedDict

import pytest

from keepstep import END, START, Graph, Retry, effect
from keepstep.errors import Diverged, NodeFailed, NodeTimeout, StepLimit


class State(TypedDict, total=False):
    result: Any
    told: list[str]


def one(body, **options):
    """A graph of one node."""
    graph = Graph("g", state=State)

    @graph.node(**options)
    def node(state, ctx):
        return {"result": body(ctx)}

    graph.edge(START, "node")
    graph.edge("node", END)
    return graph


def test_a_node_is_tried_again_when_it_says_so():
    def flaky(ctx):
        if ctx.attempt < 3:
            message = "not yet"
            raise ConnectionError(message)
        return ctx.attempt

    assert one(flaky, retry=Retry(attempts=3, delay=0.001)).run({})["result"] == 3
    with pytest.raises(NodeFailed, match="ConnectionError: not yet"):
        one(flaky, retry=Retry(attempts=2, delay=0.001)).run({})


def test_a_long_wait_between_attempts_takes_no_time_here():
    def flaky(ctx):
        if ctx.attempt < 3:
            raise ConnectionError
        return ctx.attempt

    started = time.monotonic()
    assert one(flaky, retry=Retry(attempts=3, delay=3600, delay_max=7200)).run({})["result"] == 3
    assert time.monotonic() - started < 10


def test_a_node_has_a_time_limit():
    with pytest.raises(NodeTimeout, match=r"timeout of 0\.05 s"):
        one(lambda ctx: time.sleep(20), timeout=0.05).run({})


def test_an_effect_is_done_once_however_often_the_node_is_tried():
    mails = []

    def send_mail(to):
        mails.append(to)
        return f"sent to {to}"

    def body(ctx):
        sent = ctx.effect(send_mail, "ada")
        if ctx.attempt < 3:
            raise ConnectionError
        return sent

    assert one(body, retry=Retry(attempts=3, delay=0)).run({})["result"] == "sent to ada"
    assert mails == ["ada"]


def test_a_read_is_declared_as_safe_to_repeat():
    @effect(idempotent=True)
    def read(name):
        return name.upper()

    assert one(lambda ctx: ctx.effect(read, "ada")).run({})["result"] == "ADA"


def test_a_retry_that_goes_another_way_needs_a_person():
    def pay(amount):
        return amount

    def body(ctx):
        paid = ctx.effect(pay, 99 + ctx.attempt)
        if ctx.attempt == 1:
            raise ConnectionError
        return paid

    with pytest.raises(Diverged, match="'pay'"):
        one(body, retry=Retry(attempts=3, delay=0)).run({})


def test_others_go_on_when_a_node_says_so():
    graph = Graph("g", state=State)

    @graph.node(on_error="continue")
    def breaks(state, ctx):
        message = "broken"
        raise ValueError(message)

    @graph.node
    def after(state, ctx):
        return {"told": [f"{failure['node']}: {failure['type']}: {failure['message']}" for failure in ctx.failures]}

    graph.edge(START, "breaks")
    graph.edge("breaks", "after")
    graph.edge("after", END)
    assert graph.run({})["told"] == ["breaks: ValueError: broken"]


def test_a_run_has_a_step_limit():
    graph = Graph("g", state=State, step_limit=25)
    turns = []

    @graph.node
    def turn(state, ctx):
        turns.append(1)

    graph.edge(START, "turn")
    graph.edge("turn", "turn")
    with pytest.raises(StepLimit, match="25 steps"):
        graph.run({})
    assert len(turns) == 25
    with pytest.raises(StepLimit, match="3 steps"):
        graph.run({}, step_limit=3)


def test_an_async_node_may_ask_in_a_task_group():
    graph = Graph("g", state=State)

    @graph.node
    async def node(state, ctx):
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ctx.approve("Go on?"))
        return {"result": asked.result().verdict}

    graph.edge(START, "node")
    graph.edge("node", END)
    assert graph.run({}, decisions={"Go on?": True})["result"] == "approve"
