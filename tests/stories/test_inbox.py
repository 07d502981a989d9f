"""Somebody who has read nothing but `--help` finds what waits for people, understands it and decides it."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import textwrap

import pytest

from tests.stories.terminal import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AGENTS = """
    from decimal import Decimal
    from typing import TypedDict
    from keepstep import END, START, CallRejected, Graph, tool


    class State(TypedDict, total=False):
        order: str
        said: list


    @tool("send_payment", risk="high", idempotent=True)
    def send_payment(order: str, amount: Decimal, iban: str) -> str:
        return f"paid {amount} to {iban}"


    refunds = Graph("refunds", state=State, tools=[send_payment])
    survey = Graph("survey", state=State)


    @refunds.node
    def pay(state, ctx):
        try:
            return {"said": [ctx.call(send_payment, {"order": state["order"], "amount": "120.00", "iban": "CH93"})]}
        except CallRejected as rejected:
            return {"said": [rejected.verdict, rejected.by, rejected.comment]}


    @survey.node
    def ask(state, ctx):
        parcels = ctx.ask("How many parcels?", schema={"type": "integer", "minimum": 1})
        carrier = ctx.approve("Which carrier?", choices=["post", "pigeon"], expires=86400)
        return {"said": [parcels.answer, carrier.answer]}


    for graph, node in ((refunds, "pay"), (survey, "ask")):
        graph.edge(START, node)
        graph.edge(node, END)
