"""What people may say to a question, who may say it, and what becomes of a question that nobody answers."""

from __future__ import annotations

import json
import threading
from datetime import date
from decimal import Decimal
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from keepstep import END, START, Decision, Graph
from keepstep.errors import (
    Ambiguous,
    ApprovalClosed,
    ApprovalExpired,
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    StateError,
)
from keepstep.ids import new_id
from keepstep.runtime import commands
from keepstep.runtime.principals import Principal
from tests.steps.driver import _DEFAULTS
from tests.steps.test_effects import State

ASKED = {"order": "81", "amount": "12.50"}


def asks(**options):
    """A graph whose node asks once and keeps what it was told."""
    graph = Graph("asks", state=State, types=[Decision])
    question = options.pop("question", "Pay?")
    kind = options.pop("kind", "approve")

    @graph.node
    def node(state, ctx):
        return {"log": [getattr(ctx, kind)(question, **options)]}

    graph.edge(START, "node")
    graph.edge("node", END)
    return graph


def told(d):
    """Return the decision that the node was given."""
    (decision,) = d.values()["log"]
    return decision


def open_one(d):
    (found,) = d.approvals()
    return found


def audit(d):
    """Return what the audit says of decisions."""
    return [json.loads(row.detail) for row in d.reader.audit(d.name) if row.action == "decide"]


def asked(deploy, **options):
    d = deploy(asks(**options))
    d.start()
    assert d.drain() == "waiting"
    return d


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_changes_that_are_asked_for_go_to_the_graph(deploy):
    d = asked(deploy, arguments=ASKED)
    d.decide("request_changes", comment="Ask for the receipt first")
    assert d.drain() == "done"
    decision = told(d)
    assert (decision.approved, decision.verdict, decision.comment) == (
        False,
        "request_changes",
        "Ask for the receipt first",
    )
    assert [each.status for each in d.approvals(None)] == ["changes_requested"]


def test_a_graph_may_ask_again_until_it_is_approved(deploy):
    graph = Graph("asks", state=State)

    @graph.node
    def node(state, ctx):
        amount, log = 100, []
        while not (decision := ctx.approve("Pay?", arguments={"amount": amount})).approved:
            log.append(decision.comment)
            amount -= 10
        return {"log": [*log, decision.arguments["amount"]]}

    graph.edge(START, "node")
    d = deploy(graph)
    d.start()
    for comment in ("less", "still less"):
        assert d.drain() == "waiting"
        d.decide("request_changes", comment=comment)
    assert d.drain() == "waiting"
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == ["less", "still less", 80]


def test_who_is_asked_may_hand_it_on(deploy):
    d = asked(deploy, to=["anna", "finance"])
    d.decide("delegate", by="anna", to=["bob", "finance"])
    assert open_one(d).to == ["finance", "bob"]
    assert d.drain() == "waiting"
    d.decide("delegate", by="bob", to=["carol"])
    assert open_one(d).to == ["finance", "carol"]
    d.decide(by="carol")
    assert d.drain() == "done"
    assert (told(d).verdict, told(d).by) == ("approve", "carol")
    assert [each["verdict"] for each in d.reader.decisions(d.approvals(None)[0].id)] == [
        "delegate",
        "delegate",
        "approve",
    ]


def test_who_has_handed_it_on_may_be_handed_it_back(deploy):
    d = asked(deploy, to=["anna"], quorum=1)
    d.decide("delegate", by="anna", to=["bob"])
    d.decide("delegate", by="bob", to=["anna"])
    d.decide(by="anna")
    assert d.drain() == "done"


def test_one_of_the_choices_is_chosen(deploy):
    d = asked(deploy, choices=["carrier pigeon", 0, False, None])
    for wrong in ("post", 1, True, 0.0, {"a": 1}):
        with pytest.raises(StateError, match=r'\$\.answer: choose one of "carrier pigeon", 0, false, null'):
            d.decide(answer=wrong)
    d.decide(answer=0)
    assert d.drain() == "done"
    assert (told(d).approved, told(d).answer) == (True, 0)


