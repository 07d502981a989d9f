"""Waiting: rows only, answered once, by a decision, a signal or the time, in whatever order these come."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import pytest

from keepstep import END, START, Graph, append
from keepstep.errors import (
    ApprovalClosed,
    ApprovalExpired,
    Conflict,
    InvalidInput,
    NotFound,
    StateError,
    TooLarge,
    WrongStatus,
)
from keepstep.runtime import superstep
from keepstep.store import claims, workers


class State(TypedDict, total=False):
    amount: Decimal
    log: Annotated[list[Any], append]


def asks(body, *, asynchronous=None):
    """A graph of one node, whose body gives what is logged."""
    graph = Graph("asks", state=State)
    entered = []

    if asynchronous is None:

        @graph.node
        def node(state, ctx):
            entered.append(ctx.attempt)
            return {"log": [body(state, ctx)]}

    else:

        @graph.node(name="node")
        async def node_async(state, ctx):
            entered.append(ctx.attempt)
            return {"log": [await asynchronous(state, ctx)]}

    graph.edge(START, "node")
    graph.edge("node", END)
    graph.entered = entered
    return graph


def said(decision):
    return (decision.approved, decision.verdict, decision.arguments, decision.answer, decision.by, decision.comment)


def pay(state, ctx):
    return said(ctx.approve("Pay?", arguments={"amount": state["amount"]}, context={"why": "order"}, to="finance"))


@pytest.fixture(params=["sync", "async"])
def paying(request):
    """One node that asks for an approval, sync and async."""
    if request.param == "sync":
        return asks(pay)

    async def ask(state, ctx):
        decision = await ctx.approve(
            "Pay?", arguments={"amount": state["amount"]}, context={"why": "order"}, to="finance"
        )
        return said(decision)

    return asks(None, asynchronous=ask)


# --- approvals ---


def test_a_thread_that_waits_holds_nothing(deploy, paying):
    d = deploy(paying)
    d.start({"amount": Decimal("12.50")})
    assert d.drain() == "waiting"

    row = d.thread.row
    assert (row.lease_worker, row.seq, row.version, d.queue) == (None, 0, 3, [])
    assert d.checkpoints() == [(0, "input")]
    (approval,) = d.approvals()
    assert (approval.question, approval.kind, approval.context, approval.to, approval.quorum) == (
        "Pay?",
        "approve",
        {"why": "order"},
        ["finance"],
        1,
    )
    assert approval.arguments == {"amount": {"$": "decimal", "v": "12.50"}}
    d.decide(comment="fine")
    assert [nudge.kind for nudge in d.queue] == ["step"]
    assert d.drain() == "done"
    ((approved, verdict, arguments, answer, by, comment),) = d.values()["log"]
    assert (approved, verdict, answer, by, comment) == (True, "approve", None, "anna", "fine")
    assert arguments == {"amount": Decimal("12.50")}
    assert paying.entered == [1, 2]
    assert [approval.status for approval in d.approvals(None)] == ["approved"]
    assert [wait.status for wait in d.reader.waits("t")] == ["closed"]


def test_edited_arguments_are_what_was_approved(deploy, paying):
    d = deploy(paying)
    d.start({"amount": Decimal("12.50")})
    d.drain()
    d.decide(arguments={"amount": "10.00"})
    assert d.drain() == "done"
    assert d.values()["log"][0][2] == {"amount": Decimal("10.00")}


def test_a_rejection(deploy, paying):
    d = deploy(paying)
    d.start({"amount": Decimal(1)})
    d.drain()
    d.decide("reject", by="ben", comment="no")
    assert d.drain() == "done"
    ((approved, verdict, _, _, by, comment),) = d.values()["log"]
    assert (approved, verdict, by, comment) == (False, "reject", "ben", "no")


def test_the_same_decision_twice_is_one(deploy):
    d = deploy(asks(pay))
    d.start({"amount": Decimal(1)})
    d.drain()
    (approval,) = d.approvals()
    first = d.decide(approval=approval.id, id="c1")
    before = d.dump()
    assert d.decide(approval=approval.id, id="c1").duplicate is True
    assert d.decide(approval=approval.id, id="c2").duplicate is True
    assert d.dump() == before
    assert (first.duplicate, first.thread_id) == (False, d.thread.id)
    assert d.drain() == "done"
    assert d.decide(approval=approval.id, id="c3").duplicate is True


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"verdict": "answer", "answer": 1}, InvalidInput, "asks for approval"),
        ({"verdict": "reject", "arguments": {"amount": 1}}, InvalidInput, "$.arguments"),
        ({"approval": "01jdz8k3v5w0c9q2m7r4t6y8xa"}, NotFound, "01jdz8k3v5w0c9q2m7r4t6y8xa"),
        ({"tenant": "other"}, NotFound, "there is no approval"),
    ],
)
def test_a_decision_that_cannot_be_changes_nothing(deploy, fields, error, text):
    d = deploy(asks(pay))
    d.start({"amount": Decimal(1)})
    d.drain()
    before = d.dump()
    with pytest.raises(error) as caught:
        d.decide(**fields)
    assert text in caught.value.message
    assert (d.dump(), d.queue) == (before, [])


def test_a_closed_approval_says_what_it_is_and_which_are_open(deploy):
    d = deploy(asks(lambda _state, ctx: [ctx.approve("A?").verdict, ctx.approve("B?").verdict]))
    d.start()
    d.drain()
    (first,) = d.approvals()
    d.decide()
    d.drain()
    (second,) = d.approvals()
    before = d.dump()
    with pytest.raises(ApprovalClosed) as caught:
        d.decide("reject", approval=first.id, by="ben")
    assert "approved by anna" in caught.value.message
    assert second.id in caught.value.message
    assert d.dump() == before


def test_one_persons_second_thoughts_are_refused(deploy):
    d = deploy(asks(lambda _state, ctx: ctx.approve("A?", quorum=2).verdict))
    d.start()
    d.drain()
    d.decide(by="anna")
    before = d.dump()
    with pytest.raises(Conflict, match="anna has decided"):
        d.decide("reject", by="anna")
    assert d.dump() == before


def test_a_quorum_is_of_different_people(deploy):
    d = deploy(asks(lambda _state, ctx: said(ctx.approve("A?", quorum=3))))
    d.start()
    d.drain()
    (approval,) = d.approvals()
    for by in ("anna", "anna", "ben", "ben"):
        d.decide(approval=approval.id, by=by)
    assert (d.drain(), d.queue) == ("waiting", [])
    assert [decision["by"] for decision in d.reader.decisions(approval.id)] == ["anna", "ben"]
    d.decide(by="cleo")
    assert d.drain() == "done"
    assert d.values()["log"][0][:2] == (True, "approve")


def test_one_rejection_rejects(deploy):
    d = deploy(asks(lambda _state, ctx: said(ctx.approve("A?", quorum=3))))
    d.start()
    d.drain()
    d.decide(by="anna")
    d.decide("reject", by="ben")
    assert d.drain() == "done"
    assert d.values()["log"][0][:2] == (False, "reject")


def test_a_quorum_approves_one_thing(deploy):
    d = deploy(asks(lambda _state, ctx: said(ctx.approve("A?", arguments={"amount": 9000}, quorum=2))))
    d.start()
    d.drain()
    d.decide(by="anna", arguments={"amount": 50})
    before = d.dump()
    with pytest.raises(Conflict, match="other arguments"):
        d.decide(by="ben")
    with pytest.raises(Conflict, match="other arguments"):
        d.decide(by="ben", arguments={"amount": 51})
    assert d.dump() == before
    d.decide(by="ben", arguments={"amount": 50})
    assert d.drain() == "done"
    assert d.values()["log"][0][2] == {"amount": 50}


@pytest.mark.parametrize(("on_expiry", "status"), [("reject", "done"), ("fail", "failed")])
def test_time_runs_out(timed, clock, on_expiry, status):
    graph = asks(lambda _state, ctx: said(ctx.approve("A?", arguments=[1], expires=60, on_expiry=on_expiry)))
    d = timed(graph)
    d.start()
    d.drain()
    (approval,) = d.approvals()
    clock.now += 59.9
    assert d.sweep() == []
    clock.now += 0.1
    with pytest.raises(ApprovalExpired, match="has run out"):
        d.decide()
    assert [nudge.kind for nudge in d.sweep()] == ["step"]
    assert d.sweep() == []
    with pytest.raises(ApprovalExpired):
        d.decide(approval=approval.id)
    assert d.drain() == status
    assert [each.status for each in d.approvals(None)] == ["expired"]
    if status == "done":
        assert d.values()["log"] == [(False, "expired", [1], None, None, None)]
    else:
        assert d.error == ("node_failed", "nobody answered 'A?' in time")


# --- questions ---


def test_an_answer_must_fit_the_question(deploy):
    schema = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1}}, "required": ["days"]}
    d = deploy(asks(lambda _state, ctx: said(ctx.ask("How long?", schema=schema))))
    d.start()
    d.drain()
    before = d.dump()
    for answer, path in (({"days": 0}, "$.answer.days"), ({}, "$.answer"), ("soon", "$.answer")):
        with pytest.raises(StateError) as caught:
            d.decide("answer", answer=answer)
        assert caught.value.message.startswith(f"{path}: does not fit")
        assert "soon" not in caught.value.message
    with pytest.raises(InvalidInput, match="asks for an answer"):
        d.decide("approve")
    assert d.dump() == before
    d.decide("answer", answer={"days": 3})
    assert d.drain() == "done"
    assert d.values()["log"] == [(True, "answer", None, {"days": 3}, "anna", None)]


def test_an_answers_type_is_the_questions(deploy):
    d = deploy(asks(lambda _state, ctx: ctx.ask("How much?", schema=Decimal).answer))
    d.start()
    d.drain()
    d.decide("answer", answer="12.50")
    assert d.drain() == "done"
    (answer,) = d.values()["log"]
    assert (answer, type(answer)) == (Decimal("12.50"), Decimal)


def test_a_node_that_asks_something_else_the_second_time_is_blocked(deploy):
    graph = asks(lambda _state, ctx: ctx.approve(f"A{ctx.attempt}?").verdict)
    d = deploy(graph)
    d.start()
    d.drain()
    d.decide()
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert graph.entered == [1, 2]


def test_a_wider_audience_is_still_the_same_question(deploy):
    d = deploy(asks(lambda _state, ctx: ctx.approve("A?", to=str(ctx.attempt), expires=1000 * ctx.attempt).verdict))
    d.start()
    d.drain()
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == ["approve"]


# --- signals ---


def signalled(name="go", **options):
    def body(_state, ctx):
        signal = ctx.wait_signal(name, **options)
        return None if signal is None else (signal.name, signal.payload, signal.key)

    return asks(body)


def test_a_signal_wakes_who_waits_for_it(deploy):
    d = deploy(signalled())
    d.start()
    d.drain()
    d.signal("other", 1)
    assert (d.drain(), d.queue) == ("waiting", [])
    d.signal("go", {"a": [1, None]}, key="k")
    assert d.drain() == "done"
    assert d.values()["log"] == [("go", {"a": [1, None]}, "k")]
    assert len(d.dump()["keepstep_signal"]) == 1


def test_signals_that_come_early_are_kept_and_taken_in_order(deploy):
    d = deploy(asks(lambda _state, ctx: tuple(ctx.wait_signal("go").payload for _ in range(3))))
    d.start()
    d.signal("go", 1)
    d.signal("go", 2)
    assert d.drain() == "waiting"
    d.signal("go", 3)
    assert d.drain() == "done"
    assert d.values()["log"] == [(1, 2, 3)]
    assert d.dump()["keepstep_signal"] == []


def test_a_wait_with_a_key_takes_only_that_keys(deploy):
    d = deploy(signalled(key="mine"))
    d.start()
    d.signal("go", "early, another's", key="other")
    d.drain()
    d.signal("go", "none")
    d.signal("go", "another's", key="other")
    assert d.drain() == "waiting"
    d.signal("go", "mine", key="mine")
    assert d.drain() == "done"
    assert d.values()["log"] == [("go", "mine", "mine")]
    assert len(d.dump()["keepstep_signal"]) == 3


def test_the_same_signal_twice_is_one(deploy):
    d = deploy(signalled())
    d.start()
    d.signal("go", 1, id="c1")
    before = d.dump()
    assert d.signal("go", 1, id="c1").duplicate is True
    assert d.dump() == before


def test_nobody_came_in_time(timed, clock):
    d = timed(signalled(timeout=timedelta(minutes=5)))
    d.start()
    d.drain()
    clock.now += 299
    assert d.sweep() == []
    clock.now += 1
    d.sweep()
    assert d.drain() == "done"
    assert d.values()["log"] == [None]


def test_signals_are_kept_for_a_time_and_up_to_a_number(timed, clock):
    d = timed(signalled(), signal_ttl_seconds=60.0, signals_kept_max=2)
    d.start()
    d.signal("go", 1)
    clock.now += 61
    d.signal("go", 2)
    d.signal("go", 3)
    before = d.dump()
    with pytest.raises(TooLarge, match="2 signals"):
        d.signal("go", 4)
    assert d.dump() == before
    assert d.drain() == "done"
    assert d.values()["log"] == [("go", 2, None)]


def test_a_signal_for_nobody_is_refused(deploy):
    d = deploy(signalled())
    with pytest.raises(NotFound):
        d.signal("go")
    d.start()
    d.control("cancel")
    before = d.dump()
    with pytest.raises(WrongStatus, match="cancelled"):
        d.signal("go")
    assert d.dump() == before


# --- time ---


def test_sleeping_holds_no_worker(timed, clock):
    d = timed(asks(lambda _state, ctx: ctx.sleep(timedelta(days=30))))
    d.start()
    assert d.drain() == "waiting"
    assert d.thread.row.lease_worker is None
    clock.now += 30 * 86400 - 1
    assert d.sweep() == []
    clock.now += 1
    assert len(d.sweep()) == 1
    assert d.drain() == "done"


def test_a_wake_whose_nudge_was_lost_is_found(timed, clock):
    d = timed(asks(pay))
    d.start({"amount": Decimal(1)})
    d.drain()
    d.decide()
    (lost,) = d.queue
    d.queue.clear()
    assert d.sweep() == []
    clock.now += 5
    assert d.sweep() == [lost]
    assert d.drain() == "done"


# --- several at once ---


def test_all_questions_are_asked_together(deploy):
    def body(_state, ctx):
        found = ctx.gather(
            lambda: ctx.approve("A?"),
            lambda: ctx.ask("B?"),
            lambda: ctx.wait_signal("c"),
        )
        return [found[0].verdict, found[1].answer, found[2].payload]

    graph = asks(body)
    d = deploy(graph)
    d.start()
    assert d.drain() == "waiting"
    first, second = d.approvals()
    assert [first.question, second.question] == ["A?", "B?"]
    d.signal("c", 3)
    d.decide("answer", answer=2, approval=second.id)
    assert (d.drain(), d.queue) == ("waiting", [])
    assert graph.entered == [1]
    d.decide(approval=first.id)
    assert d.drain() == "done"
    assert d.values()["log"] == [["approve", 2, 3]]
    assert graph.entered == [1, 2]


def test_async_questions_are_asked_together(deploy):
    async def body(_state, ctx):
        first, second = await ctx.gather(ctx.approve("A?"), ctx.wait_signal("c"))
        return [first.verdict, second.payload]

    graph = asks(None, asynchronous=body)
    d = deploy(graph)
    d.start()
    d.signal("c", 3)
    assert d.drain() == "waiting"
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == [["approve", 3]]
    assert graph.entered == [1, 2]


def test_a_node_cannot_swallow_that_it_waits(deploy):
    def body(_state, ctx):
        try:
            return ctx.approve("A?").verdict
        except Exception as error:  # noqa: BLE001  as careless code does
            return f"swallowed {error!r}"

    d = deploy(asks(body))
    d.start()
    assert d.drain() == "waiting"
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == ["approve"]


# --- races ---


@pytest.mark.parametrize("round_number", range(5))
def test_a_signal_that_comes_while_the_node_parks_is_not_lost(deploy, round_number):
    d = deploy(signalled())
    other = d.worker_of(pid=2)
    thread_id = d.start().thread_id
    d.queue.clear()
    barrier = threading.Barrier(2)

    def signal():
        d.reader.get("t")
        barrier.wait()
        d.signal("go", 7, worker=other)

    sender = threading.Thread(target=signal)
    sender.start()
    barrier.wait()
    superstep.run_step(d.worker, thread_id, 1)
    sender.join()

    assert d.drain() == "done"
    assert d.values()["log"] == [("go", 7, None)]
    assert d.dump()["keepstep_signal"] == []


def test_two_answers_at_once_wake_once(deploy):
    def body(_state, ctx):
        return [each.verdict for each in ctx.gather(*(lambda n=n: ctx.approve(f"{n}?") for n in range(6)))]

    graph = asks(body)
    d = deploy(graph)
    d.start()
    d.drain()
    barrier = threading.Barrier(6)
    runtimes = [d.worker_of(pid=pid) for pid in range(2, 8)]

    def decide(runtime, approval):
        barrier.wait()
        d.decide(approval=approval.id, worker=runtime)

    people = [threading.Thread(target=decide, args=pair) for pair in zip(runtimes, d.approvals(), strict=True)]
    for person in people:
        person.start()
    for person in people:
        person.join()
    assert [nudge.kind for nudge in d.queue] == ["step"]
    assert d.drain() == "done"
    assert d.values()["log"] == [["approve"] * 6]
    assert graph.entered == [1, 2]


def test_two_people_decide_at_once_and_one_is_told_so(deploy):
    d = deploy(asks(pay))
    d.start({"amount": Decimal(1)})
    d.drain()
    (approval,) = d.approvals()
    barrier, outcomes = threading.Barrier(4), Counter()
    runtimes = [d.worker_of(pid=pid) for pid in range(2, 6)]

    def decide(number, runtime):
        barrier.wait()
        try:
            d.decide("reject" if number % 2 else "approve", approval=approval.id, by=f"p{number}", worker=runtime)
            outcomes["accepted"] += 1
        except ApprovalClosed:
            outcomes["closed"] += 1

    people = [threading.Thread(target=decide, args=pair) for pair in enumerate(runtimes)]
    for person in people:
        person.start()
    for person in people:
        person.join()
    assert outcomes == {"accepted": 1, "closed": 3}
    assert len(d.queue) == 1
    assert d.drain() == "done"


def test_a_decision_is_applied_although_the_worker_that_woke_dies(deploy):
    graph = asks(pay)
    d = deploy(graph)
    d.start({"amount": Decimal(1)})
    d.drain()
    d.decide()
    (nudge,) = d.queue

    doomed = d.worker_of(pid=2)
    assert claims.claim_thread(doomed.store, nudge.thread_id, nudge.version, owner=doomed.owner, carried=doomed.carried)
    assert workers.release_child(d.store, doomed.owner.worker, 2, reason="signal 9") == [nudge]
    assert d.drain() == "done"
    assert d.values()["log"][0][:2] == (True, "approve")


# --- people meanwhile ---


def test_cancelling_withdraws_what_was_asked(deploy):
    d = deploy(asks(lambda _state, ctx: ctx.gather(lambda: ctx.approve("A?"), lambda: ctx.wait_signal("c"))))
    d.start()
    d.drain()
    (approval,) = d.approvals()
    d.control("cancel")
    assert d.thread.status == "cancelled"
    assert [each.status for each in d.approvals(None)] == ["withdrawn"]
    assert [wait.status for wait in d.reader.waits("t")] == ["closed", "closed"]
    with pytest.raises(ApprovalClosed, match="withdrawn"):
        d.decide(approval=approval.id)


def test_a_paused_thread_takes_the_answer_and_goes_on_when_resumed(deploy):
    graph = asks(pay)
    d = deploy(graph)
    d.start({"amount": Decimal(1)})
    d.drain()
    d.control("pause")
    d.decide()
    assert d.drain() == "ready"
    assert graph.entered == [1]
    d.control("resume")
    assert d.drain() == "done"


def test_a_run_after_a_run_asks_anew(deploy):
    d = deploy(asks(lambda _state, ctx: said(ctx.approve("A?"))))
    for verdict in ("approve", "reject"):
        d.start()
        assert d.drain() == "waiting"
        d.decide(verdict)
        assert d.drain() == "done"
    assert [entry[1] for entry in d.values()["log"]] == ["approve", "reject"]


def test_a_wait_cannot_be_swallowed(deploy):
    def body(_state, ctx):
        try:
            return ctx.approve("Pay?").verdict
        except BaseException:  # noqa: BLE001  what a careless node does
            return "went on"

    d = deploy(asks(body))
    d.start()
    assert d.drain() == "waiting"
    d.decide("reject")
    assert d.drain() == "done"
    assert d.values()["log"] == ["reject"]


def test_an_answer_cannot_be_passed_over(deploy):
    d = deploy(asks(lambda _state, ctx: ctx.approve("Pay?").verdict if ctx.attempt == 1 else "finished without it"))
    d.start()
    d.drain()
    d.decide("reject")
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"


@pytest.mark.parametrize("schema", [{"type": "strin"}, {"pattern": "("}, {"$ref": "#/nowhere"}])
def test_a_schema_that_cannot_be_used_is_refused_when_it_is_asked(deploy, schema):
    d = deploy(asks(lambda _state, ctx: said(ctx.ask("How?", schema=schema))))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "invalid_input"
    assert d.reader.approvals() == []
