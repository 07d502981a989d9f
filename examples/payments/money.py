"""Amounts: decimals with two places outside, whole cents in a ledger, floats nowhere."""

from __future__ import annotations

import re
from decimal import Decimal

_AMOUNT = re.compile(r"(0|[1-9][0-9]{0,11})\.[0-9]{2}")
_CENT = Decimal("0.01")


def amount(text: str) -> Decimal:
    """Return an amount above zero as it was written, such as "120.00"; raise `ValueError` for anything else."""
    if not _AMOUNT.fullmatch(text) or not Decimal(text):
        message = f"{text!r} is not an amount above zero with two decimal places"
        raise ValueError(message)
    return Decimal(text)


def cents(value: Decimal) -> int:
    """Return an amount in cents; raise `ValueError` when a fraction of a cent is left."""
    number = value / _CENT
    if number != int(number):
        message = f"{value} has a fraction of a cent"
        raise ValueError(message)
    return int(number)


def of_cents(number: int) -> Decimal:
    """Return cents as an amount with two decimal places."""
    return Decimal(number) * _CENT


def written(number: int) -> str:
    """Return cents as people read them: 1,250.00."""
    return f"{of_cents(number):,.2f}"
