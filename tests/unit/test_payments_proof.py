"""The verdict of the payments example is passed on the records outside, and finds every way to be wrong."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from examples.payments import proof, requests
from examples.payments.ledger import Hold, Payment, Request
from examples.payments.mailbox import Mail
from examples.payments.outcomes import Outcome
from examples.payments.outside import CLOSED, FROZEN
from examples.payments.proof import Records
from examples.payments.requests import RefundRequest

HEAD = "id,order,customer,mail,account,amount,reason\n"


def request(id_, amount, account="DE11"):
    return RefundRequest(id_, "81", "Amara", "a@shop.example", account, Decimal(amount), "broken")


SMALL, LARGE, REJECTED, EDITED, REFUSED, CANCELLED, DENIED, EMBARGOED, EXPIRED = (
    request("R-1", "120.00"),
    request("R-2", "1250.00"),
    request("R-1005", "2400.00"),
    request("R-1008", "980.00"),
    request("R-5", "7.20", CLOSED),
    request("R-6", "45.00", FROZEN),
    request("R-7", "5000.01"),
    request("R-8", "1.00", "KP11"),
    request("R-9", "3000.01"),
)
ALL = [SMALL, LARGE, REJECTED, EDITED, REFUSED, CANCELLED, DENIED, EMBARGOED, EXPIRED]


def hold(number, reference, status):
    return Hold(number, f"k{number}", reference, "DE11", 1, status, 0.0)


def payment(number, reference, cents):
    return Payment(number, number, f"p{number}", reference, "DE11", cents, 0.0)


def asked(number, endpoint, reference):
    return Request(number, endpoint, f"k{number}", reference, "none", 0.0, 0.1, 201)


def mail(number, reference, message_id=None):
    return Mail(number, message_id or f"<{number}>", "a@shop.example", reference, "", "", 0.0)


RIGHT = Records(
    [
        hold(1, "R-1", "captured"),
        hold(2, "R-2", "captured"),
        hold(3, "R-1005", "released"),
        hold(4, "R-1008", "captured"),
        hold(5, "R-6", "released"),
        hold(6, "R-9", "released"),
    ],
    [payment(1, "R-1", 12_000), payment(2, "R-2", 125_000), payment(3, "R-1008", 90_000)],
    [asked(1, "POST /holds", "R-1"), asked(2, "GET /payments", None)],
    [mail(number, each.id) for number, each in enumerate(ALL)],
)


OUTCOMES = [
    Outcome("R-1", "paid", 12_000),
    Outcome("R-2", "paid", 125_000),
    Outcome("R-1005", "rejected", 0),
    Outcome("R-1008", "paid", 90_000),
    Outcome("R-5", "refused", 0),
    Outcome("R-6", "refused", 0),
    Outcome("R-7", "denied", 0),
    Outcome("R-8", "denied", 0),
    Outcome("R-9", "expired", 0),
]


def wrong(records, outcomes=OUTCOMES):
    """Return what does not hold: refunds by their id, and checks by what they check."""
    rows = proof.rows(ALL, records)
    failed = {row.expected.request.id for row in rows if not row.is_right}
    return failed, {check.what for check in proof.checks(rows, records, outcomes) if not check.holds}


def test_what_is_as_it_must_be():
    assert wrong(RIGHT) == (set(), set())
    assert [line[2:] for line in proof.table(proof.rows(ALL, RIGHT))] == [
        ("under the limit", "captured", "1", "120.00", "1", "yes"),
        ("approved", "captured", "1", "1,250.00", "1", "yes"),
        ("rejected", "released", "0", "", "1", "yes"),
        ("approved, edited", "captured", "1", "900.00", "1", "yes"),
        ("account closed", "none", "0", "", "1", "yes"),
        ("account frozen", "released", "0", "", "1", "yes"),
        ("denied: too much", "none", "0", "", "1", "yes"),
        ("denied: embargo", "none", "0", "", "1", "yes"),
        ("nobody decided", "released", "0", "", "1", "yes"),
    ]


ONCE, COUNT, TOTAL, EDITS, ALL_THE_SAME, DENIALS = (
    "to be paid: paid once, the amount decided",
    "payments in the ledger",
    "paid in all: as decided, and in the ledger",
    "approved with another amount: that one paid",
    "denied, rejected, expired or refused, and paid all the same",
    "requests to the bank about what was denied",
)
REPORT, ROWS, OTHERS = (
    "paid in all: as decided, and in the agent's table",
    "rows in the agent's table, as they must be",
    "rows in the agent's table beside these",
)


@pytest.mark.parametrize(
    ("records", "refunds", "checks"),
    [
        pytest.param(
            replace(RIGHT, payments=[*RIGHT.payments, payment(4, "R-1", 12_000)]),
            {"R-1"},
            {ONCE, COUNT, TOTAL},
            id="paid-twice",
        ),
        pytest.param(replace(RIGHT, payments=RIGHT.payments[1:]), {"R-1"}, {ONCE, COUNT, TOTAL}, id="not-paid"),
        pytest.param(
            replace(RIGHT, payments=[*RIGHT.payments[:2], payment(3, "R-1008", 98_000)]),
            {"R-1008"},
            {ONCE, TOTAL, EDITS},
            id="paid-what-was-asked-and-not-what-was-approved",
        ),
        pytest.param(
            replace(RIGHT, payments=[*RIGHT.payments, payment(4, "R-1005", 1)]),
            {"R-1005"},
            {COUNT, TOTAL, ALL_THE_SAME},
            id="rejected-and-paid",
        ),
        pytest.param(
            replace(
                RIGHT,
                holds=[*RIGHT.holds, hold(7, "R-7", "captured")],
                payments=[*RIGHT.payments, payment(4, "R-7", 500_001)],
            ),
            {"R-7"},
            {COUNT, TOTAL, ALL_THE_SAME},
            id="denied-and-paid",
        ),
        pytest.param(
            replace(RIGHT, requests=[*RIGHT.requests, asked(3, "POST /holds", "R-8")]),
            set(),
            {DENIALS},
            id="denied-and-the-bank-was-asked",
        ),
        pytest.param(
            replace(RIGHT, payments=[*RIGHT.payments, payment(4, "R-99", 1)]),
            set(),
            {COUNT, TOTAL, "payments that nobody asked for"},
            id="paid-out-of-the-blue",
        ),
        pytest.param(
            replace(RIGHT, holds=[*RIGHT.holds[:2], hold(3, "R-1005", "open"), *RIGHT.holds[3:]]),
            {"R-1005"},
            {"holds left open"},
            id="hold-left-open",
        ),
        pytest.param(
            replace(RIGHT, holds=[*RIGHT.holds, hold(7, "R-1", "released")]), {"R-1"}, set(), id="held-a-second-time"
        ),
        pytest.param(
            replace(RIGHT, mails=[*RIGHT.mails, mail(99, "R-1", "<0>")]),
            {"R-1"},
            {"customers written to, each once", "mails that came twice"},
            id="mail-twice",
        ),
        pytest.param(replace(RIGHT, mails=RIGHT.mails[1:]), {"R-1"}, {"customers written to, each once"}, id="no-mail"),
    ],
)
def test_what_is_wrong_is_found(records, refunds, checks):
    assert wrong(records) == (refunds, checks)


@pytest.mark.parametrize(
    ("outcomes", "checks"),
    [
        pytest.param([Outcome("R-1", "paid", 12_001), *OUTCOMES[1:]], {REPORT, ROWS, OTHERS}, id="another-amount"),
        pytest.param([*OUTCOMES[:-1], Outcome("R-9", "rejected", 0)], {ROWS, OTHERS}, id="another-status"),
        pytest.param(OUTCOMES[:-1], {ROWS}, id="one-is-missing"),
        pytest.param([*OUTCOMES, Outcome("R-10", "denied", 0)], {OTHERS}, id="one-too-many"),
    ],
)
def test_a_table_of_the_agent_that_says_something_else_is_found(outcomes, checks):
    assert wrong(RIGHT, outcomes) == (set(), checks)


# --- the file ---------------------------------------------------------------------------------------------------------


def read(tmp_path, text, lines_max=None):
    path = tmp_path / "refunds.csv"
    path.write_text(HEAD + text)
    return requests.read(path, lines_max)


LINE = "R-1,81,Amara,a@shop.example,DE11,120.00,broken\n"


def test_a_line_that_comes_twice_asks_once(tmp_path):
    found = read(tmp_path, LINE + LINE + LINE.replace("R-1", "R-2"))

    assert [each.id for each in found.requests] == ["R-1", "R-2"]
    assert found.requests[0] == SMALL
    assert found.repeated == ["R-1"]


def test_the_first_lines_alone_may_be_meant(tmp_path):
    assert [each.id for each in read(tmp_path, LINE + LINE.replace("R-1", "R-2"), 1).requests] == ["R-1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LINE + LINE.replace("120.00", "121.00"), "line 3: R-1 stands for another request before it"),
        (LINE.replace("120.00", "120"), "line 2: '120' is not an amount"),
        (LINE.replace("Amara", ""), "line 2: customer cannot be read"),
        (LINE.replace(",broken", ""), "line 2: reason cannot be read"),
        (LINE.replace("broken", "broken,more"), "line 2: more than the columns cannot be read"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_a_file_with_other_columns_is_refused(tmp_path):
    path = tmp_path / "refunds.csv"
    path.write_text("id,amount\nR-1,1.00\n")
    with pytest.raises(ValueError, match="the columns must be id, order"):
        requests.read(path)
