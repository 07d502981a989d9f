"""Two-phase tools: prepared, approved, executed, committed or cancelled, each once, wherever the process dies."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from keepstep import CallCancelled, CallRefused, Retry, crashpoints, tool
from keepstep.errors import AnswerLost
from tests.steps.agents import AGAIN, Killed, Outside, acts, call_of, killed, released

ASKED = {"order": "7", "amount": "100.00"}


class Declined(Exception):
    """The bank says no."""


class Bank(Outside):
    """The outside, which can be told to raise, before it acts or after it has."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, list[BaseException]] = {}
        self.after: dict[str, list[BaseException]] = {}
        self.seen: list[tuple[Any, ...]] = []

    def act(self, what: str, *seen: Any, key: str) -> str:
        if self.before.get(what):
            raise self.before[what].pop(0)
        self.calls.append(what)
        self.keys.append(key)
        self.seen.append((what, *seen))
        if self.after.get(what):
            raise self.after[what].pop(0)
        return f"{what} done"


def transferring(bank, *, asynchronous=False, prepared=None, lookups=False, **options):
    """A two-phase tool over the bank."""
    options.setdefault("approve", True)
    handlers = {"idempotent": False}

    if asynchronous:

        @tool("transfer", **options)
        async def transfer(order: str, amount: Decimal, *, idempotency_key: str) -> str:
            return bank.act("execute", order, amount, key=idempotency_key)

        @transfer.prepare(**handlers)
        async def _(order, amount, *, idempotency_key):
            bank.act("prepare", order, amount, key=idempotency_key)
            return prepared

        @transfer.commit(**handlers)
        async def _(order, amount, result, *, idempotency_key):
            bank.act("commit", order, amount, result, key=idempotency_key)

        @transfer.cancel(**handlers)
        async def _(order, amount, *, idempotency_key):
            bank.act("cancel", order, amount, key=idempotency_key)

        return transfer

    @tool("transfer", **options)
    def transfer(order: str, amount: Decimal, *, idempotency_key: str) -> str:
        return bank.act("execute", order, amount, key=idempotency_key)

    @transfer.prepare
    def _(order, amount, *, idempotency_key):
        bank.act("prepare", order, amount, key=idempotency_key)
        return prepared

    @transfer.commit
    def _(order, amount, result, *, idempotency_key):
        bank.act("commit", order, amount, result, key=idempotency_key)

    @transfer.cancel
    def _(order, amount, *, idempotency_key):
        bank.act("cancel", order, amount, key=idempotency_key)

    return transfer


def told(ctx, *args):
    """Call a tool and return its result, or what it came to."""
    try:
        return ctx.call(*args)
    except (CallRefused, CallCancelled) as error:
        return [error.code, error.message]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prepared_approved_executed_committed(deploy, asynchronous):
    bank = Bank()
    transfer = transferring(bank, asynchronous=asynchronous)
    d = deploy(acts(call_of(transfer, ASKED, asynchronous), asynchronous=asynchronous))
    thread_id = d.start().thread_id
    assert d.drain() == "waiting"
    assert bank.calls == ["prepare"]
    d.decide()
    assert d.drain() == "done"
    amount = Decimal("100.00")
    assert bank.seen == [("prepare", "7", amount), ("execute", "7", amount), ("commit", "7", amount, "execute done")]
    assert d.values()["log"] == ["execute done"]
    assert len(set(bank.keys)) == 3
    assert [key.split("/node/")[1].split(":")[0] for key in bank.keys] == [
        "transfer.prepare",
        "transfer",
        "transfer.commit",
    ]
    assert all(key.startswith(f"{thread_id}/0/1/node/transfer") for key in bank.keys)
    assert [row.action for row in d.reader.audit("t")] == ["start", "decide", "call"]


def test_what_is_prepared_is_what_is_asked_and_executed(deploy):
    bank = Bank()
    transfer = transferring(bank, prepared={"order": "7", "amount": "101.50"})
    d = deploy(acts(lambda ctx: ctx.call(transfer, ASKED)))
    d.start()
    d.drain()
    assert d.approvals()[0].arguments == {"order": "7", "amount": {"$": "decimal", "v": "101.50"}}
    d.decide()
    assert d.drain() == "done"
    assert bank.seen[1] == ("execute", "7", Decimal("101.50"))


def test_without_a_demand_nobody_is_asked(deploy):
    bank = Bank()
    transfer = transferring(bank, approve=False)
    d = deploy(acts(lambda ctx: ctx.call(transfer, ASKED)))
    d.start()
    assert d.drain() == "done"
    assert bank.calls == ["prepare", "execute", "commit"]


