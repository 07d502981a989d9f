"""The two Celery tasks. A nudge is a hint: whatever goes wrong here, the row is due and the sweep finds it."""

from __future__ import annotations

import structlog
from celery import signals

from keepstep.errors import StaleLease
from keepstep.runtime import superstep
from keepstep.tasks import process, tracer
from keepstep.tasks.app import app
from keepstep.tasks.config import NODE_TASK, STEP_TASK
from keepstep.tasks.logs import told

log = structlog.get_logger("keepstep.worker")

signals.worker_process_init.connect(tracer.lighten)


def _dropped(error: Exception, **ids: object) -> None:
    if isinstance(error, StaleLease):  # somebody else goes on with it
        log.info("lease_lost", **ids)
        return
    log.error("nudge_dropped", **told(error), **ids)


@app.task(name=STEP_TASK)
def step(thread_id: str, version: int) -> None:
    """Run the super-step of a thread that is due at `version`."""
    try:
        superstep.run_step(process.runtime(), thread_id, version)
    except Exception as error:  # noqa: BLE001  a task that raised would only be logged at length
        _dropped(error, thread_id=thread_id, version=version)


@app.task(name=NODE_TASK)
def node(thread_id: str, seq: int, run: str, version: int) -> None:
    """Run one fanned-out node run that is due at `version`."""
    try:
        superstep.run_node(process.runtime(), thread_id, seq, run, version)
    except Exception as error:  # noqa: BLE001  as above
        _dropped(error, thread_id=thread_id, seq=seq, run=run, version=version)
