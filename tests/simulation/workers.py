"""Simulated workers: real runtimes, real liveness and sweeping, processes that can be stopped, killed and forgotten."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from keepstep import settings
from keepstep.errors import DatabaseUnavailable
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.environment import Runtime
from keepstep.store import workers
from keepstep.store.admission import Admission, withhold
from keepstep.store.leases import Owner, queue_of
from keepstep.tasks.events import Events
from keepstep.tasks.forkgate import Gate
from keepstep.tasks.liveness import Liveness
from keepstep.tasks.registration import Registration
from keepstep.tasks.room import Room
from keepstep.tasks.sweeper import Sweeper
from tests.simulation.agents import CLOCKED, GRAPHS, LIMITS, SPECIALISTS
from tests.simulation.fibers import Fiber
from tests.simulation.seams import SimulatedWatchdog

if TYPE_CHECKING:
    from tests.simulation.world import World

SETTINGS = settings.Settings(node_timeout_seconds=30.0, timeout_grace_seconds=2.0, parallel_inline_max=2, step_limit=40)
ROOM_MAX = 8
"""Nudges of one graph in the broker: few, so that rows have to wait for room."""


def running_max() -> Mapping[str, int]:
    """Return the limits on what runs at once."""
    return LIMITS


Key = tuple[str, str]


@functools.cache
def carried() -> dict[Key, CompiledGraph]:
    """Return the graphs that a worker carries, unless it is of another release."""
    compiled = [graph.compile() for graph in (*GRAPHS.values(), *SPECIALISTS.values(), *CLOCKED.values())]
    return {(graph.name, graph.version): graph for graph in compiled}


class Attempt:
    """What a pool child does with one nudge."""

    def __init__(self, began_at: int) -> None:
        self.began_at = began_at
        """Serial number of the database's last commit when it began."""
        self.nonces: list[str] = []
        self.overdue: tuple[float, Callable[[], None]] | None = None
        """When the watchdog's patience ends, and what it does then."""


class Process:
    """A process with at most one thing under way: a pool child, or one of its worker's services."""

    def __init__(self, worker: SimulatedWorker, name: str) -> None:
        self.worker = worker
        self.name = name
        self.fiber: Fiber | None = None
        self.attempt: Attempt | None = None
        self.stopped = False
        """Whether it is stopped by a signal, alone."""

    @property
    def runs(self) -> bool:
        """Whether the machine gives it time."""
        return not self.stopped and not self.worker.stopped


class Child(Process):
    """A pool child: runs steps under a pid of its own."""

    def __init__(self, worker: SimulatedWorker, pid: int) -> None:
        super().__init__(worker, f"{worker.id}.{pid}")
        self.pid = pid
        world = worker.world
        self.runtime = Runtime(
            store=world.store,
            graphs=worker.graphs,
            settings=SETTINGS,
            owner=Owner(worker.id, pid),
            publish=world.broker.publish,
            end_process=lambda: world.kill_child(self),
            watchdog=SimulatedWatchdog(world),
            running_max=running_max,
            _codecs=world.codecs,
        )


class SimulatedEvents(Events):
    """The service that publishes events, onto a list; the broker may fail it."""

    world: World

    def _connected(self) -> Any:
        return self

    def publish(self, body: bytes, key: str, **_properties: Any) -> None:
        """Publish an event, or fail to."""
        event = json.loads(body)
        self.world.require(key.startswith(f"{event['event']}."), "a foreign routing key", key)
        if not self.world.healing and self.world.random.random() < self.world.broker.loss / 4:
            raise ConnectionResetError
        self.world.heard.append(event)


