"""Running a nudge in a pool child with less around it than Celery puts around any task.

A nudge has no result, no retry, no link and no request that anybody asks for. What Celery's tracer does for these takes
a tenth of a step; it stays in place while something listens to Celery's task signals, as instrumentation does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import signals
from celery.app.trace import trace_ok_t

from keepstep.tasks.app import app
from keepstep.tasks.config import NODE_TASK, STEP_TASK

_HEARD = (
    signals.task_prerun,
    signals.task_postrun,
    signals.task_success,
    signals.task_failure,
    signals.task_internal_error,
)
_DONE = trace_ok_t(None, None, 0.0, "None")


def lighten(**_: object) -> None:
    """Replace the tracers of this process's nudges, unless somebody listens to what they tell."""
    if any(signal.receivers for signal in _HEARD):
        return
    for name in (STEP_TASK, NODE_TASK):
        app.tasks[name].__trace__ = _tracer(app.tasks[name].run)


def _tracer(run: Callable[..., None]) -> Callable[..., Any]:
    def trace(_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], _request: object = None) -> Any:
        run(*args, **kwargs)
        return _DONE

    return trace