def test_an_answer_may_be_one_of_few(deploy):
    d = asked(deploy, kind="ask", choices=["red", "blue"])
    assert open_one(d).choices == ["red", "blue"]
    with pytest.raises(StateError, match='choose one of "red", "blue"'):
        d.decide("answer", answer="green")
    d.decide("answer", answer="blue")
    assert d.drain() == "done"
    assert told(d).answer == "blue"


@pytest.mark.parametrize("answer", [False, 0, "", [], {}, None])
def test_an_answer_that_is_false_is_an_answer(deploy, answer):
    d = asked(deploy, kind="ask")
    d.decide("answer", answer=answer)
    assert d.drain() == "done"
    assert (told(d).approved, told(d).verdict, told(d).answer) == (True, "answer", answer)


def test_edited_arguments_must_fit_the_schema_that_the_graph_gives(deploy):
    schema = {"type": "object", "properties": {"amount": {"type": "string", "pattern": "^[0-9.]+$"}}}
    d = asked(deploy, arguments=ASKED, schema=schema)
    with pytest.raises(StateError, match=r"\$\.arguments\.amount: does not fit the question's schema \(pattern "):
        d.decide(arguments={**ASKED, "amount": "much"})
    d.decide(arguments={**ASKED, "amount": "10.00"})
    assert d.drain() == "done"
    assert told(d).arguments == {**ASKED, "amount": "10.00"}


def test_an_edit_may_copy_what_the_question_shows(deploy):
    asked_for = {"amount": Decimal("12.50"), "fee": Decimal("0.30"), "days": [date(2026, 1, 1)], "to": "ACME"}
    d = asked(deploy, arguments=asked_for)
    copied = open_one(d).arguments
    assert copied["fee"] == {"$": "decimal", "v": "0.30"}
    d.decide(arguments={**copied, "amount": "10.00", "days": [*copied["days"], "2026-01-02"]})
    assert d.drain() == "done"
    assert told(d).arguments == {
        "amount": Decimal("10.00"),
        "fee": Decimal("0.30"),
        "days": [date(2026, 1, 1), date(2026, 1, 2)],
        "to": "ACME",
    }


def test_the_audit_has_what_was_asked_and_what_was_approved(deploy):
    d = asked(deploy, arguments=ASKED)
    d.decide(arguments={**ASKED, "amount": "10.00"})
    (detail,) = audit(d)
    assert (detail["asked"], detail["approved"]) == (ASKED, {**ASKED, "amount": "10.00"})


def test_people_of_a_quorum_choose_the_same(deploy):
    d = asked(deploy, choices=["a", "b"], quorum=2)
    d.decide(by="anna", answer="a")
    with pytest.raises(Conflict, match="approve the same"):
        d.decide(by="bob", answer="b")
    d.decide(by="bob", answer="a")
    assert d.drain() == "done"
    assert told(d).answer == "a"


# --- which question ---------------------------------------------------------------------------------------------------


def test_a_bare_word_is_for_a_threads_only_question(deploy):
    d = asked(deploy)
    d.decide(approval=None, thread="t")
    assert d.drain() == "done"
    with pytest.raises(NotFound, match="asks nothing"):
        d.decide(approval=None, thread="t")
    with pytest.raises(NotFound, match="there is no thread 'other'"):
        d.decide(approval=None, thread="other")


