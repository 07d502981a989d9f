"""A deployment whose workers die where a test wants them to, and are replaced."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil

from tests.crash import evidence
from tests.crash.outside import Outside
from tests.worker.deployment import Deployment, Worker, eventually


class Crew:
    """One worker at a time; the one that is killed is followed by another."""

    def __init__(self, deployment: Deployment, outside: Outside, mark: Path) -> None:
        self.deployment = deployment
        self.outside = outside
        self._mark = mark
        self._next = Path(f"{mark}.next")
        self._relief: threading.Thread | None = None
        self._failures: list[BaseException] = []

    @property
    def worker(self) -> Worker:
        """The worker that is on duty."""
        alive = [worker for worker in self.deployment.workers if worker.process.poll() is None]
        return alive[-1] if alive else self.deployment.worker(concurrency=1)

    def arm(self, point: str, at: str = "", *, then: Any = None) -> None:
        """Have the next process that reaches the point there die; when it has, call `then` in a thread."""
        self._mark.unlink(missing_ok=True)
        self._next.write_text(f"{point}@{at}", encoding="utf-8")
        self._failures.clear()

        def relieve() -> None:
            try:
                self.reached()
                if then is not None:
                    then()
            except BaseException as error:  # noqa: BLE001  shown by `died`
                self._failures.append(error)

        self._relief = threading.Thread(target=relieve, daemon=True)
        self._relief.start()

    def reached(self) -> list[str]:
        """Wait until somebody has died at the point; return its name, the detail and the pid."""
        return eventually(lambda: self._mark.exists() and self._mark.read_text().split(), what="the crash point")

    def died(self) -> tuple[str, int]:
        """Return the point's name and the pid of who has died there; nobody dies from now on."""
        assert self._relief is not None
        self._relief.join(60)
        assert not self._relief.is_alive()
        if self._failures:
            raise self._failures[0]
        name, *_, pid = self.reached()
        eventually(lambda: not psutil.pid_exists(int(pid)) or _is_zombie(int(pid)), what="the death")
        self._next.unlink()
        return name, int(pid)

    def replaced(self) -> None:
        """Put a new worker in the place of a dead one, and let the time pass in which its nudges are waited for."""
        self.deployment.worker(concurrency=1)
        evidence.hasten(self.deployment)

    def hasten(self) -> None:
        """Let the time pass in which a nudge is waited for."""
        evidence.hasten(self.deployment)


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
