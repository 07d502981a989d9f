"""`keepstep policy`: policies listed and tried; and what the doctor says of them."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from keepstep.cli.program import run
from keepstep.runtime.policies import Policies

POLICIES = """\
@id("pay-small")
permit(principal, action, resource == Tool::"send_payment")
when { context.arguments.amount.lessThanOrEqual(decimal("100.0")) };

@id("pay-large") @approve("finance,boss") @quorum("2") @self_approval("false") @expires("2d") @mask("iban,card")
@limit("20/h")
permit(principal, action, resource == Tool::"send_payment");

@id("abroad")
forbid(principal, action, resource)
when { context.arguments has country && context.arguments.country == "XX" };
"""
ASKS = "pay-large asks for approval by finance, boss, 2 of them, not by who started the run"
CASES = """\
[[case]]
name = "a small payment"
tool = "send_payment"
risk = "high"
arguments = {amount = 100.00}
expect = "approve"
policies = ["pay-large", "pay-small"]
to = ["boss", "finance"]
quorum = 2
self_approval = false
expires = "2d"
mask = ["card", "iban"]
limits = ["20/h"]

[[case]]
name = "abroad"
tool = "send_payment"
risk = "high"
scopes = ["payments"]
version = "3"
graph = "refunds"
tenant = "acme"
thread = "t"
node = "pay"
arguments = {amount = 100.00, country = "XX", on = 2026-02-03}
expect = "deny"
policies = ["abroad"]
"""


@pytest.fixture
def folder(monkeypatch):
    """Policies in a folder that the settings name; returned as its version."""
    path = Path("policies")
    path.mkdir()
    (path / "payments.cedar").write_text(POLICIES)
    monkeypatch.setenv("KEEPSTEP_POLICIES", "policies")
    return path


def said(capsys, *arguments, code=0):
    capsys.readouterr()
    assert run(["policy", *arguments]) == code
    return capsys.readouterr().out


def document(capsys, *arguments, code=0):
    return json.loads(said(capsys, *arguments, "--json", code=code))


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_lists_policies_and_what_they_oblige_to(folder, capsys):
    version = Policies.load(folder).version
    lines = [line.split(maxsplit=3) for line in said(capsys, "check").splitlines()]
    assert lines[0] == ["POLICY", "EFFECT", "AT", "OBLIGES TO"]
    assert lines[1:4] == [
        ["pay-small", "permit", "payments.cedar:1"],
        [
            "pay-large",
            "permit",
            "payments.cedar:5",
            "approval by finance, boss, 2 of them, not who started the run, within 2 d; mask iban, card; limit 20/h",
        ],
        ["abroad", "forbid", "payments.cedar:9"],
    ]
    assert " ".join(lines[4]) == f"3 policies, version {version}"


def test_check_as_a_document(folder, capsys):
    found = document(capsys, "check", "policies/payments.cedar")
    assert found["version"] == Policies.load(folder).version
    assert [each["id"] for each in found["policies"]] == ["pay-small", "pay-large", "abroad"]
    assert found["policies"][1] == {
        "id": "pay-large",
        "effect": "permit",
        "file": "payments.cedar",
        "line": 5,
        "approve": ["finance", "boss"],
        "quorum": 2,
        "self_approval": False,
        "expires_seconds": 172_800.0,
        "mask": ["iban", "card"],
        "limit": "20/h",
    }


def test_check_of_a_broken_file_says_where(folder, capsys):
    (folder / "more.cedar").write_text("\npermit(principal, action);")
    capsys.readouterr()
    assert run(["policy", "check"]) == 2
    assert capsys.readouterr().err.startswith("error: more.cedar:2: ")
    assert document(capsys, "check", code=2)["error"]["code"] == "policy"


# --- one call ---------------------------------------------------------------------------------------------------------

PAY = ("--tool", "send_payment", "--risk", "high")


def test_a_call_is_tried(folder, capsys):
    lines = said(capsys, "test", *PAY, "--arguments", '{"amount": 120.00}').splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["verdict", "approve"],
        ["reason", ASKS],
        ["policies", "pay-large"],
        ["to", "finance, boss"],
        ["quorum", "2"],
        ["not", "who started the run"],
        ["expires", "in 2 d"],
        ["mask", "iban, card"],
        ["limits", "20/h (pay-large)"],
        ["version", Policies.load(folder).version],
    ]


def test_a_call_as_a_document(folder, capsys):
    found = document(capsys, "test", "policies", *PAY, "--arguments", '{"amount": 120.00}')
    assert found == {
        "verdict": "approve",
        "reason": ASKS,
        "policies": ["pay-large"],
        "obligations": {
            "to": ["finance", "boss"],
            "quorum": 2,
            "self_approval": False,
            "expires_seconds": 172_800.0,
            "mask": ["iban", "card"],
            "limits": [{"limit": "20/h", "policy": "pay-large"}],
        },
        "version": Policies.load(folder).version,
    }


def test_each_option_is_a_fact_of_the_call(capsys):
    Path("all.cedar").write_text(
        """permit(principal == Agent::"refunds", action, resource == Tool::"pay") when {
            principal.tenant == "acme" && context.tenant == "acme" && context.thread == "t9" && context.node == "n9" &&
            resource.version == "7" && resource.risk == "medium" && resource.scopes == ["a", "b"] &&
            context.arguments == {long: 9007199254740993, amount: decimal("0.1"), text: "0.1", none: {}}
        };"""
    )
    arguments = '{"long": 9007199254740993, "amount": 1e-1, "text": "0.1", "none": {"x": null}}'
    call = ["all.cedar", "--tool", "pay", "--risk", "medium", "--scope", "a", "--scope", "b", "--tool-version", "7"]
    call += ["--graph", "refunds", "--thread", "t9", "--node", "n9", "--tenant", "acme", "--arguments", arguments]
    assert document(capsys, "test", *call)["verdict"] == "allow"
    for name in ("--scope", "--tool-version", "--graph", "--thread", "--node", "--tenant", "--arguments"):
        at = call.index(name)
        assert document(capsys, "test", *call[:at], *call[at + 2 :])["verdict"] == "deny", name


def test_a_call_that_is_not_decided_as_expected_fails(folder, capsys):
    call = ("test", *PAY, "--arguments", '{"amount": 120.00}', "--expect")
    assert document(capsys, *call, "approve")["passed"] is True
    assert document(capsys, *call, "deny", code=1)["passed"] is False
    assert "expected  deny" in said(capsys, *call, "deny", code=1)


# --- cases ------------------------------------------------------------------------------------------------------------


def test_cases_that_are_decided_as_expected(folder, capsys):
    (folder / "tests.toml").write_text(CASES)
    lines = said(capsys, "test").splitlines()
    assert [re.split(" {2,}", line.strip()) for line in lines[:-1]] == [
        ["CASE", "VERDICT", "FOUND"],
        ["ok", "tests.toml: a small payment", "approve", ASKS],
        ["ok", "tests.toml: abroad", "deny", "forbidden by abroad"],
    ]
    assert lines[-1] == f"2 of 2 as expected, version {Policies.load(folder).version}"


def test_a_case_that_is_decided_otherwise_fails_and_says_how(folder, capsys):
    (folder / "a.tests.toml").write_text(CASES.replace("100.00, country", "7, country"))
    (folder / "tests.toml").write_text(
        CASES.replace(
            'quorum = 2\nself_approval = false\nexpires = "2d"', 'quorum = 1\nself_approval = true\nexpires = "1h"'
        ).replace('["card", "iban"]\nlimits = ["20/h"]', "[]\nlimits = []")
    )
    found = document(capsys, "test", code=1)
    assert (found["passed"], found["version"]) == (False, Policies.load(folder).version)
    assert [(each["file"], each["name"], each["passed"]) for each in found["cases"]] == [
        ("a.tests.toml", "a small payment", True),
        ("a.tests.toml", "abroad", True),
        ("tests.toml", "a small payment", False),
        ("tests.toml", "abroad", True),
    ]
    assert found["cases"][1]["reason"] == (
        "forbidden by abroad; pay-small could not be evaluated: expected decimal, got long"
    )
    assert found["cases"][2]["differences"] == [
        "quorum: expected 1, is 2",
        "self_approval: expected true, is false",
        "expires: expected 3600 s, is 172800 s",
        "mask: expected none, is card, iban",
        "limits: expected none, is 20/h",
    ]
    lines = said(capsys, "test", code=1).splitlines()
    assert lines[3].startswith("failed")
    assert lines[3].endswith("; ".join((*found["cases"][2]["differences"], found["cases"][2]["reason"])))
    assert lines[-1].startswith("3 of 4 as expected")


def test_verdict_policies_and_roles_are_compared(folder, capsys):
    (folder / "tests.toml").write_text(
        CASES.replace(
            'expect = "approve"\npolicies = ["pay-large", "pay-small"]\nto = ["boss", "finance"]',
            'expect = "allow"\npolicies = ["pay-small"]\nto = ["finance"]',
        )
    )
    assert document(capsys, "test", code=1)["cases"][0]["differences"] == [
        "verdict: expected allow, is approve",
        "policies: expected pay-small, is pay-large, pay-small",
        "to: expected finance, is boss, finance",
    ]


def test_numbers_of_cases_are_just_as_written(folder, capsys):
    amount = "922337203685477.5807"  # a float would be 922337203685477.6
    condition = f'context.arguments.amount == decimal("{amount}")'
    (folder / "payments.cedar").write_text(f"permit(principal, action, resource) when {{ {condition} }};")
    case = f'[[case]]\nname = "n"\ntool = "x"\nrisk = "low"\nexpect = "allow"\narguments = {{amount = {amount}}}\n'
    (folder / "tests.toml").write_text(case)
    assert document(capsys, "test")["cases"][0]["reason"] == "permitted by payments.cedar:1"


def test_the_cases_of_one_file_stand_beside_it(folder, capsys):
    (folder / "tests.toml").write_text("broken")
    (folder / "payments.tests.toml").write_text(CASES)
    assert len(document(capsys, "test", "policies/payments.cedar")["cases"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there are no cases beside policies: write them (tests.toml), or name a call: --tool NAME"),
        ("", "tests.toml: cases, each under [[case]], and nothing else"),
        ("x = 1\n" + CASES, "tests.toml: cases, each under [[case]], and nothing else"),
        ("[case]\n", "tests.toml: cases, each under [[case]], and nothing else"),
        ("x = ", "tests.toml: is not TOML: Invalid value (at end of document)"),
        (f"x = {'9' * 5000}", "tests.toml: an integer has too many digits"),
        ("case = [1]", "tests.toml: case 1: Input should be a valid dictionary or instance of Case"),
        (
            CASES.replace('risk = "high"', 'risk = "huge"', 1),
            "tests.toml: case 1: risk: Input should be 'low', 'medium' or 'high'",
        ),
        (CASES.replace('risk = "high"\n', "", 1), "tests.toml: case 1: risk: Field required"),
        (CASES + 'expected = "x"', "tests.toml: case 2: expected: Extra inputs are not permitted"),
        (
            CASES.replace('"abroad"\ntool', '""\ntool'),
            "tests.toml: case 2: needs a name, and expect = allow, deny or approve",
        ),
        (CASES.replace('expect = "deny"', ""), "tests.toml: case 2: needs a name, and expect = allow, deny or approve"),
        (CASES.replace('"2d"', '"2 days"'), "tests.toml: case 1: expires: a number and s, m, h or d, like 2d"),
    ],
)
def test_cases_that_are_no_cases_are_refused(folder, capsys, text, message):
    if text is not None:
        (folder / "tests.toml").write_text(text)
    assert document(capsys, "test", code=2)["error"] == {"code": "invalid_input", "message": message}


# --- doctor -----------------------------------------------------------------------------------------------------------


def policies_line(capsys, *, code):
    capsys.readouterr()
    assert run(["doctor", "--json"]) == code
    [found] = [each for each in json.loads(capsys.readouterr().out)["checks"] if each["what"] == "policies"]
    return found["level"], found["text"], found["way_out"]


def test_the_doctor_says_that_there_are_no_policies(capsys):
    assert policies_line(capsys, code=0) == ("ok", "none are configured: every tool may be called", None)


def test_the_doctor_says_which_policies_there_are(folder, capsys):
    assert policies_line(capsys, code=0) == ("ok", f"3 from policies, version {Policies.load(folder).version}", None)


def test_the_doctor_finds_policies_that_cannot_be_used(folder, capsys):
    (folder / "b.cedar").write_text("x")
    assert policies_line(capsys, code=1) == (
        "problem",
        "b.cedar:1: unexpected end of input",
        "correct it; to look again: keepstep policy check",
    )


def test_json_numbers_with_a_point_are_decimals_just_as_written():
    from keepstep.cli import values

    found = values.an_object('{"a": 1.10, "b": 1e400, "c": 1}', "x", decimals=True)
    assert found == {"a": Decimal("1.10"), "b": Decimal("1E+400"), "c": 1}
    assert str(found["a"]) == "1.10"
