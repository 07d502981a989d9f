"""What an error of a call says about the call: that it did not happen, or that its answer was lost and it may have.

A refused connection, an HTTP 404, a `ValueError` of the function's own: the outside has done nothing. A time-out while
reading, a connection that breaks off, an HTTP 502: the request may have arrived, and its answer has not. Whoever calls
again after the second kind pays twice.

Clients are known by the names of their exceptions, so that none of them has to be installed.
"""

from __future__ import annotations

import ssl
from http.client import HTTPException
from typing import Final

from keepstep.errors import AnswerLost

_LOST: Final = (AnswerLost, TimeoutError, ConnectionError, HTTPException, ssl.SSLError, EOFError)
_NOT_SENT: Final = (ConnectionRefusedError, ssl.SSLCertVerificationError)

# By the package that defines it. What is not sent comes first: it may be a kind of what is lost.
_NOT_SENT_NAMES: Final = {
    "httpx": {
        "ConnectError",
        "ConnectTimeout",
        "PoolTimeout",
        "ProxyError",
        "UnsupportedProtocol",
        "LocalProtocolError",
    },
    "requests": {"ConnectTimeout", "ProxyError", "SSLError", "InvalidURL", "MissingSchema"},
    "urllib3": {"NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "ProxyError"},
    "aiohttp": {"ClientConnectorError", "ConnectionTimeoutError", "ClientConnectorCertificateError"},
    "botocore": {"EndpointConnectionError", "ConnectTimeoutError"},
}
_LOST_NAMES: Final = {
    "httpx": {"TransportError"},
    "requests": {"Timeout", "ConnectionError", "ChunkedEncodingError", "ContentDecodingError"},
    "urllib3": {"TimeoutError", "ProtocolError", "IncompleteRead"},
    "aiohttp": {"ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"},
    "botocore": {"ReadTimeoutError", "ConnectionClosedError", "HTTPClientError"},
    "grpc": {"RpcError"},
    "smtplib": {"SMTPServerDisconnected"},
    "redis": {"ConnectionError", "TimeoutError"},
}
# Of these the SQLSTATE says more: without one, or with one of these, the server has said nothing of the statement.
_POSTGRESQL_NAMES: Final = {"psycopg2": {"OperationalError"}, "psycopg": {"OperationalError"}}
_CONNECTION_STATES: Final = ("08", "57P0")
_REQUEST_TIMEOUT, _SERVER_ERROR, _NOT_IMPLEMENTED = 408, 500, 501


def is_lost(error: BaseException) -> bool:
    """Tell whether the call that raised this may have happened all the same.

    An error that was raised `from` another, or while another was handled, is judged by that one, too: a client's own
    error hides that of its transport. `raise … from None` says that it did not happen.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        verdict = _of_one(found)
        if verdict is not None:
            return verdict
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return False


def _of_one(error: BaseException) -> bool | None:
    """Return what an error itself says; None: nothing."""
    if isinstance(error, _NOT_SENT) or _is_named(error, _NOT_SENT_NAMES):
        return False
    status = _http_status(error)
    if status is not None:
        # Whoever answers for a server that it asked in vain does not know what that one did.
        return status == _REQUEST_TIMEOUT or (status >= _SERVER_ERROR and status != _NOT_IMPLEMENTED)
    if isinstance(error, _LOST) or _is_named(error, _LOST_NAMES):
        return True
    if _is_named(error, _POSTGRESQL_NAMES):
        state = getattr(error, "pgcode", None) or getattr(error, "sqlstate", None)
        return True if state is None or str(state).startswith(_CONNECTION_STATES) else None
    return None


def _is_named(error: BaseException, names: dict[str, set[str]]) -> bool:
    return any(kind.__name__ in names.get(kind.__module__.partition(".")[0], ()) for kind in type(error).__mro__)


def _http_status(error: BaseException) -> int | None:
    """Return the status of an error that stands for an HTTP answer, as most clients' do."""
    for found in (getattr(getattr(error, "response", None), "status_code", None), getattr(error, "status", None)):
        if isinstance(found, int) and not isinstance(found, bool) and 100 <= found <= 599:  # noqa: PLR2004  HTTP's range
            return int(found)
    return None
