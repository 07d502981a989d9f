"""The monkey: seeded faults on processes, broker, database and connections, and how long each is felt."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil

from tests.chaos.workload import Database
from tests.rabbitmq import RabbitMQServer
from tests.servers import PostgreSQLServer, Proxy, RedisServer
from tests.worker.deployment import Deployment, Worker

_LOOK_SECONDS = 0.05
_IDLE = 0.1
_NONE_STARTS = 6
_LOST = 0.5
"""How often RabbitMQ comes back without what it had stored; Redis always does."""
_UNITS = """
SELECT 't' || id, version, status, lease_nonce, lease_child FROM keepstep_thread WHERE status = 'ready'
UNION ALL
SELECT 'n' || n.thread_id || '/' || n.seq || '/' || n.run, n.version, n.status, n.lease_nonce, n.lease_child
FROM keepstep_node_run n JOIN keepstep_thread t ON t.id = n.thread_id
WHERE n.status = 'ready' AND t.status = 'waiting' AND t.seq + 1 = n.seq
"""
_WEIGHTS = {
    "child killed": 26,
    "child stopped": 14,
    "worker killed": 8,
    "worker stopped": 10,
    "broker emptied": 12,
    "broker restarted": 6,
    "database crashed": 5,
    "database connections cut": 10,
    "broker connections cut": 9,
}
_ONLY_RABBITMQ = {"broker without memory": 8}

Unit = tuple[int, str | None]
"""The version and the lease of what is due."""


@dataclass
class Felt:
    """What a fault has hit and was not seen to go on yet."""

    kind: str
    began: float
    left: dict[str, Unit]


@dataclass
class Servers:
    """What the monkey may break."""

    deployment: Deployment
    database: Database
    postgresql: PostgreSQLServer
    broker: RedisServer | RabbitMQServer
    to_database: Proxy
    to_broker: Proxy
    window_seconds: float
    workers: int
    concurrency: int


class Recovery:
    """Looks at what faults have hit until all of it was taken up again: by a new lease, or by its next version."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._felt: list[Felt] = []
        self._stopping = threading.Event()
        self.seconds: list[tuple[str, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def due(self) -> dict[str, tuple[int, str | None, int | None]]:
        """Return what is due or under way: version, lease, and the child that holds it."""
        return {unit: (version, nonce, child) for unit, version, _, nonce, child in self._database.query(_UNITS)}

    def feel(self, kind: str, hit: dict[str, Unit]) -> None:
        """Begin to look at what a fault has hit."""
        if hit:
            with self._lock:
                self._felt.append(Felt(kind, time.monotonic(), hit))

    def stop(self) -> int:
        """Look once more and stop; return how many faults are still felt."""
        self._stopping.set()
        self._thread.join(30)
        self._look()
        return len(self._felt)

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        with self._lock:
            felt = list(self._felt)
        if not felt:
            return
        due, now = self.due(), time.monotonic()
        for fault in felt:
            fault.left = {unit: at for unit, at in fault.left.items() if not _went_on(due.get(unit), at)}
            if not fault.left:
                self.seconds.append((fault.kind, now - fault.began))
        with self._lock:
            self._felt = [fault for fault in self._felt if fault.left]


def _went_on(now: tuple[int, str | None, int | None] | None, before: Unit) -> bool:
    return now is None or now[0] != before[0] or (now[1] is not None and now[1] != before[1])


@dataclass
class Monkey:
    """Does one fault after the other, as its seed says."""

    servers: Servers
    recovery: Recovery
    random: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    _on_duty: set[int] = field(default_factory=set)
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterable[int] = field(default_factory=itertools.count)
    _restart: threading.Thread | None = None
    _failures: list[BaseException] = field(default_factory=list)

    # --- workers ----------------------------------------------------------------------------------------------------

    def alive(self) -> list[Worker]:
        """Return the workers whose main process runs."""
        return [worker for worker in self.servers.deployment.workers if worker.process.poll() is None]

    def relieve(self) -> None:
        """Let go what was stopped for long enough, and replace workers that are gone."""
        if self._failures:
            raise self._failures[0]
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        launched = self.servers.deployment.workers
        last = launched[-_NONE_STARTS:]
        # One that starts while the database is away may give up; when none can start it is not the monkey's doing.
        if len(last) == _NONE_STARTS and all(_ended_alone(worker) for worker in last):
            message = f"workers end by themselves: {last[-1].log.read_text(errors='replace')[-4000:]}"
            raise RuntimeError(message)
        for _ in range(self.servers.workers - len(self.alive())):
            self.servers.deployment.launch(concurrency=self.servers.concurrency)

    def heal(self) -> None:
        """Let everything go on."""
        if self._restart is not None:
            self._restart.join()
        for _, _, action in sorted(self._later):
            action()
        self._later.clear()
        self.relieve()

    # --- faults -----------------------------------------------------------------------------------------------------

    def strike(self) -> bool:
        """Do one fault; False when just now there is nobody whom it would hit."""
        due = self.recovery.due()
        # What is idle is hit now and then: mostly the monkey wants to be noticed.
        if not due and self.random.random() < 1 - _IDLE:
            return False
        kind = self.random.choices(list(self._weights), list(self._weights.values()))[0]
        if kind.startswith("broker") and self._restart is not None and self._restart.is_alive():
            return False
        if kind.startswith(("child", "worker")):
            families = self._families()
            groups = families if kind.startswith("worker") else [[pid] for family in families for pid in family[1:]]
            busy = {child for _, _, child in due.values()}
            if self.random.random() >= _IDLE:
                groups = [group for group in groups if busy & set(group)]
            if not groups:
                return False
            victims = self.random.choice(groups)
            self.recovery.feel(kind, {unit: at[:2] for unit, at in due.items() if at[2] in victims})
            if kind.endswith("killed"):
                _send(victims, signal.SIGKILL)
            else:
                self._stop(victims, self.random.uniform(0.1, 1.6 * self.servers.window_seconds))
        else:
            self.recovery.feel(kind, {unit: at[:2] for unit, at in due.items()})
            self._break(kind)
        self.faults[kind] += 1
        return True

    @property
    def _weights(self) -> dict[str, int]:
        return _WEIGHTS | (_ONLY_RABBITMQ if isinstance(self.servers.broker, RabbitMQServer) else {})

    def _families(self) -> list[list[int]]:
        """Return the main process and the children of each worker that is on duty."""
        found = []
        for worker in self.alive():
            if worker.pid not in self._on_duty and worker.events("worker_started"):
                self._on_duty.add(worker.pid)
            if worker.pid in self._on_duty:
                with contextlib.suppress(psutil.Error):
                    children = psutil.Process(worker.pid).children(recursive=True)
                    found.append([worker.pid, *sorted(child.pid for child in children)])
        return found

    def _stop(self, pids: list[int], seconds: float) -> None:
        _send(pids, signal.SIGSTOP)
        self._after(seconds, lambda: _send(pids, signal.SIGCONT))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(iter(self._numbers)), action))

    def _break(self, kind: str) -> None:
        servers = self.servers
        match kind:
            case "broker emptied":
                servers.broker.flush()
            case "broker restarted":
                self._restart_broker(self.random.uniform(0.0, 1.0), empty=self.random.random() < _LOST)
            case "broker without memory":
                assert isinstance(servers.broker, RabbitMQServer)
                servers.broker.alarm()
                self._after(self.random.uniform(0.5, servers.window_seconds), self._end_alarm)
            case "database crashed":
                servers.postgresql.crash()
                time.sleep(self.random.uniform(0.0, 1.0))
                servers.postgresql.start()
            case "database connections cut":
                servers.to_database.cut()
            case "broker connections cut":
                servers.to_broker.cut()

    def _restart_broker(self, seconds: float, *, empty: bool) -> None:
        """Kill the broker and bring it back, which takes RabbitMQ seconds: other things break meanwhile."""
        broker = self.servers.broker
        broker.kill()

        def back() -> None:
            try:
                time.sleep(seconds)
                broker.start(empty=empty) if isinstance(broker, RabbitMQServer) else broker.start()
            except BaseException as error:  # noqa: BLE001  raised by `relieve`
                self._failures.append(error)

        self._restart = threading.Thread(target=back, daemon=True)
        self._restart.start()

    def _end_alarm(self) -> None:
        if self._restart is not None:
            self._restart.join()
        assert isinstance(self.servers.broker, RabbitMQServer)
        self.servers.broker.end_alarm()


def _ended_alone(worker: Worker) -> bool:
    return worker.process.poll() not in {None, -signal.SIGKILL}


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
