"""Effects whose outcome nobody knows: the outside is asked, or a person says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from decimal import Decimal

import pytest

from keepstep import NOT_DONE, Graph, Retry, effect
from keepstep.crashpoints import Died
from keepstep.errors import EffectGivenUp, GraphError, InvalidInput, NotFound, WrongStatus
from keepstep.store import workers
from tests.steps.test_effects import AGAIN, Outside, State, acts


@dataclass
class Receipt:
    """What a bank gives."""

    number: int
    amount: Decimal


def killed(d, worker=None):
    """Work until the process dies in the call; its worker notices."""
    runtime = worker or d.worker
    with pytest.raises(Died):
        d.drain(runtime)
    d.queue += workers.release_child(d.store, runtime.owner.worker, runtime.owner.child, reason="signal 9")


class Bank:
    """Pays, and dies before it has answered, or before it has paid."""

    def __init__(self, *, pays_first=True):
        self.outside = Outside()
        self.pays_first = pays_first
        self.asked = []
        self.answer = None

    def pay(self, amount, *, idempotency_key):
        self.outside.calls.append(("pay", idempotency_key))
        if len(self.outside.calls) == 1:
            raise Died
        return Receipt(len(self.outside.calls), amount)

    def find(self, amount, *, idempotency_key):
        self.asked.append((amount, idempotency_key))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def declared(self, **options):
        def pay(amount: Decimal, *, idempotency_key: str) -> Receipt:
            return self.pay(amount, idempotency_key=idempotency_key)

        return effect(**options)(pay)


@pytest.fixture
def bank():
    return Bank()


def graph_of(function, *, retry=AGAIN, catches=False):
    def body(ctx):
        try:
            return ctx.effect(function, Decimal("12.50"), key="81")
        except EffectGivenUp as error:
            if not catches:
                raise
            return str(error)

    graph = acts(body, retry=retry)
    graph.types = (Receipt,)
    return graph


def key_of(d):
    (unknown,) = d.reader.unknown_effects()
    assert (unknown.graph, unknown.thread) == ("acts", "t")
    return unknown.effect.key


# --- the outside is asked -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_outside_says_has_happened_is_not_done_again(deploy, bank, asynchronous):
    bank.answer = Receipt(7, Decimal("12.50"))
    function = bank.declared(lookup=bank.find)
    if asynchronous:

        async def body(ctx):
            return await ctx.effect(function, Decimal("12.50"), key="81")

        graph = acts(body, asynchronous=True)
        graph.types = (Receipt,)
    else:
        graph = graph_of(function)
    d = deploy(graph)
    d.start()
    killed(d)

    assert d.drain() == "done"

    (call,) = bank.outside.calls
    assert bank.asked == [(Decimal("12.50"), call[1])]
    assert d.values()["log"] == [Receipt(7, Decimal("12.50"))]
    assert d.effects() == [("pay", "done", 1)]


def test_a_lookup_may_be_a_coroutine_function_of_an_async_node(deploy, bank):
    async def find(amount):
        await asyncio.sleep(0)
        return Receipt(9, amount)

    function = bank.declared(lookup=find)

    async def body(ctx):
        return await ctx.effect(function, Decimal("12.50"), key="81")

    graph = acts(body, asynchronous=True)
    graph.types = (Receipt,)
    d = deploy(graph)
    d.start()
    killed(d)
    assert d.drain() == "done"
    assert d.values()["log"] == [Receipt(9, Decimal("12.50"))]


def test_a_no_counts_only_when_the_call_can_not_happen_any_more(timed, clock, bank):
    bank.answer = NOT_DONE
    graph = Graph("acts", state=State, types=[Receipt])
    function = bank.declared(lookup=bank.find, settling=40)

    @graph.node(timeout=100)
    def node(state, ctx):
        return {"log": [ctx.effect(function, Decimal("12.50"), key="81")]}

    graph.edge("__start__", "node")
    d = timed(graph)
    d.start()
    killed(d)

    assert d.drain() == "ready"
    assert len(bank.asked) == 1
    thread = d.thread
    assert thread.row.due_at - clock.now == pytest.approx(140, abs=2)
    assert d.error[0] == "effect_pending"
    assert thread.row.failures == 0
    clock.now += 150
    d.sweep()
    assert d.drain() == "done"

    # Under the same key: the outside can tell that it is the same payment.
    (first, second) = bank.outside.calls
    assert first == second
    assert d.effects() == [("pay", "done", 2)]
    assert d.error == ("", "")


@pytest.mark.parametrize("then", ["returns", "raises", "parks"])
def test_a_node_cannot_swallow_that_it_has_to_wait(timed, clock, bank, then):
    bank.answer = NOT_DONE
    function = bank.declared(lookup=bank.find, settling=10)

    def body(ctx):
        try:
            return ctx.effect(function, Decimal("12.50"), key="81")
        except Exception:  # noqa: BLE001  what a careless node does
            if then == "raises":
                raise ValueError from None
            return ctx.ask("What now?").answer if then == "parks" else "went on"

    graph = acts(body)
    graph.types = (Receipt,)
    d = timed(graph)
    d.start()
    killed(d)
    assert d.drain() == "ready"
    assert d.error[0] == "effect_pending"
    assert len(bank.outside.calls) == 1


def test_a_lookup_that_fails_is_asked_again_as_the_node_is_retried_and_then_blocks(deploy, bank):
    bank.answer = ConnectionError("the bank is closed")
    d = deploy(graph_of(bank.declared(lookup=bank.find), retry=Retry(attempts=3, delay=0)))
    d.start()
    killed(d)

    assert d.drain() == "blocked"

    assert d.error[0] == "effect_unknown"
    assert "asking the outside failed: ConnectionError: the bank is closed" in d.error[1]
    assert len(bank.asked) == 3
    assert len(bank.outside.calls) == 1
    bank.answer = Receipt(7, Decimal("12.50"))
    d.control("retry")
    assert d.drain() == "done"
    assert len(bank.outside.calls) == 1


def test_what_may_be_repeated_needs_no_lookup(bank):
    with pytest.raises(GraphError, match="idempotent or has a lookup"):
        bank.declared(idempotent=True, lookup=bank.find)
    with pytest.raises(GraphError, match="settling must be a finite"):
        bank.declared(settling=-1)


# --- a person says ------------------------------------------------------------------------------------------------


def blocked(deploy, bank, **options):
    d = deploy(graph_of(bank.declared(), **options))
    d.start()
    killed(d)
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    return d


def test_the_unknown_effect_is_shown_with_its_arguments(deploy, bank):
    d = blocked(deploy, bank)
    (unknown,) = d.reader.unknown_effects()
    assert unknown.arguments == {"amount": {"$": "decimal", "v": "12.50"}}
    assert unknown.effect.key == bank.outside.calls[0][1]
    assert (unknown.effect.name, unknown.effect.calls, unknown.effect.resolved_by) == ("pay", 1, None)


def test_what_happened_is_returned_as_the_call_would_have_returned_it(deploy, bank):
    d = blocked(deploy, bank)
    key = key_of(d)

    d.send("resolve", effect=key, outcome="happened", result={"number": 7, "amount": "12.50"}, by="anna")
    assert d.drain() == "done"

    assert d.values()["log"] == [Receipt(7, Decimal("12.50"))]
    assert len(bank.outside.calls) == 1
    assert d.reader.unknown_effects() == []
    (effect_,) = d.reader.effects("t")
    assert (effect_.state, effect_.resolved_by) == ("done", "anna")
    said = [(row.action, row.actor) for row in d.reader.audit("t")]
    assert said[-1] == ("resolve", "anna")


def test_a_result_that_the_call_cannot_have_returned_is_told_and_can_be_said_again(deploy, bank):
    d = blocked(deploy, bank)
    key = key_of(d)
    d.send("resolve", effect=key, outcome="happened", result={"number": "many", "amount": "12.50"}, by="anna")
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert "the result that anna gave is not what it returns: $.number" in d.error[1]
    assert "many" not in d.error[1]

    d.send("resolve", effect=key, outcome="happened", result={"number": 7, "amount": "12.50"}, by="bert")
    assert d.drain() == "done"
    assert d.values()["log"] == [Receipt(7, Decimal("12.50"))]
    assert len(bank.outside.calls) == 1


def test_what_did_not_happen_is_called_again_under_the_same_key(deploy, bank):
    d = blocked(deploy, bank)
    d.send("resolve", effect=key_of(d), outcome="not_happened", by="anna")
    assert d.drain() == "done"
    first, second = bank.outside.calls
    assert first == second
    assert d.values()["log"] == [Receipt(2, Decimal("12.50"))]


@pytest.mark.parametrize("catches", [True, False])
def test_what_is_given_up_is_an_error_that_the_node_may_handle(deploy, bank, catches):
    d = blocked(deploy, bank, catches=catches, retry=None)
    d.send("resolve", effect=key_of(d), outcome="give_up", by="anna", reason="too old to ask")

    assert d.drain() == ("done" if catches else "failed")

    told = "effect 'pay' was given up by anna: too old to ask"
    assert len(bank.outside.calls) == 1
    if catches:
        assert d.values()["log"] == [told]
    else:
        assert d.error == ("effect_given_up", told)
        d.control("retry")
        assert d.drain() == "failed"  # for good: nothing is called for it any more
        assert len(bank.outside.calls) == 1


def test_one_command_resolves_once(deploy, bank):
    d = blocked(deploy, bank)
    said = {"effect": key_of(d), "outcome": "not_happened", "by": "anna", "id": "r1"}
    assert d.send("resolve", **said).duplicate is False
    assert d.send("resolve", **said).duplicate is True
    assert d.drain() == "done"
    assert len(bank.outside.calls) == 2


def test_refusals(deploy, bank):
    d = blocked(deploy, bank)
    key = key_of(d)
    thread_id = d.thread.id
    before = d.dump()
    for fields, error, text in [
        ({"effect": "nothing", "outcome": "give_up"}, NotFound, "there is no effect 'nothing'"),
        ({"effect": f"{thread_id}/0/9/n/pay:1", "outcome": "give_up"}, NotFound, f"without an outcome: {key}"),
        ({"effect": key, "outcome": "give_up", "tenant": "other"}, NotFound, "there is no effect"),
        ({"effect": key, "outcome": "give_up", "result": 1}, InvalidInput, r"\$.result: only what happened"),
    ]:
        with pytest.raises(error, match=text.replace("$.", ".")):
            d.send("resolve", **fields)
    assert d.dump() == before
    d.send("resolve", effect=key, outcome="not_happened")
    assert d.drain() == "done"
    with pytest.raises(WrongStatus, match="its outcome is known"):
        d.send("resolve", effect=key, outcome="give_up")


def test_a_call_under_way_is_nobodys_to_resolve(deploy):
    found = []

    def pay(amount):
        (row,) = d.reader.effects("t")
        assert d.reader.unknown_effects() == []
        try:
            d.send("resolve", worker=d.worker_of(pid=2), effect=row.key, outcome="give_up")
        except WrongStatus as error:
            found.append(str(error))
        return amount

    d = deploy(acts(lambda ctx: ctx.effect(pay, 1)))
    d.start()
    assert d.drain() == "done"
    assert found == ["effect 'pay' is being performed at this moment: wait for what comes of it"]
