"""The three that are compared: each is a real worker process with its own empty database and an empty Redis."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import redis
from celery import Celery

import keepstep
from benchmarks import lean
from keepstep.errors import KeepstepError
from keepstep.settings import load
from keepstep.store.engine import Store
from keepstep.store.migrate import upgrade
from tests.servers import PostgreSQLServer, RedisServer

_ROOT = Path(__file__).parent.parent
_START_SECONDS = 60.0
FOR_EVER = 1_000_000_000
"""More steps than a benchmark lasts."""


class Servers:
    """PostgreSQL and Redis of this run alone, with what PostgreSQL's defaults are: fsync on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis = RedisServer()
        try:
            self.postgresql = PostgreSQLServer()
        except BaseException:
            self.redis.stop()
            raise
        self._template = ""

    def stop(self) -> None:
        """Stop both."""
        try:
            self.postgresql.stop()
        finally:
            self.redis.stop()

    def configure(self, setting: str, value: str | None) -> None:
        """Set a parameter of PostgreSQL that needs a restart (None: its default), and restart it."""
        change = f"RESET {setting}" if value is None else f"SET {setting} = '{value}'"
        self.postgresql.execute(f"ALTER SYSTEM {change}")
        self.postgresql.restart()

    def migrated_database(self) -> str:
        """Return a new database with Keepstep's tables."""
        if not self._template:
            self._template = self.postgresql.create_database()
            store = Store.open(self.postgresql.url(self._template))
            upgrade(store)
            store.dispose()
        return self.postgresql.create_database(template=self._template)

    def results(self) -> str:
        """Return the URL of the Redis database for results."""
        return f"{self.redis.url.rpartition('/')[0]}/1"


class Contestant:
    """One of the compared: its worker's command, how chains are started, how many steps were done."""

    name = ""
    options: Sequence[str] = ()

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.environment = {"BENCH_BROKER": servers.redis.url}

    def command(self) -> list[str]:
        """Return the command that runs the worker."""
        return [sys.executable, "-m", "celery", "-A", f"benchmarks.{self.name}", "worker", "-c", "2", *self.options]

    def feed(self, chains: int) -> None:
        """Start that many chains."""
        raise NotImplementedError

    def steps(self) -> int:
        """Return how many steps were done so far."""
        raise NotImplementedError

    def close(self) -> None:
        """Close connections."""


class Stock(Contestant):
    """Celery with events and a Redis result backend, otherwise as it comes."""

    name = "stock"
    options = ("-E",)

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers)
        self.environment["BENCH_RESULTS"] = servers.results()
        self._results = redis.Redis.from_url(servers.results())

    def feed(self, chains: int) -> None:
        """Start that many chains."""
        with Celery("stock", broker=self.servers.redis.url) as app:
            for chain in range(chains):
                app.send_task("stock.hop", (chain, 0))

    def steps(self) -> int:
        """Return how many results there are: each task leaves one."""
        return int(self._results.dbsize())  # type: ignore[arg-type]  # redis-py types sync and async as one

    def close(self) -> None:
        """Close connections."""
        self._results.close()


class OnPostgreSQL(Contestant):
    """A contestant with a database of its own."""

    count = ""

    def __init__(self, servers: Servers, database: str) -> None:
        super().__init__(servers)
        self.database = database
        self._link = psycopg2.connect(self.dsn)
        self._link.autocommit = True

    @property
    def dsn(self) -> str:
        """The database, as libpq wants it."""
        return f"host={self.servers.postgresql.socket_folder} user=postgres dbname={self.database}"

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement on the contestant's database."""
        with self._link.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def steps(self) -> int:
        """Return how many steps were committed."""
        return int(self.query(self.count)[0][0])

    def close(self) -> None:
        """Close connections, drop the database."""
        self._link.close()
        self.servers.postgresql.drop_database(self.database)