def test_a_bare_word_for_several_questions_is_refused_and_names_them(deploy):
    """Two node runs ask; answering one finishes it, once, and leaves the other as it is."""
    bodies = []
    graph = Graph("asks", state=State)

    @graph.node
    def legal(state, ctx):
        bodies.append("legal")
        return {"log": [f"legal {ctx.approve('Lawful?').verdict}"]}

    @graph.node
    def finance(state, ctx):
        bodies.append("finance")
        return {"log": [f"finance {ctx.approve('Affordable?').verdict}"]}

    for name in ("legal", "finance"):
        graph.edge(START, name)
        graph.edge(name, END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "waiting"
    ids = {each.question: each.id for each in d.approvals()}
    with pytest.raises(Ambiguous) as refused:
        d.decide(approval=None, thread="t")
    assert all(id_ in str(refused.value) for id_ in ids.values())
    d.decide(approval=ids["Lawful?"])
    assert d.drain() == "waiting"
    assert bodies.count("legal") == 2
    d.decide("reject", approval=None, thread="t")
    assert d.drain() == "done"
    assert sorted(bodies) == ["finance", "finance", "legal", "legal"]
    assert sorted(d.values()["log"]) == ["finance reject", "legal approve"]


def test_an_answer_to_what_is_not_there_changes_nothing(deploy):
    d = asked(deploy)
    before = d.dump()
    first = open_one(d).id
    for wrong in ("0" * 26, "", first[:-1] + "0"):
        with pytest.raises(NotFound, match="there is no approval"):
            d.decide(approval=wrong)
    assert d.dump() == before
    d.decide()
    with pytest.raises(ApprovalClosed, match="approved by anna"):
        d.decide("reject", approval=first, by="bob")


# --- who --------------------------------------------------------------------------------------------------------------


def signed(d, by, verdict="approve", *, roles=(), **fields):
    fields = {**_DEFAULTS["decide"], "verdict": verdict, "by": by, "approval": open_one(d).id, **fields}
    message = SimpleNamespace(verb="decide", id=new_id(), tenant="default", **fields)
    accepted = commands.accept(d.worker, message, Principal(by, tuple(roles), "key"))
    d.queue += accepted.nudges


def test_who_hands_it_on_must_be_asked_and_who_is_handed_it_may_decide(deploy):
    d = asked(deploy, to=["finance"])
    with pytest.raises(Forbidden, match="asks finance: eve is none of them"):
        signed(d, "eve", "delegate", to=["eve"])
    signed(d, "anna", "delegate", roles=["finance"], to=["bob"])
    signed(d, "bob")
    assert d.drain() == "done"


def test_who_asked_for_the_run_does_not_decide_on_it_where_others_must(deploy):
    d = deploy(asks(), self_approval=False)
    d.start(by="eve")
    assert d.drain() == "waiting"
    with pytest.raises(Forbidden, match="eve has started the run"):
        d.decide(by="eve")
    assert open_one(d).status == "open"
    d.decide(by="anna")
    assert d.drain() == "done"
    d.start(by="eve")
    assert d.drain() == "waiting"
    d.decide("reject", by="eve")  # one's own request can be taken back
    assert d.drain() == "done"


def test_who_asked_for_the_parents_run_does_not_decide_for_its_child(deploy):
    child = asks()
    parent = Graph("parent", state=State)

    @parent.node
    def lead(state, ctx):
        ctx.join(ctx.spawn(child))
        return {"log": ["joined"]}

    parent.edge(START, "lead")
    d = deploy(parent, child, self_approval=False)
    d.start(by="eve")
    assert d.drain() == "waiting"
    with pytest.raises(Forbidden, match="eve has started the run"):
        d.decide(by="eve")
    d.decide(by="anna")
    assert d.drain() == "done"


# --- time -------------------------------------------------------------------------------------------------------------


def test_silence_may_mean_that_nobody_objects(timed, clock):
    d = timed(asks(arguments=ASKED, expires=50, on_expiry="approve"))
    d.start()
    assert d.drain() == "waiting"
    clock.now += 51
    d.sweep()
    assert d.drain() == "done"
    assert (told(d).approved, told(d).verdict, told(d).arguments) == (True, "expired", ASKED)


def test_a_question_that_nobody_answers_goes_to_others_for_as_long_again(timed, clock):
    d = timed(asks(to=["anna"], expires=50, on_expiry="escalate", escalate_to=["boss", "board"]))
    d.start()
    assert d.drain() == "waiting"
    clock.now += 51
    d.sweep()
    assert d.drain() == "waiting"
    assert open_one(d).to == ["boss", "board"]
    with pytest.raises(Forbidden, match="asks boss, board"):
        signed(d, "anna")
    clock.now += 49
    d.sweep()
    signed(d, "eve", roles=["board"])
    assert d.drain() == "done"
    assert (told(d).approved, told(d).by) == (True, "eve")


def test_a_question_that_nobody_answers_then_either_is_rejected(timed, clock):
    d = timed(asks(expires=50, on_expiry="escalate", escalate_to="boss"))
    d.start()
    assert d.drain() == "waiting"
    for _ in range(2):
        clock.now += 51
        d.sweep()
    assert d.drain() == "done"
    assert (told(d).approved, told(d).verdict) == (False, "expired")
    assert [each.status for each in d.approvals(None)] == ["expired"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_expiry": "escalate", "expires": 5}, "belong together"),
        ({"escalate_to": ["boss"], "expires": 5}, "belong together"),
        ({"on_expiry": "approve"}, "needs expires="),
        ({"on_expiry": "escalate", "escalate_to": "boss"}, "needs expires="),
        ({"on_expiry": "approve", "expires": 5, "choices": [1]}, "silence"),
        ({"choices": []}, "choices must be 1 to 100"),
        ({"on_expiry": "panic"}, "reject, approve, escalate, fail"),
    ],
)
def test_a_question_that_cannot_be_asked_fails_its_node(deploy, options, text):
    d = deploy(asks(**options))
    d.start()
    assert d.drain() == "failed"
    assert text in d.error[1]


