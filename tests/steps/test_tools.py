"""Tools that are called through the gateway: their arguments, how they are tried, what is audited."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from decimal import Decimal
from typing import Any

import pytest

from keepstep import NOT_DONE, CallDenied, CallRefused, CallRejected, Retry, ToolArguments, tool
from keepstep.errors import AnswerLost, CallTimeout, UnknownTool
from keepstep.store.schema import effect
from tests.steps.agents import AGAIN, Killed, Outside, acts, call_of, killed, released


def paying(outside, **options):
    """A tool that pays, and tells the outside with what."""

    @tool(**options)
    def pay(order: str, amount: Decimal, *, idempotency_key: str) -> dict[str, Any]:
        """Pay an order."""
        outside.calls.append((order, amount))
        outside.keys.append(idempotency_key)
        return {"paid": amount}

    return pay


ASKED = {"order": "7", "amount": "12.50"}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("idempotent", [False, True])
def test_a_tool_is_called_once_with_its_own_types(deploy, asynchronous, idempotent):
    outside = Outside()
    pay = paying(outside, idempotent=idempotent)

    def body(ctx, result):
        if ctx.attempt == 1:
            raise ConnectionError
        return result

    d = deploy(acts(call_of(pay, ASKED, asynchronous, then=body), retry=AGAIN, asynchronous=asynchronous))
    thread_id = d.start().thread_id
    assert d.drain() == "done"
    assert outside.calls == [("7", Decimal("12.50"))]
    assert outside.keys[0].startswith(f"{thread_id}/0/1/node/pay:")
    assert d.values()["log"] == [{"paid": Decimal("12.50")}]
    assert d.effects() == [("pay", "done", 1)]


@pytest.mark.parametrize("idempotent", [False, True])
def test_every_call_is_audited_once(deploy, idempotent):
    outside = Outside()
    pay = paying(outside, version="3", risk="high", idempotent=idempotent)

    def body(ctx):
        ctx.call(pay, ASKED)
        ctx.call(pay, ASKED, key="second")
        if ctx.attempt == 1:
            raise ConnectionError

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    rows = [row for row in d.reader.audit("t") if row.action == "call"]
    assert [row.actor for row in rows] == ["t", "t"]
    details = [json.loads(row.detail) for row in rows]
    assert [detail["key"] for detail in details] == outside.keys
    assert [(detail["tool"], detail["version"], detail["risk"], detail["edited"]) for detail in details] == [
        ("pay", "3", "high", False)
    ] * 2
    assert details[0]["arguments"] == details[1]["arguments"]


def test_a_tool_is_called_by_the_name_that_a_model_gives(deploy):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: ctx.call("pay", ASKED)["paid"], tools=[pay]))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == [("7", Decimal("12.50"))]


def test_an_unknown_name_is_refused_with_the_known_ones(deploy):
    caught = []

    def body(ctx):
        with pytest.raises(UnknownTool) as refused:
            ctx.call("transfer", ASKED)
        caught.append(refused.value.message)

    d = deploy(acts(body, tools=[paying(Outside())]))
    d.start()
    assert d.drain() == "done"
    assert caught == ["the graph has no tool 'transfer' (known: pay)"]


def test_arguments_that_do_not_fit_call_nothing_and_name_every_path(deploy):
    outside, caught = Outside(), []
    pay = paying(outside)

    def body(ctx):
        for given in ({"order": 7, "amount": "much", "key": "k", "timeout": 1}, {"amount": "1"}, [1]):
            with pytest.raises(ToolArguments) as refused:
                ctx.call(pay, given)
            caught.append(refused.value.message)
        return "went on"

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "done"
    unfit = "the arguments do not fit tool 'pay': "
    assert caught[0] == (
        f"{unfit}$.key: unknown argument (known: order, amount); $.timeout: unknown argument (known: order, amount); "
        "$.order: Input should be a valid string; $.amount: Input should be a valid decimal"
    )
    assert caught[1:] == [f"{unfit}$.order: missing", "the arguments of tool 'pay' must be a mapping, not list"]
    assert outside.calls == []
    assert d.effects() == []


def test_key_order_and_a_models_call_id_make_no_other_call(deploy):
    outside = Outside()
    pay = paying(outside)

    def body(ctx):
        asked = {"amount": 12.5, "order": "7"} if ctx.attempt == 1 else {"order": "7", "amount": "12.50"}
        asked["amount"] = "12.50"
        result = ctx.call("pay", asked)
        if ctx.attempt == 1:
            raise ConnectionError
        return result

    d = deploy(acts(body, retry=AGAIN, tools=[pay]))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == [("7", Decimal("12.50"))]


def test_nested_arguments_in_another_order_are_the_same_call(deploy):
    outside = Outside()

    @tool
    def ship(address: dict[str, Any]) -> str:
        outside.calls.append(address)
        return "shipped"

    def body(ctx):
        one, other = {"city": "Rom", "lines": [{"a": 1, "b": 2}]}, {"lines": [{"b": 2, "a": 1}], "city": "Rom"}
        result = ctx.call(ship, {"address": one if ctx.attempt == 1 else other})
        if ctx.attempt == 1:
            raise ConnectionError
        return result

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert len(outside.calls) == 1


def test_a_node_that_asks_for_other_arguments_after_a_call_at_risk_is_stopped(deploy):
    outside = Outside()
    pay = paying(outside)

    def body(ctx):
        ctx.call(pay, {"order": "7", "amount": 100 + ctx.attempt})
        if ctx.attempt == 1:
            raise ConnectionError

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert outside.calls == [("7", Decimal(101))]


# --- failures ---


def failing(outside, errors, **options):
    """A tool that raises what it is told, one after the other, and then succeeds."""
    left = list(errors)

    @tool(**options)
    def pay(order: str, *, idempotency_key: str) -> str:
        outside.calls.append(order)
        outside.keys.append(idempotency_key)
        if left:
            raise left.pop(0)
        return "paid"

    return pay


class Declined(Exception):
    """The bank says no: a known failure."""


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("idempotent", [False, True])
def test_a_failed_call_is_tried_again_under_its_key(deploy, asynchronous, idempotent):
    outside = Outside()
    pay = failing(outside, [Declined(), Declined()], retry=Retry(attempts=3, delay=0), idempotent=idempotent)
    d = deploy(acts(call_of(pay, {"order": "7"}, asynchronous), asynchronous=asynchronous))
    d.start()
    assert d.drain() == "done"
    assert len(outside.calls) == 3
    assert len(set(outside.keys)) == 1
    assert d.effects() == [("pay", "done", 3)]


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_long_wait_holds_no_worker_and_costs_the_node_no_attempt(timed, clock, idempotent):
    outside = Outside()
    pay = failing(outside, [Declined(), Declined()], retry=Retry(attempts=3, delay=60, jitter=0), idempotent=idempotent)
    d = timed(acts(lambda ctx: ctx.call(pay, {"order": "7"})))
    d.start()
    for made, seconds in ((1, 60), (2, 120)):
        assert d.drain() == "ready"
        assert len(outside.calls) == made
        assert d.error[0] == "put_off"
        assert f"({made} of 3 calls: Declined:" in d.error[1]
        assert d.sweep() == []
        clock.now += seconds + 1
        d.sweep()
    assert d.drain() == "done"
    assert d.effects() == [("pay", "done", 3)]


def test_the_node_gets_the_error_when_the_calls_are_used_up(deploy):
    outside = Outside()
    pay = failing(outside, [Declined(str(n)) for n in range(5)], retry=Retry(attempts=2, delay=0))

    def body(ctx):
        try:
            return ctx.call(pay, {"order": "7"})
        except Declined as error:
            return f"declined {error}"

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == ["declined 1"]
    assert len(outside.calls) == 2


def test_a_node_cannot_swallow_that_it_is_put_off(timed, clock):
    outside = Outside()
    pay = failing(outside, [Declined()], retry=Retry(attempts=2, delay=60, jitter=0))

    def body(ctx):
        try:
            return ctx.call(pay, {"order": "7"})
        except Exception:  # noqa: BLE001  what a careless node does
            return "went on"

    d = timed(acts(body))
    d.start()
    assert d.drain() == "ready"
    clock.now += 61
    d.sweep()
    assert d.drain() == "done"
    assert d.values()["log"] == ["paid"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_lost_answer_of_a_call_is_unknown_and_not_retried(deploy, asynchronous):
    outside = Outside()
    pay = failing(outside, [AnswerLost("gone")], retry=Retry(attempts=3, delay=0))
    d = deploy(acts(call_of(pay, {"order": "7"}, asynchronous), asynchronous=asynchronous))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert outside.calls == ["7"]
    d.send("resolve", effect=outside.keys[0], outcome="happened", result="paid by hand")
    assert d.drain() == "done"
    assert d.values()["log"] == ["paid by hand"]


def test_a_tools_lookup_is_asked(deploy):
    outside = Outside()

    def found(order, *, idempotency_key):
        outside.keys.append(idempotency_key)
        return "found"

    pay = failing(outside, [AnswerLost("gone")], lookup=found)
    d = deploy(acts(lambda ctx: ctx.call(pay, {"order": "7"})))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == ["found"]
    assert len(outside.keys) == 2
    assert len(set(outside.keys)) == 1


def test_what_the_lookup_denies_is_called_again(deploy):
    outside = Outside()
    pay = failing(outside, [AnswerLost("gone")], lookup=lambda order: NOT_DONE, retry=Retry(attempts=2, delay=0))
    d = deploy(acts(lambda ctx: ctx.call(pay, {"order": "7"})))
    d.start()
    # The error is a known failure by now; that an answer was lost is nothing that the call's retries are for.
    assert d.drain() == "failed"
    assert outside.calls == ["7"]
    assert d.effects() == [("pay", "failed", 1)]


# --- time ---


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_past_its_timeout_is_unknown(deploy, asynchronous):
    released_ = threading.Event()

    if asynchronous:

        @tool(timeout=0.05)
        async def hang(order: str) -> None:
            await asyncio.Event().wait()

    else:

        @tool(timeout=0.05)
        def hang(order: str) -> None:
            released_.wait(30)

    d = deploy(acts(call_of(hang, {"order": "7"}, asynchronous), asynchronous=asynchronous))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert "'hang' ran longer than its timeout of 0.05 s" in d.error[1]


def test_an_idempotent_call_past_its_timeout_is_made_again(deploy):
    outside = Outside()

    @tool(timeout=0.05, idempotent=True, retry=Retry(attempts=2, delay=0))
    def read(order: str) -> str:
        outside.calls.append(order)
        if len(outside.calls) == 1:
            threading.Event().wait(30)
        return "read"

    d = deploy(acts(lambda ctx: ctx.call(read, {"order": "7"})))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == ["read"]
    assert d.effects() == [("read", "done", 2)]


def test_the_nodes_own_time_goes_on_after_a_calls(deploy):
    @tool(timeout=0.3, idempotent=True)
    def read(order: str) -> str:
        return "read"

    def body(ctx):
        ctx.call(read, {"order": "7"})
        threading.Event().wait(30)

    d = deploy(acts(body, timeout=0.6))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "node_timeout"


def test_a_tool_may_handle_its_timeout_but_not_swallow_it(deploy):
    @tool(timeout=0.05, idempotent=True)
    def read(order: str) -> str:
        try:
            threading.Event().wait(30)
        except Exception:  # noqa: BLE001  what a careless tool does
            return "went on"
        return "read"

    def body(ctx):
        with pytest.raises(CallTimeout):
            ctx.call(read, {"order": "7"})
        return "told"

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "done"


def test_the_intents_deadline_is_the_calls(timed, clock):
    @tool(timeout=7)
    def pay(order: str) -> None:
        raise Killed

    d = timed(acts(lambda ctx: ctx.call(pay, {"order": "7"}), timeout=100))
    killed(d)
    with d.store.engine.connect() as connection:
        deadlines = connection.execute(effect.select()).mappings().all()
    assert [row["deadline"] for row in deadlines] == [clock.now + 7]


# --- concurrency, kinds ---


def test_an_async_tool_needs_an_async_node(deploy):
    @tool
    async def pay(order: str) -> str:
        return "paid"

    d = deploy(acts(lambda ctx: ctx.call(pay, {"order": "7"})))
    d.start()
    assert d.drain() == "failed"
    assert "is async" in d.error[1]
    assert d.effects() == []


def test_a_node_cannot_swallow_that_a_call_was_cut_off(deploy):
    class Odd(BaseException):
        """Neither an error nor a death."""

    @tool
    def pay(order: str) -> None:
        raise Odd

    def body(ctx):
        try:
            return ctx.call(pay, {"order": "7"})
        except Odd:
            return "went on"

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_tool_did_is_undone_when_the_run_fails(deploy, monkeypatch, asynchronous):
    monkeypatch.setenv("BANK_KEY", "s3cr3t-of-the-bank")
    outside = Outside()

    def refund(order, result, *, api_key, idempotency_key):
        outside.calls.append(("refund", order, result, api_key))
        outside.keys.append(idempotency_key)

    @tool(undo=refund, secrets={"api_key": "env:BANK_KEY"})
    def pay(order: str, *, api_key: str, idempotency_key: str) -> str:
        outside.calls.append(("pay", order, api_key))
        outside.keys.append(idempotency_key)
        return "receipt"

    def fail(_ctx, _result):
        raise Declined

    d = deploy(acts(call_of(pay, {"order": "7"}, asynchronous, then=fail), asynchronous=asynchronous))
    d.start()
    assert d.drain() == "failed"
    assert outside.calls == [("pay", "7", "s3cr3t-of-the-bank"), ("refund", "7", "receipt", "s3cr3t-of-the-bank")]
    assert outside.keys[1] == f"{outside.keys[0]}/undo"
    assert "s3cr3t" not in repr(d.dump())


def test_an_undo_that_tells_a_secret_is_masked(deploy, monkeypatch):
    monkeypatch.setenv("BANK_KEY", "s3cr3t-of-the-bank")

    def refund(order, *, api_key):
        message = f"no refunds with {api_key}"
        raise ValueError(message)

    @tool(undo=refund, secrets={"api_key": "env:BANK_KEY"})
    def pay(order: str, *, api_key: str) -> None:
        """Pay."""

    def body(ctx):
        ctx.call(pay, {"order": "7"})
        raise Declined

    d = deploy(acts(body))
    d.start()
    d.drain()
    assert "no refunds with ***" in repr(d.dump())
    assert "s3cr3t" not in repr(d.dump())


def test_there_is_no_way_past_the_gateway(deploy):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: ctx.effect(pay, "7", Decimal(1))))
    d.start()
    assert d.drain() == "failed"
    assert d.error == ("invalid_input", "'pay' is a tool: call it by ctx.call")
    assert outside.calls == []


def test_concurrent_calls_in_an_async_node(deploy):
    outside = Outside()

    @tool
    async def pay(order: str) -> str:
        outside.calls.append(order)
        return f"paid {order}"

    async def body(ctx):
        results = await asyncio.gather(*(ctx.call(pay, {"order": str(n)}) for n in range(4)))
        if ctx.attempt == 1:
            raise ConnectionError
        return results

    d = deploy(acts(body, retry=AGAIN, asynchronous=True))
    d.start()
    assert d.drain() == "done"
    assert outside.counts == Counter(map(str, range(4)))
    assert d.values()["log"] == [[f"paid {n}" for n in range(4)]]


def test_a_step_without_calls_costs_no_more(deploy):
    d = deploy(acts(lambda ctx: "nothing"))
    d.start()
    assert d.drain() == "done"
    assert d.dump()["keepstep_effect"] == []
    assert [row.action for row in d.reader.audit("t")] == ["start"]


def test_a_call_from_a_released_attempt_is_found(deploy):
    """A worker that dies after the result was recorded costs nothing."""
    outside = Outside()
    pay = paying(outside)

    def body(ctx):
        result = ctx.call(pay, ASKED)
        if ctx.attempt == 1:
            raise Killed
        return result

    d = deploy(acts(body))
    killed(d)
    released(d)
    assert d.drain() == "done"
    assert len(outside.calls) == 1


def test_refusals_have_one_base():
    assert issubclass(CallDenied, CallRefused)
    assert issubclass(CallRejected, CallRefused)
