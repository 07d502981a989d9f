"""The refund requests: what a shop hands over, as a CSV file."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from examples.payments import money

_COLUMNS = ("id", "order", "customer", "mail", "account", "amount", "reason")


@dataclass(frozen=True)
class RefundRequest:
    """One line of the file."""

    id: str
    order: str
    customer: str
    mail: str
    account: str
    amount: Decimal
    reason: str


@dataclass(frozen=True)
class Requests:
    """What a file asks for."""

    requests: list[RefundRequest]
    """Each request once, in the order of the file."""
    repeated: list[str]
    """The ids of lines that say again what a line before them said."""


def read(path: Path, lines_max: int | None = None) -> Requests:
    """Read a file, or its first `lines_max` lines.

    A line that was there before asks for nothing. Raises `ValueError` naming the line that cannot be read, and one
    that gives another request's id to something else: nothing is paid of a file that contradicts itself.
    """
    found: dict[str, RefundRequest] = {}
    repeated: list[str] = []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != _COLUMNS:
            message = f"{path.name}: the columns must be {', '.join(_COLUMNS)}"
            raise ValueError(message)
        for number, row in enumerate(reader, 1):
            if lines_max is not None and number > lines_max:
                break
            request = _request(f"{path.name}, line {reader.line_num}", row)
            if request.id not in found:
                found[request.id] = request
            elif found[request.id] == request:
                repeated.append(request.id)
            else:
                message = f"{path.name}, line {reader.line_num}: {request.id} stands for another request before it"
                raise ValueError(message)
    return Requests(list(found.values()), repeated)


def _request(place: str, row: dict[str, str]) -> RefundRequest:
    missing = [name for name in _COLUMNS if not (row.get(name) or "").strip()]
    if missing or None in row:
        message = f"{place}: {', '.join(missing) or 'more than the columns'} cannot be read"
        raise ValueError(message)
    try:
        asked = money.amount(row["amount"])
    except ValueError as error:
        message = f"{place}: {error}"
        raise ValueError(message) from None
    return RefundRequest(**{**{name: row[name].strip() for name in _COLUMNS}, "amount": asked})  # type: ignore[arg-type]
