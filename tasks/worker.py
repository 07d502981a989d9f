"""The worker: what Celery's worker does besides running tasks, and how to start one.

In the main process, beside Celery's loop, each in a thread of its own: `liveness` renews the worker's row, `children`
releases what a dead pool child held, `sweeper` finds due threads that nobody runs, `commands` takes in what people
and programs want, `events` publishes what happened, and `relay` sends what producers have written to an outbox. The
pool runs nudges, nothing else.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import structlog
from celery import bootsteps
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool

from keepstep import broker, places
from keepstep import settings as settings_module
from keepstep.errors import DatabaseUnavailable, InvalidSettings, KeepstepError
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.environment import Runtime
from keepstep.settings import Settings
from keepstep.store import admission, migrate, workers
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge, Owner, queue_of
from keepstep.tasks import carried, logs, process
from keepstep.tasks.children import Children
from keepstep.tasks.commands import Commands
from keepstep.tasks.config import default_queue
from keepstep.tasks.events import Events
from keepstep.tasks.liveness import Liveness
from keepstep.tasks.publish import Publisher
from keepstep.tasks.registration import Registration
from keepstep.tasks.relay import Relay
from keepstep.tasks.room import Room
from keepstep.tasks.service import Service, stop
from keepstep.tasks.supervise import EXIT_REFUSED, Refusal, Supervisor, python, refused
from keepstep.tasks.sweeper import Sweeper

log = structlog.get_logger("keepstep.worker")

_CONNECT_AGAIN_SECONDS_MAX = 5.0
_COLLECT_SECONDS = 0.2
_LIMITS = {
    "threads": "a pool of threads can interrupt no node: one that overstays its timeout is ended with its worker, "
    "so something must start it again (keepstep worker does); prefork ends one child",
    "solo": "a node that overstays its timeout in code that hears nothing is ended with the whole worker, so something "
    "must start that again (keepstep worker does); prefork ends one child",
}
"""What a pool cannot do for a node's timeout."""


class KeepstepStep(bootsteps.StartStopStep):
    """Adds Keepstep's services to a Celery worker.

    It starts after the pool, so that the first children are forked from a process without threads, and is therefore
    stopped before it: `stop` drains the pool itself, because running tasks need this worker's leases to stay alive.
    """

    requires = ("celery.worker.components:Pool",)

    def create(self, parent: Any) -> None:
        """Register the worker, before there are children; end the process when it cannot work as configured."""
        try:
            self._create(parent)
        except KeepstepError as error:
            _refuse(error)

    def _create(self, parent: Any) -> None:
        settings = settings_module.load()
        self._check_pool(parent)
        places.check(settings)
        graphs = carried.load(settings.graphs)
        self._store = _prepared(settings)
        _consume(parent.app, settings, graphs)
        self._registration = Registration(settings, self._store, graphs, parent.concurrency)
        worker_id = self._registration.worker_id
        self._publisher = Publisher(settings)
        pool_size = parent.concurrency if issubclass(parent.pool_cls, ThreadPool) else 1
        process.begin(settings, graphs, worker_id, pool_size)

        liveness = Liveness(settings, self._registration)
        room = Room(
            self._publisher,
            [queue_of(*key) for key in graphs],
            concurrency=parent.concurrency,
            nudges_max=settings.queue_nudges_max,
            withheld=self._withheld,
        )
        self._sweeper = Sweeper(settings, graphs.values(), worker_id, liveness, room)
        self._receiving: list[Service] = [
            self._sweeper,
            Commands(settings, _own_runtime(settings, graphs, worker_id, room.publish)),
            Events(settings, worker_id, self._store),
        ]
        self._receiving += [Relay(settings, url) for url in settings.outboxes]
        self._living: list[Service] = [liveness]
        if issubclass(parent.pool_cls, PreforkPool):
            self._living.append(Children(settings, worker_id, _processes_of(parent), room.publish))
        else:
            kind = "threads" if issubclass(parent.pool_cls, ThreadPool) else "solo"
            log.warning("node_timeouts_end_the_worker", pool=kind, reason=_LIMITS[kind])
        log.info(
            "worker_registered",
            worker_id=worker_id,
            pid=os.getpid(),
            graphs=[f"{name} {version}" for name, version in graphs],
            concurrency=parent.concurrency,
            database=self._store.shown,
        )

    def _withheld(self, nudges: Sequence[Nudge]) -> None:
        """Leave to admission what the queues have no room for, and have it look at once."""
        try:
            admission.withhold(self._store, nudges)
        except DatabaseUnavailable as error:  # admission finds it, a few seconds later
            log.info("left_to_sweep", reason=error.message)
        self._sweeper.wake()

    def start(self, parent: Any) -> None:
        """Start the services."""
        if parent.hub is not None and issubclass(parent.pool_cls, PreforkPool):
            # Celery is told of a child's death by a pipe that closes just before the child can be collected. It looks
            # once, often too early, and then not for 5 s, in which the child's place in the pool takes no work.
            parent.hub.call_repeatedly(_COLLECT_SECONDS, parent.pool._pool.maintain_pool)  # noqa: SLF001  as below
            for service in self._living:
                if isinstance(service, Children):
                    _tell_of_births(parent.pool._pool, service)  # noqa: SLF001  as below
        for service in (*self._living, *self._receiving):
            service.start()
        log.info("worker_started", worker_id=self._registration.worker_id)

    def close(self, parent: Any) -> None:  # noqa: ARG002  Celery's signature
        """Take in no more work."""
        log.info("worker_stopping", worker_id=self._registration.worker_id)
        stop(self._receiving)

    def stop(self, parent: Any) -> None:
        """Let running tasks finish, still renewing, then leave."""
        parent.pool.stop()
        self._leave()

    def terminate(self, parent: Any) -> None:
        """End running tasks, then leave: what they held is due at once and counts as nobody's death."""
        stop(service for service in self._living if isinstance(service, Children))
        parent.pool.terminate()
        self._leave()

    def _leave(self) -> None:
        stop((*self._receiving, *self._living))
        worker_id = self._registration.worker_id
        try:
            self._publisher(workers.leave(self._store, worker_id))
        except KeepstepError as error:  # the row lapses by itself
            log.warning("leave_failed", worker_id=worker_id, reason=error.message)
        else:
            log.info("worker_left", worker_id=worker_id)
        self._publisher.close()
        self._store.dispose()
        process.end()

    @staticmethod
    def _check_pool(parent: Any) -> None:
        if not issubclass(parent.pool_cls, (PreforkPool, ThreadPool, SoloPool)):
            message = f"pool {parent.pool_cls.__module__}: use prefork, threads or solo"
            raise InvalidSettings(message)


