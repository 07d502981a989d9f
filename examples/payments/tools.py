"""What the agent can do outside: hold, pay and release at the bank, and write a mail.

They are of three kinds. Placing a hold and releasing it may be asked for twice: the bank does it once. A payment may
not: asked twice, it pays twice; but the bank can be asked what it has paid under a key. A mail may not either, and
nobody can be asked: when it is not known whether one was sent, a person has to look.
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
from keepstep import NOT_DONE, effect

SENDER = "refunds@shop.example"
SETTLING_SECONDS = 1.0
"""The bank has booked what it was asked to book this long after the asking at the latest."""
_SMTP_SECONDS = 3.0
_TAKEN_IN = 250


class MailRefused(Exception):
    """The mail server has not taken the mail."""


@dataclass(frozen=True)
class Hold:
    """Money that the bank has set aside."""

    hold: str
    amount: Decimal


@dataclass(frozen=True)
class Receipt:
    """Money that the bank has paid."""

    payment: str
    hold: str
    amount: Decimal


@effect(idempotent=True)
def place_hold(order: str, account: str, amount: Decimal, *, idempotency_key: str) -> Hold:
    """Have the bank set the amount aside; it does so once for each key."""
    given = {"reference": order, "account": account, "amount": str(amount)}
    answer = banking.post(_bank(), "/holds", token=_token(), key=idempotency_key, given=given)
    return Hold(answer["hold"], Decimal(answer["amount"]))


@effect(idempotent=True)
def release_hold(hold: str, *, idempotency_key: str) -> str:
    """Have the bank give a hold free; released twice is released once."""
    answer = banking.post(_bank(), f"/holds/{hold}/release", token=_token(), key=idempotency_key, given={})
    return str(answer["status"])


def find_payment(hold: str, amount: Decimal, *, idempotency_key: str) -> Any:  # noqa: ARG001  those of the payment
    """Ask the bank what it has paid under a key."""
    paid = banking.get(_bank(), "/payments", token=_token(), query={"key": idempotency_key})["payments"]
    return _receipt(paid[0]) if paid else NOT_DONE


@effect(lookup=find_payment, settling=SETTLING_SECONDS)
def send_payment(hold: str, amount: Decimal, *, idempotency_key: str) -> Receipt:
    """Have the bank pay out of a hold. The bank pays as often as it is asked."""
    given = {"amount": str(amount)}
    return _receipt(banking.post(_bank(), f"/holds/{hold}/capture", token=_token(), key=idempotency_key, given=given))


@effect
def send_mail(to: str, reference: str, subject: str, text: str, *, idempotency_key: str) -> str:
    """Write to somebody; return the mail's Message-ID, which is made of the key, so that two would be told apart."""
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = SENDER, to, subject
    mail["Message-ID"] = message_id(idempotency_key)
    mail["X-Refund"] = reference
    mail.set_content(text)
    host, _, port = os.environ["PAYMENTS_MAIL"].partition(":")
    with closing(_introduced(host, int(port), to)) as server:
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


def _receipt(paid: dict[str, Any]) -> Receipt:
    return Receipt(paid["payment"], paid["hold"], Decimal(paid["amount"]))


def _bank() -> str:
    return os.environ["PAYMENTS_BANK"]


def _token() -> str:
    return os.environ["BANK_TOKEN"]
