"""Each way in which a decision cannot be is refused by a reply of its own kind, and changes nothing."""

from __future__ import annotations

import textwrap

import pytest
from typer.testing import CliRunner

import keepstep
from keepstep import errors
from keepstep.cli.program import app
from tests.worker.deployment import eventually

AGENTS = """
    from typing import TypedDict
    from keepstep import END, START, Graph


    class State(TypedDict, total=False):
        said: list[str]


    questions = Graph("questions", state=State)


    @questions.node
    def ask(state, ctx):
        if ctx.thread == "short":
            return {"said": [ctx.approve("Quickly?", expires=0.01, to=["finance"]).verdict, ctx.wait_signal("never")]}
        if ctx.thread == "several":
            two = ctx.gather(lambda: ctx.approve("A?"), lambda: ctx.approve("B?"))
            return {"said": [each.verdict for each in two]}
        if ctx.thread == "silent":
            ctx.wait_signal("never")
        if ctx.thread == "choosing":
            return {"said": [ctx.ask("Which?", choices=["red"]).verdict]}
        quorum = 1 if ctx.thread == "closed" else 3
        asked = {"amount": "10.00", "payee": "ACME"}
        return {"said": [ctx.approve("Pay?", arguments=asked, to=["finance", "desk"], quorum=quorum).verdict]}


    questions.edge(START, "ask")
    questions.edge("ask", END)
"""
ASKED = {"amount": "10.00", "payee": "ACME"}


@pytest.fixture
def desk(embedded, tmp_path):
    """A deployment where nobody approves what they have started; its approvals by thread; who says what to them."""
    trusted, private = tmp_path / "trusted.jwks", tmp_path / "desk.jwk"
    made = CliRunner().invoke(app, ["new-key", "desk", "--private", str(private), "--public", str(trusted)])
    assert made.exit_code == 0
    (tmp_path / "questions.py").write_text(textwrap.dedent(AGENTS))
    environment = {
        "KEEPSTEP_GRAPHS": str(tmp_path / "questions.py"),
        "KEEPSTEP_TRUSTED_KEYS": str(trusted),
        "KEEPSTEP_SELF_APPROVAL": "false",
    }
    embedded.worker(**environment)
    settings = embedded.settings.model_copy(update={"signing_key": str(private)})
    with keepstep.Client(settings=settings, confirm=True, timeout=20, principal="eve") as eve:
        for thread in ("pays", "closed", "short", "several", "silent", "choosing"):
            eve.start("questions", thread, {})

    def asked():
        rows = embedded.query(
            "SELECT t.name, a.id FROM keepstep_approval a JOIN keepstep_thread t ON t.id = a.thread_id ORDER BY a.id"
        )
        return len(rows) == 6 and dict(rows)

    approvals = eventually(asked, what="six questions")
    eventually(lambda: embedded.query("SELECT 1 FROM keepstep_approval WHERE status = 'expired'"), what="the expiry")
    eventually(lambda: embedded.statuses()["silent"] == "waiting", what="a thread that asks nothing")

    def says(by, verdict="approve", *, of=None, thread=None, roles=("finance",), tenant="default", **said):
        options = {"settings": settings, "confirm": True, "timeout": 20, "roles": roles, "tenant": tenant}
        with keepstep.Client(**options) as client:
            return client.decide(approvals.get(of, of), verdict, by=by, thread=thread, **said)

    return embedded, says


TABLE = {
    "closed": (errors.ApprovalClosed, "approval_closed", {"by": "dora", "of": "closed"}),
    "expired": (errors.ApprovalExpired, "approval_expired", {"by": "bob", "of": "short"}),
    "foreign tenant": (errors.NotFound, "not_found", {"by": "bob", "of": "pays", "tenant": "other"}),
    "unknown": (errors.NotFound, "not_found", {"by": "bob", "of": "0" * 26}),
    "unknown thread": (errors.NotFound, "not_found", {"by": "bob", "thread": "nobody"}),
    "before it is asked": (errors.NothingAsked, "nothing_asked", {"by": "bob", "thread": "silent"}),
    "ambiguous": (errors.Ambiguous, "ambiguous", {"by": "bob", "thread": "several"}),
    "not among those asked": (errors.NotAsked, "not_asked", {"by": "mallory", "of": "pays", "roles": ["intern"]}),
    "own run": (errors.SelfApproval, "self_approval", {"by": "eve", "of": "pays"}),
    "own run, by a delegate of one's own": (
        errors.SelfApproval,
        "self_approval",
        {"by": "eve", "of": "pays", "verdict": "delegate", "to": ["mallory"]},
    ),
    "counted already": (errors.AlreadyCounted, "already_counted", {"by": "anna", "of": "pays", "comment": "again"}),
    "counted in one's place": (errors.AlreadyCounted, "already_counted", {"by": "desk", "of": "pays"}),
    "stale: other arguments than were approved": (
        errors.Conflict,
        "conflict",
        {"by": "bob", "of": "pays", "arguments": {**ASKED, "amount": "9.00"}},
    ),
    "arguments that were not asked about": (
        errors.StateError,
        "state",
        {"by": "bob", "of": "pays", "arguments": {**ASKED, "iban": "CH93"}},
    ),
    "a choice that is none": (
        errors.StateError,
        "state",
        {"by": "bob", "of": "choosing", "verdict": "answer", "answer": "blue"},
    ),
    "an answer to an approval": (
        errors.InvalidInput,
        "invalid_input",
        {"by": "bob", "of": "pays", "verdict": "answer", "answer": 1},
    ),
}


def test_each_refusal_has_a_reply_of_its_own_kind_and_changes_nothing(desk):
    deployment, says = desk
    says("bob", of="closed")
    says("anna", of="pays")
    says("desk", "delegate", of="pays", roles=[], to=["carol"])
    says("carol", of="pays", roles=[])
    decisions = "SELECT * FROM keepstep_decision ORDER BY approval_id, id"
    threads = "SELECT name, status, version FROM keepstep_thread ORDER BY name"
    eventually(lambda: deployment.statuses()["closed"] == "done", what="the end of what was approved")
    before = deployment.query(decisions), deployment.query(threads)
    found = {}
    for name, (_, _, said) in TABLE.items():
        with pytest.raises(errors.InvalidInput) as refused:
            says(**said)
        found[name] = (type(refused.value), refused.value.code)
    assert found == {name: (kind, code) for name, (kind, code, _) in TABLE.items()}
    assert (deployment.query(decisions), deployment.query(threads)) == before