def test_an_edit_is_executed_and_committed(deploy):
    bank = Bank()
    transfer = transferring(bank)
    d = deploy(acts(lambda ctx: ctx.call(transfer, ASKED)))
    d.start()
    d.drain()
    d.decide(arguments={"order": "7", "amount": "80.00"})
    assert d.drain() == "done"
    amount = Decimal("80.00")
    assert bank.seen[1:] == [("execute", "7", amount), ("commit", "7", amount, "execute done")]
    [detail] = [json.loads(row.detail) for row in d.reader.audit("t") if row.action == "call"]
    assert (detail["asked"]["amount"], detail["ran"]["amount"]) == ("100.00", "80.00")


def test_what_is_rejected_is_cancelled_as_it_was_prepared(deploy):
    bank = Bank()
    transfer = transferring(bank)

    def body(ctx):
        answer = told(ctx, transfer, ASKED)
        if ctx.attempt < 4:
            raise ConnectionError
        return answer

    d = deploy(acts(body, retry=AGAIN))
    d.start()
    d.drain()
    d.decide("reject")
    assert d.drain() == "done"
    assert bank.seen == [("prepare", "7", Decimal("100.00")), ("cancel", "7", Decimal("100.00"))]
    assert d.values()["log"] == [["call_rejected", "tool 'transfer' was not called: anna rejected it"]]
    assert [row.action for row in d.reader.audit("t")].count("call_rejected") == 1


def test_what_expired_is_cancelled(timed, clock, tmp_path):
    bank = Bank()
    transfer = transferring(bank, approve=False)
    policies = tmp_path / "p.cedar"
    policies.write_text('@id("asks") @approve("") @expires("1h") permit(principal, action, resource);')
    d = timed(acts(lambda ctx: told(ctx, transfer, ASKED)), policies=str(policies))
    d.start()
    assert d.drain() == "waiting"
    clock.now += 3601
    d.sweep()
    assert d.drain() == "done"
    assert bank.calls == ["prepare", "cancel"]
    assert d.values()["log"][0][0] == "call_rejected"


def test_what_is_denied_at_the_second_look_is_cancelled(deploy, tmp_path):
    bank = Bank()
    transfer = transferring(bank)
    policies = tmp_path / "p.cedar"
    policies.write_text('@id("all") permit(principal, action, resource);')
    d = deploy(acts(lambda ctx: told(ctx, transfer, ASKED)), policies=str(policies))
    d.start()
    d.drain()
    d.decide()
    policies.write_text('@id("none") forbid(principal, action, resource);')
    assert d.drain(d.worker_of(pid=2)) == "done"
    assert bank.calls == ["prepare", "cancel"]
    assert d.values()["log"] == [["call_denied", "tool 'transfer' was not called: forbidden by none"]]


def test_what_was_prepared_before_there_were_policies_is_cancelled_by_them(deploy, monkeypatch, tmp_path):
    bank = Bank()
    left = [Killed()]

    def hook(reached, detail):
        if reached == "after_result" and detail.startswith("transfer.prepare:") and left:
            raise left.pop()

    monkeypatch.setattr(crashpoints, "hook", hook)
    d = deploy(acts(lambda ctx: told(ctx, transfer, ASKED)))
    transfer = transferring(bank, approve=False)
    killed(d)
    released(d)
    policies = tmp_path / "p.cedar"
    policies.write_text('@id("none") forbid(principal, action, resource);')
    d.settings = d.settings.model_copy(update={"policies": str(policies)})
    assert d.drain(d.worker_of(pid=2)) == "done"
    assert bank.calls == ["prepare", "cancel"]
    assert d.values()["log"][0][0] == "call_denied"


def test_what_is_denied_at_once_is_not_prepared(deploy, tmp_path):
    bank = Bank()
    policies = tmp_path / "p.cedar"
    policies.write_text('@id("none") forbid(principal, action, resource);')
    d = deploy(acts(lambda ctx: told(ctx, transferring(bank), ASKED)), policies=str(policies))
    d.start()
    assert d.drain() == "done"
    assert bank.calls == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_execution_that_failed_for_good_is_cancelled_once(deploy, asynchronous):
    bank = Bank()
    bank.before["execute"] = [Declined("no"), Declined("still no"), Declined("never asked")]
    transfer = transferring(bank, asynchronous=asynchronous, approve=False, retry=Retry(attempts=2, delay=0))
    graph = acts(call_of(transfer, ASKED, asynchronous), asynchronous=asynchronous, retry=AGAIN)
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert d.error == (
        "call_cancelled",
        "the call of tool 'transfer' failed and what it had prepared is cancelled: still no",
    )
    assert bank.calls == ["prepare", "cancel"]
    assert len(bank.before["execute"]) == 1
    d.control("retry")
    assert d.drain() == "failed"
    # Cancelled is cancelled: the same error again, and nothing is executed.
    assert d.error[0] == "call_cancelled"
    assert bank.calls == ["prepare", "cancel"]
    assert [row.action for row in d.reader.audit("t")].count("call_cancelled") == 1


