"""Calls at once that people must approve: asked about together, and none of them is lost or makes the others fail."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from keepstep import tool
from tests.steps.agents import AGAIN, Outside, acts

COUNT = 5


async def by_gather(ctx, pay):
    return await asyncio.gather(*(ctx.call(pay, {"order": str(n)}) for n in range(COUNT)))


async def by_task_group(ctx, pay):
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ctx.call(pay, {"order": str(n)})) for n in range(COUNT)]
    return [task.result() for task in tasks]


def in_threads(ctx, pay):
    with ThreadPoolExecutor(COUNT) as pool:  # its end waits for all of them, whichever parks first
        calls = [pool.submit(ctx.call, pay, {"order": str(n)}) for n in range(COUNT)]
        return [each.result() for each in calls]


@pytest.mark.parametrize("at_once", [by_gather, by_task_group, in_threads])
def test_all_are_asked_about_together(deploy, at_once):
    outside = Outside()

    @tool(approve=True)
    def pay(order: str) -> str:
        outside.calls.append(order)
        return order

    d = deploy(acts(lambda ctx: at_once(ctx, pay), asynchronous=at_once is not in_threads))
    d.start()
    assert d.drain() == "waiting"
    asked = d.approvals()
    assert sorted(each.arguments["order"] for each in asked) == ["0", "1", "2", "3", "4"]
    for each in asked:
        d.decide(approval=each.id)
    assert d.drain() == "done"
    assert d.values()["log"] == [["0", "1", "2", "3", "4"]]
    assert sorted(outside.calls) == ["0", "1", "2", "3", "4"]
    assert len(d.approvals(None)) == COUNT


def effects_by_gather(ctx, pay):
    return asyncio.gather(*(ctx.effect(pay.execution.function, str(n)) for n in range(COUNT)))


@pytest.mark.parametrize("at_once", [by_gather, by_task_group, effects_by_gather])
def test_what_was_made_before_is_not_passed_over_by_those_that_are_faster(deploy, at_once):
    """In the first attempt one call fails and the others are made; in the second all of them are asked for again."""
    outside, refusals = Outside(), [ValueError()]

    @tool
    async def pay(order: str) -> str:
        if order == "0" and refusals:
            raise refusals.pop()
        outside.calls.append(order)
        return order

    async def body(ctx):
        return await at_once(ctx, pay)

    d = deploy(acts(body, asynchronous=True, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [["0", "1", "2", "3", "4"]]
    assert sorted(outside.calls) == ["0", "1", "2", "3", "4"]
