"""What the agent can do outside: pay a refund, and write to a customer.

They are of two kinds. A payment comes in two phases: the amount is held at the bank first, which may be asked for twice
and happens once, and what is held is paid when whoever must approve it has, or released. The paying itself may not be
asked for twice, for the bank would pay twice; but the bank can be asked what it has paid under a key. A mail may not
either, and nobody can be asked: when it is not known whether one was sent, a person has to look.

What may be paid to whom, and who must approve it, stands in policies/payments.cedar.
"""

from __future__ import annotations

import hashlib
import os
import smtplib
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from email.message import EmailMessage
from typing import Any

from examples.payments import banking
from examples.payments.banking import BankRefused
from keepstep import NOT_DONE, Retry, tool

SENDER = "refunds@shop.example"
CALL_SECONDS = 4.0
"""How long a call may be under way."""
SETTLING_SECONDS = 1.0
"""The bank has booked what it was asked to book this long after the asking at the latest."""
_INSISTENT = Retry(attempts=10, delay=0.2, factor=1.5, delay_max=1, never=(BankRefused,))
_SMTP_SECONDS = 3.0
_TAKEN_IN = 250


class MailRefused(Exception):
    """The mail server has not taken the mail."""


@dataclass(frozen=True)
class Receipt:
    """Money that the bank has paid."""

    payment: str
    hold: str
    amount: Decimal


# --- payments ---------------------------------------------------------------------------------------------------------


def find_payment(
    refund: str,  # noqa: ARG001  as of the next two: a lookup is called as the payment was
    account: str,  # noqa: ARG001
    amount: Decimal,  # noqa: ARG001
    hold: str | None = None,  # noqa: ARG001
    *,
    token: str,
    idempotency_key: str,
) -> Any:
    """Ask the bank what it has paid under a key."""
    paid = banking.get(_bank(), "/payments", token=token, query={"key": idempotency_key})["payments"]
    return _receipt(paid[0]) if paid else NOT_DONE


@tool(
    version="1",
    risk="high",
    scopes=("payments",),
    lookup=find_payment,
    settling=SETTLING_SECONDS,
    timeout=CALL_SECONDS,
    rate="20/s",
    retry=_INSISTENT,
    secrets={"token": "env:BANK_TOKEN"},
)
def send_payment(
    refund: str, account: str, amount: Decimal, hold: str | None = None, *, token: str, idempotency_key: str
) -> Receipt:
    """Pay a refund. The hold is the bank's: leave it out."""
    # The bank pays as often as it is asked.
    given = {"reference": refund, "account": account, "amount": str(amount)}
    return _receipt(banking.post(_bank(), f"/holds/{hold}/capture", token=token, key=idempotency_key, given=given))


@send_payment.prepare(idempotent=True)
def place_hold(
    refund: str,
    account: str,
    amount: Decimal,
    hold: str | None = None,  # noqa: ARG001  the bank says which it is
    *,
    token: str,
    idempotency_key: str,
) -> dict[str, Any]:
    """Have the bank set the amount aside; it does so once for each key."""
    given = {"reference": refund, "account": account, "amount": str(amount)}
    answer = banking.post(_bank(), "/holds", token=token, key=idempotency_key, given=given)
    return {"refund": refund, "account": account, "amount": Decimal(answer["amount"]), "hold": answer["hold"]}


@send_payment.cancel(idempotent=True)
def release_hold(
    refund: str,
    account: str,  # noqa: ARG001  the hold is enough; as of the next
    amount: Decimal,  # noqa: ARG001
    hold: str | None = None,
    *,
    token: str,
    idempotency_key: str,
) -> None:
    """Have the bank give the hold free; released twice is released once."""
    banking.post(_bank(), f"/holds/{hold}/release", token=token, key=idempotency_key, given={"reference": refund})


def _receipt(paid: dict[str, Any]) -> Receipt:
    return Receipt(paid["payment"], paid["hold"], Decimal(paid["amount"]))


def _bank() -> str:
    return os.environ["PAYMENTS_BANK"]


# --- mails ------------------------------------------------------------------------------------------------------------


@tool(version="1", risk="medium", scopes=("mail",), timeout=CALL_SECONDS, retry=_INSISTENT)
def notify(recipient: str, refund: str, subject: str, text: str, *, idempotency_key: str) -> str:
    """Write to a customer about a refund."""
    # The Message-ID is made of the key, so that two mails would be told apart.
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = SENDER, recipient, subject
    mail["Message-ID"] = message_id(idempotency_key)
    mail["X-Refund"] = refund
    mail.set_content(text)
    host, _, port = os.environ["PAYMENTS_MAIL"].partition(":")
    with closing(_introduced(host, int(port), recipient)) as server:
        try:
            # When this breaks off the mail may have been taken in: the error says so, and Keepstep knows it.
            code, answer = server.data(mail.as_bytes())
        except smtplib.SMTPDataError as error:
            code, answer = error.smtp_code, b"not asked for"
    if code != _TAKEN_IN:
        message = f"the mail server answered {code}: {answer.decode(errors='replace')}"
        raise MailRefused(message)
    return message_id(idempotency_key)


def _introduced(host: str, port: int, to: str) -> smtplib.SMTP:
    """Return a connection that is ready for a mail to somebody; nothing has been sent by then."""
    try:
        server = smtplib.SMTP(host, port, timeout=_SMTP_SECONDS)
        server.ehlo()
        for code, answer in (server.mail(SENDER), server.rcpt(to)):
            if code != _TAKEN_IN:
                raise smtplib.SMTPResponseException(code, answer)
    except (OSError, smtplib.SMTPException) as error:
        message = f"the mail server did not take the mail: {type(error).__name__}"
        raise MailRefused(message) from None
    return server


def message_id(key: str) -> str:
    """Return the Message-ID of the mail with an idempotency key."""
    return f"<{hashlib.sha256(key.encode()).hexdigest()[:32]}@shop.example>"
