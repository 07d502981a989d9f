"""`keepstep doctor --probe`: what an orchestrator asks a worker's container, every few seconds."""

from __future__ import annotations

import socket

from keepstep.cli import brokerchecks
from keepstep.cli.finding import Finding
from keepstep.cli.session import Session
from keepstep.errors import DatabaseUnavailable, KeepstepError
from keepstep.store import health, migrate
from keepstep.store.engine import Store


def liveness(session: Session) -> list[Finding]:
    """Find a worker of this host that does not renew any more: starting it again is what helps.

    While the database cannot be asked nobody can tell, and no restart would mend that: then it passes.
    """
    if session.missing_file() is not None:  # opening the store would make its folder
        return [_missing()]
    with session.store() as store:
        try:
            return [_alive(store)]
        except Exception as error:  # noqa: BLE001  whatever is wrong there, the worker may be well
            reason = error.message if isinstance(error, KeepstepError) else type(error).__name__
            return [Finding("warning", "database", reason, "nobody can tell whether a worker is alive")]


def readiness(session: Session) -> list[Finding]:
    """Find what keeps a worker of this host from working: the database, its schema, the broker, or itself."""
    try:
        settings = session.settings
    except KeepstepError as error:
        return [Finding("problem", "settings", error.message, "correct the setting")]
    found, _ = brokerchecks.examine(settings)
    if session.missing_file() is not None:
        return [*found, _missing()]
    with session.store() as store:
        try:
            schema = migrate.state(store)
            if not schema.is_current:
                text = f"has {schema.current or 'none'}, this release needs {schema.needed}"
                return [*found, Finding("problem", "schema", text, session.hint("db upgrade"))]
            return [*found, _alive(store)]
        except DatabaseUnavailable as error:
            way_out = "is it running, and is KEEPSTEP_DATABASE right?"
            return [*found, Finding("problem", "database", error.message, way_out)]


def _missing() -> Finding:
    return Finding("problem", "database", "there is none yet", "a worker makes it")


def _alive(store: Store) -> Finding:
    host = socket.gethostname()
    count = health.live_of_host(store, host)
    if count:
        return Finding("ok", "worker", f"{count} alive on {host}")
    return Finding("problem", "worker", f"none of {host} has renewed in time", "its log says why")
