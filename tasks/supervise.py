"""Keeping a worker running: starts it again when it dies, hands signals on, ends as it ends.

Celery's main process can die of what should be an outage, and of the OOM killer like any other. Its row then lapses
and peers take over; somebody must still put a worker back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType

import structlog

log = structlog.get_logger("keepstep.worker")

EXIT_REFUSED = 78
"""The worker cannot run as it is configured (EX_CONFIG of sysexits.h): starting it again would not help."""

EXIT_INTERRUPTED = 128 + signal.SIGINT

_REFUSAL_FD = "KEEPSTEP_REFUSAL_FD"
_REFUSAL_BYTES_MAX = 16_384
"""Less than a pipe holds: the worker must not wait for a reader that waits for its end."""
_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_BACKOFF_SECONDS_MAX = 30.0
_SETTLED_SECONDS = 60.0


@dataclass(frozen=True)
class Refusal:
    """Why a worker cannot run as it is configured."""

    code: str
    reason: str
    frames: tuple[str, ...] = ()
    """Where in the user's own code, outermost first."""


def refused(why: Refusal) -> bool:
    """Tell the supervisor, which has the last word, why its worker refuses; return whether there is one."""
    number = os.environ.get(_REFUSAL_FD)
    if number is None:
        return False
    for fewer in (why, Refusal(why.code, why.reason[:1000])):
        data = json.dumps(asdict(fewer)).encode()
        if len(data) <= _REFUSAL_BYTES_MAX:
            with suppress(OSError, ValueError):  # the log has it, too
                os.write(int(number), data)
                return True
    return False


class Supervisor:
    """Runs one command for as long as nobody asks it to stop."""

    refusal: Refusal | None = None
    """Why the last process ended with `EXIT_REFUSED`, when it said so."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        self._signals: list[int] = []

    def run(self) -> int:
        """Run until told to stop by a signal, or until the command ends by itself with 0 or `EXIT_REFUSED`.

        Returns the last process's exit code, 128 + the signal's number when a signal ended it; `EXIT_INTERRUPTED` after
        Ctrl+C. To be called in the main thread: the kernel ends the worker with the thread that started it, so that
        killing the supervisor leaves no worker behind.
        """
        before = {number: signal.signal(number, self._signalled) for number in _HANDED_ON}
        try:
            code = self._run()
            return EXIT_INTERRUPTED if signal.SIGINT in self._signals and code != EXIT_REFUSED else code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        deaths = 0
        while True:
            started = time.monotonic()
            code = self._once()
            if self._stop.is_set() or code in {0, EXIT_REFUSED}:
                return code if code >= 0 else 128 - code
            deaths = 0 if time.monotonic() - started > _SETTLED_SECONDS else deaths + 1
            seconds = min(_BACKOFF_SECONDS_MAX, 0.5 * 2 ** min(deaths, 10))
            ending = f"exit code {code}" if code > 0 else f"signal {-code}"
            log.error("worker_died", pid=self._pid, reason=ending, again_in_seconds=seconds)
            if self._stop.wait(seconds):
                return code if code >= 0 else 128 - code

    def _once(self) -> int:
        reading, writing = os.pipe()
        try:
            # A group of its own: Ctrl+C reaches the supervisor alone, which hands it on once, not twice.
            process = self._process = subprocess.Popen(  # noqa: S603  ours
                self._command,
                env={**self._environment, _REFUSAL_FD: str(writing)},
                pass_fds=(writing,),
                process_group=0,
            )
            if self._stop.is_set():  # the signal came while there was nobody to hand it to
                process.terminate()
            code = process.wait()
            if code == EXIT_REFUSED:
                self.refusal = _read_refusal(reading)
            return code
        finally:
            os.close(reading)
            os.close(writing)

    @property
    def _pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        again = self._stop.is_set()
        self._stop.set()
        self._signals.append(number)
        process = self._process
        if process is None or process.poll() is not None:
            return
        # All of these ask for an end in order, for which Celery has SIGTERM: Ctrl+C would be a traceback while it
        # starts and a failure when it ends, and a terminal that went away a reason to start again. Celery takes no
        # notice of a second SIGTERM; SIGQUIT ends what is running.
        process.send_signal(signal.SIGQUIT if again or number == signal.SIGQUIT else signal.SIGTERM)


def _read_refusal(reading: int) -> Refusal | None:
    os.set_blocking(reading, False)
    try:
        said = json.loads(os.read(reading, _REFUSAL_BYTES_MAX))
    except (OSError, ValueError):  # it said nothing
        return None
    return Refusal(said["code"], said["reason"], tuple(said["frames"]))


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in this interpreter."""
    return [sys.executable, "-m", module, *arguments]
