"""What `keepstep doctor` looks at. Every check is bounded in time and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import text

from keepstep import places
from keepstep.cli import brokerchecks, fleetchecks
from keepstep.cli.finding import Finding, guarded
from keepstep.cli.session import Session
from keepstep.errors import DatabaseUnavailable, KeepstepError, PolicyError
from keepstep.runtime.policies import Policies
from keepstep.settings import Settings
from keepstep.store import migrate
from keepstep.store.engine import Store
from keepstep.tasks.tokens import TrustedKeys


def examine(session: Session) -> list[Finding]:
    """Return what all checks find; those that need what is not there are left out."""
    findings: list[Finding] = []
    try:
        settings = session.settings
    except KeepstepError as error:
        return [Finding("problem", "settings", error.message, "correct the setting; nothing else can be checked")]
    findings += _settings(session, settings)
    findings += guarded("policies", lambda: _policies(settings))
    unwritable = places.database_problem(settings.database)
    if unwritable is not None:
        findings.append(brokerchecks.unwritable("database", unwritable))
        return findings + brokerchecks.examine(settings)[0]
    missing = session.missing_file()
    if missing is not None:  # opening the store would make its folder
        text = f"there is no database yet at {missing}"
        findings.append(Finding("warning", "database", text, f"a worker makes it, or: {session.hint('db upgrade')}"))
        return findings + brokerchecks.examine(settings)[0]
    with session.store() as store:
        usable, of_database = _database(session, store)
        found, commands = brokerchecks.examine(settings, fleetchecks.queues(store) if usable else ())
        findings += of_database
        findings += found
        if usable:
            findings += fleetchecks.examine(session, settings, store, commands)
    return findings


def _settings(session: Session, settings: Settings) -> Iterator[Finding]:
    options = {"--database": session.database, "--broker": session.broker, "--tenant": session.tenant}
    sources = [name for name, value in options.items() if value is not None]
    given = [f"KEEPSTEP_{name.upper()}" for name in type(settings).model_fields]
    sources += [name for name in given if name in os.environ]
    if Path("keepstep.toml").is_file():
        sources.append("keepstep.toml")
    where = f"from {', '.join(sources)}" if sources else "all by default"
    yield Finding("ok", "settings", f"{where}; tenant {settings.tenant}, queues {settings.queue}.*")
    if settings.liveness_window_seconds < 2 * settings.renew_seconds:
        yield Finding(
            "problem",
            "settings",
            f"a worker renews every {settings.renew_seconds:g} s and is given up after "
            f"{settings.liveness_window_seconds:g} s: one late renewal gives up a worker that is alive",
            "make liveness_window_seconds at least three times renew_seconds",
        )
    yield from guarded("signatures", lambda: [_signatures(settings)])


def _signatures(settings: Settings) -> Finding:
    """Say whose word the workers of these settings take."""
    keys = TrustedKeys.of(settings)
    if keys is not None and not settings.accept_unsigned:
        return Finding("ok", "signatures", f"signed commands only, by {len(keys)} trusted keys")
    if keys is not None:
        text = f"commands by {len(keys)} trusted keys, and unsigned ones from anybody (accept_unsigned)"
        return Finding("warning", "signatures", text, "when every sender signs: accept_unsigned = false")
    text = "unsigned commands are taken, from anybody who reaches the broker"
    if settings.broker.startswith("file:"):
        return Finding("ok", "signatures", f"{text}; this one is a folder of this machine")
    way_out = (
        "for production: keepstep new-key, then KEEPSTEP_TRUSTED_KEYS for workers, KEEPSTEP_SIGNING_KEY for senders"
    )
    return Finding("warning", "signatures", text, way_out)


def _policies(settings: Settings) -> Iterator[Finding]:
    if not settings.policies:
        yield Finding("ok", "policies", "none are configured: every tool may be called")
        return
    try:
        policies = Policies.load(settings.policies)
    except PolicyError as error:
        yield Finding("problem", "policies", error.message, "correct it; to look again: keepstep policy check")
        return
    count = len(policies.listed)
    yield Finding("ok", "policies", f"{count} from {settings.policies}, version {policies.version}")


# --- database ---------------------------------------------------------------------------------------------------------


def _database(session: Session, store: Store) -> tuple[bool, list[Finding]]:
    """Return whether the database can be asked about the deployment, and what was found."""
    try:
        schema = migrate.state(store)
    except DatabaseUnavailable as error:
        way_out = "is it running, and is KEEPSTEP_DATABASE right?"
        return False, [Finding("problem", "database", error.message, way_out)]
    findings = guarded("database", lambda: _durability(store))
    if schema.is_current:
        findings.append(Finding("ok", "schema", f"{schema.current}, as this release needs"))
    else:
        newer = schema.current is not None and schema.current > schema.needed
        way_out = "run the release that made it" if newer else session.hint("db upgrade")
        text = f"has {schema.current or 'none'}, this release needs {schema.needed}"
        findings.append(Finding("problem", "schema", text, way_out))
    return schema.is_current, findings


def _durability(store: Store) -> Iterator[Finding]:
    with store.engine.connect() as connection:

        def ask(query: str) -> str:
            return str(connection.execute(text(query)).scalar())

        if store.dialect == "sqlite":
            mode = ask("PRAGMA journal_mode")
            yield Finding("ok", "database", f"{store.shown}: SQLite {ask('SELECT sqlite_version()')}, journal {mode}")
            return
        version = ask("SHOW server_version").split()[0]
        if ask("SELECT pg_is_in_recovery()") == "True":
            yield Finding(
                "problem",
                "database",
                f"{store.shown}: PostgreSQL {version} is a replica: nothing can be committed there",
                "point KEEPSTEP_DATABASE at the primary",
            )
            return
        yield Finding("ok", "database", f"{store.shown}: PostgreSQL {version}")
        off = [name for name in ("fsync", "full_page_writes") if ask(f"SHOW {name}") == "off"]
        if off:
            yield Finding(
                "problem",
                "durability",
                f"{' and '.join(off)} off: what was committed can be lost or torn when the machine stops",
                "turn it on in postgresql.conf",
            )
        commit = ask("SHOW synchronous_commit")
        if commit == "off":
            yield Finding(
                "problem",
                "durability",
                "synchronous_commit off: a step, an effect or a decision that was acknowledged can be lost in a crash",
                "ALTER DATABASE … SET synchronous_commit = on",
            )
        elif not off:
            standbys = ask("SHOW synchronous_standby_names")
            kept = f"standbys {standbys}" if standbys else "no synchronous standby, so a failover may lose commits"
            yield Finding("ok", "durability", f"fsync on, synchronous_commit {commit}; {kept}")