def test_a_failed_execution_is_tried_again_before_it_is_cancelled(deploy):
    bank = Bank()
    bank.before["execute"] = [Declined("no")]
    transfer = transferring(bank, approve=False, retry=Retry(attempts=2, delay=0))
    d = deploy(acts(lambda ctx: ctx.call(transfer, ASKED)))
    d.start()
    assert d.drain() == "done"
    assert bank.calls == ["prepare", "execute", "commit"]


def test_an_unknown_execution_is_not_cancelled_and_goes_on_when_it_happened(deploy):
    bank = Bank()
    bank.after["execute"] = [AnswerLost("gone")]
    transfer = transferring(bank)
    d = deploy(acts(lambda ctx: told(ctx, transfer, ASKED)))
    d.start()
    d.drain()
    d.decide()
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert bank.calls == ["prepare", "execute"]
    d.send("resolve", effect=bank.keys[1], outcome="happened", result="by hand")
    assert d.drain() == "done"
    assert bank.seen[2] == ("commit", "7", Decimal("100.00"), "by hand")
    assert d.values()["log"] == ["by hand"]


def test_an_unknown_execution_that_did_not_happen_is_executed(deploy):
    bank = Bank()
    bank.before["execute"] = [AnswerLost("gone")]
    transfer = transferring(bank, approve=False)
    d = deploy(acts(lambda ctx: told(ctx, transfer, ASKED)))
    thread_id = d.start().thread_id
    assert d.drain() == "blocked"
    [key] = [f"{thread_id}/0/1/node/{row.call}" for row in d.reader.effects("t") if row.name == "transfer"]
    d.send("resolve", effect=key, outcome="not_happened")
    assert d.drain() == "done"
    assert bank.calls == ["prepare", "execute", "commit"]


def test_a_given_up_execution_is_the_nodes_and_not_cancelled(deploy):
    bank = Bank()
    bank.after["execute"] = [AnswerLost("gone")]
    transfer = transferring(bank, approve=False)
    d = deploy(acts(lambda ctx: told(ctx, transfer, ASKED)))
    d.start()
    d.drain()
    d.send("resolve", effect=bank.keys[1], outcome="give_up")
    assert d.drain() == "failed"
    assert d.error[0] == "effect_given_up"
    assert bank.calls == ["prepare", "execute"]


def test_a_commit_that_fails_is_tried_again_and_never_cancelled(timed, clock):
    bank = Bank()
    bank.before["commit"] = [Declined("busy"), Declined("busy"), Declined("busy")]
    transfer = transferring(bank, approve=False)
    d = timed(acts(lambda ctx: told(ctx, transfer, ASKED)), retry_in_place_seconds_max=0)
    d.start()
    for _ in range(2):
        assert d.drain() == "ready"
        assert d.error[0] == "put_off"
        clock.now += 5
        d.sweep()
    assert d.drain() == "failed"
    assert d.error == ("node_failed", "busy")
    assert bank.calls == ["prepare", "execute"]
    d.control("retry")
    assert d.drain() == "done"
    assert bank.calls == ["prepare", "execute", "commit"]


def test_what_prepare_returns_must_be_the_tools_arguments(deploy):
    bank = Bank()
    transfer = transferring(bank, prepared={"order": "7", "hold": "h"})
    d = deploy(acts(lambda ctx: ctx.call(transfer, ASKED)))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "call_cancelled"
    assert "is cancelled: what transfer.prepare returned is not what is to be executed: " in d.error[1]
    assert bank.seen == [("prepare", "7", Decimal("100.00")), ("cancel", "7", Decimal("100.00"))]


# --- killed ---