class SimulatedWorker:
    """A worker: a main process with its services, and pool children."""

    def __init__(self, world: World, number: int, children: int, graphs: Mapping[Key, CompiledGraph]) -> None:
        self.world = world
        self.id = f"w{number}"
        self.graphs = graphs
        self.stopped = False
        self.alive = True
        self.ready = False
        self.renewed = False
        self._pids = number * 100
        self.dead: list[int] = []
        """Pids of children that died and were not yet missed."""
        self.commands = Process(self, f"{self.id}.commands")
        self.sweeps = Process(self, f"{self.id}.sweeper")
        self.reaps = Process(self, f"{self.id}.children")
        self.registration = Registration.__new__(Registration)
        self._fill(
            self.registration,
            _window_seconds=SETTINGS.liveness_window_seconds,
            _carried=sorted(self.graphs),
            _concurrency=children,
            worker_id=self.id,
        )
        self.children: list[Child] = []
        for _ in range(children):
            self.fork()

    @staticmethod
    def _fill(service: object, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(service, name, value)

    @property
    def processes(self) -> list[Process]:
        """Everything of it that may have something under way."""
        return [*self.children, self.commands, self.sweeps, self.reaps]

    @property
    def is_healthy(self) -> bool:
        """Whether it has renewed lately, by the machines' time."""
        if not self.renewed or self.stopped:
            return False
        return self.world.monotonic() - self.liveness._renewed_at < SETTINGS.liveness_window_seconds

    def fork(self) -> None:
        """Add a pool child."""
        self._pids += 1
        self.children.append(Child(self, self._pids))

    def begin(self) -> None:
        """Register, and start the services."""
        world = self.world
        self.registration.register(world.store)
        # As the services' constructors do, but with the world's store and without threads.
        self.liveness = Liveness.__new__(Liveness)
        now = world.monotonic()
        self._fill(
            self.liveness,
            gate=Gate(),
            _settings=SETTINGS,
            _registration=self.registration,
            _store=world.store,
            _window=SETTINGS.liveness_window_seconds,
            _steady_since=now,
            _renewed_at=now,
            _database_ahead=None,
            _clock_skew=None,
        )
        with contextlib.suppress(DatabaseUnavailable):  # as `Liveness.start` does
            self.liveness.work()
        self.sweeper = Sweeper.__new__(Sweeper)
        self._fill(
            self.sweeper,
            gate=Gate(),
            _settings=SETTINGS,
            _worker_id=self.id,
            _liveness=self.liveness,
            _room=Room(
                world.broker,
                [queue_of(*key) for key in self.graphs],
                concurrency=len(self.children),
                nudges_max=ROOM_MAX,
                withheld=lambda nudges: withhold(world.store, nudges),
                clock=world.monotonic,
            ),
            _store=world.store,
            _admission=Admission(world.store, self.graphs),
            _running_max=running_max,
            _responses=None,  # no model is asked here
            _sweep_at=0.0,
        )
        self.events = SimulatedEvents.__new__(SimulatedEvents)
        self._fill(
            self.events,
            gate=Gate(),
            world=world,
            _settings=SETTINGS,
            _worker_id=self.id,
            _store=world.store,
            _announcer=None,
            _connection=None,
        )
        self.ready = True

    def sweep(self) -> None:
        """Sweep, and publish what happened."""
        self.sweeper._sweep_at = 0.0
        self.sweeper.work()
        self.events.work()

    def renew(self, *, steadily: bool) -> None:
        """Renew once; `steadily`: as the last of many renewals, one every few seconds."""
        if steadily:
            self.liveness._renewed_at = self.world.monotonic() - 1.0
        self.liveness.work()
        self.renewed = True

    def release(self) -> None:
        """Miss a child that died: give its leases back, fork another."""
        pid = self.dead[0]
        nudges = workers.release_child(self.world.store, self.id, pid, reason="signal 9 (SIGKILL)")
        self.dead.remove(pid)
        self._require_nothing_held("AND lease_child = ?", pid)
        self.world.broker.publish(nudges)

    def leave(self) -> None:
        """Deregister in good order."""
        nudges = workers.leave(self.world.store, self.id)
        self._require_nothing_held("")
        self.world.broker.publish(nudges)

    def _require_nothing_held(self, condition: str, *values: object) -> None:
        for table in ("keepstep_thread", "keepstep_node_run"):
            query = f"SELECT 1 FROM {table} WHERE lease_worker = ? {condition}"
            held = self.world.store.query(query, self.id, *values)
            self.world.require(not held, "the dead hold a lease", f"{self.id} {values}")
