"""The bank of the payments example: what it does once, what it does twice, and how it answers."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from decimal import Decimal

import pytest

from examples.payments import banking, money
from examples.payments.bank import Bank, Fault, Faults
from examples.payments.banking import BankFailed, BankRefused
from examples.payments.ledger import Ledger, Refused
from keepstep import AnswerLost, RateLimited

TOKEN = "a-token-of-the-bank"
HOLD = {"reference": "R-1", "account": "DE11", "amount": "120.00"}
PAYMENT = HOLD


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "bank.db", closed=frozenset({"IT77"}), frozen=frozenset({"JO99"}), balance_cents=50_000)
    yield opened
    opened.close()


def place(ledger, key="k1", cents=12_000, **others):
    return ledger.place(key, **{"reference": "R-1", "account": "DE11", "cents": cents, **others})


def refused(act):
    with pytest.raises(Refused) as caught:
        act()
    return caught.value.status, caught.value.code


# --- the rules --------------------------------------------------------------------------------------------------------


def test_a_hold_is_placed_once_for_each_key(ledger):
    first = place(ledger)

    assert place(ledger) == first
    assert ledger.holds() == [first]
    assert place(ledger, key="k2").number == first.number + 1
    assert ledger.balance_cents() == 50_000


def test_a_key_stands_for_one_hold_alone(ledger):
    first = place(ledger)

    assert refused(lambda: place(ledger, cents=12_001)) == (409, "key_reused")
    assert refused(lambda: place(ledger, account="DE12")) == (409, "key_reused")
    assert refused(lambda: place(ledger, reference="R-2")) == (409, "key_reused")
    assert ledger.holds() == [first]


def test_captured_twice_is_paid_twice_under_one_key_as_under_two(ledger):
    hold = place(ledger)

    first, second = (ledger.capture(hold.number, "k-pay", 12_000) for _ in range(2))
    third = ledger.capture(hold.number, "another", 12_000)

    assert ledger.payments() == [first, second, third]
    assert ledger.payments("k-pay") == [first, second]
    assert ledger.balance_cents() == 50_000 - 3 * 12_000
    assert [each.status for each in ledger.holds()] == ["captured"]


def test_a_second_payment_needs_to_be_covered_too(ledger):
    hold = place(ledger, cents=30_000)
    ledger.capture(hold.number, "k-pay", 30_000)

    assert refused(lambda: ledger.capture(hold.number, "k-pay", 30_000)) == (402, "not_covered")
    assert ledger.balance_cents() == 20_000


def test_less_than_the_hold_may_be_paid_and_more_may_not(ledger):
    hold = place(ledger)

    assert refused(lambda: ledger.capture(hold.number, "k-pay", 12_001)) == (422, "over_hold")
    assert ledger.payments() == []
    assert ledger.capture(hold.number, "k-pay", 9_000).cents == 9_000
    assert place(ledger, key="k2", cents=41_000).cents == 41_000  # the rest of the hold is free again


def test_released_twice_is_released_once_and_never_paid(ledger):
    hold = place(ledger)

    assert ledger.release(hold.number) == ledger.release(hold.number)
    assert refused(lambda: ledger.capture(hold.number, "k-pay", 12_000)) == (409, "hold_released")
    assert ledger.payments() == []
    assert place(ledger, key="k2", cents=50_000).cents == 50_000


def test_what_was_paid_cannot_be_released(ledger):
    hold = place(ledger)
    ledger.capture(hold.number, "k-pay", 12_000)

    assert refused(lambda: ledger.release(hold.number)) == (409, "hold_captured")
    assert [each.status for each in ledger.holds()] == ["captured"]


def test_nothing_is_held_for_a_closed_account_nor_beyond_what_there_is(ledger):
    assert refused(lambda: place(ledger, account="IT77")) == (422, "account_closed")
    assert refused(lambda: place(ledger, cents=50_001)) == (402, "not_covered")
    place(ledger, cents=30_000)
    assert refused(lambda: place(ledger, key="k2", cents=20_001)) == (402, "not_covered")
    assert [each.cents for each in ledger.holds()] == [30_000]


def test_a_frozen_account_shows_only_when_it_is_to_be_paid(ledger):
    hold = place(ledger, account="JO99")

    assert refused(lambda: ledger.capture(hold.number, "k-pay", 12_000)) == (422, "account_frozen")
    assert (ledger.payments(), [each.status for each in ledger.holds()]) == ([], ["open"])
    assert ledger.release(hold.number).status == "released"


def test_a_hold_pays_the_account_it_is_for_and_no_other(ledger):
    hold = place(ledger)

    assert refused(lambda: ledger.capture(hold.number, "k-pay", 12_000, account="DE12")) == (409, "other_account")
    assert ledger.payments() == []
    assert ledger.capture(hold.number, "k-pay", 12_000, account="DE11").account == "DE11"


def test_a_hold_that_there_is_not(ledger):
    assert refused(lambda: ledger.capture(7, "k-pay", 1)) == (404, "no_such_hold")
    assert refused(lambda: ledger.release(7)) == (404, "no_such_hold")


# --- amounts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["120", "120.0", "120.000", "-1.00", "+1.00", "1e3", "0.00", "01.00", "NaN", "", "1,00"]
)
def test_an_amount_is_written_with_two_places_and_above_zero(text):
    with pytest.raises(ValueError, match="is not an amount"):
        money.amount(text)


def test_cents_lose_nothing():
    assert sum(money.cents(money.amount(text)) for text in ("0.10", "0.20")) == 30
    assert money.of_cents(30) == Decimal("0.30")
    assert str(money.of_cents(120_000)) == "1200.00"
    assert money.written(123_456_789) == "1,234,567.89"
    with pytest.raises(ValueError, match="fraction of a cent"):
        money.cents(Decimal("0.005"))


# --- over HTTP --------------------------------------------------------------------------------------------------------


class Scripted(Faults):
    """Faults by the number of the request."""

    def __init__(self, *kinds):
        super().__init__()
        object.__setattr__(self, "kinds", kinds)

    def of(self, number):
        return Fault(self.kinds[number - 1] if number <= len(self.kinds) else "none", 0.0, 0.0)


@contextmanager
def serving(ledger, *faults):
    bank = Bank(ledger, token=TOKEN, faults=Scripted(*faults))
    thread = threading.Thread(target=bank.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{bank.port}"
    finally:
        bank.shutdown()
        thread.join()
        bank.server_close()


def post(url, path, key="k1", given=None, token=TOKEN):
    return banking.post(url, path, token=token, key=key, given={} if given is None else given)


def paid_under(url, key):
    return banking.get(url, "/payments", token=TOKEN, query={"key": key})["payments"]


def test_a_payment_from_hold_to_ledger(ledger):
    with serving(ledger) as url:
        hold = post(url, "/holds", given=HOLD)
        assert hold == {"hold": "1", "account": "DE11", "amount": "120.00", "status": "open"}
        assert post(url, "/holds", given=HOLD) == hold
        assert paid_under(url, "k-pay") == []
        paid = post(url, "/holds/1/capture", "k-pay", PAYMENT)
        assert paid == {"payment": "1", "hold": "1", "amount": "120.00"}
        assert paid_under(url, "k-pay") == [paid]

    told = [(each.endpoint, each.key, each.reference, each.status) for each in ledger.requests()]
    assert told == [
        ("POST /holds", "k1", "R-1", 201),
        ("POST /holds", "k1", "R-1", 201),
        ("GET /payments", "k-pay", None, 200),
        ("POST /holds/ID/capture", "k-pay", "R-1", 201),
        ("GET /payments", "k-pay", None, 200),
    ]


def test_an_answer_that_is_lost_was_booked(ledger):
    with serving(ledger, "none", "lost") as url:
        post(url, "/holds", given=HOLD)
        with pytest.raises(AnswerLost):
            post(url, "/holds/1/capture", "k-pay", PAYMENT)
        assert len(paid_under(url, "k-pay")) == 1

    assert [(each.fault, each.status) for each in ledger.requests()] == [("none", 201), ("lost", 201), ("none", 200)]


def test_a_bank_that_is_busy_or_fails_has_booked_nothing(ledger):
    with serving(ledger, "none", "busy", "failing") as url:
        post(url, "/holds", given=HOLD)
        with pytest.raises(RateLimited) as busy:
            post(url, "/holds/1/capture", "k-pay", PAYMENT)
        with pytest.raises(BankFailed):
            post(url, "/holds/1/capture", "k-pay", PAYMENT)

    assert busy.value.retry_after == 1.0
    assert ledger.payments() == []
    assert [each.status for each in ledger.requests()] == [201, 429, 500]


def test_a_bank_that_is_not_there_has_done_nothing(ledger):
    with serving(ledger) as url:
        pass
    with pytest.raises(BankFailed, match="cannot be reached"):
        post(url, "/holds", given=HOLD)


@pytest.mark.parametrize(
    ("path", "key", "given", "token", "code"),
    [
        ("/holds", "", HOLD, TOKEN, "key_missing"),
        ("/holds", "k1", {**HOLD, "amount": "12.5"}, TOKEN, "invalid"),
        ("/holds", "k1", {**HOLD, "amount": 12.5}, TOKEN, "invalid"),
        ("/holds", "k1", {"reference": "R-1", "amount": "1.00"}, TOKEN, "invalid"),
        ("/holds", "k1", {**HOLD, "account": "IT77"}, TOKEN, "account_closed"),
        ("/holds", "k1", HOLD, "another", "not_allowed"),
        ("/holds/1/capture", "k1", {"amount": "1.00"}, TOKEN, "invalid"),
        ("/holds/1/refund", "k1", {}, TOKEN, "no_such_endpoint"),
    ],
)
def test_what_the_bank_refuses_changes_nothing(ledger, path, key, given, token, code):
    with serving(ledger) as url, pytest.raises(BankRefused) as refusal:
        post(url, path, key, given, token)

    assert refusal.value.code == code
    assert (ledger.holds(), ledger.payments(), ledger.balance_cents()) == ([], [], 50_000)


def test_the_seed_decides_which_requests_go_wrong():
    faults = Faults(7, lost=0.2, busy=0.1, failing=0.1, slow_seconds_max=0.5)
    kinds = [faults.of(number).kind for number in range(1, 1001)]

    assert kinds == [faults.of(number).kind for number in range(1, 1001)]
    assert kinds != [Faults(8, lost=0.2, busy=0.1, failing=0.1).of(number).kind for number in range(1, 1001)]
    assert {kind: round(kinds.count(kind) / 1000, 1) for kind in set(kinds)} == {
        "none": 0.6,
        "lost": 0.2,
        "busy": 0.1,
        "failing": 0.1,
    }
    assert all(fault.seconds_before + fault.seconds_after <= 0.5 for fault in map(faults.of, range(100)))
