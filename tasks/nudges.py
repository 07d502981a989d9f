"""The two Celery tasks. A nudge is a hint: whatever goes wrong here, the row is due and the sweep finds it."""

from __future__ import annotations

import time

import structlog
from celery import signals

from keepstep.errors import StaleLease
from keepstep.runtime import superstep
from keepstep.store.leases import Nudge
from keepstep.tasks import process, tracer
from keepstep.tasks.app import app
from keepstep.tasks.config import NODE_TASK, STEP_TASK
from keepstep.tasks.logs import told

log = structlog.get_logger("keepstep.worker")

_GO_ON_SECONDS = 0.05

signals.worker_process_init.connect(tracer.lighten)


def _dropped(error: Exception, **ids: object) -> None:
    if isinstance(error, StaleLease):  # somebody else goes on with it
        log.info("lease_lost", **ids)
        return
    log.error("nudge_dropped", **told(error), **ids)


@app.task(name=STEP_TASK)
def step(thread_id: str, version: int) -> None:
    """Run the super-step of a thread that is due at `version`, and go on (see `_work`)."""
    _work(Nudge("step", thread_id, version))


@app.task(name=NODE_TASK)
def node(thread_id: str, seq: int, run: str, version: int) -> None:
    """Run one fanned-out node run that is due at `version`, and go on (see `_work`)."""
    _work(Nudge("node", thread_id, version, seq, run))


def _work(nudge: Nudge) -> None:
    """Run a nudge, then for a moment what waits in the queue.

    The way of a message through Celery's main process costs as much as a short step, and its child is idle meanwhile.
    A nudge that is taken from the queue here is the same message, in the same order, and no other worker's; after that
    moment the child is the pool's again, and a node that takes longer never has another one behind it.
    """
    until = time.monotonic() + _GO_ON_SECONDS
    _run(nudge)
    while time.monotonic() < until:
        following = process.take()
        if following is None:
            return
        _run(following)


def _run(nudge: Nudge) -> None:
    try:
        if nudge.kind == "node":
            superstep.run_node(process.runtime(), nudge.thread_id, nudge.seq, nudge.run, nudge.version)
        else:
            superstep.run_step(process.runtime(), nudge.thread_id, nudge.version)
    except Exception as error:  # noqa: BLE001  a task that raised would only be logged at length
        _dropped(error, **nudge._asdict())
