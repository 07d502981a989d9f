"""A deployment whose workers die where a test wants them to, and are replaced."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

from tests.crash import evidence
from tests.crash.outside import Outside
from tests.worker.deployment import Deployment, Worker, eventually


class Crew:
    """Workers of a module's tests; those that are killed are followed by others."""

    def __init__(self, deployment: Deployment, outside: Outside, mark: Path) -> None:
        self.deployment = deployment
        self.outside = outside
        self._mark = mark
        self._next = Path(f"{mark}.next")
        self._relief: threading.Thread | None = None
        self._failures: list[BaseException] = []

    def workers(self, number: int) -> list[Worker]:
        """Return that many workers, which live and are on duty."""

        def alive() -> list[Worker]:
            return [worker for worker in self.deployment.workers if worker.process.poll() is None]

        missing = [self.deployment.launch(concurrency=1) for _ in range(number - len(alive()))]
        for worker in missing:
            worker.ready(60)
        while len(alive()) > number:
            alive()[0].stop()
        return alive()

    def arm(self, point: str, at: str = "") -> None:
        """Have the next process that reaches the point there die; what it was to publish is then soon found missing."""
        self._mark.unlink(missing_ok=True)
        self._next.write_text(f"{point}@{at}", encoding="utf-8")
        self._failures.clear()

        def relieve() -> None:
            try:
                self.reached()
                evidence.hasten(self.deployment)
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


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
