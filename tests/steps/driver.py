"""A deployment without a broker: a database, workers that are driven by hand, and a list for a queue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from sqlalchemy import text

from keepstep import settings
from keepstep.ids import new_id
from keepstep.runtime import commands, superstep
from keepstep.runtime.commands import Accepted
from keepstep.runtime.environment import Runtime
from keepstep.runtime.graph import Graph
from keepstep.runtime.history import restore
from keepstep.runtime.reader import Reader, Thread
from keepstep.store import sweep, workers
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge, Owner
from keepstep.store.schema import metadata
from tests.commands import defaults

_DEFAULTS: dict[str, dict[str, Any]] = {
    "start": defaults("start", input={}),
    "decide": defaults("decide", by="anna"),
    "signal": defaults("signal"),
    "resolve": defaults("resolve", by="anna"),
    "control": defaults("control"),
    "edit": defaults("edit", by="anna"),
    "schedule": defaults("schedule", input={}, cron="@daily"),
    "unschedule": defaults("unschedule"),
    "schedule_control": defaults("schedule_control"),
}


class Clock:
    """SQLite's time, set by the test."""

    def __init__(self) -> None:
        self.now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now


class Deployment:
    """One database with a graph, its workers, and what they put into the queue."""

    def __init__(
        self, url: str, *graphs: Graph, clock: Callable[[], float] = time.time, thread: str = "t", **options: Any
    ) -> None:
        self.url = url
        self.graphs = graphs
        self.name = thread
        self.settings = settings.load(**options)
        self._clock = clock
        self._stores: list[Store] = []
        self.store = self.open()
        self.reader = Reader(store=self.store)
        self.queue: list[Nudge] = []
        self.worker = self.worker_of(pid=1)

    # --- workers ----------------------------------------------------------------------------------------------------

    def open(self, url: str | None = None) -> Store:
        """Open another store on the database: every worker has its own."""
        store = Store.open(url or self.url, clock=self._clock)
        self._stores.append(store)
        return store

    def worker_of(self, *, pid: int, url: str | None = None, window_seconds: float = 1e6) -> Runtime:
        """Register a worker, whose only pool child has the pid."""
        compiled = [graph.compile() for graph in self.graphs]
        graphs = {(graph.name, graph.version): graph for graph in compiled}
        store = self.open(url)
        worker_id = workers.register(
            store,
            host="test",
            pid=pid,
            concurrency=1,
            graphs=list(graphs),
            release="test",
            window_seconds=window_seconds,
        )
        return Runtime(store, graphs, self.settings, Owner(worker_id, pid), self.queue.extend)

    def close(self) -> None:
        """Close every connection."""
        for store in self._stores:
            store.dispose()

    # --- commands ---------------------------------------------------------------------------------------------------

    def send(self, verb: str, *, worker: Runtime | None = None, **fields: Any) -> Accepted:
        """Have a command accepted, and queue what follows from it."""
        message = {"verb": verb, "id": new_id(), "tenant": "default", **_DEFAULTS[verb], **fields}
        accepted = commands.accept(worker or self.worker, SimpleNamespace(**message))
        self.queue += accepted.nudges
        return accepted

    def start(self, given: object = None, **fields: Any) -> Accepted:
        """Start a run of the first graph."""
        return self.send(
            "start",
            **{"graph": self.graphs[0].name, "thread": self.name, "input": {} if given is None else given, **fields},
        )

    def decide(self, verdict: str = "approve", **fields: Any) -> Accepted:
        """Decide the oldest open approval, or the one given."""
        if "approval" not in fields:
            fields["approval"] = self.approvals()[0].id
        return self.send("decide", verdict=verdict, **fields)

    def signal(self, name: str, payload: Any = None, **fields: Any) -> Accepted:
        """Send the thread a signal."""
        return self.send("signal", **{"thread": self.name, "name": name, "payload": payload, **fields})

    def control(self, action: str, **fields: Any) -> Accepted:
        """pause, resume, cancel or retry the thread."""
        return self.send("control", **{"thread": self.name, "action": action, **fields})

    def edit(self, values: Any, **fields: Any) -> Accepted:
        """Replace values in the thread's state."""
        return self.send("edit", **{"thread": self.name, "values": values, **fields})

    # --- the queue --------------------------------------------------------------------------------------------------

    def work(self, nudge: Nudge, worker: Runtime | None = None) -> bool:
        """Do what a nudge says, as the task would."""
        runtime = worker or self.worker
        if nudge.kind == "step":
            return superstep.run_step(runtime, nudge.thread_id, nudge.version)
        return superstep.run_node(runtime, nudge.thread_id, nudge.seq, nudge.run, nudge.version)

    def drain(self, worker: Runtime | None = None) -> str:
        """Work until the queue is empty; return the thread's status."""
        while self.queue:
            self.work(self.queue.pop(0), worker)
        return self.thread.status

    def drain_together(self, *runtimes: Runtime) -> str:
        """Work with several workers at once until the queue is empty."""
        lock, idle, errors = threading.Lock(), threading.Barrier(len(runtimes)), []

        def loop(runtime: Runtime) -> None:
            try:
                while True:
                    with lock:
                        nudge = self.queue.pop(0) if self.queue else None
                    if nudge is not None:
                        self.work(nudge, runtime)
                    # All are idle at once only when nobody can add to the queue any more.
                    elif idle.wait(60) is not None and not self.queue:
                        return
            except BaseException as error:  # noqa: BLE001  shown by the test's own thread
                errors.append(error)
                idle.abort()

        threads = [threading.Thread(target=loop, args=(runtime,)) for runtime in runtimes]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]
        return self.thread.status

    def sweep(self, *, takeover: bool = False, worker: Runtime | None = None) -> list[Nudge]:
        """Sweep once, and queue what was found."""
        runtime = worker or self.worker
        found = sweep.sweep(runtime.store, takeover=takeover, limit=1000)
        found += runtime.admission.look(lambda _queue: 1000, runtime.running_max()).nudges
        self.queue += found
        return found

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def thread(self) -> Thread:
        """The thread as people see it."""
        return self.reader.get(self.name)

    @property
    def error(self) -> tuple[str, str]:
        """The code and the message of the thread's error."""
        error = self.thread.error or {}
        return error.get("code", ""), error.get("message", "")

    def values(self, graph: Graph | None = None) -> dict[str, Any]:
        """The head's channels with their types, as the next step would see them."""
        compiled = (graph or self.graphs[0]).compile()
        return restore(self.worker.codec(compiled), self.reader.head_rows(self.thread.id)).channels

    def approvals(self, status: str | None = "open") -> list[Any]:
        """The thread's approvals, oldest first."""
        return self.reader.approvals(status=status)

    def effects(self) -> list[tuple[str, str, int]]:
        """(name, state, calls) of the journal, in order."""
        return [(effect.name, effect.state, effect.calls) for effect in self.reader.effects(self.name)]

    def checkpoints(self) -> list[tuple[int, str]]:
        """(seq, kind) of the history, whose chain is checked."""
        return [(checkpoint.seq, checkpoint.kind) for checkpoint in self.reader.history(self.name)]

    def execute(self, statement: str, **values: Any) -> None:
        """Change rows behind everybody's back."""
        with self.store.engine.begin() as connection:
            connection.execute(text(statement), values)

    def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table."""
        return dump(self.store)


def dump(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table but the workers', which live on their own time."""
    found = {}
    with store.engine.connect() as connection:
        for table in metadata.sorted_tables:
            if table.name == "keepstep_worker":
                continue
            rows = connection.execute(table.select()).all()
            plain = [tuple(bytes(v) if isinstance(v, memoryview) else v for v in row) for row in rows]
            found[table.name] = sorted(plain, key=repr)
    return found


@contextlib.contextmanager
def deployed(url: str, *graphs: Graph, **options: Any) -> Iterator[Deployment]:
    """A deployment, closed at the end of the block."""
    deployment = Deployment(url, *graphs, **options)
    try:
        yield deployment
    finally:
        deployment.close()