"""
POLICY = """
@id("large") @approve("finance") @quorum("2") @self_approval("false") @expires("2d") @mask("iban")
permit(principal, action, resource);
"""


@pytest.fixture
def desk(tmp_path, capsys, monkeypatch):
    """A deployment on one machine with four threads that ask: three refunds that eve has started, and a survey."""
    (tmp_path / "agents.py").write_text(textwrap.dedent(AGENTS))
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "payments.cedar").write_text(POLICY)
    monkeypatch.setenv("KEEPSTEP_POLICIES", str(tmp_path / "policies"))
    with contextlib.closing(Terminal(tmp_path, capsys)) as terminal:
        terminal.worker(tmp_path / "agents.py")
        for thread in ("r1", "r2", "r3"):
            terminal.type("start", "refunds", thread, f"order={thread}", "--by", "eve", "--confirm-timeout", "120")
            terminal.approval(thread)
        terminal.type("start", "survey", "s1")
        terminal.approval("s1")
        yield terminal


def flat(text):
    return " ".join(text.split())


def test_one_question_is_found_understood_and_decided(desk):
    assert "approvals" in desk.type("--help")
    id_ = desk.approval("r1")["id"]
    for named in (id_, id_[:22], "r1"):
        shown = flat(desk.type("approvals", named))
        assert f"{id_} open refunds/r1 asked" in shown
    assert "question Call send_payment?" in shown
    assert 'arguments {"order": "r1", "amount": 120.00, "iban": "(masked)"}' in shown
    assert "if approved the tool send_payment is called, once, with these arguments or as they are edited" in shown
    assert "why large asks for approval by finance, 2 of them, not by who started the run" in shown
    assert "for finance" in shown
    assert "needs 2 different people, nobody who started the run (eve); so far: nobody" in shown
    assert re.search(r"expires in 4[78] h; without an answer it counts as rejected", shown)
    edit = '{"order": "r1", "amount": "120.00", "iban": "(masked)"}'
    for verb in (
        f"approve {id_}",
        f"approve {id_} --arguments '{edit}'",
        f"reject {id_}",
        f"request-changes {id_} COMMENT",
        f"delegate {id_} NAME",
    ):
        assert f"keepstep {verb}" in shown
    assert f"it is an approval: keepstep approvals {id_}" in desk.type("show", id_, code=2)

    waits = flat(desk.type("show", "r1"))
    assert "; asks finance; needs 2 different people, nobody who started the run (eve); so far: nobody" in waits

    # What it offers can be typed as it stands, with another amount.
    edited = ("--arguments", edit.replace("120", "110"))
    assert "eve has started the run" in desk.type("approve", id_, "--by", "eve", code=2)
    told = desk.type("approve", id_, *edited, "--by", "anna")
    assert told == f"approved {id_} as anna, with edited arguments; 1 of 2 people so far: it stays open\n"
    assert "approve the same or reject" in desk.type("approve", id_, "--by", "bob", code=2)
    assert "so far: anna" in desk.type("approvals", id_)
    assert desk.type("approve", "r1", *edited, "--by", "bob") == f"approved {id_} as bob, with edited arguments\n"
    desk.status("r1", "done")
    assert desk.ask("state", "r1")["state"]["said"] == ["paid 110.00 to CH93"]
    assert "refused (approve) eve" in flat(desk.type("show", "r1"))
    paid = '{"order": "r1", "amount": "110.00", "iban": "(masked)"}'
    decided = f"decided approve by anna with {paid} instead; approve by bob with {paid} instead"
    assert decided in flat(desk.type("approvals", id_))
    assert desk.type("approve", "r1", code=2).startswith("error: thread 'r1' asks nothing now: keepstep show r1")


def test_every_other_word(desk):
    assert desk.type("delegate", "r1", "carol", "--by", "anna").endswith("asks carol in the place of anna\n")
    assert "carol" in desk.type("approvals", "r1")
    desk.type("approve", "r1", "--by", "carol")
    assert "approve by carol in the place of anna" in desk.type("approvals", "r1")
    desk.type("reject", "r1", "--by", "bob", "--comment", "Too much")
    desk.status("r1", "done")
    assert desk.ask("state", "r1")["state"]["said"] == ["reject", "bob", "Too much"]

    desk.type("request-changes", "r2", "Ask the shop first", "--by", "bob")
    desk.status("r2", "done")
    assert desk.ask("state", "r2")["state"]["said"] == ["request_changes", "bob", "Ask the shop first"]

    asked = desk.approval("s1")["id"]
    assert f"keepstep answer {asked} VALUE" in desk.type("approvals", "s1")
    assert f"keepstep answer {asked} VALUE" in desk.type("approve", "s1", code=2)
    assert '(type "integer")' in desk.type("answer", "s1", "many", code=2)
    assert "(minimum 1)" in desk.type("answer", "s1", "0", code=2)
    desk.type("answer", "s1", "2")
    chosen = desk.approval("s1")["id"]
    assert f"keepstep approve {chosen} --choice post" in desk.type("approvals", "s1")
    assert 'choose one of "post", "pigeon"' in desk.type("approve", "s1", code=2)
    desk.type("approve", "s1", "--choice", "pigeon")
    desk.status("s1", "done")
    assert desk.ask("state", "s1")["state"]["said"] == [2, "pigeon"]


def test_several_at_once_and_only_those_that_are_meant(desk, monkeypatch):
    assert "IDs (keepstep approvals lists them), or --all" in desk.type("approve", code=2)
    assert "--thread belongs to --all" in desk.type("approve", "r1", "--thread", "r1", code=2)
    listed = desk.ask("approvals", "--graph", "survey")["approvals"]
    assert [each["thread"] for each in listed] == ["s1"]
    assert desk.ask("approvals", "--graph", "nobody") == {"approvals": []}

    class AtTerminal(io.StringIO):
        def isatty(self):
            return True

    # At a terminal one is asked first, and a No decides nothing.
    monkeypatch.setattr(sys, "stdin", AtTerminal("n\n"))
    said = desk.type("reject", "--all", "--graph", "refunds", code=1)
    assert "These 3 are to be rejected. Go on?" in said
    assert said.count("refunds/r") == 3
    assert "nothing was decided" in said
    assert len(desk.ask("approvals")["approvals"]) == 4
    monkeypatch.setattr(sys, "stdin", AtTerminal("y\n"))
    assert desk.type("approve", "--all", "--graph", "refunds", "--by", "anna").count("1 of 2 people so far") == 3
    assert desk.type("reject", "--all", "--graph", "refunds", "--by", "bob", "--yes").count("rejected") == 3
    for thread in ("r1", "r2", "r3"):
        desk.status(thread, "done")
    assert [each["thread"] for each in desk.ask("approvals")["approvals"]] == ["s1"]


WRONG_WORDS = (
    (("approvals", "zzz"), "there is no approval 'zzz', and no thread of that name asks: keepstep approvals lists"),
    (("approve", "zzz"), "there is no approval 'zzz': keepstep approvals lists those that are open"),
    (("approve", "01"), "means several approvals: "),
    (("aprove", "r1"), "Did you mean 'approve'"),
    (("approve", "r1", "--arguments", "x"), "--arguments: not JSON"),
    (("approve", "r1", "--arguments", '{"order": "r1"}'), "missing; an edit gives all arguments (order, amount, iban)"),
    (("answer", "r1", "5"), "this asks for approval, not for an answer: keepstep approve 01"),
    (("request-changes", "r1"), "Missing argument 'COMMENT'"),
    (("delegate", "r1"), "Missing argument 'NAME...'"),
    (("approvals", "--status", "nope"), "'nope' is not one of 'open', 'approved'"),
)


def test_a_wrong_word_tells_the_right_one_and_changes_nothing(desk):
    before = desk.ask("approvals")
    for words, complaint in WRONG_WORDS:
        assert complaint in flat(desk.type(*words, code=2))
    assert desk.ask("approvals") == before
