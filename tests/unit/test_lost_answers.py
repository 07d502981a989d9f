"""Which errors of a call leave open whether it happened."""

import http.client
import socket
import ssl
import urllib.error

import pytest

from keepstep.errors import AnswerLost
from keepstep.runtime.lostanswers import is_lost


def of(module, *names):
    """Return an error of a client that is not installed, each name a kind of the next."""
    kind = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {"__module__": module})
    return kind("it says this")


class Response:
    def __init__(self, status_code):
        self.status_code = status_code


def answered(status):
    error = of("httpx", "HTTPStatusError")
    error.response = Response(status)
    return error


def postgresql(state):
    error = of("psycopg2", "OperationalError")
    error.pgcode = state
    return error


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        AnswerLost(),
        TimeoutError(),
        ConnectionResetError(),
        BrokenPipeError(),
        ConnectionError("broke off"),
        http.client.RemoteDisconnected(),
        http.client.IncompleteRead(b""),
        ssl.SSLEOFError(),
        EOFError(),
        of("httpx", "ReadTimeout", "TimeoutException", "TransportError"),
        of("httpx", "RemoteProtocolError", "ProtocolError", "TransportError"),
        of("requests.exceptions", "ReadTimeout", "Timeout"),
        of("requests.exceptions", "ConnectionError"),
        of("urllib3.exceptions", "ProtocolError"),
        of("aiohttp.client_exceptions", "ServerDisconnectedError", "ClientConnectionError"),
        of("smtplib", "SMTPServerDisconnected"),
        answered(500),
        answered(502),
        answered(504),
        answered(408),
        urllib.error.HTTPError("http://bank", 503, "busy", None, None),
        of("redis.exceptions", "TimeoutError"),
        of("redis.exceptions", "BusyLoadingError", "ConnectionError"),
        postgresql(None),
        postgresql("57P01"),
        postgresql("08006"),
        caused(ValueError("my own"), TimeoutError()),
        caused(of("sqlalchemy.exc", "OperationalError"), postgresql(None)),
        caused(ValueError("my own"), caused(KeyError("mine, too"), ConnectionResetError())),
    ],
    ids=repr,
)
def test_its_answer_was_lost(error):
    assert is_lost(error) is True


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such account"),
        ConnectionRefusedError(),
        socket.gaierror(),
        FileNotFoundError(),
        ssl.SSLCertVerificationError(),
        of("httpx", "ConnectTimeout", "TimeoutException", "TransportError"),
        of("httpx", "ConnectError", "NetworkError", "TransportError"),
        of("requests.exceptions", "ConnectTimeout", "ConnectionError", "Timeout"),
        of("aiohttp.client_exceptions", "ClientConnectorError", "ClientOSError", "ClientConnectionError"),
        of("mine", "ReadTimeout"),
        answered(404),
        answered(429),
        answered(501),
        urllib.error.HTTPError("http://bank", 409, "conflict", None, None),
        postgresql("57014"),
        postgresql("40P01"),
        caused(ValueError("my own"), answered(422)),
        caused(of("requests.exceptions", "ConnectionError"), ConnectionRefusedError()).__cause__,
    ],
    ids=repr,
)
def test_it_did_not_happen(error):
    assert is_lost(error) is False


def test_who_raises_from_none_says_that_it_did_not_happen():
    def reads():
        raise TimeoutError

    def asks_the_bank():
        try:
            reads()
        except TimeoutError:
            message = "the bank says that it has not booked"
            raise ValueError(message) from None

    with pytest.raises(ValueError, match="not booked") as raised:
        asks_the_bank()
    assert is_lost(raised.value) is False


def test_an_error_raised_while_another_is_handled_is_judged_by_that_one():
    def asks_the_bank(error):
        try:
            raise error
        except OSError:
            message = "the bank is out of order"
            raise ValueError(message)  # noqa: B904  as people write it

    for error, lost in ((TimeoutError(), True), (ConnectionRefusedError(), False)):
        with pytest.raises(ValueError, match="out of order") as raised:
            asks_the_bank(error)
        assert is_lost(raised.value) is lost


def test_causes_in_a_circle_end():
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert is_lost(first) is False
