"""A deployment for tests: settings, real worker processes, a client, and looks at what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kombu
import psutil
import sqlalchemy

import keepstep
from keepstep import broker
from keepstep.settings import load

AGENTS = Path(__file__).with_name("agents.py")
_ROOT = Path(__file__).parents[2]


def eventually(look: Callable[[], Any], *, seconds: float = 30.0, what: str = "it") -> Any:
    """Return the first true value of `look`; fail when there was none in time."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            message = f"{what} did not come about within {seconds} s; last seen: {found!r}"
            raise AssertionError(message)
        time.sleep(0.01)


class Worker:
    """A worker process: Celery's main process, or its supervisor."""

    supervised = False

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=out, stderr=out, process_group=0
            )
        self.pid = self.process.pid

    @property
    def main_pid(self) -> int:
        """The pid of Celery's main process."""
        if not self.supervised:
            return self.pid
        return eventually(lambda: [p.pid for p in psutil.Process(self.pid).children()], what="the worker's start")[0]

    def children(self) -> list[int]:
        """The pids of the pool's processes."""
        return [child.pid for child in psutil.Process(self.main_pid).children()]

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of the log, or those of one event."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if name is None or event.get("event") == name:
                    found.append(event)
        return found

    def ready(self, seconds: float = 60.0) -> Worker:
        """Wait until the worker has told that it is there, with its pool."""

        def look() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            return bool(self.events("worker_started"))

        eventually(look, seconds=seconds, what="the worker's start")
        return self

    def kill(self) -> None:
        """End it as a machine's loss does: the children with it."""
        pids = [self.pid, *[p.pid for p in psutil.Process(self.pid).children(recursive=True)]]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def stop(self, seconds: float = 20.0) -> int:
        """Ask it to end in order; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            message = f"the worker did not stop: {self.log.read_text()[-4000:]}"
            raise AssertionError(message) from None


class Deployment:
    """Workers over one broker and one database."""

    def __init__(
        self, folder: Path, database: str, broker_url: str, looked_at: str | None = None, **overrides: Any
    ) -> None:
        """`looked_at`: where the test finds the database when the workers reach it through a proxy."""
        self.folder = folder
        settings = {
            "database": database,
            "broker": broker_url,
            "graphs": str(AGENTS),
            "renew_seconds": 0.3,
            "liveness_window_seconds": 2.0,
            "sweep_seconds": 0.3,
            **overrides,
        }
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")},
            **{f"KEEPSTEP_{name.upper()}": str(value) for name, value in settings.items()},
            "KEEPSTEP_TEST_FOLDER": str(folder),
            # Graphs may share what stands in other test folders; whoever runs the tests may have put a package before.
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT)]),
        }
        self.settings = load(**{k: v for k, v in settings.items() if k != "graphs"})
        self.workers: list[Worker] = []
        self.client = keepstep.Client(settings=self.settings, confirm=True, timeout=20)
        self._engine = sqlalchemy.create_engine(looked_at or database)

    # --- processes --------------------------------------------------------------------------------------------------

    def launch(self, *options: str, concurrency: int = 1, pool: str = "prefork", **environment: str) -> Worker:
        """Start a worker by Celery's own command; return at once."""
        command = [sys.executable, "-m", "celery", "-A", "keepstep.tasks", "worker", "--loglevel", "INFO"]
        command += ["--pool", pool, "--concurrency", str(concurrency), *options]
        return self._started(command, environment)

    def worker(self, *, concurrency: int = 1, pool: str = "prefork", **environment: str) -> Worker:
        """Start a worker and wait until it is ready."""
        return self.launch(concurrency=concurrency, pool=pool, **environment).ready()

    def supervised(self, *, concurrency: int = 1, pool: str = "prefork") -> Worker:
        """Start a supervised worker and wait until it is ready."""
        program = (
            "from keepstep.settings import load; from keepstep.tasks import worker; import sys; "
            f"sys.exit(worker.main(load(), concurrency={concurrency}, pool={pool!r}))"
        )
        worker = self._started([sys.executable, "-c", program], {})
        worker.supervised = True
        return worker.ready()

    def _started(self, command: Sequence[str], environment: dict[str, str]) -> Worker:
        log = self.folder / f"worker-{len(self.workers)}.log"
        worker = Worker(command, {**self.environment, **environment}, self.folder, log)
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        """End everything."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()
        self.client.close()
        self._engine.dispose()

    # --- work -------------------------------------------------------------------------------------------------------

    def start(self, graph: str, *threads: str, **state: Any) -> None:
        """Start threads; each is accepted when this returns."""
        for thread in threads:
            self.client.start(graph, thread, state)

    def touch(self, name: str) -> None:
        """Make the file that some node waits for."""
        (self.folder / name).touch()

    # --- looking ----------------------------------------------------------------------------------------------------

    def notes(self, kind: str) -> list[list[str]]:
        """Return the words of each line that nodes wrote: those of the node, then pid and time."""
        path = self.folder / kind
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def counts(self, kind: str) -> Counter[str]:
        """Return how often nodes wrote each line of a kind."""
        return Counter(" ".join(words[:-2]) for words in self.notes(kind))

    def noted(self, kind: str, line: str, times: int = 1, seconds: float = 60.0) -> list[list[str]]:
        """Wait until nodes wrote a line of a kind that often; return the words of those lines."""

        def look() -> list[list[str]] | None:
            found = [words for words in self.notes(kind) if " ".join(words[:-2]) == line]
            return found if len(found) >= times else None

        return eventually(look, seconds=seconds, what=f"{times} x {line!r}")

    def started(self, line: str, times: int = 1) -> list[list[str]]:
        """Wait until a node has started that often."""
        return self.noted("starts", line, times)

    def holding(self, thread: str, times: int = 1) -> list[list[str]]:
        """Wait until a thread's held node has recorded its effect and waits to be let go."""
        return self.noted("holding", thread, times)

    @contextlib.contextmanager
    def looking_at(self, queue: kombu.Queue) -> Iterator[Callable[[], int]]:
        """Give how to ask how many messages lie in a queue of the broker; 0 when there is no such queue."""
        settings = self.settings
        with broker.connection(settings.broker, commands=False, queue=settings.queue) as connection:

            def count() -> int:
                try:
                    with connection.channel() as channel:
                        return int(queue(channel).queue_declare(passive=True).message_count)
                except connection.channel_errors:
                    return 0

            yield count

    def query(self, statement: str, **params: Any) -> list[tuple[Any, ...]]:
        """Run a statement on the database."""
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sqlalchemy.text(statement), params)]

    def execute(self, statement: str, **params: Any) -> int:
        """Change rows behind everybody's back; return how many."""
        with self._engine.begin() as connection:
            return connection.execute(sqlalchemy.text(statement), params).rowcount

    def statuses(self) -> dict[str, str]:
        """Return every thread's status."""
        return dict(self.query("SELECT name, status FROM keepstep_thread"))  # type: ignore[arg-type]

    def ended(self, *threads: str, status: str = "done", seconds: float = 60.0) -> None:
        """Wait until threads have a status."""
        wanted = sqlalchemy.text("SELECT name, status FROM keepstep_thread WHERE name IN :names")
        wanted = wanted.bindparams(sqlalchemy.bindparam("names", threads, expanding=True))

        def look() -> bool:
            with self._engine.connect() as connection:
                found = dict(connection.execute(wanted).all())
            return all(found.get(thread) == status for thread in threads)

        try:
            eventually(look, seconds=seconds, what=f"{status} of {threads}")
        except AssertionError as error:
            rows = self.query("SELECT name, status, version, starts, deaths, error FROM keepstep_thread")
            logs = "\n".join(worker.log.read_text(errors="replace")[-3000:] for worker in self.workers)
            message = f"{error}\n{rows}\n{logs}"
            raise AssertionError(message) from None


@contextlib.contextmanager
def deployed(
    folder: Path, database: str, broker_url: str, looked_at: str | None = None, **overrides: Any
) -> Iterator[Deployment]:
    """Give a deployment that ends with the block."""
    deployment = Deployment(folder, database, broker_url, looked_at, **overrides)
    try:
        yield deployment
    finally:
        deployment.close()
