"""Effects: what is recorded is returned, what is unknown blocks, what went another way blocks."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import pytest

from keepstep import END, START, Graph, Retry, append, effect
from keepstep.crashpoints import Died
from keepstep.errors import StepError
from keepstep.store import claims, workers


class State(TypedDict, total=False):
    log: Annotated[list[Any], append]


class Outside:
    """The world: what was done to it, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @property
    def counts(self) -> Counter[Any]:
        return Counter(self.calls)


def acts(body, *, retry=None, asynchronous=False):
    """A graph of one node; `body(ctx)` gives what is logged."""
    graph = Graph("acts", state=State)
    if asynchronous:

        @graph.node(name="node", retry=retry)
        async def node_async(state, ctx):
            return {"log": [await body(ctx)]}

    else:

        @graph.node(retry=retry)
        def node(state, ctx):
            return {"log": [body(ctx)]}

    graph.edge(START, "node")
    graph.edge("node", END)
    return graph


AGAIN = Retry(attempts=3, delay=0)


class Crash(Exception):
    """What a node raises after it acted."""


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_recorded_result_is_returned_and_nothing_is_called(deploy, idempotent):
    outside = Outside()

    @effect(idempotent=idempotent)
    def charge(amount):
        outside.calls.append(amount)
        return {"receipt": len(outside.calls), "amount": amount}

    def body(ctx):
        receipt = ctx.effect(charge, Decimal("12.50"))
        if ctx.attempt < 3:
            raise Crash
        return receipt

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == [Decimal("12.50")]
    assert d.values()["log"] == [{"receipt": 1, "amount": Decimal("12.50")}]
    assert d.effects() == [("charge", "done", 1)]


def test_the_same_call_three_times_is_three_calls_answered_in_order(deploy):
    outside = Outside()

    @effect(idempotent=True)
    def get_status(job):
        outside.calls.append(job)
        return f"answer {len(outside.calls)}"

    @effect
    def send_sms(text):
        outside.calls.append(text)

    def body(ctx):
        answers = [ctx.effect(get_status, "job-1") for _ in range(3)]
        ctx.effect(send_sms, "hello")
        ctx.effect(send_sms, "hello")
        if ctx.attempt == 1:
            raise Crash
        return answers

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert outside.counts == {"job-1": 3, "hello": 2}
    assert d.values()["log"] == [["answer 1", "answer 2", "answer 3"]]


def test_one_key_for_two_commands_is_refused(deploy):
    outside = Outside()

    def charge(amount):
        outside.calls.append(amount)

    def body(ctx):
        ctx.effect(charge, Decimal("10.00"), key="order-7")
        ctx.effect(charge, Decimal("12.00"), key="order-7")

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "effect_conflict"
    assert "'order-7'" in d.error[1]
    assert outside.calls == [Decimal("10.00")]


def test_one_key_twice_for_one_command_is_one_call(deploy):
    outside = Outside()

    def charge(amount):
        outside.calls.append(amount)
        return "receipt"

    d = deploy(acts(lambda ctx: [ctx.effect(charge, 10, key="k"), ctx.effect(charge, 10, key="k")]))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == [10]
    assert d.values()["log"] == [["receipt", "receipt"]]


def test_two_payments_in_one_run_are_two(deploy):
    outside = Outside()

    def charge(amount):
        outside.calls.append(amount)

    d = deploy(acts(lambda ctx: [ctx.effect(charge, 1), ctx.effect(charge, 2)]))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == [1, 2]


def test_arguments_are_told_apart_however_they_are_given(deploy):
    def call(name, arguments=None, /, *rest, **named):
        return [name, arguments, rest, named]

    def other(name, arguments=None):
        return [name, arguments]

    def body(ctx):
        return [
            ctx.effect(other, "pay", arguments={"amount": 1}),
            ctx.effect(other, "refund", arguments={"amount": 1}),
            ctx.effect(other, "pay", {"amount": 1}),
            ctx.effect(call, "x", 1, 2, arguments=3),
            ctx.effect(call, "y", 1, 2, arguments=3),
        ]

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "done"
    calls = sorted(row.call for row in d.reader.effects("t"))
    # The third is the first one's second occurrence; no other two are alike.
    assert [call.rsplit(":", 1)[1] for call in calls].count("1") == 1
    assert len({call.rsplit(":", 1)[0] for call in calls}) == 4


