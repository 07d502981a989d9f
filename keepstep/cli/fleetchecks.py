"""What `keepstep doctor` looks at in workers and threads: who is alive, what waits for whom, what needs an operator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from keepstep import __version__
from keepstep.cli.brokerchecks import Queue
from keepstep.cli.finding import Finding, ago, guarded, named
from keepstep.cli.records import error_of
from keepstep.cli.session import Session
from keepstep.cli.waysout import way_out
from keepstep.settings import Settings
from keepstep.store import events, health, kin, leases, limits, schedules, views, workers
from keepstep.store.engine import Store

if TYPE_CHECKING:
    from keepstep.store.health import Backlog, LapsedWorker
    from keepstep.store.workers import WorkerState

_SKEW_SECONDS = 2.0
_COMMANDS_SECONDS = 15.0
"""A command that has waited for longer than this is taken in by nobody."""
_LAG_SECONDS = 10.0
_EVENTS_SECONDS = 30.0
"""An event that has waited for longer than this is told to nobody."""
_LOOKED_AT_MAX = 1000
_SHOWN_MAX = 5


def examine(session: Session, settings: Settings, store: Store, commands: Queue) -> list[Finding]:
    """Return what was found of workers and threads; `commands` is what waits in the broker for workers."""
    return [
        *guarded("clock", lambda: _clock(store)),
        *guarded("workers", lambda: _workers(settings, store, commands)),
        *guarded("threads", lambda: _threads(session, settings, store)),
        *guarded("schedules", lambda: _schedules(settings, store)),
        *guarded("events", lambda: _events(settings, store)),
    ]


def queues(store: Store) -> list[str]:
    """Return the queues of nudges that live workers consume, as rows name them; none when that cannot be told."""
    with suppress(Exception):  # what is wrong there is told by the checks themselves
        return sorted({leases.queue_of(*key) for each in workers.live(store) for key in _carried(each)})
    return []


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


def _schedules(settings: Settings, store: Store) -> Iterator[Finding]:
    """Find schedules whose tick has come and has started nothing."""
    found = schedules.list_schedules(store, settings.tenant, limit=_LOOKED_AT_MAX)
    overdue = [
        (each, each.now - each.next_at)
        for each in found
        if not each.paused and each.next_at is not None and each.now - each.next_at > _patience(settings)
    ]
    for each, late in overdue[:_SHOWN_MAX]:
        reason = (error_of(each.error) or {}).get("message", "no live worker looks for ticks")
        text = f"schedule {each.name!r} has started nothing at its tick of {ago(late)} ago: {reason}"
        yield Finding(
            "problem", "schedules", text, f"a worker that carries graph {each.agent!r}: the tick waits for it"
        )


def _events(settings: Settings, store: Store) -> Iterator[Finding]:
    """Find events that nobody hears of."""
    lag = events.lag(store)
    way = "the live workers' logs say why (events_left_in_log, service_failed); without any: keepstep worker MODULE"
    if lag.unplaced is not None and lag.unplaced > _EVENTS_SECONDS:
        text = f"what has happened since {ago(lag.unplaced)} ago has no place in the log: who reads it does not see it"
        yield Finding("problem", "events", text, way)
    elif settings.publish_events and lag.unpublished is not None and lag.unpublished > _EVENTS_SECONDS:
        text = f"what has happened since {ago(lag.unpublished)} ago is not published; in the log it stands"
        yield Finding("warning", "events", text, way)


# --- workers ----------------------------------------------------------------------------------------------------------


def _patience(settings: Settings) -> float:
    """Return how long what is due, or somebody's who is gone, may be in nobody's hands before something is wrong."""
    return 2 * settings.liveness_window_seconds + 2 * settings.sweep_seconds


def _workers(settings: Settings, store: Store, commands: Queue) -> Iterator[Finding]:
    live = workers.live(store)
    for each in live:
        graphs = ", ".join(f"{name} {version}" for name, version in _carried(each)) or "no graphs"
        level, way = "ok", None
        if each.release != __version__:
            level, way = "warning", f"this is release {__version__}: run one release everywhere"
        what = f"{each.host}, pid {each.pid}, {each.concurrency} at once: {graphs} (release {each.release})"
        yield Finding(level, "worker", what, way)
        if each.clock_skew is not None and abs(each.clock_skew) > _SKEW_SECONDS:
            yield _skewed(each, each.clock_skew)
    for lapsed in health.lapsed(store, limit=_SHOWN_MAX):
        yield _lapsed(settings, lapsed, is_alone=not live)
    orphans = health.orphaned_leases(store)
    if orphans:
        text = f"{orphans} leases are held by workers that are gone"
        yield Finding("warning" if live else "problem", "workers", text, _taken_over(is_alone=not live))
    if not live and not commands.length:
        yield Finding("warning", "workers", "none is alive", "keepstep worker MODULE")
    yield from _commands(commands, is_alone=not live)


def _commands(commands: Queue, *, is_alone: bool) -> Iterator[Finding]:
    """Find commands that nobody takes in."""
    if not commands.length:
        return
    if is_alone:
        text = f"none is alive; commands that wait for one: {commands.length}"
        yield Finding("problem", "workers", text, "keepstep worker MODULE")
        return
    age = commands.oldest_seconds
    is_old = age is not None and age > _COMMANDS_SECONDS
    if is_old or commands.is_consumed is False:
        oldest = f", the oldest for {ago(age)}" if age is not None else ""
        yield Finding(
            "problem",
            "workers",
            f"commands wait in the queue ({commands.length}{oldest}), and no live worker takes them",
            "do workers have the same KEEPSTEP_BROKER and KEEPSTEP_QUEUE as this command? Else their logs say what "
            "keeps them (service_failed, command_put_back)",
        )


def _skewed(worker: WorkerState, skew: float) -> Finding:
    text = (
        f"{worker.host}, pid {worker.pid}: its clock is {ago(abs(skew))} {'ahead of' if skew > 0 else 'behind'} the "
        "database's. No step depends on it, but the times in its logs do, and what its nodes read from it"
    )
    return Finding("warning", "clock", text, "let that machine follow a time server")


def _lapsed(settings: Settings, lapsed: LapsedWorker, *, is_alone: bool) -> Finding:
    leases = f"holds {lapsed.leases} leases" if lapsed.leases != 1 else "holds a lease"
    text = f"{lapsed.host}, pid {lapsed.pid} was to renew {ago(lapsed.silent_seconds)} ago at the latest and {leases}"
    is_stuck = lapsed.leases > 0 and (is_alone or lapsed.silent_seconds > _patience(settings))
    return Finding("problem" if is_stuck else "warning", "worker", text, _taken_over(is_alone=is_alone))


def _taken_over(*, is_alone: bool) -> str:
    if is_alone:
        return "keepstep worker MODULE: it takes them over after one liveness window"
    return "the live workers take them over within a liveness window and a sweep; if not, their logs say why"


def _carried(worker: WorkerState) -> list[tuple[str, str]]:
    parts = [part.split("\x1f", 1) for part in worker.carried.split("\n") if part]
    return [(name, version) for name, version in parts]


# --- threads ----------------------------------------------------------------------------------------------------------


def _threads(session: Session, settings: Settings, store: Store) -> Iterator[Finding]:
    rows = views.counts(store, settings.tenant)
    by_status: dict[str, int] = defaultdict(int)
    for status, _, _, count in rows:
        by_status[status] += count
    summary = ", ".join(f"{count} {status}" for status, count in by_status.items()) or "none yet"
    yield Finding("ok", "threads", f"{summary} (tenant {settings.tenant})")
    yield from _blocked(session, settings, store, by_status["blocked"])
    yield from _deadly(session, settings, store)
    carried = {key for each in workers.live(store) for key in _carried(each)}
    for status, graph, version, count in rows:
        if status in {"ready", "waiting"} and (graph, version) not in carried:
            yield Finding(
                "problem" if status == "ready" else "warning",
                "graphs",
                f"{count} {status} of {graph} version {version}, which no live worker carries",
                "run a worker with the module that defines it; keep old versions running until their threads end",
            )
    for graph, count in kin.unstarted(store, settings.tenant, overdue_seconds=_patience(settings)):
        yield Finding(
            "problem",
            "graphs",
            f"{count} children of {graph} are wanted and not started: no live worker carries a graph of that name",
            "run a worker with the module that defines it",
        )
    yield from _backlog(settings, store, carried)


def _blocked(session: Session, settings: Settings, store: Store, count: int) -> Iterator[Finding]:
    """Tell the blocked threads by their reason, each with its own way out."""
    if not count:
        return
    found = health.blocked(store, settings.tenant, limit=_LOOKED_AT_MAX)
    by_code: dict[str, list[str]] = defaultdict(list)
    for each in found:
        error = error_of(each.error)
        by_code[str(error.get("code")) if isinstance(error, dict) else "blocked"].append(each.name)
    for code, names in sorted(by_code.items()):
        thread = names[0] if len(names) == 1 else "THREAD"
        yield Finding(
            "warning",
            "threads",
            f"{len(names)} blocked as {code}: {named(names)}",
            way_out(session, thread, "blocked", {"code": code}),
        )
    if count > len(found):
        way = session.hint("threads --status blocked")
        yield Finding("warning", "threads", f"{count - len(found)} more are blocked", way)


def _deadly(session: Session, settings: Settings, store: Store) -> Iterator[Finding]:
    """Tell the steps that take their process down, while they are still tried again."""
    found = health.deadly(store, settings.tenant, limit=_SHOWN_MAX)
    for each in found:
        run = f", node run {each.run}," if each.run else ""
        times = "once" if each.deaths == 1 else f"{each.deaths} times"
        yield Finding(
            "warning",
            "poison",
            f"{each.agent}/{each.thread}{run} has taken its process down {times} (last: {each.last_death}): after "
            f"{settings.deaths_max} it is blocked",
            f"look at that worker's log and at its memory; {session.hint(f'show {each.thread}')}",
        )


def _backlog(settings: Settings, store: Store, carried: set[tuple[str, str]]) -> Iterator[Finding]:
    """Tell how far workers are behind, and what nobody takes although somebody could."""
    late_seconds = _patience(settings)
    limited = {scope for scope, count in limits.taken(store).items() if count}
    due: list[Backlog] = []
    held: list[Backlog] = []
    for each in health.backlogs(store, late_seconds=late_seconds, limit=_LOOKED_AT_MAX):
        if (each.agent, each.graph_version) in carried:
            scopes = {limits.of_graph(each.agent), limits.of_tenant(each.tenant)}
            (held if scopes & limited else due).append(each)
    if held:
        names = named(sorted({f"{each.agent} of tenant {each.tenant}" for each in held}))
        yield Finding("ok", "lag", f"{_sum(held)} steps are due where a limit says how many may run at once: {names}")
    if due:
        oldest = max(each.oldest_seconds for each in due)
        text = f"{_sum(due)} steps are due and in nobody's hands, the oldest for {ago(oldest)}"
        is_behind = oldest > _LAG_SECONDS
        way = "workers are behind: raise --concurrency or add some" if is_behind else None
        yield Finding("warning" if is_behind else "ok", "lag", text, way)
    late: dict[str, int] = defaultdict(int)
    for each in due:
        what = "node runs of " if each.of_node_runs else "of "
        late[f"{what}{each.agent} version {each.graph_version}"] += each.late
    for what, count in late.items():
        if count:
            yield Finding(
                "problem",
                "threads",
                f"{count} {what} have been due for over {late_seconds:.0f} s in nobody's hands, although a live "
                "worker carries it",
                "all workers may be busy (raise --concurrency, add workers), or stuck: look at their logs",
            )


def _sum(backlogs: list[Backlog]) -> int:
    return sum(each.due for each in backlogs)
