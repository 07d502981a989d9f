"""Keeping a worker running: starts it again when it dies, hands signals on, ends as it ends.

Celery's main process can die of what should be an outage, and of the OOM killer like any other. Its row then lapses
and peers take over; somebody must still put a worker back.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import structlog

log = structlog.get_logger("keepstep.worker")

EXIT_REFUSED = 78
"""The worker cannot run as it is configured (EX_CONFIG of sysexits.h): starting it again would not help."""

_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_BACKOFF_SECONDS_MAX = 30.0
_SETTLED_SECONDS = 60.0


class Supervisor:
    """Runs one command for as long as nobody asks it to stop."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()

    def run(self) -> int:
        """Run until told to stop by a signal, or until the command ends by itself with 0 or `EXIT_REFUSED`.

        Returns the last process's exit code; 128 + the signal's number when a signal ended it. To be called in the
        main thread: the kernel ends the worker with the thread that started it, so that killing the supervisor leaves
        no worker behind.
        """
        before = {number: signal.signal(number, self._signalled) for number in _HANDED_ON}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        deaths = 0
        while True:
            started = time.monotonic()
            # A group of its own: Ctrl+C reaches the supervisor alone, which hands it on once, not twice.
            self._process = subprocess.Popen(self._command, env=self._environment, process_group=0)  # noqa: S603  ours
            if self._stop.is_set():  # the signal came while there was nobody to hand it to
                self._process.terminate()
            code = self._process.wait()
            if self._stop.is_set() or code in {0, EXIT_REFUSED}:
                return code if code >= 0 else 128 - code
            deaths = 0 if time.monotonic() - started > _SETTLED_SECONDS else deaths + 1
            seconds = min(_BACKOFF_SECONDS_MAX, 0.5 * 2 ** min(deaths, 10))
            ending = f"exit code {code}" if code > 0 else f"signal {-code}"
            log.error("worker_died", pid=self._process.pid, reason=ending, again_in_seconds=seconds)
            if self._stop.wait(seconds):
                return code if code >= 0 else 128 - code

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        self._stop.set()
        process = self._process
        if process is None or process.poll() is not None:
            return
        # A terminal that went away is a reason to end in order, not to start again as Celery takes it.
        process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in this interpreter."""
    return [sys.executable, "-m", module, *arguments]