def test_the_key_is_the_same_on_every_attempt_and_given_to_who_asks_for_it(deploy):
    keys = []

    @effect(idempotent=True)
    def pay(amount, *, idempotency_key):
        keys.append(idempotency_key)
        if len(keys) < 3:
            raise ConnectionError
        return "paid"

    d = deploy(acts(lambda ctx: ctx.effect(pay, 5), retry=AGAIN))
    thread_id = d.start().thread_id
    assert d.drain() == "done"
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert keys[0].startswith(f"{thread_id}/0/1/node/pay:")
    d.name = "other"
    d.start()
    assert d.drain() == "done"
    assert keys[3] != keys[0]


def test_a_known_failure_may_be_tried_again(deploy):
    outside = Outside()

    def pay():
        outside.calls.append("pay")
        if len(outside.calls) == 1:
            message = "refused"
            raise ConnectionRefusedError(message)
        return "paid"

    d = deploy(acts(lambda ctx: ctx.effect(pay), retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == ["pay", "pay"]
    assert d.effects() == [("pay", "done", 2)]


def test_mails_around_two_questions_are_sent_once_each(deploy):
    outside = Outside()
    entered = []

    def send_mail(text):
        outside.calls.append(text)

    def body(ctx):
        entered.append(ctx.attempt)
        ctx.effect(send_mail, "a")
        first = ctx.ask("ok?").answer
        ctx.effect(send_mail, "b")
        second = ctx.ask("sure?").answer
        ctx.effect(send_mail, "c")
        return [first, second]

    d = deploy(acts(body))
    other, doomed = d.worker_of(pid=2), d.worker_of(pid=3)
    d.start()
    assert d.drain() == "waiting"
    d.decide("answer", answer=1)
    # A worker takes the woken thread and dies.

    (nudge,) = d.queue
    assert claims.claim_thread(doomed.store, nudge.thread_id, nudge.version, owner=doomed.owner, carried=doomed.carried)
    workers.release_child(d.store, doomed.owner.worker, 3, reason="signal 9")
    assert d.drain(other) == "waiting"
    d.decide("answer", answer=2)
    assert d.drain() == "done"

    assert outside.calls == ["a", "b", "c"]
    assert [approval.question for approval in d.approvals(None)] == ["ok?", "sure?"]
    assert d.values()["log"] == [[1, 2]]
    assert entered == [1, 3, 4]
    (_, step) = d.reader.history("t")
    assert [(node["run"], node["starts"]) for node in step.nodes] == [("node", 4)]


# --- not known, or not the same again ---


class Killed(Died):
    """Takes the attempt out of the node's hands, as a kill does."""


def _killed_in_the_call(d, outside):
    """Let the worker die after it called and before it recorded."""
    d.start()
    nudge = d.queue.pop(0)
    with pytest.raises(Killed):
        d.work(nudge)
    assert outside.calls == ["pay"]
    d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9 (SIGKILL)")


def test_an_intent_without_a_result_blocks(deploy):
    outside = Outside()

    def pay():
        outside.calls.append("pay")
        raise Killed

    d = deploy(acts(lambda ctx: ctx.effect(pay), retry=AGAIN))
    _killed_in_the_call(d, outside)
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert "'pay'" in d.error[1]
    assert outside.calls == ["pay"]
    assert d.effects() == [("pay", "intent", 1)]
    d.control("retry")
    assert d.drain() == "blocked"
    assert outside.calls == ["pay"]


def test_a_node_cannot_swallow_that_an_outcome_is_unknown(deploy):
    outside = Outside()

    def pay():
        outside.calls.append("pay")
        raise Killed

    def body(ctx):
        try:
            return ctx.effect(pay)
        except Exception:  # noqa: BLE001  what a careless node does
            return "went on"

    d = deploy(acts(body))
    _killed_in_the_call(d, outside)
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert outside.calls == ["pay"]


def test_what_a_partial_function_was_given_is_part_of_the_call(deploy):
    outside = Outside()

    def pay(amount):
        outside.calls.append(amount)
        return amount

    def body(ctx):
        amount = 99 + ctx.attempt
        paid = ctx.effect(functools.partial(pay, amount))
        if ctx.attempt == 1:
            raise ConnectionError
        return paid

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert outside.calls == [100]


def test_an_async_effect_that_nobody_waits_for_ends_and_is_recorded(deploy):
    outside = Outside()
    may_end = threading.Event()

    def pay():
        may_end.wait(20)
        outside.calls.append("pay")
        return "paid"

    async def body(ctx):
        try:
            async with asyncio.timeout(0.01):
                await ctx.effect(pay)
        except TimeoutError:
            may_end.set()
        return "went on"

    d = deploy(acts(body, asynchronous=True))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == ["pay"]
    assert d.effects() == [("pay", "done", 1)]


def test_a_read_without_a_result_is_repeated(deploy):
    outside = Outside()

    @effect(idempotent=True)
    def pay():
        outside.calls.append("pay")
        if len(outside.calls) == 1:
            raise Killed
        return "read"

    d = deploy(acts(lambda ctx: ctx.effect(pay)))
    _killed_in_the_call(d, outside)
    assert d.drain() == "done"
    assert outside.calls == ["pay", "pay"]
    assert d.effects() == [("pay", "done", 1)]


def test_an_unknown_outcome_in_a_task_group_blocks_too(deploy):
    outside = Outside()

    async def pay():
        outside.calls.append("pay")
        raise Killed

    async def body(ctx):
        if ctx.attempt == 1:
            return await ctx.effect(pay)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ctx.effect(pay))
        return task.result()

    d = deploy(acts(body, asynchronous=True, retry=AGAIN))
    _killed_in_the_call(d, outside)
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert outside.calls == ["pay"]


@pytest.mark.parametrize("then", ["another effect", "the end", "a question", "a failure"])
def test_a_retry_that_goes_another_way_blocks(deploy, then):
    outside = Outside()

    def charge(amount):
        outside.calls.append(amount)

    def body(ctx):
        if ctx.attempt == 1:
            ctx.effect(charge, 100)
            raise Crash
        if then == "another effect":
            ctx.effect(charge, 101)
        if then == "a question":
            ctx.approve("Sure?")
        if then == "a failure":
            raise NotImplementedError
        return "ended"

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert "'charge'" in d.error[1]
    assert outside.calls == [100]
    assert d.approvals() == []


def test_a_read_that_is_not_asked_for_again_is_no_matter(deploy):
    @effect(idempotent=True)
    def look(where):
        return where

    def body(ctx):
        found = ctx.effect(look, ctx.attempt)
        if ctx.attempt == 1:
            raise Crash
        return found

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [2]


def test_the_same_effects_in_another_order_are_the_same_effects(deploy):
    outside = Outside()

    def charge(amount):
        outside.calls.append(amount)
        return amount

    def body(ctx):
        order = [1, 2] if ctx.attempt == 1 else [2, 1]
        found = [ctx.effect(charge, amount) for amount in order]
        if ctx.attempt == 1:
            raise Crash
        return found

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == [1, 2]
    assert d.values()["log"] == [[2, 1]]


def test_a_result_that_cannot_be_stored_happened_all_the_same(deploy):
    outside = Outside()

    def pay():
        outside.calls.append("pay")
        return object()

    d = deploy(acts(lambda ctx: ctx.effect(pay), retry=AGAIN))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "not_storable"
    assert "$pay.result" in d.error[1]
    assert d.effects() == [("pay", "intent", 1)]
    d.control("retry")
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert outside.calls == ["pay"]


def test_an_argument_that_cannot_be_stored_is_refused_before_the_call(deploy):
    outside = Outside()

    def pay(to):
        outside.calls.append(to)

    d = deploy(acts(lambda ctx: ctx.effect(pay, object()), retry=AGAIN))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "not_storable"
    assert "$pay.to" in d.error[1]
    assert (outside.calls, d.effects()) == ([], [])


# --- at once ---


def test_equal_calls_at_once_need_keys(deploy):
    outside = Outside()

    async def charge(amount):
        outside.calls.append(amount)
        await asyncio.sleep(0.05)
        return amount

    async def body(ctx):
        return await asyncio.gather(ctx.effect(charge, 5), ctx.effect(charge, 5))

    d = deploy(acts(body, asynchronous=True))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "effect_conflict"
    assert "key=" in d.error[1]
    assert len(outside.calls) <= 1


def test_equal_calls_at_once_with_keys(deploy):
    outside = Outside()

    async def charge(amount):
        outside.calls.append(amount)
        await asyncio.sleep(0)
        return amount

    async def body(ctx):
        found = await asyncio.gather(*(ctx.effect(charge, 5, key=f"k{n}") for n in range(4)))
        if ctx.attempt == 1:
            raise Crash
        return found

    d = deploy(acts(body, asynchronous=True, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == [5] * 4
    assert d.values()["log"] == [[5] * 4]


def test_one_key_at_once_is_performed_once(deploy):
    outside = Outside()

    async def charge(amount):
        outside.calls.append(amount)
        await asyncio.sleep(0.05)
        return amount

    async def body(ctx):
        return await asyncio.gather(ctx.effect(charge, 5, key="k"), ctx.effect(charge, 5, key="k"))

    d = deploy(acts(body, asynchronous=True))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "effect_conflict"
    assert "'k'" in d.error[1]
    assert len(outside.calls) <= 1


def test_an_attempt_ends_when_all_that_it_began_has(deploy):
    outside = Outside()

    @effect(idempotent=True)
    async def slow(name):
        await asyncio.sleep(0.05)
        outside.calls.append(name)
        return name

    @effect(idempotent=True)
    def break_down():
        raise Crash

    async def body(ctx):
        if ctx.attempt == 1:
            await asyncio.gather(ctx.effect(slow, "a"), ctx.effect(break_down))
        outside.calls.append("second attempt")
        return await ctx.effect(slow, "a")

    d = deploy(acts(body, asynchronous=True, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == ["a", "second attempt"]


def test_nothing_is_begun_after_the_node_has_ended(deploy):
    outside = Outside()
    left = []

    def charge(amount):
        outside.calls.append(amount)

    def body(ctx):
        left.append(ctx)
        return 0

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "done"
    with pytest.raises(StepError, match="'charge' was asked for when the node had ended"):
        left[0].effect(charge, 1)
    assert (outside.calls, d.effects()) == ([], [])


def test_unequal_calls_at_once(deploy):
    together = asyncio.Event()
    running = []

    @effect(idempotent=True)
    async def read(name):
        running.append(name)
        if len(running) == 2:
            together.set()
        await asyncio.wait_for(together.wait(), 20)
        return name

    async def body(ctx):
        return await asyncio.gather(ctx.effect(read, "a"), ctx.effect(read, "b"))

    d = deploy(acts(body, asynchronous=True))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [["a", "b"]]


def test_an_effect_of_a_cancelled_thread_is_refused(deploy):
    outside = Outside()

    def charge(amount):
        outside.calls.append(amount)

    def body(ctx):
        ctx.effect(charge, 1)
        d.control("cancel")
        ctx.effect(charge, 2)

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "cancelled"
    assert outside.calls == [1]
    assert d.effects() == [("charge", "done", 1)]
    assert d.checkpoints() == [(0, "input")]


def test_a_result_that_comes_after_the_lease_was_lost_is_kept(deploy):
    outside = Outside()
    reached, go_on = threading.Event(), threading.Event()

    def charge(amount):
        outside.calls.append(amount)
        reached.set()
        assert go_on.wait(20)
        return "receipt"

    d = deploy(acts(lambda ctx: ctx.effect(charge, 1)))
    slow = d.worker_of(pid=2)
    d.start()
    nudge = d.queue.pop(0)
    running = threading.Thread(target=lambda: d.work(nudge, slow))
    running.start()
    assert reached.wait(20)
    d.queue += workers.release_child(d.store, slow.owner.worker, 2, reason="given up")
    go_on.set()
    running.join()
    assert d.thread.status == "ready"  # the late worker's commit was refused
    assert d.drain() == "done"
    assert outside.calls == [1]
    assert d.values()["log"] == ["receipt"]


# --- facts and events ---


@pytest.mark.parametrize("asynchronous", [False, True])
def test_facts_are_the_same_on_every_attempt(deploy, asynchronous):
    seen = []

    def facts(ctx):
        return [ctx.now(), ctx.random(), ctx.random(), ctx.uuid()]

    async def facts_async(ctx):
        return [await ctx.now(), await ctx.random(), await ctx.random(), await ctx.uuid()]

    def sync_body(ctx):
        seen.append(facts(ctx))
        if ctx.attempt == 1:
            raise Crash
        return 0

    async def async_body(ctx):
        seen.append(await facts_async(ctx))
        if ctx.attempt == 1:
            raise Crash
        return 0

    d = deploy(acts(async_body if asynchronous else sync_body, asynchronous=asynchronous, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    first, second = seen
    assert first == second
    assert first[1] != first[2]
    assert (first[3].version, first[0].utcoffset().total_seconds()) == (8, 0)


def test_events_are_published_once_and_with_the_outcome(deploy):
    def body(ctx):
        ctx.emit({"attempt": ctx.attempt})
        if ctx.attempt == 1:
            raise Crash
        ctx.ask("Go on?")
        ctx.emit("after")
        return 0

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "waiting"
    emitted = {"kind": "node.emitted"}
    assert [event.payload for event in d.reader.events("t", **emitted)] == [{"attempt": 2}]
    d.decide("answer", answer=1)
    assert d.drain() == "done"
    events = d.reader.events("t", **emitted)
    assert [(event.payload, event.node, event.seq) for event in events] == [
        ({"attempt": 2}, "node", 1),
        ("after", "node", 1),
    ]
    assert d.reader.events("t", after=events[0].cursor, **emitted) == events[1:]
