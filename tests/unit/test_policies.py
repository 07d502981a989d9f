"""Policies: which call is allowed, denied, or asks for approval, and what goes with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from decimal import Decimal
from functools import partial

import pytest
import structlog

from keepstep.runtime.policies import NO_POLICIES, Obligations, Policies, PolicyDecision, _why
from tests.unit.policy_samples import CALL, PERMIT, decided, forbid_when, permit_when, permits, write


@pytest.fixture
def load(tmp_path):
    """Load policies from texts by file name, or from one text."""

    def load_texts(text=None, *, clock=None, **texts):
        write(tmp_path, text, **texts)
        return Policies.load(tmp_path, **({} if clock is None else {"clock": clock}))

    return load_texts


@pytest.fixture
def decide(tmp_path):
    """Return what one text says of `CALL` with other arguments or other facts."""
    return partial(decided, tmp_path)


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_without_policies_everything_is_allowed():
    assert Policies.load("") is NO_POLICIES
    assert NO_POLICIES.decide(CALL) == PolicyDecision(
        verdict="allow", policies=(), obligations=Obligations(), version="", reason="no policies are configured"
    )
    assert (NO_POLICIES.version, NO_POLICIES.listed) == ("", ())


def test_what_nothing_permits_is_denied(load):
    policies = load('permit(principal, action, resource == Tool::"read_order");')
    decision = policies.decide(CALL)
    assert (decision.verdict, decision.policies) == ("deny", ())
    assert decision.reason == "no policy permits refunds to call send_payment"
    assert decision.version == policies.version


def test_what_a_policy_permits_is_allowed(decide):
    decision = decide(PERMIT)
    assert decision == PolicyDecision("allow", ("all",), Obligations(), decision.version, "permitted by all")


def test_forbid_wins_over_any_permit(decide):
    decision = decide(forbid_when('resource.risk == "high"'))
    assert (decision.verdict, decision.policies, decision.reason) == ("deny", ("f",), "forbidden by f")


def test_policies_without_id_are_named_by_file_and_line(load):
    permit = "permit(principal, action, resource);"
    policies = load(a=f"// the first\n\n{permit}", b=f"{permit}{permit} {permit}\n{permit}")
    assert policies.decide(CALL).policies == ("a.cedar:3", "b.cedar:1", "b.cedar:1.2", "b.cedar:1.3", "b.cedar:2")


def test_determining_policies_stand_in_the_order_of_their_texts(load):
    policies = load("\n".join(f'@id("p{number}") permit(principal, action, resource);' for number in range(12)))
    decision = policies.decide(CALL)
    assert decision.policies == tuple(f"p{number}" for number in range(12))
    assert decision.reason == "permitted by p0, p1, p2 and 9 more"


@pytest.mark.parametrize(
    "condition",
    [
        'principal == Agent::"refunds"',
        'principal.tenant == "acme"',
        'action == Action::"call"',
        'resource == Tool::"send_payment"',
        'resource.version == "2"',
        'resource.risk == "high"',
        'resource.scopes == ["bank", "payments"]',
        'resource.scopes.contains("payments")',
        'context.tenant == "acme"',
        'context.thread == "order-81"',
        'context.node == "pay"',
        'context.arguments == {amount: decimal("120.0")}',
    ],
)
def test_each_fact_of_a_call_can_be_asked(decide, condition):
    assert decide(permit_when(condition)).verdict == "allow"
    assert decide(permit_when(f"!({condition})")).verdict == "deny"


def test_another_calls_facts_are_not_these(load):
    policies = load(permit_when('principal.tenant == "acme" && resource.risk == "high" && context.node == "pay"'))
    others = [replace(CALL, tenant="b"), replace(CALL, risk="low"), replace(CALL, node="n"), CALL]
    assert [policies.decide(each).verdict for each in others] == ["deny", "deny", "deny", "allow"]


# --- errors of evaluation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "arguments", "why"),
    [
        (
            'context.arguments.iban == "X"',
            {},
            "there is no iban (ask whether there is one first: context.arguments has iban)",
        ),
        ("context.arguments.x < 3", {"x": "secret"}, "expected long, got string"),
        ("context.arguments.x.y == 3", {"x": Decimal("1.23456")}, "what it asks has no parts"),
        ("context.arguments.x + 1 > 3", {"x": 2**63 - 1}, "a sum, difference or product is over 64 bits"),
        ('decimal(context.arguments.x) == decimal("1.0")', {"x": "sec`ret"}, "decimal(…) was given what is none"),
    ],
)
@pytest.mark.parametrize("effect", ["permit", "forbid"])
def test_a_policy_that_cannot_be_evaluated_denies(decide, condition, arguments, why, effect):
    decision = decide(f'{PERMIT}@id("q") {effect}(principal, action, resource) when {{ {condition} }};', arguments)
    assert (decision.verdict, decision.policies) == ("deny", ("q",))
    assert decision.reason == f"q could not be evaluated: {why}"


def test_a_policy_that_forbids_has_decided_beside_one_that_cannot_be_evaluated(decide):
    text = (
        forbid_when('resource.risk == "high"')
        + '@id("q") permit(principal, action, resource) when { context.arguments.y };'
    )
    decision = decide(text)
    assert (decision.verdict, decision.policies) == ("deny", ("f",))
    assert decision.reason == (
        "forbidden by f; "
        "q could not be evaluated: there is no y (ask whether there is one first: context.arguments has y)"
    )


def test_a_condition_of_another_tool_is_not_evaluated(decide):
    text = f'{PERMIT}forbid(principal, action, resource == Tool::"other") when {{ context.arguments.nothing }};'
    assert decide(text).verdict == "allow"


def test_an_error_that_cedar_may_have_one_day_shows_no_value_either():
    assert _why("cannot do anything with `hunter2`") == "Cedar gave up on it"


def test_no_reason_shows_an_arguments_value(decide):
    for condition in (
        'decimal(context.arguments.x) == decimal("1.0")',
        "context.arguments.x < 1",
        "context.arguments.x.y",
    ):
        assert "hunter2" not in decide(permit_when(condition), {"x": "hunter2"}).reason


# --- obligations ------------------------------------------------------------------------------------------------------


def test_approval_with_everything(decide):
    decision = decide(
        permits('@approve("finance, boss") @quorum("2") @expires("2d") @mask("card,iban") @limit("20/h")')
    )
    assert decision.verdict == "approve"
    assert decision.reason == "p0 asks for approval by finance, boss, 2 of them"
    assert decision.obligations == Obligations(
        to=("finance", "boss"),
        quorum=2,
        expires_seconds=172_800.0,
        mask=("card", "iban"),
        limits=(("20/h", "p0"),),
    )


def test_four_eyes(decide):
    """Two different people, of whom none has started the run; whichever policy asks for it."""
    decision = decide(permits('@approve("finance") @quorum("2") @self_approval("false")', '@approve("finance")'))
    assert decision.obligations == Obligations(to=("finance",), quorum=2, self_approval=False)
    assert decision.reason == "p0, p1 asks for approval by finance, 2 of them, not by who started the run"
    assert decide(permits('@approve("finance")')).obligations.self_approval is True


@pytest.mark.parametrize("annotation", ['@approve("")', "@approve"])
def test_approval_by_anybody(decide, annotation):
    decision = decide(permits(annotation))
    assert (decision.verdict, decision.obligations) == ("approve", Obligations())
    assert decision.reason == "p0 asks for approval by anybody"


def test_what_several_policies_oblige_to_is_joined(decide):
    decision = decide(
        permits(
            '@approve("finance") @expires("2d") @mask("iban,card")',
            '@limit("20/h") @mask("card,pin")',
            '@approve("boss,finance") @quorum("3") @expires("12h") @limit("5/10m")',
            '@approve("") @quorum("2")',
        )
    )
    assert decision.verdict == "approve"
    assert decision.policies == ("p0", "p1", "p2", "p3")
    assert decision.obligations == Obligations(
        to=("finance", "boss"),
        quorum=3,
        expires_seconds=43_200.0,
        mask=("iban", "card", "pin"),
        limits=(("20/h", "p1"), ("5/10m", "p2")),
    )


def test_only_what_determines_obliges(load):
    policies = load(
        """
        @id("small") permit(principal, action, resource) when { context.arguments.amount.lessThan(decimal("100.0")) };
        @id("large") @approve("finance") @mask("iban") permit(principal, action, resource)
        unless { context.arguments.amount.lessThan(decimal("100.0")) };
        """
    )
    small = policies.decide(replace(CALL, arguments={"amount": Decimal("99.99")}))
    large = policies.decide(CALL)
    assert (small.verdict, small.policies, small.obligations) == ("allow", ("small",), Obligations())
    assert (large.verdict, large.policies, large.obligations) == (
        "approve",
        ("large",),
        Obligations(to=("finance",), mask=("iban",)),
    )


def test_a_denied_call_masks_what_any_policy_masks(decide):
    decision = decide(
        permits('@mask("iban") @limit("1/s")')
        + 'forbid(principal, action, resource);@mask("card") permit(principal, action, resource == Tool::"x");'
    )
    assert (decision.verdict, decision.obligations) == ("deny", Obligations(mask=("iban", "card")))


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("15m", 900.0), ("12h", 43_200.0), ("30d", 2_592_000.0)])
def test_an_expiry_in_each_unit(decide, text, seconds):
    assert decide(permits(f'@approve @expires("{text}")')).obligations.expires_seconds == seconds


# --- the version, and changes -----------------------------------------------------------------------------------------


def test_the_version_is_of_names_and_texts(load, tmp_path):
    first = load(PERMIT).version
    assert (len(first), load(PERMIT).version) == (16, first)
    assert load(PERMIT + "// a comment").version != first
    (tmp_path / "a.cedar").rename(tmp_path / "b.cedar")
    assert load(b=PERMIT).version not in {first, ""}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_change_is_taken_in_within_a_second(load, tmp_path, clock):
    policies = load(PERMIT, clock=clock)
    before = policies.version
    (tmp_path / "b.cedar").write_text("forbid(principal, action, resource);")
    clock.now += 0.9
    assert (policies.decide(CALL).verdict, policies.version) == ("allow", before)
    clock.now += 0.2
    decision = policies.decide(CALL)
    assert (decision.verdict, decision.policies) == ("deny", ("b.cedar:1",))
    assert decision.version == policies.version != before

    (tmp_path / "b.cedar").unlink()
    clock.now += 1.1
    assert (policies.decide(CALL).verdict, policies.version) == ("allow", before)


def test_an_unchanged_folder_is_not_read_again(load, clock, monkeypatch):
    policies = load(PERMIT, clock=clock)
    monkeypatch.setattr("keepstep.runtime.policytexts.read", lambda path: pytest.fail("read again"))
    clock.now += 5
    assert policies.decide(CALL).verdict == "allow"


def test_a_folder_is_looked_at_once_a_second(load, clock, monkeypatch):
    policies = load(PERMIT, clock=clock)
    looked = []
    monkeypatch.setattr("keepstep.runtime.policies._fingerprint", lambda path: looked.append(clock.now))
    for _ in range(40):
        clock.now += 0.25
        policies.decide(CALL)
    assert looked == [1001.0 + number for number in range(10)]


def test_a_broken_change_keeps_the_old_version_and_says_so_once(load, tmp_path, clock):
    policies = load(PERMIT, clock=clock)
    before = policies.version
    (tmp_path / "b.cedar").write_text("forbid(principal, action, resource")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            clock.now += 1.1
            assert (policies.decide(CALL).verdict, policies.version) == ("allow", before)
    assert logs == [
        {
            "event": "policies_kept_old",
            "log_level": "warning",
            "reason": "b.cedar:1: unexpected end of input",
            "version": before,
        }
    ]

    (tmp_path / "b.cedar").write_text("forbid(principal, action, resource);")
    clock.now += 1.1
    with structlog.testing.capture_logs() as logs:
        assert policies.decide(CALL).verdict == "deny"
    assert logs == [{"event": "policies_taken", "log_level": "info", "policies": 2, "version": policies.version}]


def test_a_folder_that_goes_away_keeps_the_old_version(load, tmp_path, clock):
    policies = load(PERMIT, clock=clock)
    (tmp_path / "a.cedar").unlink()
    clock.now += 1.1
    with structlog.testing.capture_logs() as logs:
        assert policies.decide(CALL).verdict == "allow"
    assert [each["event"] for each in logs] == ["policies_kept_old"]


# --- processes and threads --------------------------------------------------------------------------------------------


def test_threads_share_it_while_it_changes(load, tmp_path):
    ticks = iter(range(1_000_000))
    policies = load(PERMIT, clock=lambda: float(next(ticks)))  # each look at the clock is a second later
    versions = {policies.version: "allow"}
    found = set()
    failures = []
    done = threading.Event()

    def ask():
        try:
            while not done.is_set():
                decision = policies.decide(CALL)
                found.add((decision.version, decision.verdict))
        except BaseException as error:  # a thread's failure must be seen
            failures.append(error)
            raise

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    other = tmp_path / "b.cedar"
    for number in range(20):
        pending = tmp_path / "pending"
        pending.write_text(f"// {number}\nforbid(principal, action, resource);")
        pending.rename(other)
        versions[Policies.load(tmp_path).version] = "deny"
        while policies.version != list(versions)[-1]:
            policies.decide(CALL)
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert found <= set(versions.items())
    assert len(found) > 1


def test_a_child_process_goes_on_though_a_thread_was_looking(load, tmp_path, clock):
    policies = load(PERMIT, clock=clock)
    assert policies._lock.acquire(blocking=False)  # a thread that the child does not have is in the middle of a look
    (tmp_path / "b.cedar").write_text("forbid(principal, action, resource);")
    clock.now += 1.1
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if policies.decide(CALL).verdict == "deny" else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert policies.decide(CALL).verdict == "allow"  # here the other thread still looks, and nobody waits for it


# --- the extra --------------------------------------------------------------------------------------------------------


def test_without_the_extra_policies_are_refused_and_nothing_else_is(tmp_path):
    (tmp_path / "a.cedar").write_text(PERMIT)
    code = """
import sys
from keepstep.errors import PolicyError
from keepstep.runtime.policies import Policies
assert "cedarpy" not in sys.modules
assert Policies.load("").version == ""
assert "cedarpy" not in sys.modules
sys.modules["cedarpy"] = None  # as if it were not installed
try:
    Policies.load("a.cedar")
except PolicyError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60
    )
    assert done.stdout == "policies are configured, and Cedar is not installed: pip install 'keepstep[policy]'\n"
