"""Rates as they are written, and "too many requests" as tools say it."""

from __future__ import annotations

import io
import urllib.error
from email.message import Message
from types import SimpleNamespace

import pytest
import requests

from keepstep import RateLimited
from keepstep.errors import InvalidInput
from keepstep.runtime.rates import Rate
from keepstep.runtime.throttling import retry_after


@pytest.mark.parametrize(
    ("text", "calls", "per_seconds"),
    [
        ("10/s", 10, 1.0),
        ("20/m", 20, 60.0),
        ("1000/h", 1000, 3600.0),
        ("2/d", 2, 86400.0),
        ("5/10s", 5, 10.0),
        (" 5 / 0.5 s ", 5, 0.5),
        ("1000000/s", 1_000_000, 1.0),
    ],
)
def test_a_rate_is_read(text, calls, per_seconds):
    rate = Rate.parse(text)
    assert rate == Rate(calls, per_seconds)
    assert rate.burst == calls
    assert Rate.parse(str(rate)) == rate


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write calls/time"),
        ("10", "write calls/time"),
        ("10/w", "write calls/time"),
        ("-1/s", "write calls/time"),
        ("1.5/s", "write calls/time"),
        ("٣/s", "write calls/time"),
        (10, "write calls/time"),
        (None, "write calls/time"),
        ("0/s", "0 calls"),
        ("1000001/s", "1000001 calls"),
        ("1/0s", "a time of 0 s"),
        ("1/2d", "a time of 172800 s"),
    ],
)
def test_what_is_no_rate_is_refused_with_what_is_wrong(text, says):
    with pytest.raises(InvalidInput, match=says) as refused:
        Rate.parse(text)
    assert refused.value.message.startswith(f"rate {text!r}")


# --- too many requests ---


def answered(status=429, headers=(), name="status_code"):
    error = RuntimeError("refused")
    error.response = SimpleNamespace(**{name: status}, headers=dict(headers))
    return error


def urllib_error(status, **headers):
    message = Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return urllib.error.HTTPError("https://example.org", status, "no", message, io.BytesIO())


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RateLimited("slowly", retry_after=7), 7.0),
        (RateLimited("slowly", 0.2), 1.0),
        (RateLimited("slowly", 1e9), 86400.0),
        (RateLimited("slowly", float("nan")), 1.0),
        (answered(headers={"Retry-After": "12"}), 12.0),
        (answered(headers={"retry-after": " 12.5 "}), 12.5),
        (answered(headers={"Retry-After": "9999999"}), 86400.0),
        (answered(headers={"Retry-After": "-3"}), 1.0),
        (answered(headers={"Retry-After": "soon"}), 1.0),
        (answered(name="status", headers={"RETRY-AFTER": "3"}), 3.0),
        (urllib_error(429, Retry_After="30"), 30.0),
        (urllib_error(429), 1.0),
        (answered(500), None),
        (urllib_error(503, Retry_After="30"), None),
        (ValueError("429"), None),
        (RuntimeError(), None),
    ],
)
def test_a_429_and_what_it_says_of_the_time(error, seconds):
    assert retry_after(error, 1) == seconds


def test_a_date_counts_from_the_time_of_the_answer_else_from_now():
    date = {"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT"}
    of_answer = answered(headers={**date, "Date": "Wed, 21 Oct 2026 07:28:00 GMT"})
    assert retry_after(of_answer, 1, clock=lambda: 0.0) == 30.0
    assert retry_after(answered(headers=date), 1, clock=lambda: 1_792_567_700.0) == 10.0
    assert retry_after(answered(headers=date), 1, clock=lambda: 1_892_567_700.0) == 1.0  # gone by


def test_without_a_word_the_time_doubles_up_to_a_minute():
    assert [retry_after(RateLimited(), tries) for tries in (1, 2, 3, 6, 7, 100)] == [1, 2, 4, 32, 60, 60]


def test_an_error_that_cannot_be_looked_at_is_no_429():
    class Odd(Exception):
        @property
        def response(self):
            raise RuntimeError

    class Mute(Exception):
        status = 429
        headers = 5

    assert retry_after(Odd(), 1) is None
    assert retry_after(Mute(), 2) == 2.0


def test_an_error_of_requests_is_understood():
    response = requests.Response()
    response.status_code = 429
    response.headers["retry-after"] = "6"
    with pytest.raises(requests.HTTPError) as refused:
        response.raise_for_status()
    assert retry_after(refused.value, 1) == 6.0


def test_a_rate_limited_error_is_worth_a_retry():
    error = RateLimited()
    assert (error.code, error.retryable, error.retry_after) == ("rate_limited", True, None)
    assert error.message == "The tool refused the call, which did not happen: there were too many."
