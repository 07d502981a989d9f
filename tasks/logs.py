"""A worker's log: one line per event, JSON for machines, columns for a terminal; no secret in either."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import billiard.util
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

# user:password@ of any URL that an error message quotes
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def configure(level: int, *, as_json: bool | None = None) -> None:
    """Send everything, Celery's lines too, to standard error; `as_json` None: JSON unless that is a terminal."""
    if as_json is None:
        as_json = not sys.stderr.isatty()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.PositionalArgumentsFormatter(),
    ]
    # Without the frames' variables: they are the states, the arguments and the secrets of users.
    tracebacks = structlog.processors.ExceptionRenderer(
        structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    )
    last: list[Processor] = (
        [tracebacks, _redacted, structlog.processors.JSONRenderer()]
        if as_json
        else [_redacted, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.captureWarnings(capture=True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("keepstep").setLevel(level)
    billiard.util.get_logger()  # it makes itself silent when first asked for
    # Celery writes two lines for every task at INFO, which costs more than the task's own work.
    for name in ("celery", "kombu", "amqp", "multiprocessing"):
        logging.getLogger(name).setLevel(level if level <= logging.DEBUG else max(level, logging.WARNING))
        logging.getLogger(name).propagate = True
        logging.getLogger(name).handlers.clear()
    # A lost child is told by `children`, in one line and with what it held; this would be a traceback of billiard's.
    logging.getLogger("celery.worker.request").setLevel(logging.CRITICAL)


def told(error: BaseException) -> dict[str, str]:
    """Return what a log line says of an error: its type, the first line of its text, and where it was raised.

    No more than that: drivers put statements and their values into the other lines.
    """
    lines = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return {"error": type(error).__name__, "reason": lines[0][:500] if lines else "", "where": where}


def _redacted(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        event[key] = _without_credentials(value)
    return event


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        return _CREDENTIALS.sub("***@", value) if "://" in value else value
    if isinstance(value, dict):
        return {key: _without_credentials(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_credentials(item) for item in value]
    return value