def test_an_unknown_option_is_an_error(deploy):
    d = deploy(asks(urgent=True))
    d.start()
    assert d.drain() == "failed"
    assert "unexpected keyword argument 'urgent'" in d.error[1]


def test_what_does_not_belong_to_a_verdict_is_refused(deploy):
    d = asked(deploy)
    with pytest.raises(InvalidInput, match="has no choices"):
        d.decide(answer="a")
    with pytest.raises(InvalidInput, match="this asks for approval"):
        d.decide("answer", answer="a")


# --- at once, and at the last moment ----------------------------------------------------------------------------------


def test_twenty_people_at_once_make_one_decision(served):
    """Ten times the same person's yes, ten others' no: the first counts, others are told so."""
    graph = asks()
    d = served(graph)
    d.start()
    assert d.drain() == "waiting"
    approval = open_one(d).id
    workers = [d.worker_of(pid=number + 2) for number in range(20)]
    together = threading.Barrier(20)
    said = []

    def decide(number):
        together.wait(20)
        fields = {"by": "anna"} if number < 10 else {"by": f"person {number}", "verdict": "reject"}
        try:
            accepted = d.send("decide", worker=workers[number], approval=approval, **{"verdict": "approve", **fields})
        except ApprovalClosed as error:
            said.append((number, str(error)))
        else:
            said.append((number, accepted.duplicate))

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(20)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert d.drain() == "done"
    decisions = d.reader.decisions(approval)
    assert len(decisions) == 1
    accepted = [number for number, word in said if word is False]
    assert len(accepted) == 1
    same = {number for number, word in said if word is True}
    told_closed = {number for number, word in said if isinstance(word, str)}
    if decisions[0]["by"] == "anna":
        assert same == set(range(10)) - set(accepted)
        assert told_closed == set(range(10, 20))
    else:
        assert same == set()
        assert told_closed == set(range(20)) - set(accepted)
    assert all(decisions[0]["by"] in word for _, word in said if isinstance(word, str))
    assert d.reader.history(d.name)[-1].nodes == [{"run": "node", "starts": 2, "seconds": ANY}]


@pytest.mark.parametrize("answers_first", [True, False])
@pytest.mark.parametrize(
    ("late", "verdict"), [(-0.01, "approve"), (0.0, "expired"), (0.01, "expired"), (3600, "expired")]
)
def test_at_the_deadline_there_is_one_outcome(timed, clock, late, verdict, answers_first):
    d = timed(asks(expires=100))
    d.start()
    assert d.drain() == "waiting"
    deadline = open_one(d).expires_at.timestamp()
    clock.now = deadline + late
    if not answers_first:
        d.sweep()
    if verdict == "approve":
        d.decide()
    else:
        with pytest.raises(ApprovalExpired):
            d.decide(approval=d.approvals(None)[0].id)
    d.sweep()
    assert d.drain() == "done"
    assert told(d).verdict == verdict
    assert d.reader.history(d.name)[-1].nodes == [{"run": "node", "starts": 2, "seconds": ANY}]
