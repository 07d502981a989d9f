"""Effects whose outcome nobody knows: the outside is asked, or a person says."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass
from decimal import Decimal

import msgspec
import pytest

from keepstep import END, NOT_DONE, START, AnswerLost, Graph, Retry, effect
from keepstep.crashpoints import Died
from keepstep.errors import EffectGivenUp, GraphError, InvalidInput, NotFound, WrongStatus
from keepstep.store import effects, workers
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


def test_a_lookup_is_asked_with_what_a_partial_function_was_given_before(deploy):
    paid, asked = [], []

    def find(order, amount, *, idempotency_key):
        asked.append((order, amount, idempotency_key))
        return "receipt"

    @effect(lookup=find)
    def pay(order, amount) -> str:
        paid.append((order, amount))
        raise Died

    d = deploy(acts(lambda ctx: ctx.effect(functools.partial(pay, "order-81"), amount=10, key="81")))
    d.start()
    killed(d)
    assert d.drain() == "done"
    assert asked == [("order-81", 10, f"{d.thread.id}/0/1/node/pay:81")]
    assert paid == [("order-81", 10)]
    assert d.values()["log"] == ["receipt"]


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


@dataclass
class Told:
    """What the effects below have done."""

    paid: list
    entered: list
    die: bool = True


class Slip(msgspec.Struct):
    """What another bank gives."""

    number: int


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_result_becomes_what_the_annotation_says_also_of_structs_and_partial_functions(deploy, wrapped):
    def pay(amount: int) -> Slip:
        raise Died

    function = functools.partial(pay, 3) if wrapped else pay
    graph = acts(lambda ctx: ctx.effect(function, *([] if wrapped else [3]), key="k"))
    graph.types = (Slip,)
    d = deploy(graph)
    d.start()
    killed(d)
    assert d.drain() == "blocked"
    d.send("resolve", effect=key_of(d), outcome="happened", result={"number": "seven"})
    assert d.drain() == "blocked"
    assert "the result that anna gave is not what it returns: $" in d.error[1]
    (found,) = d.reader.effects("t")
    d.send("resolve", effect=found.key, outcome="happened", result={"number": 7})
    assert d.drain() == "done"
    assert d.values()["log"] == [Slip(7)]


def beside(told, *, ends, retry=None):
    """A fan-out of `a`, which pays, and `b`, which asks or fails."""
    graph = Graph("acts", state=State, fan_out=True)

    def pay():
        told.paid.append(1)
        if told.die:
            raise Died
        return "paid"

    @graph.node
    def a(state, ctx):
        told.entered.append("a")
        return {"log": [ctx.effect(pay)]}

    @graph.node(retry=retry)
    def b(state, ctx):
        told.entered.append("b")
        if ends == "fails":
            message = "never"
            raise ValueError(message)
        return {"log": [ctx.ask("b?").answer]}

    for name in ("a", "b"):
        graph.edge(START, name)
        graph.edge(name, END)
    return graph


def died_in_a(d):
    while d.queue:
        with contextlib.suppress(Died):
            d.work(d.queue.pop(0))
    d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9")
    d.drain()


def test_a_node_run_of_a_fan_out_goes_on_while_its_sibling_waits(deploy):
    told = Told([], [])
    d = deploy(beside(told, ends="asks"))
    d.start()
    died_in_a(d)
    assert d.thread.status == "waiting"
    told.die = False

    d.send("resolve", effect=key_of(d), outcome="happened", result="by hand")
    assert d.drain() == "waiting"
    d.decide("answer", answer="yes")
    assert d.drain() == "done"
    assert d.values()["log"] == ["by hand", "yes"]
    assert told.paid == [1]


def test_only_the_node_run_of_the_effect_runs_again(deploy):
    told = Told([], [])
    d = deploy(beside(told, ends="fails"))
    d.start()
    died_in_a(d)
    assert d.thread.status == "blocked"
    told.die = False
    entered = told.entered.count("b")

    d.send("resolve", effect=key_of(d), outcome="not_happened")
    assert d.drain() == "failed"  # as b has, for good

    assert told.entered.count("b") == entered
    assert told.paid == [1, 1]
    assert d.error[0] == "node_failed"


def test_a_word_that_a_node_has_gone_on_from_stands(deploy):
    """Its step is committed, or it went on within the step: what it did since rests on it."""
    told = Told([], [])

    def pay():
        told.paid.append(1)
        raise Died

    def body(ctx):
        receipt = ctx.effect(pay)
        return [receipt, ctx.ask("Ship?").answer]

    d = deploy(acts(body))
    d.start()
    killed(d)
    d.drain()
    key = key_of(d)
    d.send("resolve", effect=key, outcome="happened", result="R-81", by="anna")
    assert d.drain() == "waiting"
    with pytest.raises(WrongStatus, match="as anna said: its outcome is known"):
        d.send("resolve", effect=key, outcome="not_happened", by="bert")
    d.decide("answer", answer="yes")
    assert d.drain() == "done"
    for outcome in ("not_happened", "give_up", "happened"):
        with pytest.raises(WrongStatus, match="its outcome is known"):
            d.send("resolve", effect=key, outcome=outcome, by="bert")
    assert d.values()["log"] == [["R-81", "yes"]]
    assert told.paid == [1]


def test_what_is_given_up_may_be_known_after_all(deploy, bank):
    d = blocked(deploy, bank, retry=None)
    key = key_of(d)
    d.send("resolve", effect=key, outcome="give_up")
    assert d.drain() == "failed"
    d.send("resolve", effect=key, outcome="happened", result={"number": 7, "amount": "12.50"})
    d.control("retry")
    assert d.drain() == "done"
    assert d.values()["log"] == [Receipt(7, Decimal("12.50"))]
    assert len(bank.outside.calls) == 1


@pytest.mark.parametrize(("outcome", "status"), [("happened", "done"), ("give_up", "failed")])
def test_a_word_that_comes_while_the_outside_is_asked_is_what_counts(deploy, bank, monkeypatch, outcome, status):
    """It is refused while the attempt holds its lease; one that comes in between all the same is found."""

    def find(amount, *, idempotency_key):
        monkeypatch.setattr(effects, "is_under_way", lambda *_: False)
        result = {"number": 7, "amount": "12.50"} if outcome == "happened" else None
        d.send("resolve", worker=other, effect=idempotency_key, outcome=outcome, result=result)
        return NOT_DONE

    graph = Graph("acts", state=State, types=[Receipt])
    function = bank.declared(lookup=find)

    @graph.node(timeout=60)
    def node(state, ctx):
        return {"log": [ctx.effect(function, Decimal("12.50"), key="81")]}

    graph.edge(START, "node")
    d = deploy(graph)
    other = d.worker_of(pid=2)
    d.start()
    killed(d)
    d.execute("UPDATE keepstep_effect SET deadline = deadline - 100")
    assert d.drain() == status
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
    assert found == ["effect 'pay' is being tried at this moment: wait for what comes of it"]


# --- an answer that was lost ---


class LosesItsAnswer(Bank):
    """Books, or does not, and its answer does not arrive."""

    def pay(self, amount, *, idempotency_key):
        self.outside.calls.append(("pay", idempotency_key))
        if len(self.outside.calls) == 1:
            message = "while reading"
            raise TimeoutError(message)
        return Receipt(len(self.outside.calls), amount)


def test_a_call_whose_answer_was_lost_is_not_a_failed_one(deploy):
    bank = LosesItsAnswer()
    d = deploy(graph_of(bank.declared(), retry=AGAIN))
    d.start()
    assert d.drain() == "blocked"
    code, message = d.error
    assert code == "effect_unknown"
    assert "its answer was lost: TimeoutError: while reading" in message
    assert d.effects() == [("pay", "intent", 1)]
    (unknown,) = d.reader.unknown_effects()
    d.send("resolve", effect=unknown.effect.key, outcome="happened", result={"number": 1, "amount": "12.50"})
    assert d.drain() == "done"
    assert d.values()["log"] == [Receipt(1, Decimal("12.50"))]
    assert len(bank.outside.calls) == 1


def test_a_node_that_catches_a_lost_answer_blocks_all_the_same(deploy):
    bank = LosesItsAnswer()

    def body(ctx):
        try:
            return ctx.effect(bank.declared(), Decimal("12.50"), key="81")
        except Exception:  # noqa: BLE001  what a careless node does
            return "went on"

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"


def test_the_outside_is_asked_at_once_when_an_answer_was_lost(deploy):
    bank = LosesItsAnswer()
    bank.answer = Receipt(1, Decimal("12.50"))
    d = deploy(graph_of(bank.declared(lookup=bank.find)))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [bank.answer]
    assert len(bank.outside.calls) == len(bank.asked) == 1
    assert d.effects() == [("pay", "done", 1)]


def test_what_the_outside_does_not_know_of_has_failed_and_may_be_tried_again(deploy):
    bank = LosesItsAnswer()
    bank.answer = NOT_DONE
    d = deploy(graph_of(bank.declared(lookup=bank.find), retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert [name for name, _ in bank.outside.calls] == ["pay", "pay"]
    assert len(bank.asked) == 1
    assert d.effects() == [("pay", "done", 2)]


def test_what_the_outside_does_not_know_of_yet_is_asked_again_when_it_has_settled(timed, clock):
    bank = LosesItsAnswer()
    bank.answer = NOT_DONE
    d = timed(graph_of(bank.declared(lookup=bank.find, settling=50)))
    d.start()
    assert d.drain() == "ready"
    assert d.effects() == [("pay", "intent", 1)]
    assert d.error[0] == "effect_pending"
    # The call is over: it is not waited for as long as the node might have taken.
    assert d.thread.row.due_at - clock.now == pytest.approx(50, abs=2)
    bank.answer = Receipt(1, Decimal("12.50"))
    clock.now += 60
    d.sweep()
    assert d.drain() == "done"
    assert len(bank.outside.calls) == 1


def test_an_async_node_asks_at_once_too(deploy):
    bank = LosesItsAnswer()
    bank.answer = Receipt(1, Decimal("12.50"))
    function = bank.declared(lookup=bank.find)

    async def body(ctx):
        return await ctx.effect(function, Decimal("12.50"), key="81")

    graph = acts(body, asynchronous=True)
    graph.types = (Receipt,)
    d = deploy(graph)
    d.start()
    assert d.drain() == "done"
    assert len(bank.outside.calls) == len(bank.asked) == 1


def test_a_lost_answer_of_what_may_be_repeated_is_an_error_like_others(deploy, bank):
    def read(*, idempotency_key):
        bank.asked.append(idempotency_key)
        if len(bank.asked) == 1:
            raise AnswerLost
        return "read"

    d = deploy(acts(lambda ctx: ctx.effect(effect(idempotent=True)(read)), retry=AGAIN))
    d.start()

    assert d.drain() == "done"
    assert d.values()["log"] == ["read"]
    assert len(bank.asked) == 2
    assert len(set(bank.asked)) == 1


def test_a_lookup_whose_answer_is_lost_is_asked_again(deploy, bank):
    receipt = Receipt(7, Decimal("12.50"))

    def find(amount, *, idempotency_key):
        bank.asked.append(idempotency_key)
        if len(bank.asked) == 1:
            raise AnswerLost
        return receipt

    d = deploy(graph_of(bank.declared(lookup=find)))
    d.start()
    killed(d)

    assert d.drain() == "done"
    assert d.values()["log"] == [receipt]
    assert len(bank.asked) == 2
    assert len(bank.outside.calls) == 1
