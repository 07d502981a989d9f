"""Throttling: whether what a tool raised says that there were too many requests, and when to come back."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from keepstep.errors import RateLimited
from keepstep.store.rates import HOLD_SECONDS_MAX

_TOO_MANY_REQUESTS = 429
_FIRST_SECONDS = 1.0
_SECONDS_MAX = 60.0
_DOUBLINGS_MAX = 10


def retry_after(error: BaseException, tries: int, *, clock: Callable[[], float] = time.time) -> float | None:
    """Return the seconds after which a call that was refused as one too many may be made again; None: it was not.

    Such a call is known not to have happened. A tool says it by `RateLimited`, or by any error that carries the HTTP
    status 429 as httpx, requests, urllib, aiohttp and the clients built on them do: `error.response.status_code`,
    `error.status_code`, `error.status` or `error.code`. How long is the error's own word or the header `Retry-After`
    (seconds, or a date, by the time that the answer gives), at least a second and at most a day; else 1, 2, 4 … up
    to 60 seconds by `tries`, the number of times the call was made, this one included.
    """
    if isinstance(error, RateLimited):
        said = error.retry_after
    elif _is_429(error):
        said = _said(error, clock)
    else:
        return None
    if said is None or not math.isfinite(said):
        return min(_FIRST_SECONDS * 2.0 ** min(max(tries, 1) - 1, _DOUBLINGS_MAX), _SECONDS_MAX)
    return min(max(said, _FIRST_SECONDS), HOLD_SECONDS_MAX)


def _is_429(error: BaseException) -> bool:
    response = _of(error, "response")
    numbers = [_of(response, "status_code"), _of(response, "status")]
    numbers += [_of(error, name) for name in ("status_code", "status", "code")]
    return any(type(number) is not bool and number == _TOO_MANY_REQUESTS for number in numbers)


def _said(error: BaseException, clock: Callable[[], float]) -> float | None:
    for carrier in (_of(error, "response"), error):
        headers = _of(carrier, "headers")
        text = _header(headers, "retry-after")
        if text is None:
            continue
        with contextlib.suppress(ValueError):
            return float(text)
        at = _time(text)
        if at is not None:
            now = _time(_header(headers, "date") or "")
            return at - (clock() if now is None else now)
    return None


def _time(text: str) -> float | None:
    """Return the seconds since 1970 of an HTTP date; None when it is none."""
    with contextlib.suppress(ValueError, TypeError, OverflowError, IndexError):
        found: datetime = parsedate_to_datetime(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return None


def _header(headers: Any, name: str) -> str | None:
    """Return a header, whatever its case; the mappings of clients differ in whether they heed that."""
    with contextlib.suppress(Exception):  # another library's object: what it cannot say is not said
        pairs = headers.items() if isinstance(headers, Mapping) or hasattr(headers, "items") else ()
        for key, value in pairs:
            if str(key).lower() == name:
                return str(value).strip()
    return None


def _of(thing: Any, name: str) -> Any:
    """Return an attribute; None when it is not there, or raises, as a property of another library's may."""
    with contextlib.suppress(Exception):
        return getattr(thing, name, None)
    return None
