"""What a failed run did outside is undone, the newest first, each once, before the run counts as failed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import pytest

from keepstep import END, NOT_DONE, START, ChildFailed, Graph, Retry, Send, append, crashpoints, effect
from keepstep.cli.program import run
from keepstep.crashpoints import Died
from keepstep.errors import InvalidInput, NodeFailed, RunUndone, UndoFailed, WrongStatus
from keepstep.runtime import undos
from keepstep.store import workers


class Trip(TypedDict, total=False):
    fails: bool
    seat: int
    log: Annotated[list[Any], append]


@dataclass
class Booking:
    """What an agency gives."""

    number: int
    price: Decimal


class Agency:
    """Books and takes back; `ledger` is what was done to it, in order."""

    def __init__(self):
        self.ledger = []
        self.keys = []
        self.broken = {}
        """What raises how often: {what: [errors]}."""

    def book(self, what, price):
        self.ledger.append(f"book {what}")
        return Booking(len(self.ledger), price)

    def cancel(self, what, booking, key):
        self.keys.append(key)
        errors = self.broken.get(what)
        if errors:
            raise errors.pop(0)
        self.ledger.append(f"cancel {what} {booking.number} at {booking.price}")

    def declared(self, *, undo=None, **options):
        """Return the effect of booking, undone by `undo` or by cancelling."""

        def cancel(what: str, result: Booking, *, idempotency_key: str) -> None:
            self.cancel(what, result, idempotency_key)

        @effect(undo=undo or effect(**options)(cancel))
        def book(what: str, price: Decimal, note: str = "") -> Booking:
            return self.book(what, price)

        return book


@pytest.fixture
def agency():
    return Agency()


def trip(book, *, last=None, fan_out=None):
    """A graph that books a flight, then a hotel and a car, and then fails, unless `last(ctx)` says otherwise."""
    graph = Graph("trip", state=Trip, types=[Booking], fan_out=fan_out)

    @graph.node
    def fly(state, ctx):
        return {"log": [ctx.effect(book, "flight", Decimal("100.00"))]}

    @graph.node
    def stay(state, ctx):
        ctx.effect(book, "hotel", price=Decimal("80.50"))
        ctx.effect(book, "car", Decimal("40.00"), key="car")
        if last is not None:
            return {"log": [last(ctx)]}
        message = "no passport"
        raise ValueError(message)

    graph.edge(START, "fly")
    graph.edge("fly", "stay")
    graph.edge("stay", END)
    return graph


BOOKED = ["book flight", "book hotel", "book car"]
CANCELLED = ["cancel car 3 at 40.00", "cancel hotel 2 at 80.50", "cancel flight 1 at 100.00"]


def undoes(d):
    """[(undone, name, state, calls)] of the journal, in order."""
    return [(each.undone, each.name, each.state, each.calls) for each in d.reader.effects("t")]


def audited(d):
    return [json.loads(each.detail) for each in d.reader.audit("t") if each.action == "undo"]


def due_now(d):
    """Let the time pass for which a retry was put off."""
    assert (d.thread.status, d.queue) == ("ready", [])
    d.execute("UPDATE keepstep_thread SET due_at = 0, next_nudge_at = 0")
    assert len(d.sweep()) == 1
    return d.drain()


def dies(monkeypatch, point, detail):
    """Have the process die once at a point."""
    died = []

    def hook(name, text):
        if not died and name == point and detail in text:
            died.append(name)
            raise Died

    monkeypatch.setattr(crashpoints, "hook", hook)
    return died


def relieved(d):
    with pytest.raises(Died):
        d.drain()
    d.queue += workers.release_child(d.store, d.worker.owner.worker, d.worker.owner.child, reason="signal 9")


# --- each once, the newest first ----------------------------------------------------------------------------------


def test_a_failed_run_is_undone_from_its_newest_effect_to_its_oldest(deploy, agency):
    d = deploy(trip(agency.declared()))
    thread_id = d.start().thread_id
    assert d.drain() == "failed"

    assert agency.ledger == BOOKED + CANCELLED
    assert len(set(agency.keys)) == 3
    done = {each.key for each in d.reader.effects("t") if each.undo}
    assert set(agency.keys) == {f"{key}/undo" for key in done}
    assert f"{thread_id}/0/2/stay/book:car/undo" in agency.keys
    assert d.error == ("node_failed", "no passport (3 effects were undone: start it again)")
    assert d.thread.error["undone"] == 3
    assert d.thread.error["node"] == "stay"
    assert (d.thread.undoing, d.thread.undone) == (False, True)
    assert Counter(undoes(d)) == {("undone", "book", "done", 1): 3, (None, "cancel", "done", 1): 3}
    assert [each["name"] for each in audited(d)] == ["book"] * 3
    assert [each["effect"].rpartition("/")[0].rpartition("/")[2] for each in audited(d)] == ["stay", "stay", "fly"]
    assert d.checkpoints() == [(0, "input"), (1, "step")]
    (found,) = d.reader.runs("t")
    assert (found.status, json.loads(found.error)) == ("failed", d.thread.error)


def test_nothing_is_undone_of_a_run_that_does_not_fail(deploy, agency):
    d = deploy(trip(agency.declared(), last=lambda _ctx: "home"))
    d.start()
    assert d.drain() == "done"
    assert agency.ledger == BOOKED


def test_a_run_without_such_effects_fails_as_ever(deploy):
    graph = Graph("trip", state=Trip)

    def book(what):
        return what

    @graph.node
    def fly(state, ctx):
        ctx.effect(book, "x")
        raise ValueError

    graph.edge(START, "fly")
    d = deploy(graph)
    d.start()
    d.work(d.queue.pop(0))
    assert (d.thread.status, d.queue, d.thread.undone) == ("failed", [], False)


def test_each_undo_is_a_claim_of_its_own_which_any_worker_may_take(deploy, agency):
    d = deploy(trip(agency.declared()))
    other = d.worker_of(pid=2)
    d.start()
    d.work(d.queue.pop(0))
    d.work(d.queue.pop(0))
    assert (d.thread.status, d.thread.undoing, agency.ledger) == ("ready", True, BOOKED)
    assert d.error == ("node_failed", "no passport")
    for number in (1, 2, 3):
        (nudge,) = d.queue
        d.queue.clear()
        assert d.work(nudge, other if number % 2 else d.worker)
        assert not d.work(nudge)
        assert agency.ledger == BOOKED + CANCELLED[:number]
    assert (d.thread.status, d.queue) == ("failed", [])


def test_several_workers_undo_each_effect_once(deploy, agency):
    d = deploy(trip(agency.declared()))
    d.start()
    until_undoing(d)
    others = [d.worker_of(pid=pid) for pid in (2, 3)]
    d.queue += d.queue * 5
    assert d.drain_together(d.worker, *others) == "failed"
    assert agency.ledger == BOOKED + CANCELLED
    assert len(audited(d)) == 3


def test_what_a_failed_attempt_did_is_undone_once_and_what_failed_is_not(deploy, agency):
    tries = []

    def tried(what: str):
        tries.append(what)
        message = "sold out"
        raise LookupError(message)

    def never(what):
        tries.append(f"undo {what}")

    failing = effect(undo=never)(tried)
    book = agency.declared()
    graph = Graph("trip", state=Trip, types=[Booking])

    @graph.node(retry=Retry(attempts=3, delay=0))
    def fly(state, ctx):
        ctx.effect(book, "flight", Decimal("100.00"))
        ctx.effect(failing, "ship")

    graph.edge(START, "fly")
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert agency.ledger == ["book flight", "cancel flight 1 at 100.00"]
    assert tries == ["ship"] * 3


def test_what_every_node_run_of_a_fan_out_did_is_undone(deploy, agency):
    book = agency.declared()
    graph = Graph("trip", state=Trip, types=[Booking], fan_out=True)

    @graph.node
    def seat(state, ctx):
        ctx.effect(book, f"seat{state['seat']}", Decimal(state["seat"]))
        if state["seat"] == 1:
            message = "no window"
            raise ValueError(message)
        return {}

    graph.route(START, lambda _state: [Send("seat", {"seat": number}) for number in range(3)], to=["seat"])
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert agency.ledger[:3] == ["book seat0", "book seat1", "book seat2"]
    assert agency.ledger[3:] == ["cancel seat2 3 at 2", "cancel seat1 2 at 1", "cancel seat0 1 at 0"]
    assert d.error == ("node_failed", "no window (3 effects were undone: start it again)")


def test_a_failure_that_is_continued_after_undoes_nothing(deploy, agency):
    book = agency.declared()
    graph = Graph("trip", state=Trip, types=[Booking])

    @graph.node(on_error="continue")
    def fly(state, ctx):
        ctx.effect(book, "flight", Decimal(1))
        raise ValueError

    @graph.node
    def home(state, ctx):
        return {"log": [len(ctx.failures)]}

    graph.edge(START, "fly")
    graph.edge("fly", "home")
    d = deploy(graph)
    d.start()
    assert d.drain() == "done"
    assert agency.ledger == ["book flight"]


def test_a_run_that_reaches_its_step_limit_is_undone(deploy, agency):
    d = deploy(trip(agency.declared()))
    d.start(step_limit=1)
    assert d.drain() == "failed"
    assert agency.ledger == ["book flight", "cancel flight 1 at 100.00"]
    assert d.error[0] == "step_limit"
    assert d.error[1].endswith("(1 effect was undone: start it again)")
    assert d.checkpoints() == [(0, "input"), (1, "step")]
    with pytest.raises(RunUndone):
        d.control("retry", step_limit=9)


def test_a_route_that_is_refused_fails_the_run_which_is_undone(deploy, agency):
    book = agency.declared()
    graph = Graph("trip", state=Trip, types=[Booking])

    @graph.node
    def fly(state, ctx):
        return {"log": [ctx.effect(book, "flight", Decimal(1))]}

    def lost(_state):
        message = "which way?"
        raise LookupError(message)

    graph.edge(START, "fly")
    graph.route("fly", lost, to=["fly"])
    d = deploy(graph)
    d.start()
    status = d.drain()
    assert (status, agency.ledger) == ("failed", ["book flight", "cancel flight 1 at 1"])


def test_coroutine_functions_undo_and_are_undone(deploy, agency):
    async def cancel(what, result):
        await asyncio.sleep(0)
        agency.cancel(what, result, "")

    @effect(undo=cancel)
    async def book(what: str, price: Decimal) -> Booking:
        await asyncio.sleep(0)
        return agency.book(what, price)

    graph = Graph("trip", state=Trip, types=[Booking])

    @graph.node
    async def fly(state, ctx):
        await ctx.effect(book, "flight", Decimal(1))
        raise ValueError

    graph.edge(START, "fly")
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert agency.ledger == ["book flight", "cancel flight 1 at 1"]


def test_an_undo_is_given_what_it_takes(deploy, agency):
    given = []

    def wants_all(**everything):
        given.append(everything)

    d = deploy(trip(agency.declared(undo=wants_all)))
    d.start()
    assert d.drain() == "failed"
    key = given[0].pop("idempotency_key")
    assert key.endswith("/book:car/undo")
    assert given[0] == {"what": "car", "price": Decimal("40.00"), "result": Booking(3, Decimal("40.00"))}


def test_what_an_undo_returns_need_not_be_storable(deploy, agency):
    d = deploy(trip(agency.declared(undo=returns_a_lock)))
    d.start()
    assert d.drain() == "failed"
    assert d.thread.error["undone"] == 3


def returns_a_lock(what):
    return threading.Lock()


# --- the run's end comes after ------------------------------------------------------------------------------------


def test_a_run_that_is_queued_begins_when_all_is_undone(deploy, agency):
    d = deploy(trip(agency.declared()))
    d.start()
    d.work(d.queue.pop(0))
    d.start({"fails": True})
    d.work(d.queue.pop(0))
    assert [each.status for each in d.reader.runs("t")] == ["running", "queued"]
    d.work(d.queue.pop(0))
    assert [each.status for each in d.reader.runs("t")] == ["running", "queued"]
    assert d.drain() == "failed"
    assert agency.ledger == [
        *BOOKED,
        *CANCELLED,
        *BOOKED,
        *(each.replace("3", "9").replace("2 ", "8 ").replace("1 ", "7 ") for each in CANCELLED),
    ]
    assert [each.status for each in d.reader.runs("t")] == ["failed", "failed"]


def test_the_next_run_of_the_thread_may_succeed_and_undoes_nothing_of_the_one_before(deploy, agency):
    def last(ctx):
        if len(agency.ledger) == 3:
            message = "no passport"
            raise ValueError(message)
        return "home"

    d = deploy(trip(agency.declared(), last=last))
    d.start()
    assert d.drain() == "failed"
    before = d.dump()
    with pytest.raises(RunUndone, match="what the run of thread 't' did was undone when it failed"):
        d.control("retry")
    assert d.dump() == before
    d.start()
    assert d.drain() == "done"
    assert agency.ledger == BOOKED + CANCELLED + BOOKED
    assert (d.thread.undone, d.thread.error) == (False, None)


def test_a_run_that_is_retried_and_fails_again_is_undone_as_a_whole(deploy, agency):
    """What failed before an effect with an undo was done can be retried, as ever."""
    book = agency.declared()
    graph = Graph("trip", state=Trip, types=[Booking])
    tries = []

    @graph.node
    def fly(state, ctx):
        tries.append(1)
        if len(tries) > 1:
            ctx.effect(book, "flight", Decimal(1))
        raise ValueError

    graph.edge(START, "fly")
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    d.control("retry")
    assert d.drain() == "failed"
    assert agency.ledger == ["book flight", "cancel flight 1 at 1"]


def test_a_parent_is_told_when_its_child_is_undone_and_not_before(deploy, agency):
    child = trip(agency.declared())
    parent = Graph("parent", state=Trip)
    told = []

    @parent.node
    def send(state, ctx):
        try:
            ctx.join(ctx.spawn(child, {}, thread="c"))
        except ChildFailed as error:
            told.append((list(agency.ledger), error.error["message"]))
        return {"log": ["told"]}

    parent.edge(START, "send")
    d = deploy(parent, child)
    d.start()
    assert d.drain() == "done"
    assert told == [(BOOKED + CANCELLED, "no passport (3 effects were undone: start it again)")]


def test_what_a_child_has_done_is_not_undone_with_its_parent(deploy, agency):
    child = trip(agency.declared(), last=lambda _ctx: "home")
    parent = Graph("parent", state=Trip)

    @parent.node
    def send(state, ctx):
        ctx.join(ctx.spawn(child, {}, thread="c"))
        raise ValueError

    parent.edge(START, "send")
    d = deploy(parent, child)
    d.start()
    assert d.drain() == "failed"
    assert agency.ledger == BOOKED


def test_a_cancelled_run_is_not_undone(deploy, agency):
    d = deploy(trip(agency.declared(), last=lambda ctx: ctx.ask("Go?").answer))
    d.start()
    assert d.drain() == "waiting"
    d.control("cancel")
    assert d.drain() == "cancelled"
    assert agency.ledger == BOOKED


# --- people -------------------------------------------------------------------------------------------------------


def until_undoing(d, number=0):
    """Work until so many effects are undone."""
    while not d.thread.undoing:
        d.work(d.queue.pop(0))
    for _ in range(number):
        d.work(d.queue.pop(0))


def test_a_pause_holds_between_two_undos(deploy, agency):
    d = deploy(trip(agency.declared()))
    d.start()
    until_undoing(d, 1)
    d.control("pause")
    assert d.drain() == "ready"
    assert agency.ledger == BOOKED + CANCELLED[:1]
    with pytest.raises(WrongStatus, match="has failed and is being undone"):
        d.edit({"fails": False})
    d.control("resume")
    assert d.drain() == "failed"
    assert agency.ledger == BOOKED + CANCELLED


def test_a_cancel_ends_the_undoing_and_a_retry_goes_on_with_it(deploy, agency):
    d = deploy(trip(agency.declared()))
    d.start()
    until_undoing(d, 1)
    d.control("cancel")
    assert d.drain() == "cancelled"
    assert agency.ledger == BOOKED + CANCELLED[:1]
    assert [each.status for each in d.reader.runs("t")] == ["cancelled"]
    d.control("retry")
    assert d.drain() == "failed"
    assert agency.ledger == BOOKED + CANCELLED
    assert d.error == ("node_failed", "no passport (3 effects were undone: start it again)")


def test_a_new_run_after_a_cancelled_undoing_leaves_the_rest_as_it_is(deploy, agency):
    d = deploy(trip(agency.declared()))
    d.start()
    until_undoing(d, 1)
    d.control("cancel")
    d.queue.clear()
    d.edit({"fails": True})
    d.start()
    assert d.drain() == "failed"
    own = ["cancel car 7 at 40.00", "cancel hotel 6 at 80.50", "cancel flight 5 at 100.00"]
    assert agency.ledger == [*BOOKED, CANCELLED[0], *BOOKED, *own]


def test_a_cancel_while_an_undo_is_called_keeps_what_came_of_it(deploy, agency):
    def cancel(what, result):
        agency.cancel(what, result, "")
        if what == "car":
            d.send("control", worker=other, thread="t", action="cancel")

    d = deploy(trip(agency.declared(undo=cancel)))
    other = d.worker_of(pid=2)
    d.start()
    assert d.drain() == "cancelled"
    d.control("retry")
    assert d.drain() == "failed"
    assert agency.ledger == BOOKED + CANCELLED


def test_it_is_shown(deploy, agency, capsys):
    def shown(*arguments):
        code = run(["--database", d.url, *arguments])
        assert code == 0
        return capsys.readouterr().out

    d = deploy(trip(agency.declared()))
    d.start()
    until_undoing(d, 1)
    assert "being undone" in shown("threads")
    assert "its failed run is being undone" in shown("show", "t")
    assert json.loads(shown("--json", "show", "t"))["thread"]["undoing"] is True
    d.drain()
    assert shown("effects", "t").count("done, undone") == 3
    assert "give the thread another run" in shown("show", "t").replace("\n", " ")
    effects = json.loads(shown("--json", "effects", "t"))["effects"]
    assert Counter(each["undone"] for each in effects) == {"undone": 3, None: 3}


# --- deaths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "detail", "status"),
    [
        ("before_undo", "hotel", "failed"),
        ("before_intent", "/undo", "failed"),
        ("after_intent", "/undo", "blocked"),
        ("after_call", "/undo", "blocked"),
        ("after_result", "/undo", "failed"),
        ("after_undo", "/stay/", "failed"),
        ("after_undo", "/fly/", "failed"),
    ],
)
def test_each_is_undone_once_whenever_the_process_dies(deploy, agency, monkeypatch, point, detail, status):
    if detail == "hotel":
        detail = "/stay/"
    d = deploy(trip(agency.declared()))
    d.start()
    died = dies(monkeypatch, point, detail)
    relieved(d)
    assert d.drain() == status
    assert died == [point]
    if status == "blocked":
        assert d.error[0] == "effect_unknown"
        assert agency.ledger == BOOKED + (CANCELLED[:1] if point == "after_call" else [])
        (unknown,) = d.reader.unknown_effects()
        assert unknown.effect.key.endswith("/book:car/undo")
        assert unknown.arguments["what"] == "car"
        d.control("retry")
        assert d.drain() == "blocked"
        d.send("resolve", effect=unknown.effect.key, outcome="happened" if point == "after_call" else "not_happened")
        assert d.drain() == "failed"
    assert agency.ledger == BOOKED + CANCELLED
    assert len(audited(d)) == 3


@pytest.mark.parametrize("point", ["after_intent", "after_call"])
def test_an_idempotent_undo_is_called_again_under_its_key(deploy, agency, monkeypatch, point):
    d = deploy(trip(agency.declared(idempotent=True)))
    d.start()
    dies(monkeypatch, point, "/undo")
    relieved(d)
    assert d.drain() == "failed"
    again = [CANCELLED[0]] if point == "after_call" else []
    assert agency.ledger == BOOKED + again + CANCELLED
    assert len(set(agency.keys)) == 3


@pytest.mark.parametrize("cancelled", [True, False])
def test_an_undo_with_a_lookup_is_looked_up(deploy, agency, monkeypatch, cancelled):
    asked = []

    def find(what, *, idempotency_key):
        asked.append((what, idempotency_key))
        return "cancelled" if cancelled else NOT_DONE

    d = deploy(trip(agency.declared(lookup=find)))
    d.start()
    dies(monkeypatch, "after_call" if cancelled else "after_intent", "/undo")
    relieved(d)
    if not cancelled:
        assert d.drain() == "ready"  # it may still happen, until the call's deadline
        d.execute("UPDATE keepstep_effect SET deadline = 0")
        due_now(d)
    assert d.drain() == "failed"
    assert agency.ledger == BOOKED + CANCELLED
    assert {what for what, _ in asked} == {"car"}
    assert {key.rpartition("/book")[2] for _, key in asked} == {":car/undo"}


def test_an_undo_that_takes_its_process_down_is_not_entered_for_ever(deploy, agency):
    def cancel(what):
        raise Died

    d = deploy(trip(agency.declared(undo=effect(idempotent=True)(cancel))))
    d.start()
    for _ in range(3):
        relieved(d)
    assert d.drain() == "blocked"
    assert d.error[0] == "worker_lost"
    assert agency.ledger == BOOKED


# --- effects of which nobody knows whether they happened ------------------------------------------------------------


def half_booked(agency, *, lookup=None, answer=None):
    """A trip whose car may have been booked: its node ran out of time in the call, and has no attempts left."""

    def cancel(what: str, result: Booking) -> None:
        agency.cancel(what, result, "")

    def find(what, price):
        return answer

    def book(what: str, price: Decimal) -> Booking:
        booking = agency.book(what, price)
        if what == "car":
            _wait_for_the_alarm()
        return booking

    book = effect(undo=cancel, **({"lookup": find, "settling": 60} if lookup else {}))(book)
    graph = Graph("trip", state=Trip, types=[Booking])

    @graph.node
    def fly(state, ctx):
        return {"log": [ctx.effect(book, "flight", Decimal(1))]}

    @graph.node(timeout=0.3)
    def drive(state, ctx):
        ctx.effect(book, "car", Decimal(2), key="car")

    graph.edge(START, "fly")
    graph.edge("fly", "drive")
    return graph


def _wait_for_the_alarm():
    threading.Event().wait(30)


@pytest.mark.parametrize(
    ("outcome", "rest"),
    [
        ("happened", ["cancel car 7 at 2", "cancel flight 1 at 1"]),
        ("not_happened", ["cancel flight 1 at 1"]),
        ("give_up", ["cancel flight 1 at 1"]),
    ],
)
def test_an_effect_without_an_outcome_is_asked_of_a_person_first(deploy, agency, outcome, rest):
    d = deploy(half_booked(agency))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert agency.ledger == ["book flight", "book car"]
    (unknown,) = d.reader.unknown_effects()
    result = {"number": 7, "price": "2"} if outcome == "happened" else None
    if outcome == "happened":
        d.send("resolve", effect=unknown.effect.key, outcome=outcome, result={"number": "many"})
        assert d.drain() == "blocked"
        assert "the result that anna gave is not what it returns" in d.error[1]
    d.send("resolve", effect=unknown.effect.key, outcome=outcome, result=result)
    assert d.drain() == "failed"
    assert agency.ledger == ["book flight", "book car", *rest]
    assert d.error[0] == "node_timeout"


@pytest.mark.parametrize("booked", [True, False])
def test_an_effect_without_an_outcome_is_looked_up(deploy, agency, booked):
    d = deploy(half_booked(agency, lookup=True, answer=Booking(5, Decimal(2)) if booked else NOT_DONE))
    d.start()
    if not booked:
        assert d.drain() == "ready"
        d.execute("UPDATE keepstep_effect SET deadline = 0")
        due_now(d)
    assert d.drain() == "failed"
    assert agency.ledger == [
        "book flight",
        "book car",
        *(["cancel car 5 at 2"] if booked else []),
        "cancel flight 1 at 1",
    ]
    assert d.thread.error["undone"] == 1 + booked


# --- undos that fail ----------------------------------------------------------------------------------------------


def test_an_undo_that_fails_is_tried_again_and_holds_no_worker(deploy, agency):
    agency.broken = {"hotel": [LookupError("down"), LookupError("still down")]}
    d = deploy(trip(agency.declared()))
    d.start()
    for failures in (1, 2):
        assert (d.drain() if failures == 1 else due_now(d)) == "ready"
        assert (d.thread.row.failures, d.thread.row.lease_worker) == (failures, None)
        assert d.error[0] == "undo_failed"
        assert agency.ledger == BOOKED + CANCELLED[:1]
    assert due_now(d) == "failed"
    assert agency.ledger == BOOKED + CANCELLED
    assert d.error == ("node_failed", "no passport (3 effects were undone: start it again)")


def failing(deploy, agency, **options):
    """A deployment that is blocked, since the hotel cannot be cancelled."""
    agency.broken = {"hotel": [LookupError("down")] * 3}
    d = deploy(trip(agency.declared(**options)))
    d.start()
    d.drain()
    due_now(d)
    assert due_now(d) == "blocked"
    assert d.error[0] == "undo_failed"
    assert "could not be undone after 3 attempts: LookupError: down" in d.error[1]
    assert agency.ledger == BOOKED + CANCELLED[:1]
    return d


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_retry_goes_on_where_the_undoing_stopped(deploy, agency, idempotent):
    d = failing(deploy, agency, idempotent=idempotent)
    d.control("retry")
    assert d.drain() == "failed"
    assert agency.ledger == BOOKED + CANCELLED


@pytest.mark.parametrize(
    ("outcome", "undone", "note"),
    [
        ("happened", "undone", "3 effects were undone"),
        ("give_up", "given_up", "2 effects were undone, 1 was left as it is"),
    ],
)
@pytest.mark.parametrize("idempotent", [True, False])
def test_a_person_may_undo_it_by_hand_or_leave_it(deploy, agency, idempotent, outcome, undone, note):
    d = failing(deploy, agency, idempotent=idempotent)
    (hotel,) = [each for each in d.reader.effects("t") if each.state == "failed"]
    assert hotel.key.endswith("/undo")
    d.send("resolve", effect=hotel.key, outcome=outcome)
    assert d.drain() == "failed"
    assert agency.ledger == [*BOOKED, CANCELLED[0], CANCELLED[2]]
    assert d.error == ("node_failed", f"no passport ({note}: start it again)")
    assert [each.undone for each in d.reader.effects("t") if each.key == hotel.key.removesuffix("/undo")] == [undone]


def test_a_blocked_undoing_can_be_cancelled(deploy, agency):
    d = failing(deploy, agency)
    d.control("cancel")
    assert d.drain() == "cancelled"


def test_an_undo_that_this_worker_does_not_know_blocks_the_thread(deploy, agency, monkeypatch):
    book = agency.declared()
    d = deploy(trip(book))
    d.start()
    until_undoing(d)
    monkeypatch.setattr(undos, "_declared", {})
    assert d.drain() == "blocked"
    assert d.error[0] == "undo_unavailable"
    assert "effect 'book' is to be undone by tests.steps.test_undo.Agency.declared.<locals>.cancel" in d.error[1]
    assert "then retry" in d.error[1]
    monkeypatch.undo()
    d.control("retry")
    assert d.drain() == "failed"
    assert agency.ledger == BOOKED + CANCELLED


def test_an_undo_that_takes_too_long_is_ended_and_unknown(deploy, agency):
    def cancel(what):
        agency.keys.append(what)
        _wait_for_the_alarm()

    d = deploy(trip(agency.declared(undo=cancel)), node_timeout_seconds=0.3)
    d.start()
    assert d.drain() == "ready"
    assert d.error[0] == "node_timeout"
    assert due_now(d) == "blocked"
    assert d.error[0] == "effect_unknown"
    assert agency.keys == ["car"]


def test_a_key_of_an_undo_is_nobody_elses(deploy, agency):
    book = agency.declared()
    graph = Graph("trip", state=Trip, types=[Booking])

    @graph.node
    def fly(state, ctx):
        ctx.effect(book, "flight", Decimal(1), key="x/undo")

    graph.edge(START, "fly")
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "invalid_input"
    assert agency.ledger == []


# --- in process ---------------------------------------------------------------------------------------------------


def test_graph_run_undoes_before_it_raises(agency):
    with pytest.raises(
        NodeFailed, match=r"node 'stay' failed: ValueError: no passport \(3 effects were undone: start it again\)"
    ) as e:
        trip(agency.declared()).run({})
    assert isinstance(e.value.__cause__, ValueError)
    assert agency.ledger == BOOKED + CANCELLED


def test_graph_run_tells_what_could_not_be_undone(agency):
    agency.broken = {"car": [LookupError("down")] * 3}
    with pytest.raises(UndoFailed, match="LookupError: down") as error:
        trip(agency.declared()).run({})
    assert isinstance(error.value.__cause__, LookupError)


def test_input_errors_of_resolve_stay(deploy, agency):
    d = failing(deploy, agency)
    (hotel,) = [each for each in d.reader.effects("t") if each.state == "failed"]
    with pytest.raises(InvalidInput, match="only what happened has a result"):
        d.send("resolve", effect=hotel.key, outcome="give_up", result=1)
    (done,) = [each for each in d.reader.effects("t") if each.undone and each.name == "book"]
    with pytest.raises(WrongStatus, match="its outcome is known"):
        d.send("resolve", effect=f"{done.key}/undo", outcome="happened")
