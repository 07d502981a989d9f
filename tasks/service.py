"""A service: a thread of the worker's main process that does one thing again and again.

It survives every error (one line in the log, then it goes on) and stops promptly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import structlog

from keepstep.tasks.forkgate import Gate
from keepstep.tasks.logs import told

log = structlog.get_logger("keepstep.worker")


class Service:
    """One thing done again and again in a thread of its own; subclasses say what in `work`."""

    name = "service"
    failed_seconds = 1.0
    """How long to wait after an error."""

    def __init__(self) -> None:
        self.gate = Gate()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"keepstep-{self.name}", daemon=True)

    def work(self) -> float:
        """Do the thing once; return the seconds until the next time."""
        raise NotImplementedError

    def finish(self) -> None:
        """Give back what the thread holds; called in the thread when it ends."""

    @property
    def stopping(self) -> bool:
        """Whether the service was told to stop."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """End the present wait."""
        self._wake.set()

    def pause(self, seconds: float) -> None:
        """Wait, until woken or told to stop."""
        self._wake.wait(seconds)
        self._wake.clear()

    def tell(self) -> None:
        """Tell the thread to stop."""
        self._stopping.set()
        self._wake.set()

    def join(self, timeout_seconds: float = 5.0) -> None:
        """Wait, a bounded time, for a thread that was told to stop."""
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self.stopping:
            started = time.monotonic()
            try:
                seconds = self.work()
            except Exception as error:  # noqa: BLE001  a service that died would be missed by nobody
                log.warning("service_failed", service=self.name, **told(error))
                seconds = max(0.0, self.failed_seconds - (time.monotonic() - started))
            if not self.stopping:
                self.pause(seconds)
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001  what is left is the process's end
            log.debug("service_finish_failed", service=self.name, **told(error))


def stop(services: Iterable[Service]) -> None:
    """Stop services, all at once."""
    told = list(services)
    for service in told:
        service.tell()
    for service in told:
        service.join()