def expected(handler, rejected):
    return ["prepare", "cancel"] if rejected else ["prepare", "execute", "commit"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("handler", ["prepare", "execute", "commit", "cancel"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_killed_in_a_handler_it_is_unknown_and_then_resolved(deploy, asynchronous, handler, where):
    bank = Bank()
    transfer = transferring(bank, asynchronous=asynchronous)
    d = deploy(acts(call_of(transfer, ASKED, asynchronous), asynchronous=asynchronous))
    getattr(bank, where)[handler] = [Killed()]
    rejected = handler == "cancel"
    thread_id = d.start().thread_id
    if handler == "prepare":
        killed(d, start=False)
        released(d)
    else:
        assert d.drain() == "waiting"
        d.decide("reject" if rejected else "approve")
        killed(d, start=False)
        released(d)
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    name = "transfer" if handler == "execute" else f"transfer.{handler}"
    [key] = [f"{thread_id}/0/1/node/{row.call}" for row in d.reader.effects("t") if row.name == name]
    happened = where == "after"
    result = {"prepare": None, "execute": "by hand"}.get(handler)
    d.send(
        "resolve", effect=key, outcome="happened" if happened else "not_happened", result=result if happened else None
    )
    if handler == "prepare":
        assert d.drain() == "waiting"
        d.decide()
    assert d.drain() == ("failed" if rejected else "done")
    assert bank.calls == expected(handler, rejected)
    if rejected:
        assert d.error[0] == "call_rejected"


@pytest.mark.parametrize("point", ["before_intent", "after_result"])
@pytest.mark.parametrize("handler", ["prepare", "execute", "commit", "cancel"])
def test_killed_between_the_handlers_each_is_called_once(deploy, monkeypatch, handler, point):
    bank = Bank()
    transfer = transferring(bank)
    rejected = handler == "cancel"
    name = "transfer:" if handler == "execute" else f"transfer.{handler}:"
    left = [Killed()]

    def hook(reached, detail):
        if reached == point and detail.startswith(name) and left:
            raise left.pop()

    monkeypatch.setattr(crashpoints, "hook", hook)
    d = deploy(acts(lambda ctx: told(ctx, transfer, ASKED)))
    d.start()
    if handler == "prepare":
        killed(d, start=False)
        released(d)
    assert d.drain() == "waiting"
    d.decide("reject" if rejected else "approve")
    if handler != "prepare":
        killed(d, start=False)
        released(d)
    assert d.drain() == "done"
    assert left == []
    assert bank.calls == expected(handler, rejected)


@pytest.mark.parametrize("point", ["before_park", "after_park"])
def test_killed_around_the_approval(deploy, monkeypatch, point):
    bank = Bank()
    transfer = transferring(bank)
    left = [Killed()]

    def hook(reached, _detail):
        if reached == point and left:
            raise left.pop()

    monkeypatch.setattr(crashpoints, "hook", hook)
    d = deploy(acts(lambda ctx: told(ctx, transfer, ASKED)))
    killed(d)
    released(d)
    assert d.drain() == "waiting"
    assert len(d.approvals()) == 1
    d.decide()
    assert d.drain() == "done"
    assert bank.calls == ["prepare", "execute", "commit"]


def test_killed_before_the_failure_is_written_down_nothing_is_lost(deploy, monkeypatch):
    bank = Bank()
    bank.before["execute"] = [Declined("no"), Declined("no")]
    transfer = transferring(bank, approve=False)
    left = [Killed()]

    def hook(reached, detail):
        if reached == "after_call" and detail.startswith("keepstep.ruling:") and left:
            raise left.pop()

    monkeypatch.setattr(crashpoints, "hook", hook)
    d = deploy(acts(lambda ctx: told(ctx, transfer, ASKED)))
    killed(d)
    released(d)
    assert d.drain() == "done"
    assert bank.before["execute"] == []
    assert bank.calls == ["prepare", "cancel"]
    assert d.values()["log"][0][0] == "call_cancelled"


@pytest.mark.parametrize("handler", ["commit", "cancel"])
def test_an_idempotent_handler_that_was_killed_is_called_again(deploy, handler):
    bank = Bank()
    bank.before[handler] = [Killed()]

    @tool(approve=True)
    def transfer(order: str, amount: Decimal, *, idempotency_key: str) -> str:
        return bank.act("execute", key=idempotency_key)

    @transfer.prepare(idempotent=True)
    def _(order, amount, *, idempotency_key):
        bank.act("prepare", key=idempotency_key)

    @transfer.commit(idempotent=True)
    def _(order, amount, *, idempotency_key):
        bank.act("commit", key=idempotency_key)

    @transfer.cancel(idempotent=True)
    def _(order, amount, *, idempotency_key):
        bank.act("cancel", key=idempotency_key)

    d = deploy(acts(lambda ctx: told(ctx, transfer, ASKED)))
    d.start()
    d.drain()
    d.decide("reject" if handler == "cancel" else "approve")
    killed(d, start=False)
    released(d)
    assert d.drain() == "done"
    assert bank.calls == expected(handler, handler == "cancel")
