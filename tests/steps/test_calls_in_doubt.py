"""Two-phase calls of which it is not certain what happened: nothing is cancelled, and nothing is done twice."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from keepstep import CallCancelled, Retry, tool
from keepstep.errors import AnswerLost
from tests.steps.agents import Killed, Outside, acts, killed, released

ALL = '@id("all") permit(principal, action, resource);'
NONE = '@id("none") forbid(principal, action, resource);'
ASKED = {"order": "7", "amount": "100.00"}


class Declined(Exception):
    """The bank says no."""


class Receipt:
    """Nothing that could be stored."""


def holding(outside, steps, *, release=None, **options):
    """A tool that prepares, executes and cancels; `steps` are what the executions return or raise, in order."""
    left = list(steps)

    @tool("transfer", **options)
    def transfer(order: str, amount: Decimal) -> Any:
        outside.calls.append("execute")
        step = left.pop(0)
        if isinstance(step, BaseException):
            raise step
        return step

    @transfer.prepare(idempotent=True)
    def _(order, amount):
        outside.calls.append("prepare")

    @transfer.cancel(idempotent=True)
    def _(order, amount):
        outside.calls.append(("cancel", amount))
        if release is not None:
            release()

    return transfer


def test_what_was_executed_and_could_not_be_recorded_is_not_cancelled(deploy):
    """A known failure first, then an execution whose result cannot be stored: that one has happened."""
    outside = Outside()
    transfer = holding(outside, [Declined("no"), Receipt()], retry=Retry(attempts=3, delay=0))
    d = deploy(acts(lambda ctx: ctx.call(transfer, ASKED)))
    d.start()
    assert d.drain() == "failed"
    d.control("retry")
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert outside.calls == ["prepare", "execute", "execute"]


def test_an_error_while_a_result_is_recorded_makes_no_second_call(deploy, monkeypatch):
    outside = Outside()
    transfer = holding(outside, [Declined("no"), "receipt", "second receipt"], retry=Retry(attempts=3, delay=0))
    d = deploy(acts(lambda ctx: ctx.call(transfer, ASKED)))
    finish = d.worker.large_values.placed

    def placed(tenant, data, name, artifact):
        if name == "result" and data is not None and b"receipt" in data:
            raise OSError
        return finish(tenant, data, name, artifact)

    monkeypatch.setattr(d.worker.large_values, "placed", placed)
    d.start()
    assert d.drain() == "failed"
    d.control("retry")
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert outside.calls == ["prepare", "execute", "execute"]


@pytest.mark.parametrize("errors", [[AnswerLost("gone")], [AnswerLost("gone"), Declined("a replay")]])
def test_an_idempotent_execution_whose_answer_was_lost_is_not_cancelled(deploy, errors):
    outside = Outside()
    transfer = holding(
        outside, [*errors, "receipt"], idempotent=True, retry=Retry(attempts=len(errors), delay=0, never=())
    )
    if len(errors) == 2:
        errors[0].retryable = True
    d = deploy(acts(lambda ctx: ctx.call(transfer, ASKED)))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] in {"answer_lost", "node_failed"}
    assert outside.calls == ["prepare", *["execute"] * len(errors)]
    d.control("retry")
    assert d.drain() == "done"
    assert d.values()["log"] == ["receipt"]
    assert outside.calls == ["prepare", *["execute"] * (len(errors) + 1)]


@pytest.mark.parametrize("then", [["receipt"], [Declined("no"), "receipt"]])
def test_an_idempotent_execution_that_was_killed_is_called_again_whatever_policies_say_by_now(deploy, tmp_path, then):
    outside = Outside()
    transfer = holding(outside, [Killed(), *then], idempotent=True)
    policies = tmp_path / "p.cedar"
    policies.write_text(ALL)
    d = deploy(acts(lambda ctx: ctx.call(transfer, ASKED)), policies=str(policies))
    killed(d)
    released(d)
    policies.write_text(NONE)
    worker = d.worker_of(pid=2)
    if len(then) == 2:
        assert d.drain(worker) == "failed"
        assert "cancel" not in d.error[0]
        d.control("retry")
    assert d.drain(worker) == "done"
    assert d.values()["log"] == ["receipt"]
    assert outside.calls == ["prepare", "execute", *["execute"] * len(then)]


def test_an_idempotent_execution_that_is_known_to_have_failed_is_cancelled(deploy):
    outside = Outside()
    transfer = holding(outside, [Declined("no"), Declined("no")], idempotent=True, retry=Retry(attempts=2, delay=0))

    def body(ctx):
        with pytest.raises(CallCancelled):
            ctx.call(transfer, ASKED)
        return "cancelled"

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "done"
    assert outside.calls == ["prepare", "execute", "execute", ("cancel", Decimal("100.00"))]
