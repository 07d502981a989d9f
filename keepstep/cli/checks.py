"""What `keepstep doctor` looks at. Every check is bounded in time and changes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import kombu
from sqlalchemy import text

from keepstep import __version__, broker, places
from keepstep.cli.session import Session
from keepstep.errors import DatabaseUnavailable, KeepstepError
from keepstep.settings import Settings
from keepstep.store import migrate, views, workers
from keepstep.store.engine import Store

if TYPE_CHECKING:
    from keepstep.store.workers import WorkerState

_BROKER_SECONDS = 4.0
_SKEW_SECONDS = 2.0


class Finding(NamedTuple):
    """What one check found."""

    level: str
    """`ok`, `warning` or `problem`."""
    what: str
    text: str
    way_out: str | None = None


def examine(session: Session) -> list[Finding]:
    """Return what all checks find; those that need what is not there are left out."""
    findings: list[Finding] = []
    try:
        settings = session.settings
    except KeepstepError as error:
        return [Finding("problem", "settings", error.message, "correct the setting; nothing else can be checked")]
    findings += _settings(session, settings)
    found, commands_waiting = _broker(settings)
    unwritable = places.database_problem(settings.database)
    if unwritable is not None:
        return [*findings, _unwritable("database", unwritable), *found]
    missing = session.missing_file()
    if missing is not None:  # opening the store would make its folder
        text = f"there is no database yet at {missing}"
        findings.append(Finding("warning", "database", text, f"a worker makes it, or: {session.hint('db upgrade')}"))
        return findings + found
    with session.store() as store:
        usable, of_database = _database(session, store)
        findings += of_database
        findings += found
        if usable:
            findings += _deployment(session, settings, store, commands_waiting)
    return findings


def _unwritable(what: str, problem: str) -> Finding:
    text, _, way_out = problem.rpartition(". ")
    return Finding("problem", what, text, way_out[:1].lower() + way_out[1:])


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


# --- database ---------------------------------------------------------------------------------------------------------


def _database(session: Session, store: Store) -> tuple[bool, list[Finding]]:
    """Return whether the database can be asked about the deployment, and what was found."""
    try:
        schema = migrate.state(store)
    except DatabaseUnavailable as error:
        way_out = "is it running, and is KEEPSTEP_DATABASE right?"
        return False, [Finding("problem", "database", error.message, way_out)]
    findings = _guarded("database", lambda: _durability(store))
    if schema.is_current:
        findings.append(Finding("ok", "schema", f"{schema.current}, as this release needs"))
    else:
        newer = schema.current is not None and schema.current > schema.needed
        way_out = "run the release that made it" if newer else session.hint("db upgrade")
        text = f"has {schema.current or 'none'}, this release needs {schema.needed}"
        findings.append(Finding("problem", "schema", text, way_out))
    return schema.is_current, findings


def _guarded(what: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Run a check; an error of the database's is a finding, too."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001  a doctor that falls over helps nobody
        reason = str(error).strip().splitlines()
        return [Finding("problem", what, f"the check failed: {reason[0][:200] if reason else type(error).__name__}")]


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


# --- broker -----------------------------------------------------------------------------------------------------------


def _broker(settings: Settings) -> tuple[list[Finding], int]:
    """Return what was found of the broker, and how many commands wait there."""
    url = settings.broker
    shown = broker.redacted(url)
    if url.startswith("file://"):
        unwritable = places.broker_problem(url)
        if unwritable is not None:
            return [_unwritable("broker", f"{shown}: {unwritable}")], 0
        if not Path(url.removeprefix("file://")).exists():
            return [Finding("ok", "broker", f"{shown}: no folder yet; the first worker or client makes it")], 0
    begun = time.monotonic()
    try:
        connection = broker.connection(url, commands=True, queue=settings.queue, timeout_seconds=_BROKER_SECONDS)
    except KeepstepError as error:
        return [Finding("problem", "broker", error.message, "correct KEEPSTEP_BROKER")], 0
    try:
        connection.ensure_connection(max_retries=0, timeout=_BROKER_SECONDS, reraise_as_library_errors=False)
        lengths = _lengths(connection, settings)
    except Exception as error:  # noqa: BLE001  each transport has its own, and all say that it is not to be reached
        cause = broker.scrubbed(f"{type(error).__name__}: {error}", url)
        way_out = "is it running, and is KEEPSTEP_BROKER right?"
        return [Finding("problem", "broker", f"{shown}: not reached: {cause}", way_out)], 0
    finally:
        with suppress(Exception):
            connection.release()
    waiting = ", ".join(f"{name} {count}" for name, count in lengths.items() if count is not None)
    took = f"{(time.monotonic() - begun) * 1000:.0f} ms"
    findings = [Finding("ok", "broker", f"{shown}: answers in {took}; its queues: {waiting or 'none yet'}")]
    if lengths.get("rejected"):
        findings.append(
            Finding(
                "warning",
                "broker",
                f"commands that no worker could handle: {lengths['rejected']}",
                f"look at the queue {broker.commands_name(settings.queue)}.rejected",
            )
        )
    return findings, lengths.get("commands") or 0


def _lengths(connection: kombu.Connection, settings: Settings) -> dict[str, int | None]:
    names = {"commands": broker.commands_name(settings.queue)}
    if broker.kind_of(settings.broker) == "amqp":
        names["rejected"] = f"{names['commands']}.rejected"
    return {what: _length(connection, name) for what, name in names.items()}


def _length(connection: kombu.Connection, name: str) -> int | None:
    """Return how many messages wait in a queue, None when there is no such queue."""
    channel: Any = connection.channel()  # one each: RabbitMQ closes it when there is no such queue
    try:
        return int(channel.queue_declare(queue=name, passive=True).message_count)
    except connection.channel_errors:
        return None
    finally:
        with suppress(Exception):
            channel.close()


# --- workers and threads ----------------------------------------------------------------------------------------------


def _deployment(session: Session, settings: Settings, store: Store, commands_waiting: int) -> list[Finding]:
    return [
        *_guarded("clock", lambda: _clock(store)),
        *_guarded("workers", lambda: _workers(store, commands_waiting)),
        *_guarded("threads", lambda: _threads(session, settings, store)),
    ]


def _clock(store: Store) -> Iterator[Finding]:
    if store.dialect == "sqlite":
        return
    before = time.time()
    now = views.now(store)
    after = time.time()
    skew = 0.0 if before <= now <= after else min(now - before, now - after, key=abs)
    if abs(skew) <= _SKEW_SECONDS:
        yield Finding("ok", "clock", f"the database and this machine differ by {abs(skew):.2f} s")
        return
    yield Finding(
        "warning",
        "clock",
        f"this machine is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} the database. No step depends on "
        "it, but the times of logs and of `state --at` do",
        "let both follow a time server",
    )


def _workers(store: Store, commands_waiting: int) -> Iterator[Finding]:
    live = workers.live(store)
    for each in live:
        graphs = ", ".join(f"{name} {version}" for name, version in _carried(each)) or "no graphs"
        level, way_out = "ok", None
        if each.release != __version__:
            level, way_out = "warning", f"this is release {__version__}: run one release everywhere"
        what = f"{each.host}, pid {each.pid}, {each.concurrency} at once: {graphs} (release {each.release})"
        yield Finding(level, "worker", what, way_out)
    if live:
        return
    if commands_waiting:
        text = f"none is alive; commands that wait for one: {commands_waiting}"
        yield Finding("problem", "workers", text, "keepstep worker MODULE")
    else:
        yield Finding("warning", "workers", "none is alive", "keepstep worker MODULE")


def _carried(worker: WorkerState) -> list[tuple[str, str]]:
    parts = [part.split("\x1f", 1) for part in worker.carried.split("\n") if part]
    return [(name, version) for name, version in parts]


def _threads(session: Session, settings: Settings, store: Store) -> Iterator[Finding]:
    overdue_seconds = 2 * settings.liveness_window_seconds + 2 * settings.sweep_seconds
    rows = views.counts(store, settings.tenant, overdue_seconds=overdue_seconds)
    by_status: dict[str, int] = {}
    for status, _, _, count, _ in rows:
        by_status[status] = by_status.get(status, 0) + count
    summary = ", ".join(f"{count} {status}" for status, count in by_status.items()) or "none yet"
    yield Finding("ok", "threads", f"{summary} (tenant {settings.tenant})")
    if by_status.get("blocked"):
        look = f"{session.hint('threads --status blocked')}; {session.hint('show THREAD')}"
        way_out = f"{look} says the way out of each"
        yield Finding("warning", "threads", f"{by_status['blocked']} blocked: each needs an operator", way_out)
    carried = {key for each in workers.live(store) for key in _carried(each)}
    for status, graph, version, count, overdue in rows:
        if status in {"ready", "waiting"} and (graph, version) not in carried:
            yield Finding(
                "problem" if status == "ready" else "warning",
                "graphs",
                f"{count} {status} of {graph} version {version}, which no live worker carries",
                "run a worker with the module that defines it; keep old versions running until their threads end",
            )
        elif overdue:
            yield Finding(
                "problem",
                "threads",
                f"{overdue} of {graph} version {version} have been due for over {overdue_seconds:.0f} s in nobody's "
                "hands, although a live worker carries it",
                "all workers may be busy (raise --concurrency, add workers), or stuck: look at their logs",
            )
