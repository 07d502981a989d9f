"""What is to be done under the monkey: producers that start threads and send signals, and an operator who decides."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlalchemy.exc import DBAPIError

import keepstep
from keepstep.errors import BrokerUnavailable, KeepstepError, NotConfirmed

_PRODUCERS = 4
_OPERATOR_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """One thread to be run, and what it must have done when it is done."""

    graph: str
    thread: str
    log: tuple[str, ...]
    paid: tuple[str, ...]
    """What it must have done outside exactly once."""
    read: tuple[str, ...]
    """What it must have done outside at least once, under one key."""


_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "order": (("price", "payment", "ship"), ("payment",), ("price", "ship")),
    "tour": (("seat0", "seat1", "seat2", "toast"), ("seat0", "seat1", "seat2"), ("toast",)),
    "permit": (("rules", "=approve", "fee"), ("fee",), ("rules",)),
    "parcel": (("=there", "duty"), ("duty",), ()),
}


def jobs(count: int) -> list[Job]:
    """Return that many jobs, of all graphs in turn."""
    found = []
    for number in range(count):
        graph = list(_NAMES)[number % len(_NAMES)]
        told, paid, read = _NAMES[graph]
        thread = f"{graph}-{number}"
        log = tuple(each[1:] if each.startswith("=") else f"{each} of {thread}" for each in told)
        found.append(Job(graph, thread, log, paid, read))
    return found


class Database:
    """The database as the harness looks at it: it waits while the database is away."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine = sqlalchemy.create_engine(url, pool_size=10)

    def query(self, statement: str, *, seconds: float = 60.0, **params: Any) -> list[tuple[Any, ...]]:
        """Run a statement; try again while the database is away."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                with self._engine.connect() as connection:
                    return [tuple(row) for row in connection.execute(sqlalchemy.text(statement), params)]
            except DBAPIError:
                self._engine.dispose()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """Close its connections."""
        self._engine.dispose()


class Workload:
    """Producers and an operator, each in a thread of its own, who insist until they are told that they were heard."""

    def __init__(self, settings: keepstep.Settings, database: Database) -> None:
        self._client = keepstep.Client(settings=settings, confirm=True, timeout=6)
        self._database = database
        self._asked: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.begun: list[Job] = []
        self.accepted: list[Job] = []
        self.unanswered = 0
        """Jobs of which no worker has said yet that it has them."""
        self.refused: list[str] = []
        self.counts: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._produce, daemon=True) for _ in range(_PRODUCERS)]
        self._threads.append(threading.Thread(target=self._operate, daemon=True))
        for each in self._threads:
            each.start()

    def begin(self, job: Job) -> None:
        """Have a job started."""
        with self._lock:
            self.begun.append(job)
            self.unanswered += 1
        self._asked.put(job)

    def stop(self) -> None:
        """End all of them."""
        self._stopping.set()
        for _ in range(_PRODUCERS):
            self._asked.put(None)
        for each in self._threads:
            each.join(30)
        self._client.close()

    def _produce(self) -> None:
        while (job := self._asked.get()) is not None:
            started = self._insist(lambda job=job: self._client.start(job.graph, job.thread, {}, request_id=job.thread))
            if started and job.graph == "parcel":
                started = self._insist(
                    lambda job=job: self._client.signal(job.thread, "arrived", "there", id=f"arrived-{job.thread}")
                )
            with self._lock:
                self.unanswered -= 1
                if started:
                    self.accepted.append(job)

    def _insist(self, send: Callable[[], object]) -> bool:
        """Send until it is accepted; False when it was refused or there is no more time."""
        while not self._stopping.is_set():
            try:
                send()
            except (BrokerUnavailable, NotConfirmed):
                self.counts["sent again"] += 1
            except KeepstepError as error:
                self.refused.append(f"{error.code}: {error.message}")
                return False
            else:
                return True
        return False

    def _operate(self) -> None:
        while not self._stopping.wait(_OPERATOR_SECONDS):
            for (approval,) in self._database.query("SELECT id FROM keepstep_approval WHERE status = 'open'"):
                if self._stopping.is_set():
                    return
                try:
                    self._client.approve(approval, by="anna")
                    self.counts["decided"] += 1
                except (BrokerUnavailable, NotConfirmed):
                    self.counts["sent again"] += 1
                except KeepstepError as error:
                    if error.code != "approval_closed":
                        self.refused.append(f"{error.code}: {error.message}")