class Lean(OnPostgreSQL):
    """Lean Celery with one transaction per task."""

    name = "lean"
    options = ("--loglevel", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat")
    count = "SELECT coalesce(sum(n), 0) FROM chain"

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers, servers.postgresql.create_database())
        self.environment["BENCH_DATABASE"] = self.dsn
        self.query(lean.SCHEMA)

    def feed(self, chains: int) -> None:
        """Start that many chains."""
        self.query(f"INSERT INTO chain SELECT number, 0 FROM generate_series(0, {chains - 1}) AS number")  # noqa: S608
        for chain in range(chains):
            lean.publish(chain, self.servers.redis.url)


class Keepstep(OnPostgreSQL):
    """Threads of a graph with one node that goes round, in `sync` durability."""

    name = "keepstep"
    # The input's checkpoint has seq 0, so seq is the number of steps.
    count = "SELECT coalesce(sum(seq), 0) FROM keepstep_thread WHERE seq > 0"

    def __init__(self, servers: Servers, *, until: int = FOR_EVER) -> None:
        super().__init__(servers, servers.migrated_database())
        self._until = until
        self.environment |= {
            "KEEPSTEP_BROKER": servers.redis.url,
            "KEEPSTEP_DATABASE": servers.postgresql.url(self.database),
            "KEEPSTEP_GRAPHS": str(_ROOT / "benchmarks" / "loop.py"),
        }

    def command(self) -> list[str]:
        """Return the command that runs the worker: Keepstep's own app and defaults."""
        return [sys.executable, "-m", "celery", "-A", "keepstep.tasks", "worker", "-c", "2", "--loglevel", "INFO"]

    def feed(self, chains: int) -> None:
        """Start that many threads; they are accepted when this returns."""
        settings = load(broker=self.servers.redis.url)
        with keepstep.Client(settings=settings) as client:
            receipts = [
                client.start("loop", f"chain-{chain}", {"n": 0, "until": self._until}, step_limit=FOR_EVER)
                for chain in range(chains)
            ]
            for receipt in receipts:
                receipt.accepted(timeout=_START_SECONDS)


class Worker:
    """A running worker process."""

    def __init__(self, contestant: Contestant, log: Path) -> None:
        self._log = log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        path = os.pathsep.join(filter(None, [str(_ROOT), inherited.get("PYTHONPATH")]))
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                contestant.command(),
                env={**inherited, **contestant.environment, "PYTHONPATH": path},
                cwd=log.parent,
                stdout=out,
                stderr=out,
                process_group=0,
            )

    def log_end(self) -> str:
        """Return the last lines of its log."""
        return self._log.read_text(errors="replace")[-3000:]

    def processor_seconds(self) -> float:
        """Return the processor time that the worker and its pool have used so far."""
        main = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def memory_bytes(self) -> int:
        """Return the resident memory of the worker and its pool, what they share counted for each."""
        main = psutil.Process(self._process.pid)
        return sum(process.memory_info().rss for process in (main, *main.children(recursive=True)))

    def until(self, reached: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Wait until something is so; raise with the worker's log when it died or the time is over."""
        deadline = time.monotonic() + seconds
        while not reached():
            if self._process.poll() is not None or time.monotonic() > deadline:
                message = f"{what}: not within {seconds:g} s; the worker's log:\n{self.log_end()}"
                raise RuntimeError(message)
            time.sleep(0.02)

    def stop(self) -> None:
        """End it at once, pool and all: whatever it is doing is no longer of interest."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def working(contestant: Contestant, *, chains: int) -> Iterator[Worker]:
    """Run a contestant's worker with chains under way, on an empty Redis; clean up at the end of the block."""
    servers = contestant.servers
    servers.redis.flush()
    worker = Worker(contestant, servers.folder / f"{contestant.name}.log")
    try:
        try:
            contestant.feed(chains)
        except KeepstepError as error:
            message = f"{contestant.name} takes nothing in: {error}; the worker's log:\n{worker.log_end()}"
            raise RuntimeError(message) from error
        worker.until(lambda: contestant.steps() > chains, seconds=_START_SECONDS, what="the first steps")
        yield worker
    finally:
        worker.stop()
        contestant.close()
