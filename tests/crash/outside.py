"""The outside world of these tests: an HTTP server on loopback that counts what it is asked to do; and asking it."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

_HELD_SECONDS_MAX = 90.0


def ask_outside(name: str, thread: str, key: str = "") -> str:
    """Ask the outside world for something, from a worker, once: nothing here tries again."""
    link = http.client.HTTPConnection(os.environ["KEEPSTEP_TEST_OUTSIDE"], timeout=_HELD_SECONDS_MAX)
    try:
        link.request("POST", f"/{name}/{thread}", headers={"Idempotency-Key": key})
        return link.getresponse().read().decode()
    finally:
        link.close()


class Outside:
    """Counts every call when it arrives, by thread, name and idempotency key; answers now, or when it is let go.

    A call is `POST /NAME/THREAD` with the header `Idempotency-Key`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[str, Counter[str]] = defaultdict(Counter)
        self._keys: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._held: dict[tuple[str, str], list[threading.Event]] = {}
        outside = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                _, name, thread = self.path.split("/")
                outside._take(name, thread, self.headers.get("Idempotency-Key", ""))
                body = f"{name} of {thread}".encode()
                # Who called may have been killed meanwhile.
                with contextlib.suppress(OSError):
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.send_header("Connection", "close")
                    self.end_headers()
                    self.wfile.write(body)
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

    def _take(self, name: str, thread: str, key: str) -> None:
        with self._changed:
            self._calls[thread][name] += 1
            self._keys[thread, name].add(key)
            self._changed.notify_all()
            answer = threading.Event()
            is_held = (name, thread) in self._held
            if is_held:
                self._held[name, thread].append(answer)
        if is_held:
            answer.wait(_HELD_SECONDS_MAX)

    # --- counting -----------------------------------------------------------------------------------------------------

    def calls(self, thread: str) -> dict[str, int]:
        """Return how often each thing was asked for by a thread."""
        with self._changed:
            return dict(self._calls[thread])

    def keys(self, thread: str, name: str) -> set[str]:
        """Return the idempotency keys under which a thread asked for a thing."""
        with self._changed:
            return set(self._keys[thread, name])

    def called(self, name: str, thread: str, times: int = 1, *, seconds: float = 60.0) -> None:
        """Wait until a thread has asked for a thing that often."""
        self._until(lambda: self._calls[thread][name] >= times, f"{times} x {name} of {thread}", seconds)

    def called_in_all(self, name: str, times: int, *, seconds: float = 60.0) -> None:
        """Wait until all threads together have asked for a thing that often."""
        self._until(lambda: sum(calls[name] for calls in self._calls.values()) >= times, f"{times} x {name}", seconds)

    def heard(self, thread: str, times: int, *, seconds: float = 60.0) -> None:
        """Wait until a thread has asked for that many things, whatever they are."""
        self._until(lambda: sum(self._calls[thread].values()) >= times, f"{times} calls of {thread}", seconds)

    def _until(self, look: object, what: str, seconds: float) -> None:
        assert callable(look)
        deadline = time.monotonic() + seconds
        with self._changed:
            while not look():
                left = deadline - time.monotonic()
                if left <= 0:
                    message = f"{what} did not come about within {seconds} s"
                    raise AssertionError(message)
                self._changed.wait(left)

    def forget(self) -> None:
        """Count from nothing again: whoever called before is gone."""
        with self._changed:
            self._calls.clear()
            self._keys.clear()

    # --- holding ------------------------------------------------------------------------------------------------------

    def hold(self, name: str, *threads: str) -> None:
        """Count calls as ever and answer them only when they are let go."""
        with self._changed:
            for thread in threads:
                self._held[name, thread] = []

    def let_go(self, name: str, *threads: str) -> None:
        """Answer the calls that were held, and later ones at once."""
        with self._changed:
            held = [event for thread in threads for event in self._held.pop((name, thread), ())]
        for event in held:
            event.set()

    def let_first_go(self, name: str, thread: str) -> None:
        """Answer the first of the calls that are held, and go on holding the others."""
        with self._changed:
            self._held[name, thread].pop(0).set()

    def stop(self) -> None:
        """Answer everybody and stop."""
        with self._changed:
            held = [event for events in self._held.values() for event in events]
            self._held.clear()
        for event in held:
            event.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def outside_world() -> Iterator[Outside]:
    """Give an outside world that ends with the block."""
    outside = Outside()
    try:
        yield outside
    finally:
        outside.stop()