def _consume(app: Any, settings: Settings, graphs: Iterable[carried.Key]) -> None:
    """Have the worker consume the queues of the graphs that it carries, beside those of the deployment's file."""
    queues = app.amqp.queues
    others = [name for name in queues.consume_from if name != default_queue(settings)]
    mine = [broker.nudges_queue(settings.broker, settings.queue, queue_of(*key)) for key in graphs]
    for queue in mine:
        queues.add(queue)
    queues.select([*others, *(queue.name for queue in mine)])


def _processes_of(parent: Any) -> Callable[[], Iterable[Any]]:
    def processes() -> Iterable[Any]:
        pool = parent.pool._pool  # noqa: SLF001  billiard's pool has no public list of its processes
        return list(pool._pool) if pool is not None else []  # noqa: SLF001

    return processes


def _tell_of_births(pool: Any, children: Children) -> None:
    """Have a pool tell of every child that it starts from now on."""
    create = pool._create_worker_process  # noqa: SLF001  billiard has no other way to hear of it

    def created(index: int) -> Any:
        child = create(index)
        children.watch(child)
        return child

    pool._create_worker_process = created  # noqa: SLF001  as above


def _own_runtime(
    settings: Settings,
    graphs: Mapping[carried.Key, CompiledGraph],
    worker_id: str,
    publish: Callable[[Sequence[Nudge]], None],
) -> Runtime:
    """Return a runtime with a connection of its own, for the thread that takes in commands."""
    store = Store.open(settings.database, pool_size=1)
    return Runtime(store=store, graphs=graphs, settings=settings, owner=Owner(worker_id, os.getpid()), publish=publish)


def _prepared(settings: Settings) -> Store:
    """Return the store, its schema checked; wait for a database that is away."""
    store = Store.open(settings.database, pool_size=1)
    seconds = 0.2
    while True:
        try:
            migrate.prepare(store)
        except DatabaseUnavailable as error:
            log.warning("waiting_for_database", reason=error.message, again_in_seconds=seconds)
            time.sleep(seconds)
            seconds = min(_CONNECT_AGAIN_SECONDS_MAX, seconds * 2)
        else:
            return store


def _refuse(error: KeepstepError) -> NoReturn:
    frames = error.frames if isinstance(error, carried.CannotImport) else ()
    told = refused(Refusal(error.code, error.message, frames))
    # The supervisor's caller has the last word, and the frames are many lines.
    more = {"frames": frames} if frames and not told else {}
    log.error("worker_refused", code=error.code, reason=error.message, **more)
    raise SystemExit(EXIT_REFUSED)


# --- starting one -----------------------------------------------------------------------------------------------------


def main(
    settings: Settings,
    *,
    concurrency: int | None = None,
    pool: str = "prefork",
    loglevel: str = "INFO",
    on_refusal: Callable[[Refusal], None] | None = None,
) -> int:
    """Run a supervised worker until a signal stops it; return 0, 130 after Ctrl+C, or `EXIT_REFUSED`.

    It refuses when it cannot work as configured, and `on_refusal` is told why. `concurrency` None: one child per
    processor. SIGTERM and SIGINT let running tasks finish; a second one does not.
    """
    logs.configure(_level(loglevel))
    arguments = ["--pool", pool, "--loglevel", loglevel.upper()]
    if concurrency is not None:
        arguments += ["--concurrency", str(concurrency)]
    command = python("keepstep.tasks", str(os.getpid()), *arguments)
    supervisor = Supervisor(command, {**os.environ, **environment(settings)})
    code = supervisor.run()
    if supervisor.refusal is not None and on_refusal is not None:
        on_refusal(supervisor.refusal)
    return code


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment that makes another process load the same settings."""
    found: dict[str, str] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.default:
            found[f"KEEPSTEP_{name.upper()}"] = ",".join(value) if isinstance(value, tuple) else str(value)
    return found


def _level(name: str) -> int:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        message = f"log level {name!r}: use debug, info, warning or error"
        raise InvalidSettings(message)
    return level
