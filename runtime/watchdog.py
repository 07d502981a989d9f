"""The time of a node, and of the routes and reducers after it: an alarm that tells it, a watchdog if it does not hear.

An async node is cancelled by its event loop. A sync node in a process's main thread is interrupted by SIGALRM, between
two bytecodes. What hears neither, because it is in C code or in another thread, is given a grace time and then ended
with its process: nothing less ends it, and a second attempt beside a live first one would act twice at once. Where the
process is not ours to end (`graph.run` in a program), its attempt is over when it returns, and counts as timed out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from keepstep.runtime.outcome import NodeOverdue

_TICK_SECONDS = 0.25
_SOON_SECONDS = 0.001


def _raise_overdue(_number: int, _frame: FrameType | None) -> None:
    raise NodeOverdue


# The process whose alarms were ours alone when its first node ran. Asking for the handler at each node is slow: the
# signal module tries to make an enum of it.
_own_process = 0


@contextlib.contextmanager
def alarm(seconds: float, *, process_is_ours: bool = False) -> Iterator[None]:
    """Raise `NodeOverdue` in the block after that time, where the process allows it: in its main thread.

    `process_is_ours`: nobody else in this process sets alarms.
    """
    global _own_process  # noqa: PLW0603  as the handler is, this is the process's
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: object = _raise_overdue
    if not (process_is_ours and _own_process == os.getpid()):
        before = signal.getsignal(signal.SIGALRM)
        if before is not _raise_overdue:
            signal.signal(signal.SIGALRM, _raise_overdue)
        _own_process = os.getpid() if process_is_ours else 0
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if before is not _raise_overdue and before not in {signal.SIG_DFL, None}:
            signal.signal(signal.SIGALRM, before)  # type: ignore[arg-type]  # as getsignal gave it
            _own_process = 0


class CallOverdue(BaseException):
    """Raised into a call whose time is over."""


def _raise_call_overdue(_number: int, _frame: FrameType | None) -> None:
    raise CallOverdue


@contextlib.contextmanager
def call_alarm(seconds: float) -> Iterator[None]:
    """Raise `CallOverdue` in the block after that time, where `alarm` could; the node's own alarm goes on afterwards.

    When the node's time ends first, that is what ends the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    if 0 < left <= seconds:
        yield
        return
    begun = time.monotonic()
    before = signal.signal(signal.SIGALRM, _raise_call_overdue)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), _SOON_SECONDS))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold the alarm back during the block: what is being written down must not be cut in two."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Watchdog:
    """Calls back for what is still running when its time and grace are over."""

    def __init__(self) -> None:
        self._due: dict[int, tuple[float, Callable[[], None], Callable[[], None]]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, seconds: float, write_off: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
        """Call `write_off` and `end`, in another thread, if the block takes longer than that.

        `end` is called when all that are overdue together are written off, for it may end the process.
        """
        with self._lock:
            self._number += 1
            number = self._number
            self._due[number] = (time.monotonic() + seconds, write_off, end)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="keepstep-watchdog", daemon=True)
                self._thread.start()
            if not self._busy.is_set():
                self._busy.set()
        try:
            yield
        finally:
            with self._lock:
                self._due.pop(number, None)

    def _run(self) -> None:
        while True:
            self._busy.wait()
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            with self._lock:
                late = [number for number, (deadline, *_) in self._due.items() if deadline <= now]
                calls = [self._due.pop(number) for number in late]
                if not self._due:
                    # Here and not when a node ends: nodes that follow each other need not wake this thread.
                    self._busy.clear()
            for _, write_off, _ in calls:
                write_off()
            for _, _, end in calls:
                end()
