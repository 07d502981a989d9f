"""Dropping a connection to the broker that is of no further use, in bounded time."""

from __future__ import annotations

import structlog
from kombu import Connection

from keepstep.tasks.logs import told

log = structlog.get_logger("keepstep.worker")


def hang_up(connection: Connection | None, failure: str) -> None:
    """Close a connection, if there is one, without waiting for the broker; what fails then is logged as `failure`."""
    if connection is not None:
        try:
            connection.collect(socket_timeout=1)
        except Exception as error:  # noqa: BLE001  it may be dropped because it does not work
            log.debug(failure, **told(error))
