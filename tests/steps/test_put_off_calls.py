"""Calls that are put off: no failure of anybody's, seen from outside, and ended as any other thread is."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep import RateLimited, Retry, ToolArguments, tool
from tests.steps.agents import Outside, acts


class Failing(Exception):
    """A failure of the node's own."""


def busy(outside, refusals, **options):
    left = list(range(refusals))

    @tool("pay", **options)
    def pay(order: Any) -> str:
        outside.calls.append(order)
        if left:
            left.pop()
            raise RateLimited(retry_after=60)
        return "paid"

    return pay


@pytest.mark.parametrize("idempotent", [False, True])
def test_being_put_off_costs_the_node_none_of_its_attempts(timed, clock, idempotent):
    outside = Outside()
    pay = busy(outside, 3, idempotent=idempotent)
    failing = [Failing()]

    def body(ctx):
        result = ctx.call(pay, {"order": "7"})
        if failing:
            raise failing.pop()
        return result

    d = timed(acts(body, retry=Retry(attempts=2, delay=0)))
    d.start()
    for _ in range(3):
        assert d.drain() == "ready"
        assert d.error == ("put_off", "tool 'pay' was called too often: called again in 60 s")
        clock.now += 61
        d.worker = d.worker_of(pid=2)  # this one's clock has gone on, too
        d.sweep()
    assert d.drain() == "done"
    assert d.effects() == [("pay", "done", 4)]


@pytest.mark.parametrize("action", ["cancel", "pause"])
def test_a_call_that_is_put_off_is_not_made_when_people_end_it(timed, clock, action):
    outside = Outside()
    pay = busy(outside, 1)
    d = timed(acts(lambda ctx: ctx.call(pay, {"order": "7"})))
    d.start()
    assert d.drain() == "ready"
    d.control(action)
    d.drain()
    clock.now += 61
    worker = d.worker_of(pid=2)
    d.sweep()
    assert d.drain(worker) != "done"
    assert outside.calls == ["7"]
    d.control("retry" if action == "cancel" else "resume")
    assert d.drain(worker) == "done"
    assert outside.calls == ["7", "7"]


def test_what_a_model_made_up_is_refused_in_few_words(deploy):
    outside, said = Outside(), []
    pay = busy(outside, 0)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]

    def body(ctx):
        for given in ({"order": "7", "x" * 100_000: 1}, {"order": deep}):
            with pytest.raises(ToolArguments) as refused:
                ctx.call(pay, given)
            said.append(refused.value.message)

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "done"
    assert len(said[0]) < 300
    assert said[1] == "the arguments do not fit tool 'pay': they are nested too deep"
    assert outside.calls == []
