"""What people approved is what runs, what is kept, and what stays approved."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from keepstep import CallRefused, tool
from keepstep.errors import CallCancelled
from keepstep.store.schema import effect
from tests.steps.agents import Outside, acts

LARGE = {"order": "7", "amount": "100.00"}
POLICIES = """
@id("large") @approve("finance") permit(principal, action, resource)
when { context.arguments.amount.lessThan(decimal("1000.0")) };
@id("huge") @approve("boss") permit(principal, action, resource)
when { context.arguments.amount.greaterThanOrEqual(decimal("1000.0")) };
"""


class Failing(Exception):
    """Ends the run."""


def paying(outside, **options):
    @tool("pay", **options)
    def pay(order: str, amount: Decimal) -> str:
        outside.calls.append(("pay", amount))
        return "paid"

    return pay


def test_an_edit_that_others_approved_as_it_was_is_kept_as_it_ran(deploy, tmp_path):
    """The journal, the audit and the undo have what ran, not what was asked for first."""
    outside = Outside()

    def refund(order, amount):
        outside.calls.append(("refund", amount))

    pay = paying(outside, undo=refund)
    policies = tmp_path / "p.cedar"
    policies.write_text(POLICIES)

    def body(ctx):
        ctx.call(pay, LARGE)
        raise Failing

    d = deploy(acts(body), policies=str(policies))
    d.start()
    d.drain()
    d.decide(arguments={"order": "7", "amount": "9000.00"})
    assert d.drain() == "waiting"
    d.decide(by="bea")
    assert d.drain() == "failed"
    assert outside.calls == [("pay", Decimal("9000.00")), ("refund", Decimal("9000.00"))]
    [detail] = [json.loads(row.detail) for row in d.reader.audit("t") if row.action == "call"]
    assert (detail["edited"], detail["asked"]["amount"], detail["ran"]["amount"]) == (True, "100.00", "9000.00")
    assert detail["arguments"] == d.approvals(None)[-1].context["digest"]


def test_what_an_edit_changed_is_not_approved_by_who_saw_it_before(deploy):
    """What `prepare` returns is another thing on a re-run: its approval is of what it returned before."""
    outside, prepared = Outside(), iter(["100.00", "9000.00"])

    @tool("pay", approve=True)
    def pay(order: str, amount: Decimal) -> str:
        outside.calls.append(("pay", amount))
        return "paid"

    @pay.prepare(idempotent=True)
    def _(order, amount):
        return {"order": order, "amount": next(prepared)}

    d = deploy(acts(lambda ctx: ctx.call(pay, LARGE)))
    d.start()
    d.drain()
    d.decide()
    # As a restored backup would: what was prepared is forgotten, and prepared again.
    d.execute("DELETE FROM keepstep_effect WHERE name = 'pay.prepare'")
    assert d.drain() == "waiting"
    assert outside.calls == []
    assert d.approvals()[0].arguments["amount"] == {"$": "decimal", "v": "9000.00"}


def test_a_new_version_asks_nobody_about_a_call_that_was_made(deploy):
    outside = Outside()
    made = {"version": "1"}

    def body(ctx):
        result = ctx.call(paying(outside, version=made["version"], approve=True), LARGE)
        ctx.approve("go on?")
        return result

    d = deploy(acts(body))
    d.start()
    d.drain()
    d.decide()
    assert d.drain() == "waiting"
    made["version"] = "2"
    d.decide()
    assert d.drain() == "done"
    assert outside.calls == [("pay", Decimal("100.00"))]
    assert len(d.approvals(None)) == 2


def test_a_new_version_cancels_nothing_that_was_executed(deploy):
    outside = Outside()
    made = {"version": "1"}

    def body(ctx):
        transfer = paying(outside, version=made["version"], approve=True)

        @transfer.prepare(idempotent=True)
        def _(order, amount):
            outside.calls.append("prepare")

        @transfer.cancel(idempotent=True)
        def _(order, amount):
            outside.calls.append("cancel")

        result = ctx.call(transfer, LARGE)
        ctx.wait_signal("go")
        return result

    d = deploy(acts(body))
    d.start()
    d.drain()
    d.decide()
    d.drain()
    made["version"] = "2"
    d.signal("go")
    assert d.drain() == "done"
    assert d.values()["log"] == ["paid"]
    assert outside.calls == ["prepare", ("pay", Decimal("100.00"))]


def test_a_new_version_is_not_called_on_the_word_about_the_old_one_also_without_a_demand(deploy, tmp_path):
    """The policy asks no more; but that this call needs an approval was decided, and nobody approved this version."""
    outside = Outside()
    policies = tmp_path / "p.cedar"
    policies.write_text('@id("asks") @approve("") permit(principal, action, resource);')
    made = {"version": "1"}
    d = deploy(acts(lambda ctx: ctx.call(paying(outside, version=made["version"]), LARGE)), policies=str(policies))
    d.start()
    d.drain()
    d.decide()
    made["version"] = "2"
    policies.write_text('@id("all") permit(principal, action, resource);')
    assert d.drain(d.worker_of(pid=2)) == "waiting"
    assert [each.context["version"] for each in d.approvals()] == ["2"]
    assert outside.calls == []
    d.decide()
    assert d.drain() == "done"
    assert outside.calls == [("pay", Decimal("100.00"))]


def test_a_rejection_stands_when_the_version_changes(deploy):
    outside = Outside()
    made = {"version": "1"}

    def body(ctx):
        try:
            return ctx.call(paying(outside, version=made["version"], approve=True), LARGE)
        except CallRefused as refused:
            ctx.wait_signal("go")
            return refused.code

    d = deploy(acts(body))
    d.start()
    d.drain()
    d.decide("reject")
    assert d.drain() == "waiting"
    made["version"] = "2"
    d.signal("go")
    assert d.drain() == "done"
    assert d.values()["log"] == ["call_rejected"]
    assert len(d.approvals(None)) == 1


_CHECK = {"on": True}


def even(amount: int) -> int:
    if amount % 2 and _CHECK["on"]:
        message = "must be even"
        raise ValueError(message)
    return amount


@pytest.mark.parametrize("unfit", ["edited", "prepared"])
def test_what_does_not_fit_after_it_was_prepared_is_cancelled_for_good(deploy, unfit, monkeypatch):
    outside = Outside()
    monkeypatch.setitem(_CHECK, "on", True)

    @tool(approve=True)
    def pay(amount: Annotated[int, AfterValidator(even)]) -> None:
        outside.calls.append(("pay", amount))

    @pay.prepare
    def _(amount) -> dict[str, Any] | None:
        outside.calls.append(("prepare", amount))
        return {"amount": 5} if unfit == "prepared" else None

    @pay.cancel
    def _(amount):
        outside.calls.append(("cancel", amount))

    def body(ctx):
        try:
            ctx.call(pay, {"amount": 2})
        except CallCancelled as cancelled:
            said = [cancelled.code, cancelled.message]
            ctx.wait_signal("go")
            return said

    d = deploy(acts(body))
    d.start()
    d.drain()
    if unfit == "edited":
        d.decide(arguments={"amount": 3})
        d.drain()
    assert outside.calls == [("prepare", 2), ("cancel", 2)]
    _CHECK["on"] = False  # a release that takes what the one before did not
    d.signal("go")
    status = d.drain()
    if unfit == "prepared" and status == "waiting":
        d.decide()
        status = d.drain()
    assert status == "done"
    assert outside.calls == [("prepare", 2), ("cancel", 2)]
    [[code, message]] = d.values()["log"]
    assert code == "call_cancelled"
    assert "must be even" in message
    assert [row.action for row in d.reader.audit("t")].count("call_cancelled") == 1


def test_a_secret_among_its_arguments_is_not_journaled_before_the_secret_is_known(deploy, monkeypatch):
    """The model was told the key by somebody, and passes it on."""
    monkeypatch.setenv("BANK_KEY", "s3cr3t-of-the-bank")
    outside = Outside()

    @tool(secrets={"api_key": "env:BANK_KEY"})
    def pay(order: str, *, api_key: str) -> None:
        outside.calls.append(order)

    d = deploy(acts(lambda ctx: ctx.call(pay, {"order": "s3cr3t-of-the-bank"})))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "not_storable"
    assert outside.calls == []
    with d.store.engine.connect() as connection:
        assert connection.execute(effect.select()).all() == []
    assert "s3cr3t" not in repr(d.dump())
