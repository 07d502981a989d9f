"""The verdict of the payments example is passed on the records outside, and finds every way to be wrong."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from examples.payments import proof, requests
from examples.payments.ledger import Hold, Payment
from examples.payments.mailbox import Mail
from examples.payments.outside import CLOSED
from examples.payments.proof import Records
from examples.payments.requests import RefundRequest

HEAD = "id,order,customer,mail,account,amount,reason\n"


def request(id_, amount, account="DE11"):
    return RefundRequest(id_, "81", "Amara", "a@shop.example", account, Decimal(amount), "broken")


SMALL, LARGE, REJECTED, EDITED, REFUSED = (
    request("R-1", "120.00"),
    request("R-2", "1250.00"),
    request("R-1005", "2400.00"),
    request("R-1008", "980.00"),
    request("R-5", "7.20", CLOSED),
)
ALL = [SMALL, LARGE, REJECTED, EDITED, REFUSED]


def hold(number, reference, status):
    return Hold(number, f"k{number}", reference, "DE11", 1, status, 0.0)


def payment(number, reference, cents):
    return Payment(number, number, f"p{number}", reference, "DE11", cents, 0.0)


def mail(number, reference, message_id=None):
    return Mail(number, message_id or f"<{number}>", "a@shop.example", reference, "", "", 0.0)


RIGHT = Records(
    [
        hold(1, "R-1", "captured"),
        hold(2, "R-2", "captured"),
        hold(3, "R-1005", "released"),
        hold(4, "R-1008", "captured"),
    ],
    [payment(1, "R-1", 12_000), payment(2, "R-2", 125_000), payment(3, "R-1008", 90_000)],
    [],
    [mail(number, each.id) for number, each in enumerate(ALL)],
)


def wrong(records, reported="2,270.00"):
    """Return what does not hold: refunds by their id, and checks by what they check."""
    rows = proof.rows(ALL, records)
    failed = {row.expected.request.id for row in rows if not row.is_right}
    return failed, {check.what for check in proof.checks(rows, records, reported=reported) if not check.holds}


def test_what_is_as_it_must_be():
    assert wrong(RIGHT) == (set(), set())
    assert [line[2:] for line in proof.table(proof.rows(ALL, RIGHT))] == [
        ("under the limit", "captured", "1", "120.00", "1", "yes"),
        ("approved", "captured", "1", "1,250.00", "1", "yes"),
        ("rejected", "released", "0", "", "1", "yes"),
        ("approved, edited", "captured", "1", "900.00", "1", "yes"),
        ("account closed", "none", "0", "", "1", "yes"),
    ]


ONCE, COUNT, TOTAL = (
    "to be paid: paid once, the amount decided",
    "payments in the ledger",
    "paid in all: as decided, and in the ledger",
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
            {ONCE, TOTAL},
            id="paid-what-was-asked-and-not-what-was-approved",
        ),
        pytest.param(
            replace(RIGHT, payments=[*RIGHT.payments, payment(4, "R-1005", 1)]),
            {"R-1005"},
            {COUNT, TOTAL, "rejected or refused, and paid all the same"},
            id="rejected-and-paid",
        ),
        pytest.param(
            replace(RIGHT, payments=[*RIGHT.payments, payment(4, "R-9", 1)]),
            set(),
            {COUNT, TOTAL, "payments that nobody asked for"},
            id="paid-out-of-the-blue",
        ),
        pytest.param(
            replace(RIGHT, holds=[*RIGHT.holds[:2], hold(3, "R-1005", "open"), RIGHT.holds[3]]),
            {"R-1005"},
            {"holds left open"},
            id="hold-left-open",
        ),
        pytest.param(
            replace(RIGHT, holds=[*RIGHT.holds, hold(5, "R-1", "released")]), {"R-1"}, set(), id="held-a-second-time"
        ),
        pytest.param(
            replace(RIGHT, mails=[*RIGHT.mails, mail(9, "R-1", "<0>")]),
            {"R-1"},
            {"customers written to, each once", "mails that came twice"},
            id="mail-twice",
        ),
        pytest.param(replace(RIGHT, mails=RIGHT.mails[1:]), {"R-1"}, {"customers written to, each once"}, id="no-mail"),
    ],
)
def test_what_is_wrong_is_found(records, refunds, checks):
    assert wrong(records) == (refunds, checks)


def test_a_report_that_says_something_else_is_found():
    assert wrong(RIGHT, reported="2,270.01") == (set(), {"paid in all: as decided, and in the agent's report"})


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
