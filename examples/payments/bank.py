"""The bank: an HTTP server with a ledger of its own, and with the faults that servers have.

    python -m examples.payments.bank --ledger ledger.db --closed IT77-5001-0007 --lost 0.1 --seed 7

    POST /holds {"reference", "account", "amount"}   sets money aside, once for each Idempotency-Key
    POST /holds/ID/capture {"account", "amount"}     pays; not deduplicated: twice is twice
    POST /holds/ID/release                           gives free; twice is once
    GET  /payments?key=KEY                           what was paid under an Idempotency-Key

Amounts are texts such as "120.00". Every request carries `Authorization: Bearer TOKEN`; the token is taken from the
environment, `BANK_TOKEN`. A 500 with the error `not_booked` promises that nothing was booked.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from examples.payments import money
from examples.payments.ledger import Hold, Ledger, Payment, Refused

_BODY_BYTES_MAX = 10_000
_SOCKET_SECONDS = 30.0
_HOLD = re.compile(r"/holds/([0-9]{1,18})/(capture|release)")


@dataclass(frozen=True)
class Faults:
    """What goes wrong, as shares of the requests. Which of them is decided by the seed and the request's number."""

    seed: int = 0
    lost: float = 0.0
    """Booked, and the connection closed without an answer."""
    busy: float = 0.0
    """429 with Retry-After, nothing booked."""
    failing: float = 0.0
    """500, nothing booked."""
    slow_seconds_max: float = 0.0
    """Each request takes up to this long, some of it before and some of it after the booking."""
    retry_after_seconds: int = 1

    def of(self, number: int) -> Fault:
        """Return the fault of a request."""
        rolled = random.Random(f"{self.seed}/{number}")  # noqa: S311  seeded on purpose
        roll, slow, before = rolled.random(), rolled.random() * self.slow_seconds_max, rolled.random()
        kind = "none"
        for name, share in (("lost", self.lost), ("busy", self.busy), ("failing", self.failing)):
            if 0 <= roll < share:
                kind = name
            roll -= share
        return Fault(kind, slow * before, slow * (1 - before))


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request."""

    kind: str
    seconds_before: float
    seconds_after: float


class Bank(ThreadingHTTPServer):
    """The server; `port` is where it listens on the loopback interface."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, ledger: Ledger, *, token: str, faults: Faults | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.ledger = ledger
        self.token = token
        self.faults = faults if faults is not None else Faults()

    @property
    def port(self) -> int:
        """The port."""
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that were killed before they had their answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Bank
    timeout = _SOCKET_SECONDS
    endpoints: ClassVar[dict[str, str]] = {"capture": "POST /holds/ID/capture", "release": "POST /holds/ID/release"}

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path != "/payments":
            self._answer(404, {"error": "no_such_endpoint"})
            return
        key = next(iter(parse_qs(url.query).get("key", [])), None)
        self._serve("GET /payments", key, None, lambda: self._payments(key))

    def do_POST(self) -> None:
        key = self.headers.get("Idempotency-Key")
        given = self._body()
        reference = given["reference"] if isinstance(given.get("reference"), str) else None
        if self.path == "/holds":
            self._serve("POST /holds", key, reference, lambda: self._place(key, given))
        elif found := _HOLD.fullmatch(self.path):
            number, verb = int(found[1]), found[2]
            act = {
                "capture": lambda: self._capture(number, key, given),
                "release": lambda: (200, _shown_hold(self.server.ledger.release(number))),
            }[verb]
            self._serve(self.endpoints[verb], key, reference, act)
        else:
            self._answer(404, {"error": "no_such_endpoint"})

    def _serve(self, endpoint: str, key: str | None, reference: str | None, act: Any) -> None:
        """Do what was asked, badly if that is this request's fate."""
        ledger = self.server.ledger
        number = ledger.began(endpoint, key, reference)
        fault = self.server.faults.of(number)
        status = 0
        try:
            time.sleep(fault.seconds_before)
            status, body, headers = self._acted(fault, act)
            time.sleep(fault.seconds_after)
        finally:
            ledger.ended(number, status=status, fault=fault.kind)
        if fault.kind == "lost":
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._answer(status, body, headers)

    def _acted(self, fault: Fault, act: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        expected = f"Bearer {self.server.token}".encode()
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
            return 401, {"error": "not_allowed"}, {}
        if fault.kind == "busy":
            return 429, {"error": "busy"}, {"Retry-After": str(self.server.faults.retry_after_seconds)}
        if fault.kind == "failing":
            return 500, {"error": "not_booked"}, {}
        try:
            status, body = act()
        except Refused as refusal:
            return refusal.status, {"error": refusal.code, "message": str(refusal)}, {}
        return status, body, {}

    # --- endpoints ----------------------------------------------------------------------------------------------------

    def _place(self, key: str | None, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        reference, account = _text(given, "reference"), _text(given, "account")
        hold = self.server.ledger.place(_required(key), reference=reference, account=account, cents=_cents(given))
        return 201, _shown_hold(hold)

    def _capture(self, number: int, key: str | None, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        account, cents = _text(given, "account"), _cents(given)
        return 201, _shown_payment(self.server.ledger.capture(number, _required(key), cents, account=account))

    def _payments(self, key: str | None) -> tuple[int, dict[str, Any]]:
        return 200, {"payments": [_shown_payment(each) for each in self.server.ledger.payments(_required(key))]}

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "0")
        size = int(length) if length.isdecimal() else 0
        with suppress(ValueError):
            given = json.loads(self.rfile.read(min(size, _BODY_BYTES_MAX)) or b"{}")
            if isinstance(given, dict):
                return given
        return {}

    def _answer(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Log nothing: the ledger has every request."""


def _required(key: str | None) -> str:
    if not key:
        raise Refused(400, "key_missing", "give an Idempotency-Key")
    return key


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(400, "invalid", f"{name} must be a text")
    return value


def _cents(given: dict[str, Any]) -> int:
    try:
        return money.cents(money.amount(_text(given, "amount")))
    except ValueError as error:
        raise Refused(400, "invalid", f"amount: {error}") from None


def _shown_hold(hold: Hold) -> dict[str, Any]:
    return {"hold": str(hold.number), "account": hold.account, "amount": _shown(hold.cents), "status": hold.status}


def _shown_payment(payment: Payment) -> dict[str, Any]:
    return {"payment": str(payment.number), "hold": str(payment.hold), "amount": _shown(payment.cents)}


def _shown(cents: int) -> str:
    return str(money.of_cents(cents))


def main() -> int:
    """Serve until SIGTERM; the first line of output says where."""
    parser = argparse.ArgumentParser(prog="python -m examples.payments.bank", description=__doc__.partition("\n")[0])
    parser.add_argument("--ledger", type=Path, required=True, help="the SQLite file")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--closed", action="append", default=[], metavar="ACCOUNT", help="an account that is closed")
    parser.add_argument("--frozen", action="append", default=[], metavar="ACCOUNT", help="one that refuses payments")
    parser.add_argument("--seed", type=int, default=0, help="decides which requests go wrong")
    for name, what in (("lost", "answers lost after the booking"), ("busy", "429"), ("failing", "500")):
        parser.add_argument(f"--{name}", type=float, default=0.0, metavar="SHARE", help=f"share of {what}")
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS", help="the longest time of a request")
    chosen = parser.parse_args()
    faults = Faults(chosen.seed, chosen.lost, chosen.busy, chosen.failing, chosen.slow)
    ledger = Ledger(chosen.ledger, closed=frozenset(chosen.closed), frozen=frozenset(chosen.frozen))
    bank = Bank(ledger, token=os.environ["BANK_TOKEN"], faults=faults, port=chosen.port)
    # Shutting down waits for the loop, which is in this very thread.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=bank.shutdown).start())
    print(f"listening on 127.0.0.1:{bank.port}", flush=True)
    bank.serve_forever(poll_interval=0.1)
    bank.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
