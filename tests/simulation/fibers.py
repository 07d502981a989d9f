"""Fibers: pieces of real code that stop where they are told to and go on when they are told to, one at a time.

Each runs in a thread of its own, handed a baton: exactly one thread runs at any moment and the operating system decides
nothing, so the same decisions make the same schedule. Threads are kept and used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from keepstep.crashpoints import Died


class SimulatedCrash(Died):
    """The process that runs this code was killed here. Nothing may catch it, and nothing that it unwinds may write."""


class _Carrier:
    """A thread that runs one fiber after another."""

    idle: list[_Carrier] = []  # noqa: RUF012  shared on purpose

    def __init__(self) -> None:
        self.job: Callable[[], None] | None = None
        self.go = threading.Lock()
        self.go.acquire()
        threading.Thread(target=self._loop, name="simulated-fiber", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self.go.acquire()
            if self.job is not None:
                self.job()


class Fiber:
    """Code under way. `resume` runs it until it stops or ends; only its own code calls `stop_here`."""

    def __init__(self, name: str, body: Callable[[], object]) -> None:
        self.name = name
        self.ended = False
        self.error: BaseException | None = None
        self.wake_at = 0.0
        """Not to be resumed before this moment of the machine's clock."""
        self._body = body
        self._killed = False
        self._carrier: _Carrier | None = None
        self._back = threading.Lock()
        self._back.acquire()

    @property
    def killed(self) -> bool:
        """Whether its process is gone: whatever it still does is an artefact of unwinding."""
        return self._killed

    def resume(self) -> None:
        """Run on, until the code stops or ends."""
        if self._carrier is None:
            self._carrier = _Carrier.idle.pop() if _Carrier.idle else _Carrier()
            self._carrier.job = self._run
        self._carrier.go.release()
        self._back.acquire()
        if self.ended:
            _Carrier.idle.append(self._carrier)

    def kill(self) -> None:
        """End it where it stands, as SIGKILL would; not from within."""
        self._killed = True
        if self._carrier is None:
            self.ended = True
        elif not self.ended:
            self.resume()

    def stop_here(self) -> None:
        """Hand the baton back; return when resumed."""
        carrier = self._carrier
        if carrier is None:
            message = "only a fiber's own code stops it"
            raise RuntimeError(message)
        self._back.release()
        carrier.go.acquire()
        self.check_alive()

    def die(self) -> None:
        """End it here, from within, as SIGKILL would."""
        self._killed = True
        raise SimulatedCrash

    def check_alive(self) -> None:
        """Raise `SimulatedCrash` when the process of this code was killed."""
        if self._killed:
            raise SimulatedCrash

    def _run(self) -> None:
        try:
            self.check_alive()
            self._body()
        except BaseException as error:  # noqa: BLE001  the world looks at it
            self.error = error
        self.ended = True
        self._back.release()
