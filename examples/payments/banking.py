"""The way to the bank: one request, and what came of it told apart.

A `BankError` says that nothing happened, and so does `RateLimited`, which also says when to come back.
`AnswerLost` says that it may have happened, and has Keepstep find out.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from keepstep import AnswerLost, RateLimited

_HTTP_SECONDS = 3.0


class BankError(Exception):
    """The bank has not done what it was asked to do."""


class BankRefused(BankError):
    """The bank said no, and will say no again."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


class BankFailed(BankError):
    """The bank could not be reached, or failed before it had booked anything: it promises that nothing happened."""


def post(url: str, path: str, *, token: str, key: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Ask the bank to do something under an idempotency key; raise a `BankError`, `RateLimited` or `AnswerLost`."""
    return _asked(url, "POST", path, {"Authorization": f"Bearer {token}", "Idempotency-Key": key}, json.dumps(given))


def get(url: str, path: str, *, token: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Ask the bank what it knows; raises as `post` does."""
    return _asked(url, "GET", f"{path}?{urlencode(query)}", {"Authorization": f"Bearer {token}"}, None)


def _asked(url: str, method: str, path: str, headers: dict[str, str], body: str | None) -> dict[str, Any]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_HTTP_SECONDS)
    try:
        try:
            connection.connect()
        except OSError as error:
            message = f"the bank cannot be reached: {type(error).__name__}"
            raise BankFailed(message) from None  # nothing was sent, whatever the cause
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = f"{method} {path.partition('?')[0]}: no answer ({type(error).__name__})"
            raise AnswerLost(message) from error
    finally:
        connection.close()
    return _judged(response, answer)


def _judged(response: http.client.HTTPResponse, answer: dict[str, Any]) -> dict[str, Any]:
    code = str(answer.get("error", ""))
    if response.status < 300:
        return answer
    if response.status == 429:
        message = "the bank is busy, and has done nothing"
        raise RateLimited(message, float(response.headers.get("Retry-After") or 1))
    if response.status == 500 and code == "not_booked":
        message = "the bank failed before it had booked anything"
        raise BankFailed(message)
    if response.status >= 500:
        message = f"the bank answered {response.status}, which promises nothing"
        raise AnswerLost(message)
    raise BankRefused(code, str(answer.get("message", "")))
