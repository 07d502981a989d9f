"""The two Celery tasks. A nudge is a hint: whatever goes wrong here, the row is due and the sweep finds it."""

from __future__ import annotations

import time

import structlog
from celery import signals

from keepstep.errors import StaleLease
from keepstep.runtime import superstep
from keepstep.runtime.environment import Runtime
from keepstep.store import workers
from keepstep.tasks import process, tracer
from keepstep.tasks.app import app
from keepstep.tasks.config import NODE_TASK, STEP_TASK
from keepstep.tasks.logs import told
from keepstep.tasks.publish import Hint

log = structlog.get_logger("keepstep.worker")

_GO_ON_SECONDS = 0.05
_TELL_AGAIN_SECONDS = 60.0
_told_of: dict[tuple[str, str], float] = {}

signals.worker_process_init.connect(tracer.lighten)


def _dropped(error: Exception, **ids: object) -> None:
    if isinstance(error, StaleLease):  # somebody else goes on with it
        log.info("lease_lost", **ids)
        return
    log.error("nudge_dropped", **told(error), **ids)


def _tell_of_foreign(runtime: Runtime, thread_id: str) -> None:
    """Say, once a minute, when a nudge was for a graph or version that this release does not carry.

    It is not handed on from here, where it would come back: workers that carry the graph sweep for its threads, and
    their nudges come less and less often.
    """
    found = workers.foreign(runtime.store, thread_id, carried=runtime.carried)
    now = time.monotonic()
    if found is not None and now >= _told_of.get(found, 0.0):
        _told_of[found] = now + _TELL_AGAIN_SECONDS
        graph, version = found
        log.warning("graph_not_carried", graph=graph, version=version, thread_id=thread_id)


@app.task(name=STEP_TASK)
def step(thread_id: str, version: int) -> None:
    """Run the super-step of a thread that is due at `version`, and go on (see `_work`)."""
    _work(Hint("step", thread_id, version))


@app.task(name=NODE_TASK)
def node(thread_id: str, seq: int, run: str, version: int) -> None:
    """Run one fanned-out node run that is due at `version`, and go on (see `_work`)."""
    _work(Hint("node", thread_id, version, seq, run))


def _work(hint: Hint) -> None:
    """Do what a nudge says, then for a moment what waits in the queues.

    The way of a message through Celery's main process costs as much as a short step, and its child is idle meanwhile.
    A nudge that is taken from the queue here is the same message, in the same order, and no other worker's; after that
    moment the child is the pool's again, and a node that takes longer never has another one behind it.
    """
    until = time.monotonic() + _GO_ON_SECONDS
    _run(hint)
    while time.monotonic() < until:
        following = process.take()
        if following is None:
            return
        _run(following)


def _run(hint: Hint) -> None:
    try:
        runtime = process.runtime()
        if hint.kind == "node":
            ran = superstep.run_node(runtime, hint.thread_id, hint.seq, hint.run, hint.version)
        else:
            ran = superstep.run_step(runtime, hint.thread_id, hint.version)
        if not ran:
            _tell_of_foreign(runtime, hint.thread_id)
    except Exception as error:  # noqa: BLE001  a task that raised would only be logged at length
        _dropped(error, **hint._asdict())
