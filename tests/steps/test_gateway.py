"""What stands between a node and its tools: policies, people, secrets, rates."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, Field

from keepstep import CallDenied, CallRefused, CallRejected, RateLimited, Retry, Secret, ToolArguments, tool
from keepstep.errors import StateError
from keepstep.runtime.rates import Rates
from tests.steps.agents import AGAIN, Killed, Outside, acts, call_of, killed, released

POLICIES = """
@id("small")
permit(principal, action == Action::"call", resource == Tool::"pay")
when { context.arguments.amount.lessThan(decimal("50.0")) };

@id("large")
@approve("finance")
permit(principal, action == Action::"call", resource == Tool::"pay")
when {
  context.arguments.amount.greaterThanOrEqual(decimal("50.0")) &&
  context.arguments.amount.lessThan(decimal("1000.0"))
};

@id("no casino")
forbid(principal, action, resource)
when { context.arguments has order && context.arguments.order == "casino" };
"""
HUGE = """
@id("huge")
@approve("boss")
permit(principal, action == Action::"call", resource == Tool::"pay")
when { context.arguments.amount.greaterThanOrEqual(decimal("1000.0")) };
"""
ALL = '@id("all") permit(principal, action, resource);'
NONE = '@id("none") forbid(principal, action, resource);'
ASK_BOSS = '@id("boss") @approve("boss") permit(principal, action, resource);'


@pytest.fixture
def policies(tmp_path):
    """A file of policies, which a test may write again; workers that start later read what it holds then."""

    class File:
        path = tmp_path / "policies.cedar"

        def write(self, text):
            self.path.write_text(text, encoding="utf-8")
            return str(self.path)

    return File()


def paying(outside, **options):
    @tool(**options)
    def pay(order: str, amount: Decimal, note: str | None = None, *, idempotency_key: str) -> dict[str, Any]:
        """Pay an order."""
        outside.calls.append((order, amount))
        outside.keys.append(idempotency_key)
        return {"paid": amount}

    return pay


def even(amount: int) -> int:
    if amount % 2:
        message = "must be even"
        raise ValueError(message)
    return amount


def refused(ctx, *args, **kwargs):
    """Call a tool and return its result, or what it was refused by."""
    try:
        return ctx.call(*args, **kwargs)
    except CallRefused as error:
        return [error.code, error.message]


def audited(d, action):
    return [json.loads(row.detail) for row in d.reader.audit("t") if row.action == action]


LARGE = {"order": "7", "amount": "120.00"}
SMALL = {"order": "7", "amount": "12.00"}
CASINO = {"order": "casino", "amount": "1.00"}

# --- policies ---


def test_what_is_allowed_is_called_and_what_is_denied_is_not(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    d = deploy(
        acts(lambda ctx: [refused(ctx, pay, SMALL), refused(ctx, pay, CASINO)]), policies=policies.write(POLICIES)
    )
    d.start()
    assert d.drain() == "done"
    assert outside.calls == [("7", Decimal("12.00"))]
    [[_, denied]] = d.values()["log"]
    assert denied == ["call_denied", "tool 'pay' was not called: forbidden by no casino"]
    [said] = audited(d, "call_denied")
    assert (said["tool"], said["policies"], said["reason"]) == ("pay", ["no casino"], "forbidden by no casino")
    [called] = audited(d, "call")
    assert (called["policies"], called["policy_version"]) == (["small"], d.worker.policies.version)


def test_a_denial_has_its_policies_and_its_reason(deploy, policies):
    pay = paying(Outside())

    def body(ctx):
        with pytest.raises(CallDenied) as denied:
            ctx.call(pay, CASINO)
        return [denied.value.policies, denied.value.reason]

    d = deploy(acts(body), policies=policies.write(POLICIES))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [[("no casino",), "forbidden by no casino"]]


def test_a_denial_stands_when_the_node_runs_again(deploy, policies):
    outside = Outside()
    pay = paying(outside)

    def body(ctx):
        answer = refused(ctx, pay, SMALL)
        if ctx.attempt == 1:
            raise Killed
        return answer

    d = deploy(acts(body), policies=policies.write(NONE))
    killed(d)
    released(d)
    policies.write(ALL)
    assert d.drain(d.worker_of(pid=2)) == "done"
    assert outside.calls == []
    assert d.values()["log"] == [["call_denied", "tool 'pay' was not called: forbidden by none"]]
    assert len(audited(d, "call_denied")) == 1


def test_what_was_called_is_not_judged_again(deploy, policies):
    outside = Outside()
    pay = paying(outside)

    def body(ctx):
        answer = ctx.call(pay, SMALL)
        if ctx.attempt == 1:
            raise Killed
        return answer

    d = deploy(acts(body), policies=policies.write(ALL))
    killed(d)
    released(d)
    policies.write(NONE)
    assert d.drain(d.worker_of(pid=2)) == "done"
    assert outside.calls == [("7", Decimal("12.00"))]


def test_what_was_called_before_there_were_policies_is_not_judged(deploy, policies):
    outside = Outside()
    pay = paying(outside)

    def body(ctx):
        answer = ctx.call(pay, SMALL)
        if ctx.attempt == 1:
            raise Killed
        return answer

    d = deploy(acts(body))
    killed(d)
    released(d)
    d.settings = d.settings.model_copy(update={"policies": policies.write(NONE)})
    assert d.drain(d.worker_of(pid=2)) == "done"
    assert len(outside.calls) == 1


def test_policies_that_cannot_be_read_hold_the_call_up(timed, clock, policies):
    outside = Outside()
    pay = paying(outside)
    d = timed(acts(lambda ctx: ctx.call(pay, SMALL)), policies=policies.write("permit(;"))
    d.start()
    assert d.drain() == "ready"
    assert d.error[0] == "put_off"
    assert outside.calls == []
    policies.write(ALL)
    clock.now += 11
    d.sweep()
    assert d.drain() == "done"
    assert len(outside.calls) == 1


# --- people ---


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_needs_approval_waits_for_it_without_a_worker(deploy, policies, asynchronous):
    outside = Outside()
    pay = paying(outside, version="2", risk="high", scopes=["payments"])
    d = deploy(acts(call_of(pay, LARGE, asynchronous), asynchronous=asynchronous), policies=policies.write(POLICIES))
    d.start()
    assert d.drain() == "waiting"
    assert outside.calls == []
    [approval] = d.approvals()
    assert approval.question == "Call pay?"
    assert approval.to == ["finance"]
    assert approval.arguments == {"order": "7", "amount": {"$": "decimal", "v": "120.00"}}
    assert {**approval.context, "digest": "", "reason": ""} == {
        "tool": "pay",
        "version": "2",
        "risk": "high",
        "scopes": ["payments"],
        "policies": ["large"],
        "reason": "",
        "digest": "",
    }
    d.decide()
    assert d.drain() == "done"
    assert outside.calls == [("7", Decimal("120.00"))]
    [called] = audited(d, "call")
    assert (called["approval"], called["by"], called["edited"]) == (approval.id, "anna", False)
    assert called["arguments"] == approval.context["digest"]


def test_what_an_approver_edits_is_what_runs_and_is_audited(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: ctx.call(pay, LARGE)), policies=policies.write(POLICIES))
    d.start()
    d.drain()
    d.decide(arguments={"order": "7", "amount": "80.00"})
    assert d.drain() == "done"
    assert outside.calls == [("7", Decimal("80.00"))]
    assert d.values()["log"] == [{"paid": Decimal("80.00")}]
    [called] = audited(d, "call")
    assert called["edited"]
    assert called["asked"] == {"order": "7", "amount": "120.00"}
    assert called["ran"] == {"order": "7", "amount": "80.00"}


def test_an_edit_is_judged_too(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: refused(ctx, pay, LARGE)), policies=policies.write(POLICIES))
    d.start()
    d.drain()
    d.decide(arguments={"order": "casino", "amount": "120.00"})
    assert d.drain() == "done"
    assert outside.calls == []
    assert d.values()["log"] == [["call_denied", "tool 'pay' was not called: forbidden by no casino"]]


def test_an_edit_that_others_must_approve_is_asked_of_them(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    text = POLICIES + HUGE
    d = deploy(acts(lambda ctx: refused(ctx, pay, LARGE)), policies=policies.write(text))
    d.start()
    d.drain()
    d.decide(arguments={"order": "7", "amount": "9000.00"})
    assert d.drain() == "waiting"
    [again] = d.approvals()
    assert again.to == ["boss"]
    assert again.arguments["amount"] == {"$": "decimal", "v": "9000.00"}
    assert outside.calls == []
    d.decide(by="bea")
    assert d.drain() == "done"
    assert outside.calls == [("7", Decimal("9000.00"))]
    [called] = audited(d, "call")
    assert called["by"] == "bea"


def test_who_approved_something_else_has_not_approved_what_came_of_it(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: refused(ctx, pay, LARGE)), policies=policies.write(POLICIES + HUGE))
    d.start()
    d.drain()
    for by, to, amount in (("anna", "finance", "9000.00"), ("bea", "boss", "80.00"), ("carl", "finance", None)):
        assert d.drain() == "waiting"
        assert d.approvals()[0].to == [to]
        d.decide(by=by, arguments=None if amount is None else {"order": "7", "amount": amount})
    assert d.drain() == "done"
    assert outside.calls == [("7", Decimal("80.00"))]
    [called] = audited(d, "call")
    assert called["by"] == "carl"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"order": "7", "amount": "much"}, "$.arguments.amount"),
        ({"order": 7, "amount": "1.00"}, "$.arguments.order"),
        ({"order": "7"}, "$.arguments.amount"),
        ({"order": "7", "amount": "1.00", "key": "k"}, "$.arguments.key"),
    ],
)
def test_an_edit_that_does_not_fit_the_tool_is_refused_at_the_door(deploy, policies, edit, said):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: ctx.call(pay, LARGE)), policies=policies.write(POLICIES))
    d.start()
    d.drain()
    with pytest.raises(StateError) as error:
        d.decide(arguments=edit)
    assert said in error.value.message
    assert d.thread.status == "waiting"
    assert outside.calls == []


def test_an_edit_past_a_limit_of_the_tools_schema_is_refused_at_the_door(deploy):
    @tool(approve=True)
    def pay(amount: Annotated[int, Field(ge=1)]) -> None:
        """Pay."""

    d = deploy(acts(lambda ctx: ctx.call(pay, {"amount": 2})))
    d.start()
    d.drain()
    with pytest.raises(StateError, match=r"\$\.arguments\.amount: does not fit the question's schema \(minimum 1\)"):
        d.decide(arguments={"amount": 0})
    assert d.thread.status == "waiting"


def test_an_edit_that_only_the_tool_can_refuse_is_refused_before_the_call(deploy):
    outside = Outside()

    @tool(approve=True)
    def pay(amount: Annotated[int, AfterValidator(even)]) -> None:
        outside.calls.append(amount)

    def body(ctx):
        with pytest.raises(ToolArguments) as error:
            ctx.call(pay, {"amount": 2})
        return error.value.message

    d = deploy(acts(body))
    d.start()
    d.drain()
    d.decide(arguments={"amount": 3})
    assert d.drain() == "done"
    assert outside.calls == []
    [message] = d.values()["log"]
    assert message == (
        "anna approved arguments of their own, and the arguments do not fit tool 'pay': "
        "$.amount: Value error, must be even"
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_rejected_is_not_called(deploy, asynchronous):
    outside = Outside()
    pay = paying(outside, approve=("finance", "boss"))

    if asynchronous:

        async def body(ctx):
            try:
                return await ctx.call(pay, LARGE)
            except CallRejected as error:
                return [error.verdict, error.by, error.comment, error.message]

    else:

        def body(ctx):
            try:
                return ctx.call(pay, LARGE)
            except CallRejected as error:
                if ctx.attempt == 2:
                    raise ConnectionError from error
                return [error.verdict, error.by, error.comment, error.message]

    d = deploy(acts(body, asynchronous=asynchronous, retry=AGAIN))
    d.start()
    d.drain()
    [approval] = d.approvals()
    assert approval.to == ["finance", "boss"]
    d.decide("reject", comment="too much")
    assert d.drain() == "done"
    assert outside.calls == []
    assert d.values()["log"] == [
        ["reject", "anna", "too much", "tool 'pay' was not called: anna rejected it: too much"]
    ]
    [said] = audited(d, "call_rejected")
    assert (said["tool"], said["approval"], said["by"], said["verdict"]) == ("pay", approval.id, "anna", "reject")


def test_changes_that_are_asked_for_are_the_nodes_to_make(deploy):
    outside = Outside()
    pay = paying(outside, approve=("finance",))

    def body(ctx):
        try:
            return ctx.call(pay, LARGE)
        except CallRejected as error:
            return [error.verdict, error.comment, error.message]

    d = deploy(acts(body))
    d.start()
    d.drain()
    d.decide("request_changes", comment="half of it")
    assert d.drain() == "done"
    assert outside.calls == []
    told = "tool 'pay' was not called: anna asks for changes: half of it"
    assert d.values()["log"] == [["request_changes", "half of it", told]]


def test_what_nobody_approves_in_time_is_not_called(timed, clock, policies):
    outside = Outside()
    pay = paying(outside)
    text = '@id("asks") @approve("") @expires("1h") permit(principal, action, resource);'

    def body(ctx):
        try:
            return ctx.call(pay, LARGE)
        except CallRejected as error:
            return [error.verdict, error.by, error.message]

    d = timed(acts(body), policies=policies.write(text))
    d.start()
    assert d.drain() == "waiting"
    clock.now += 3601
    d.sweep()
    assert d.drain() == "done"
    assert d.values()["log"] == [["expired", None, "tool 'pay' was not called: nobody approved it in time"]]
    assert outside.calls == []
    assert [said["verdict"] for said in audited(d, "call_rejected")] == ["expired"]


def test_a_quorum_of_a_policy_is_asked_for(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    text = '@id("two") @approve("boss") @quorum("2") permit(principal, action, resource);'
    d = deploy(acts(lambda ctx: ctx.call(pay, LARGE)), policies=policies.write(text))
    d.start()
    d.drain()
    d.decide(by="anna")
    assert d.drain() == "waiting"
    d.decide(by="bea")
    assert d.drain() == "done"
    assert len(outside.calls) == 1


def test_a_policy_that_changed_while_people_decided(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: refused(ctx, pay, LARGE)), policies=policies.write(POLICIES))
    d.start()
    d.drain()
    d.decide()
    policies.write(NONE)
    assert d.drain(d.worker_of(pid=2)) == "done"
    assert outside.calls == []
    assert d.values()["log"] == [["call_denied", "tool 'pay' was not called: forbidden by none"]]


def test_a_policy_that_asks_somebody_else_by_now(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: refused(ctx, pay, LARGE)), policies=policies.write(POLICIES))
    d.start()
    d.drain()
    d.decide()
    policies.write(ASK_BOSS)
    other = d.worker_of(pid=2)
    assert d.drain(other) == "waiting"
    assert [approval.to for approval in d.approvals()] == [["boss"]]
    d.decide(by="bea")
    assert d.drain(other) == "done"
    assert outside.calls == [("7", Decimal("120.00"))]


def test_a_policy_that_asks_more_people_by_now(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: refused(ctx, pay, LARGE)), policies=policies.write(POLICIES))
    d.start()
    d.drain()
    d.decide()
    policies.write(POLICIES.replace('@approve("finance")', '@approve("finance") @quorum("2")'))
    other = d.worker_of(pid=2)
    assert d.drain(other) == "waiting"
    d.decide(by="anna")
    assert outside.calls == []
    d.decide(by="bea")
    assert d.drain(other) == "done"
    assert outside.calls == [("7", Decimal("120.00"))]


def test_an_approval_that_was_needed_stays_needed(deploy, policies):
    outside = Outside()
    pay = paying(outside)
    d = deploy(acts(lambda ctx: refused(ctx, pay, LARGE)), policies=policies.write(POLICIES))
    d.start()
    d.drain()
    policies.write(ALL)
    d.decide("reject")
    assert d.drain(d.worker_of(pid=2)) == "done"
    assert outside.calls == []
    assert d.values()["log"][0][0] == "call_rejected"


def test_masked_arguments_are_seen_by_nobody_and_run_as_they_are(deploy, policies):
    outside = Outside()

    @tool
    def pay(card: str, amount: int) -> str:
        outside.calls.append((card, amount))
        return "paid"

    text = '@id("card") @approve("") @mask("card") permit(principal, action, resource);'
    d = deploy(acts(lambda ctx: ctx.call(pay, {"card": "4111-1111", "amount": 5})), policies=policies.write(text))
    d.start()
    d.drain()
    [approval] = d.approvals()
    assert approval.arguments == {"card": "(masked)", "amount": 5}
    d.decide(arguments={"card": "(masked)", "amount": 4})
    assert d.drain() == "done"
    assert outside.calls == [("4111-1111", 4)]
    tables = d.dump()
    assert "4111-1111" not in repr(tables)


def test_tool_and_policy_that_both_name_roles_ask_those_of_both(deploy, policies):
    pay = paying(Outside(), approve=("finance", "boss"))
    text = '@id("two") @approve("boss,legal") permit(principal, action, resource);'
    d = deploy(acts(lambda ctx: ctx.call(pay, LARGE)), policies=policies.write(text))
    d.start()
    d.drain()
    assert d.approvals()[0].to == ["boss"]


# --- S48, S51: what an approval is for ---


def test_another_amount_on_a_re_run_needs_another_approval(deploy):
    outside = Outside()
    pay = paying(outside, approve=True)
    amounts = iter(["100.00", "9000.00", "9000.00"])

    d = deploy(acts(lambda ctx: ctx.call(pay, {"order": "7", "amount": next(amounts)})))
    d.start()
    d.drain()
    d.decide()
    assert d.drain() == "waiting"
    assert outside.calls == []
    [approval] = d.approvals()
    assert approval.arguments["amount"] == {"$": "decimal", "v": "9000.00"}
    d.decide()
    assert d.drain() == "done"
    assert outside.calls == [("7", Decimal("9000.00"))]


def test_another_tool_with_like_arguments_needs_another_approval(deploy):
    outside = Outside()
    pay = paying(outside, approve=True)

    @tool(approve=True)
    def refund(order: str, amount: Decimal) -> str:
        outside.calls.append(("refund", order))
        return "refunded"

    tools = iter(["pay", "refund", "refund"])
    d = deploy(acts(lambda ctx: ctx.call(next(tools), LARGE), tools=[pay, refund]))
    d.start()
    d.drain()
    d.decide()
    assert d.drain() == "waiting"
    assert outside.calls == []
    assert [approval.question for approval in d.approvals()] == ["Call refund?"]
    d.decide("reject")
    assert d.drain() == "failed"
    assert d.error[0] == "call_rejected"
    assert outside.calls == []


def test_another_version_of_the_tool_needs_another_approval(deploy):
    outside = Outside()
    versions = iter([paying(outside, version="1", approve=True), *[paying(outside, version="2", approve=True)] * 2])
    d = deploy(acts(lambda ctx: ctx.call(next(versions), LARGE)))
    d.start()
    d.drain()
    d.decide()
    assert d.drain() == "waiting"
    assert [approval.context["version"] for approval in d.approvals()] == ["2"]
    d.decide()
    assert d.drain() == "done"
    assert len(outside.calls) == 1


def test_only_key_order_changed_runs_once_under_the_approval(deploy):
    outside = Outside()
    pay = paying(outside, approve=True)

    def body(ctx):
        asked = LARGE if ctx.attempt == 1 else dict(reversed(LARGE.items()))
        return ctx.call(pay, asked)

    d = deploy(acts(body))
    d.start()
    d.drain()
    d.decide()
    assert d.drain() == "done"
    assert len(outside.calls) == 1
    assert len(d.approvals(None)) == 1


def test_an_approval_holds_in_another_process_with_more_tools(deploy):
    outside = Outside()
    pay = paying(outside, approve=True)
    d = deploy(acts(lambda ctx: ctx.call("pay", LARGE), tools=[pay]))
    d.start()
    d.drain()
    d.decide()

    @tool
    def other(order: str) -> None:
        """A tool that is there by now."""

    d.graphs = (acts(lambda ctx: ctx.call("pay", LARGE), tools=[paying(outside, approve=True), other]),)
    assert d.drain(d.worker_of(pid=2)) == "done"
    assert len(outside.calls) == 1
    assert len(d.approvals(None)) == 1


def test_two_calls_that_are_asked_together_get_their_own_answers(deploy):
    outside = Outside()
    pay = paying(outside, approve=True)

    def body(ctx):
        return ctx.gather(
            lambda: refused(ctx, pay, {"order": "a", "amount": 1}),
            lambda: refused(ctx, pay, {"order": "b", "amount": 1}),
        )

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "waiting"
    first, second = d.approvals()
    assert [first.arguments["order"], second.arguments["order"]] == ["a", "b"]
    d.decide("reject", approval=second.id)
    d.decide(approval=first.id)
    assert d.drain() == "done"
    assert outside.calls == [("a", Decimal(1))]


def test_questions_of_the_node_keep_their_places_beside_those_of_calls(deploy):
    outside = Outside()
    pay = paying(outside, approve=True)

    def body(ctx):
        first = ctx.ask("one?").answer
        ctx.call(pay, LARGE)
        return [first, ctx.ask("two?").answer]

    d = deploy(acts(body))
    d.start()
    for answer in (("answer", 1), ("approve", None), ("answer", 2)):
        assert d.drain() == "waiting"
        d.decide(answer[0], answer=answer[1])
    assert d.drain() == "done"
    assert d.values()["log"] == [[1, 2]]
    assert len(outside.calls) == 1


# --- secrets ---


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_secret_reaches_the_tool_and_no_table(deploy, monkeypatch, idempotent):
    monkeypatch.setenv("BANK_KEY", "s3cr3t-of-the-bank")
    seen = []

    @tool(secrets={"api_key": "env:BANK_KEY", "token": "env:BANK_KEY"}, approve=True, idempotent=idempotent)
    def pay(order: str, api_key: str, token: Secret) -> dict[str, str]:
        seen.append((api_key, token.reveal()))
        return {"receipt": f"paid with {api_key}"}

    @tool(secrets={"api_key": "env:BANK_KEY"}, retry=Retry(attempts=2, delay=0))
    def fail(order: str, api_key: str) -> None:
        message = f"wrong key {api_key}"
        raise ValueError(message)

    def body(ctx):
        ctx.call(pay, {"order": "7"})
        ctx.call(fail, {"order": "7"})

    d = deploy(acts(body))
    d.start()
    assert d.drain() == "waiting"
    assert seen == []
    d.decide()
    assert d.drain() == "failed"
    assert seen == [("s3cr3t-of-the-bank", "s3cr3t-of-the-bank")]
    assert "s3cr3t" not in repr(d.dump())
    assert d.error[1] == "wrong key ***"


def test_a_secret_is_no_argument(deploy, monkeypatch):
    monkeypatch.setenv("BANK_KEY", "s3cr3t-of-the-bank")

    @tool(secrets={"api_key": "env:BANK_KEY"})
    def pay(order: str, api_key: str) -> None:
        """Pay."""

    d = deploy(acts(lambda ctx: ctx.call(pay, {"order": "7", "api_key": "mine"})))
    d.start()
    assert d.drain() == "failed"
    assert d.error == (
        "tool_arguments",
        "the arguments do not fit tool 'pay': $.api_key: unknown argument (known: order)",
    )


def test_a_lookup_gets_the_secrets_that_it_takes(deploy, monkeypatch):
    monkeypatch.setenv("BANK_KEY", "s3cr3t-of-the-bank")
    seen = []

    def found(order, api_key):
        seen.append(api_key)
        return "found"

    @tool(secrets={"api_key": "env:BANK_KEY"}, lookup=found)
    def pay(order: str, api_key: str) -> str:
        raise TimeoutError

    d = deploy(acts(lambda ctx: ctx.call(pay, {"order": "7"})))
    d.start()
    assert d.drain() == "done"
    assert seen == ["s3cr3t-of-the-bank"]


def test_a_secret_that_is_missing_stops_the_call_before_it_begins(deploy):
    outside = Outside()

    @tool(secrets={"api_key": "env:NO_SUCH_KEY"})
    def pay(order: str, api_key: str) -> None:
        outside.calls.append(order)

    d = deploy(acts(lambda ctx: ctx.call(pay, {"order": "7"})))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "secret_not_found"
    assert outside.calls == []
    assert d.effects() == []


# --- rates ---


def test_a_call_over_the_rate_puts_the_node_off(timed, clock):
    outside = Outside()
    pay = paying(outside, rate="2/m")
    d = timed(acts(lambda ctx: [ctx.call(pay, {"order": str(n), "amount": 1}) for n in range(3)]))
    d.start()
    assert d.drain() == "ready"
    assert d.error == ("put_off", "tool 'pay' is not to be called over 2/60s now: called in 30 s")
    assert len(outside.calls) == 2
    assert d.sweep() == []
    clock.now += 31
    d.sweep()
    assert d.drain() == "done"
    assert [order for order, _ in outside.calls] == ["0", "1", "2"]


def test_what_was_called_takes_no_other_turn_and_needs_no_secret(timed, monkeypatch):
    monkeypatch.setenv("BANK_KEY", "s3cr3t-of-the-bank")
    outside = Outside()

    @tool(rate="1/h", secrets={"api_key": "env:BANK_KEY"})
    def pay(order: str, api_key: str) -> str:
        outside.calls.append(order)
        return "paid"

    def body(ctx):
        answer = ctx.call(pay, {"order": "7"})
        if ctx.attempt == 1:
            raise Killed
        return answer

    d = timed(acts(body))
    killed(d)
    released(d)
    monkeypatch.delenv("BANK_KEY")
    assert d.drain() == "done"
    assert outside.calls == ["7"]


def test_the_rate_of_one_tenant_is_nobody_elses(timed):
    outside = Outside()
    pay = paying(outside, rate="1/h")
    d = timed(acts(lambda ctx: [ctx.call(pay, {"order": str(n), "amount": 1}) for n in range(2)]))
    d.start()
    assert d.drain() == "ready"
    d.start(tenant="acme")
    d.drain()
    assert [order for order, _ in outside.calls] == ["0", "0"]


def test_a_limit_of_a_policy_counts_apart(timed, clock, policies):
    outside = Outside()
    pay = paying(outside)
    text = '@id("hourly") @limit("1/h") permit(principal, action, resource);'
    d = timed(
        acts(lambda ctx: [ctx.call(pay, {"order": str(n), "amount": 1}) for n in range(2)]),
        policies=policies.write(text),
    )
    d.start()
    assert d.drain() == "ready"
    assert d.error[0] == "put_off"
    assert len(outside.calls) == 1
    clock.now += 3601
    d.sweep()
    assert d.drain() == "done"
    assert len(outside.calls) == 2


@pytest.mark.parametrize("idempotent", [False, True])
def test_too_many_requests_hold_no_worker_and_no_other_tenant(timed, clock, idempotent):
    outside = Outside()

    @tool(idempotent=idempotent)
    def ask(tenant: str) -> str:
        outside.calls.append(tenant)
        if outside.counts["default"] == 1 and tenant == "default":
            raise RateLimited(retry_after=90)
        return "answered"

    d = timed(acts(lambda ctx: ctx.call(ask, {"tenant": ctx.tenant})))
    d.worker.__dict__["rates"] = Rates(d.worker.store, clock=clock)
    d.start()
    assert d.drain() == "ready"
    assert d.error == ("put_off", "tool 'ask' was called too often: called again in 90 s")
    # Another thread of the tenant's does not even try; another tenant's does.
    d.start(thread="second")
    d.start(tenant="acme")
    d.drain()
    assert outside.calls == ["default", "acme"]
    clock.now += 91
    d.sweep()
    d.drain()
    clock.now += 91
    d.sweep()
    d.drain()
    assert outside.counts == {"default": 3, "acme": 1}
    assert d.effects() == [("ask", "done", 2)]


def test_too_many_requests_for_good_are_the_nodes_error(timed, clock):
    outside = Outside()

    @tool
    def ask(order: str) -> None:
        outside.calls.append(order)
        raise RateLimited(retry_after=1)

    d = timed(acts(lambda ctx: ctx.call(ask, {"order": "7"})), retry_in_place_seconds_max=0)
    d.worker.__dict__["rates"] = Rates(d.worker.store, clock=clock)
    d.start()
    for _ in range(40):
        if d.drain() != "ready":
            break
        clock.now += 5
        d.sweep()
    assert d.thread.status == "failed"
    assert d.error[0] == "rate_limited"
    assert len(outside.calls) == 20
