"""What one worker process, or one of its pool children, runs nudges with.

The main process opens its own store and every child opens its own after the fork: a connection shared by two processes
gives one the other's answers. All of them act under the main process's worker id; the lease names the child besides.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from celery import signals

from keepstep import broker
from keepstep import settings as settings_module
from keepstep.errors import KeepstepError
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.environment import Runtime
from keepstep.settings import Settings
from keepstep.store import workers
from keepstep.store.engine import Store
from keepstep.store.leases import Owner, queue_of
from keepstep.tasks import carried
from keepstep.tasks.publish import Hint, Publisher

_WORKER_ID = "KEEPSTEP_WORKER_ID"


@dataclass
class _Process:
    pid: int
    runtime: Runtime
    publisher: Publisher
    queues: deque[str]
    """The names of the queues of what it carries; turned by one at each look, so that none is always last."""


_current: _Process | None = None
_inherited: list[_Process] = []


def begin(settings: Settings, graphs: Mapping[carried.Key, CompiledGraph], worker_id: str, pool_size: int) -> None:
    """Make this process able to run nudges as a child of that worker (or as the worker itself)."""
    global _current  # noqa: PLW0603  Celery calls tasks as functions: there is nothing to pass it through
    # The environment reaches children that are started as fresh interpreters, too.
    os.environ[_WORKER_ID] = worker_id
    pid = os.getpid()
    store = Store.open(settings.database, pool_size=pool_size)
    publisher = Publisher(settings)
    runtime = Runtime(
        store=store,
        graphs=graphs,
        settings=settings,
        owner=Owner(worker_id, pid),
        publish=publisher,
        end_process=_end_process,
    )
    _current = _Process(pid, runtime, publisher, deque(queues(settings, graphs)))


def _end_process() -> None:
    """End this process, whatever it is doing: nothing less ends a node that hangs in C code.

    In a pool of threads, which has one process, that takes its other nodes along, and in any pool those of one fan-out
    that run beside it: they run again, which they are made for, while two attempts of one node acting at once is what
    nothing is made for. They are handed over first, so that it counts as nobody's death.
    """
    found = _current
    if found is not None and found.pid == os.getpid():
        with contextlib.suppress(Exception):  # they are found by who misses this process
            owner = found.runtime.owner
            found.publisher(workers.hand_over(found.runtime.store, owner.worker, owner.child))
    os.kill(os.getpid(), signal.SIGKILL)


@signals.worker_process_init.connect
def begin_child(**_: object) -> None:
    """Give a pool child a runtime of its own; what it inherited is left to the parent."""
    if _current is None:
        settings = settings_module.load()
        begin(settings, carried.load(settings.graphs), os.environ[_WORKER_ID], pool_size=1)
        return
    parent = _current
    # Kept, not collected: the finalizers of its connections would say goodbye on the parent's sockets.
    _inherited.append(parent)
    parent.runtime.store.dispose(close=False)
    begin(parent.runtime.settings, parent.runtime.graphs, parent.runtime.owner.worker, pool_size=1)


def runtime() -> Runtime:
    """Return this process's runtime."""
    if _current is None:
        message = "this process is not a Keepstep worker"
        raise KeepstepError(message)
    if _current.pid != os.getpid():  # a pool that forks without telling
        begin_child()
    return _current.runtime


def queues(settings: Settings, graphs: Iterable[carried.Key]) -> list[str]:
    """Return the names of the queues of nudges for these graphs."""
    return [broker.nudges_name(settings.queue, queue_of(*key)) for key in graphs]


def take() -> Hint | None:
    """Return what a waiting nudge says, taken out of its queue, if it can be had without the main process."""
    if _current is None:
        return None
    _current.queues.rotate(1)
    return _current.publisher.take(_current.queues)


@signals.worker_process_shutdown.connect
def end(**_: object) -> None:
    """Close this process's connections."""
    global _current  # noqa: PLW0603  as above
    if _current is not None and _current.pid == os.getpid():
        _current.runtime.store.dispose()
        _current = None
