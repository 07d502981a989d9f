"""A show's deployment: a folder with a database and a broker in it, and worker processes that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from keepstep.settings import Settings, load

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
_STOP_SECONDS = 10.0
_LOG_CHARACTERS = 2000


class ShowFailed(Exception):
    """Something was not as it must be."""


def until(look: Callable[[], T | None], seconds: float, what: str) -> T:
    """Return the first thing that `look` finds; raise `ShowFailed` saying what it was about after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            message = f"{what}: not within {seconds:g} s"
            raise ShowFailed(message)
        time.sleep(0.02)
    return found


class WorkerProcess:
    """One `keepstep worker`: a supervisor, the worker that it watches over, and the worker's pool."""

    def __init__(self, name: str, module: str, environment: dict[str, str], log: Path, *, concurrency: int) -> None:
        self.name = name
        self.log = log
        self.id = ""
        """The worker's id in the database, once it has registered."""
        self.pid = 0
        """The worker's own; the supervisor's is `supervisor.pid`."""
        command = [sys.executable, "-m", "keepstep", "worker", module, "--concurrency", str(concurrency)]
        with log.open("wb") as out:
            # A group of its own: Ctrl+C is for the show alone, which then stops its workers in order.
            self.supervisor = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
            )

    def started(self) -> bool:
        """Tell whether it is registered and at work; raise `ShowFailed` when it is gone instead."""
        if self.supervisor.poll() is not None:
            message = f"{self.name} ended with {self.supervisor.returncode}: {self.last_words()}"
            raise ShowFailed(message)
        events = self._events()
        for event in events:
            if event.get("event") == "worker_registered":
                self.id, self.pid = event["worker_id"], event["pid"]
        return any(event.get("event") == "worker_started" for event in events)

    def kill(self) -> None:
        """End it as the loss of its machine would: SIGKILL for the supervisor and for the group of the worker."""
        self.supervisor.kill()
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.supervisor.wait(_STOP_SECONDS)

    def stop(self) -> None:
        """End it in order, and by force when that takes too long."""
        if self.supervisor.poll() is not None:
            return
        try:
            self.supervisor.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ShowFailed):
                self.started()  # it may have registered since somebody looked
            self.kill()

    def last_words(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:].strip()

    def _events(self) -> list[dict[str, Any]]:
        found = []
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    found.append(event)
        return found


class Deployment:
    """A database, a broker and workers in one folder; leaving it ends every process that it started."""

    def __init__(self, folder: Path, module: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """`module`: the file whose graphs the workers carry; `environment`: what else they are told."""
        self.folder = folder
        self.module = module
        self.broker = folder / "broker"
        chosen = {
            "KEEPSTEP_DATABASE": f"sqlite:///{folder / 'keepstep.db'}",
            "KEEPSTEP_BROKER": f"file://{self.broker}",
            # The defaults (3, 10 and 2 s) suit machines; a show is watched by people.
            "KEEPSTEP_RENEW_SECONDS": "0.5",
            "KEEPSTEP_LIVENESS_WINDOW_SECONDS": "3",
            "KEEPSTEP_SWEEP_SECONDS": "0.5",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        self.environment = {**inherited, **chosen, **environment}
        self.producer_environment = {**inherited, "KEEPSTEP_BROKER": chosen["KEEPSTEP_BROKER"]}
        self.settings: Settings = load(**{name.removeprefix("KEEPSTEP_").lower(): chosen[name] for name in chosen})
        self.workers: list[WorkerProcess] = []

    def start_workers(self, count: int, *, concurrency: int, seconds: float = 60.0) -> list[WorkerProcess]:
        """Start workers and return when all of them are at work."""
        for _ in range(count):
            self.start_worker(concurrency=concurrency)
        until(lambda: all(worker.started() for worker in self.workers), seconds, "the workers' start")
        return self.workers

    def start_worker(self, *, concurrency: int) -> WorkerProcess:
        """Start one more worker and return at once."""
        number = len(self.workers) + 1
        log = self.folder / f"worker-{number}.log"
        worker = WorkerProcess(f"worker {number}", self.module, self.environment, log, concurrency=concurrency)
        self.workers.append(worker)
        return worker

    def messages(self) -> int:
        """Return how many commands and nudges are in the broker's folder, waiting or taken and not acknowledged."""
        queue = self.settings.queue
        return sum(
            len(list(self.broker.glob(pattern)))
            for name in (f"{queue}.commands", f"{queue}.nudges.*")
            for pattern in (f"queues/{name}/*.msg", f"in-flight/*/{name}/*.msg")
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Nobody may interrupt the end: a second Ctrl+C would leave processes behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for worker in self.workers:
                if worker.supervisor.poll() is None:
                    worker.supervisor.terminate()
            for worker in self.workers:
                worker.stop()
        finally:
            signal.signal(signal.SIGINT, before)
