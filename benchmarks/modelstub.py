"""A model and a bank in one HTTP server on loopback, which remembers every call: who made it, and when it answered."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class StubCall:
    """A call that arrived: from then on it is paid for, or has happened."""

    kind: str
    """model | payment"""
    thread: str
    leg: int
    key: str
    caller: int
    """The pid of who called."""
    received_at: float
    answered_at: float | None = None
    """When its whole answer had been handed to the kernel, by this process's monotonic clock; None: it was not."""


class Stub:
    """The server; `address` is its host and port."""

    def __init__(self, latency_seconds: float) -> None:
        self._lock = threading.Condition()
        self._calls: list[StubCall] = []
        self._last: dict[str, StubCall] = {}
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                _, kind, thread, leg = self.path.split("/")
                key, caller = self.headers["Idempotency-Key"], int(self.headers["Caller"])
                call = stub.take(StubCall(kind, thread, int(leg), key, caller, time.monotonic()))
                time.sleep(latency_seconds)
                usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
                choice = {"message": {"content": f"{kind} {leg} of {thread}"}, "finish_reason": "stop"}
                body = json.dumps({"model": "stub-1", "choices": [choice], "usage": usage}).encode()
                with contextlib.suppress(OSError):  # who called may have been killed meanwhile
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.send_header("Connection", "close")
                    self.end_headers()
                    self.wfile.write(body)
                    call.answered_at = time.monotonic()
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                pass  # a caller that was killed while it spoke

        self._server = Server(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def take(self, call: StubCall) -> StubCall:
        """Remember a call."""
        with self._lock:
            self._calls.append(call)
            self._last[call.thread] = call
            self._lock.notify_all()
        return call

    def reached(self, thread: str, leg: int, seconds: float) -> None:
        """Wait until a thread has come to a leg; raise `TimeoutError` when it does not."""
        with self._lock:
            if not self._lock.wait_for(lambda: thread in self._last and self._last[thread].leg >= leg, seconds):
                message = f"{thread} did not come to leg {leg} in {seconds:.0f} s"
                raise TimeoutError(message)

    def calls(self) -> list[StubCall]:
        """Return every call, in the order in which they arrived."""
        with self._lock:
            return list(self._calls)

    def last_caller(self, thread: str) -> int | None:
        """Return the pid of who called last for a thread."""
        with self._lock:
            return self._last[thread].caller if thread in self._last else None

    def has_paid(self, key: str) -> bool:
        """Tell whether a payment under a key has arrived."""
        with self._lock:
            return any(call.key == key and call.kind == "payment" for call in self._calls)

    def stop(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def stub_of(latency_seconds: float) -> Iterator[Stub]:
    """Give a stub that ends with the block."""
    stub = Stub(latency_seconds)
    try:
        yield stub
    finally:
        stub.stop()
