"""What the bank's ledger and the mail server's box say, held against what must be true. Keepstep is not asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from examples.check import Check
from examples.payments import money
from examples.payments.ledger import Hold, Ledger, Payment, Request
from examples.payments.mailbox import Mail, Mailbox
from examples.payments.outcomes import Outcome
from examples.payments.outside import CLOSED, FROZEN
from examples.payments.people import verdict_on
from examples.payments.requests import RefundRequest

PAID, REJECTED, EXPIRED, REFUSED, DENIED = "paid", "rejected", "expired", "refused", "denied"
# What the policies say, said again: a policy that lets more through is found by what was paid.
_LIMIT, _OF_FINANCE, _MAXIMUM = Decimal(500), Decimal(3000), Decimal(5000)
_EMBARGOED = "KP"


@dataclass(frozen=True)
class Expected:
    """What must come of a refund."""

    request: RefundRequest
    outcome: str
    cents: int
    """What must have been paid."""
    said: str
    """How that was decided."""
    hold: str
    """What must have become of the hold; "": there must be none."""
    is_edited: bool = False
    """Whether the approver says another amount."""


def expected(request: RefundRequest) -> Expected:
    """Return what must come of a request, from the limits, the accounts and what the approver says."""
    if request.amount > _MAXIMUM or request.account.startswith(_EMBARGOED):
        why = "too much" if request.amount > _MAXIMUM else "embargo"
        return Expected(request, DENIED, 0, f"denied: {why}", "")
    if request.account == CLOSED:
        return Expected(request, REFUSED, 0, "account closed", "")
    if request.amount > _OF_FINANCE:
        return Expected(request, EXPIRED, 0, "nobody decided", "released")
    said = verdict_on(request.id)
    if request.amount > _LIMIT and said.verdict == "reject":
        return Expected(request, REJECTED, 0, "rejected", "released")
    if request.account == FROZEN:
        return Expected(request, REFUSED, 0, "account frozen", "released")
    if request.amount <= _LIMIT:
        return Expected(request, PAID, money.cents(request.amount), "under the limit", "captured")
    if said.amount is None:
        return Expected(request, PAID, money.cents(request.amount), "approved", "captured")
    return Expected(request, PAID, money.cents(said.amount), "approved, edited", "captured", is_edited=True)


@dataclass(frozen=True)
class Records:
    """Everything that the world outside has on record."""

    holds: list[Hold]
    payments: list[Payment]
    requests: list[Request]
    mails: list[Mail]

    @classmethod
    def of(cls, ledger: Ledger, mailbox: Mailbox) -> Records:
        """Read them."""
        return cls(ledger.holds(), ledger.payments(), ledger.requests(), mailbox.mails())


@dataclass(frozen=True)
class Row:
    """One refund, by the records."""

    expected: Expected
    holds: str
    """The holds' statuses, none: "" ."""
    paid_times: int
    paid_cents: int
    mails: int

    @property
    def is_paid_right(self) -> bool:
        """Whether what must be paid was paid once, and what must not be was not."""
        return (self.paid_times, self.paid_cents) == (int(self.expected.outcome == PAID), self.expected.cents)

    @property
    def is_right(self) -> bool:
        """Whether the records have all that must have come of it, and nothing else."""
        return self.is_paid_right and (self.holds, self.mails) == (self.expected.hold, 1)


def rows(requests: Sequence[RefundRequest], records: Records) -> list[Row]:
    """Return what the records say of each request."""
    found = []
    for request in requests:
        paid = [each.cents for each in records.payments if each.reference == request.id]
        holds = ", ".join(each.status for each in records.holds if each.reference == request.id)
        mails = sum(each.reference == request.id for each in records.mails)
        found.append(Row(expected(request), holds, len(paid), sum(paid), mails))
    return found


def table(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the rows as people read them."""
    return [
        (
            row.expected.request.id,
            money.written(money.cents(row.expected.request.amount)),
            row.expected.said,
            row.holds or "none",
            str(row.paid_times),
            money.written(row.paid_cents) if row.paid_times else "",
            str(row.mails),
            "yes" if row.is_right else "NO",
        )
        for row in found
    ]


HEAD = ("refund", "amount", "decided", "hold", "times paid", "paid", "mails", "")


def checks(found: Sequence[Row], records: Records, outcomes: Sequence[Outcome]) -> list[Check]:
    """Return what must be true of all of them. `outcomes`: what the agent says in its own table."""
    known = {row.expected.request.id for row in found}
    to_pay = [row for row in found if row.expected.outcome == PAID]
    others = [row for row in found if row.expected.outcome != PAID]
    denied = {row.expected.request.id for row in found if row.expected.outcome == DENIED}
    edited = [row for row in found if row.expected.is_edited]
    by_message = Counter(each.message_id for each in records.mails)
    decided = money.written(sum(row.expected.cents for row in found))
    booked = money.written(sum(each.cents for each in records.payments))
    wanted = Counter((row.expected.request.id, row.expected.outcome, row.expected.cents) for row in found)
    written = Counter((each.refund, each.status, each.cents) for each in outcomes)
    counts = [
        ("to be paid: paid once, the amount decided", len(to_pay), sum(row.is_paid_right for row in to_pay)),
        ("payments in the ledger", len(to_pay), len(records.payments)),
        ("approved with another amount: that one paid", len(edited), sum(row.is_paid_right for row in edited)),
        ("denied, rejected, expired or refused, and paid all the same", 0, sum(row.paid_times > 0 for row in others)),
        ("requests to the bank about what was denied", 0, sum(each.reference in denied for each in records.requests)),
        ("payments that nobody asked for", 0, sum(each.reference not in known for each in records.payments)),
        ("holds left open", 0, sum(each.status == "open" for each in records.holds)),
        ("customers written to, each once", len(found), sum(row.mails == 1 for row in found)),
        ("mails that came twice", 0, sum(times > 1 for times in by_message.values())),
        ("rows in the agent's table, as they must be", len(found), (wanted & written).total()),
        ("rows in the agent's table beside these", 0, (written - wanted).total()),
    ]
    return [
        *(Check(what, str(must), str(is_)) for what, must, is_ in counts),
        Check("paid in all: as decided, and in the ledger", decided, booked),
        Check("paid in all: as decided, and in the agent's table", decided, _sum(outcomes)),
    ]


def _sum(outcomes: Sequence[Outcome]) -> str:
    return money.written(sum(each.cents for each in outcomes))


def asked(records: Records) -> list[tuple[str, ...]]:
    """Return (endpoint, requests, answers lost, 429, 500) of everything that the bank was asked."""
    told = []
    for endpoint in sorted({each.endpoint for each in records.requests}):
        requests = [each for each in records.requests if each.endpoint == endpoint]
        faults = Counter(each.fault for each in requests)
        told.append((endpoint, str(len(requests)), *(str(faults[name]) for name in ("lost", "busy", "failing"))))
    return told
