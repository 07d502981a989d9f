"""The reader: what threads are, were and wait for, from the database, without a graph and without a broker."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NamedTuple, Self

from keepstep import eventkinds
from keepstep import settings as settings_module
from keepstep.errors import Ambiguous, ArtifactCorrupt, ArtifactsUnavailable, InvalidInput, NotFound
from keepstep.runtime import delta
from keepstep.runtime.codec import view
from keepstep.runtime.history import verify
from keepstep.runtime.planner import HIDDEN
from keepstep.runtime.schedules import Schedule, schedule_of
from keepstep.settings import Settings
from keepstep.store import events, kin, schedules, views
from keepstep.store.artifacts import Artifacts
from keepstep.store.claims import CheckpointRow
from keepstep.store.engine import Store
from keepstep.store.events import EventView
from keepstep.store.kin import KinView
from keepstep.store.schema import BLOCKED, ENDED, UNDOING, UNDONE
from keepstep.store.views import AuditView, EffectView, NodeRunView, RunView, ThreadView, WaitView

_TIME_MAX = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_POLL_SECONDS_MIN, _POLL_SECONDS_MAX = 0.02, 0.5


@dataclass(frozen=True)
class Thread:
    """A thread's present."""

    id: str
    tenant: str
    application: str
    graph: str
    name: str
    version: str
    """Of the graph."""
    status: str
    paused: bool
    error: dict[str, Any] | None
    """{code, message, type, node, run} of why it is blocked, failed or cancelled."""
    seq: int
    checkpoint: str | None
    run: str | None
    steps: int
    """Super-steps of the present run."""
    running_on: str | None
    """The worker that holds the lease."""
    row: ThreadView

    @property
    def undoing(self) -> bool:
        """Whether its run has failed and what that did is being undone."""
        return self.row.undoing == UNDOING

    @property
    def undone(self) -> bool:
        """Whether what its failed run did was undone."""
        return self.row.undoing == UNDONE


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a thread's history."""

    id: str
    seq: int
    kind: str
    """`input`, `step` or `edit`."""
    at: datetime
    run: str
    parent: str | None
    nodes: list[dict[str, Any]]
    """{run, starts, failures} of the node runs whose work it holds."""
    next: list[str]
    """The node runs that were due after it."""
    changed: list[str]
    """The state keys it changed."""
    meta: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class Approval:
    """A question to people."""

    id: str
    thread: str
    graph: str
    thread_id: str
    run: str
    kind: str
    """`approve` or `ask`."""
    status: str
    """`open`, `approved`, `rejected`, `answered`, `changes_requested`, `expired` or `withdrawn`."""
    question: str
    arguments: Any
    context: Any
    to: list[str]
    """The people and roles that are asked now; empty: anybody."""
    quorum: int
    expires_at: datetime | None
    created_at: datetime
    closed_at: datetime | None
    node_run: str
    """Which node run asks."""
    schema: Any
    """The JSON schema that answers must fit, if any."""
    choices: list[Any] | None
    on_expiry: str
    """What happens when nobody has answered in time: `reject`, `approve`, `escalate` or `fail`."""
    escalate_to: list[str]
    self_approval: bool
    """Whether who started the run may approve, as far as the question itself says."""
    started_by: str | None
    """Who started the thread's present run."""
    remind_seconds: float | None
    """How often its people are reminded while it is open; None: never."""
    reminders: int
    """How often they were."""
    escalated: bool
    """Whether it has gone to those in `escalate_to` already."""


@dataclass(frozen=True)
class Kin:
    """A child and its parent."""

    parent: str
    """The parent's name."""
    parent_graph: str
    parent_id: str
    node_run: str
    """Which node run of the parent spawned it."""
    thread: str
    """The child's name."""
    graph: str
    version: str | None
    id: str | None
    """The id of the child's thread; None while that is not started."""
    run: str
    """The id of the child's run."""
    state: str
    """`wanted`, `started`, `ended`, or `delivered`: the parent was told."""
    status: str | None
    """How the run ended, `done`, `failed` or `cancelled`; until then how its thread is."""
    error: dict[str, Any] | None
    """Why it failed, was cancelled, or is not started."""
    spawned_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True)
class Event:
    """Something that happened, as the log has it. `cursor` is where to read on."""

    cursor: int
    id: int
    """The same wherever it is read or received."""
    kind: str
    """`thread.started`, `approval.opened`, …: docs/messages.md. `node.emitted`: what a node told the world."""
    tenant: str
    application: str
    graph: str
    thread: str
    thread_id: str
    run: str | None
    """The run's id."""
    node: str
    """The node run; empty when it is about none."""
    seq: int
    """Of `node.emitted` the checkpoint that its step writes, else -1."""
    approval: str | None
    """The approval's id, where it is about one."""
    payload: Any
    """What the node emitted, or more about what happened."""
    at: datetime
    left_out: bool = False
    """Whether the payload was larger than the reader wanted it."""


def _time(value: float | None) -> datetime | None:
    return None if value is None else datetime.fromtimestamp(min(value, _TIME_MAX), UTC)


def _readable(effect: EffectView) -> EffectView:
    return effect if effect.meta is None else effect._replace(meta=view(effect.meta))


class UnknownEffect(NamedTuple):
    """An effect whose outcome nobody knows, and whose thread's it is."""

    graph: str
    thread: str
    effect: EffectView

    @property
    def arguments(self) -> Any:
        """What the call was given, in the plain view; None when that was not kept, or is an artifact that is lost."""
        return None if self.effect.arguments is None else view(self.effect.arguments)


class Reader:
    """Reads a deployment's database. Values are plain: what JSON cannot carry is shown as {"$": type, "v": …}."""

    def __init__(
        self,
        database: str | None = None,
        *,
        tenant: str | None = None,
        settings: Settings | None = None,
        store: Store | None = None,
    ) -> None:
        chosen = settings if settings is not None else settings_module.load(database=database, tenant=tenant)
        self.tenant = tenant or chosen.tenant
        self._store = store if store is not None else Store.open(database or chosen.database)

    def close(self) -> None:
        """Close the database's connections."""
        self._store.dispose()

    def __enter__(self) -> Self:
        """Return the reader; it is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # --- threads ---

    def get(self, thread: str, *, graph: str | None = None) -> Thread:
        """Return a thread by name or id; raise `NotFound`, or `Ambiguous` when several graphs have one of that name."""
        return _thread_of(self._one(thread, graph))

    def threads(
        self, *, graph: str | None = None, status: str | None = None, limit: int = 50, before: str | None = None
    ) -> list[Thread]:
        """Return threads, newest first; `before` is the id of the last one of the page before."""
        rows = views.list_threads(self._store, self.tenant, agent=graph, status=status, limit=limit, before=before)
        return [_thread_of(row) for row in rows]

    def runs(self, thread: str, *, graph: str | None = None) -> list[RunView]:
        """Return a thread's runs in order."""
        return views.runs(self._store, self._one(thread, graph).id)

    def node_runs(self, thread: str, *, graph: str | None = None) -> list[NodeRunView]:
        """Return a thread's fanned-out node runs in order."""
        return views.node_runs(self._store, self._one(thread, graph).id)

    def effects(self, thread: str, *, graph: str | None = None) -> list[EffectView]:
        """Return a thread's effects in order; `meta` of a model call is what is known of it."""
        found = views.effects(self._store, self._one(thread, graph).id)
        return [_readable(each) for each in found]

    def result(self, thread: str, key: str, *, graph: str | None = None) -> Any:
        """Return the recorded result of an effect by its key; None when it has none.

        Raises `NotFound`, `ArtifactCorrupt` when it was kept apart and is gone.
        """
        row = views.result_of(self._store, self._one(thread, graph).id, key)
        if row is None:
            message = f"thread {thread!r} has no effect {key!r}"
            raise NotFound(message)
        tenant, stored, digest = row
        result = stored if digest is None else Artifacts(self._store).get(tenant, digest)
        return None if result is None else view(result)

    def _whole(self, effect: EffectView) -> EffectView:
        """Return an effect with its arguments, wherever they are kept; without them when they cannot be read there.

        Nobody could be told of the other effects otherwise, nor say what became of this one.
        """
        effect = _readable(effect)
        if effect.arguments_artifact is None:
            return effect
        with contextlib.suppress(ArtifactCorrupt, ArtifactsUnavailable):
            return effect._replace(arguments=Artifacts(self._store).get(effect.tenant, effect.arguments_artifact))
        return effect

    def unknown_effects(self, *, limit: int = 100) -> list[UnknownEffect]:
        """Return effects that were begun and whose outcome nobody knows, oldest first: `Client.resolve` says it."""
        found = views.unknown_effects(self._store, self.tenant, limit=limit)
        found = [(graph, thread, self._whole(effect)) for graph, thread, effect in found]
        return [UnknownEffect(*each) for each in found]

    def waits(self, thread: str, *, graph: str | None = None) -> list[WaitView]:
        """Return a thread's waits in order."""
        return views.waits(self._store, self._one(thread, graph).id)

    def children(self, thread: str, *, graph: str | None = None) -> list[Kin]:
        """Return the children that a thread has spawned, in order."""
        return [_kin_of(row) for row in kin.children(self._store, self._one(thread, graph).id)]

    def parents(self, thread: str, *, graph: str | None = None) -> list[Kin]:
        """Return by whom runs of a thread were spawned, in order: one entry of a child that has been given one run."""
        return [_kin_of(row) for row in kin.parents(self._store, self._one(thread, graph).id)]

    def audit(self, thread: str, *, graph: str | None = None) -> list[AuditView]:
        """Return who asked for what of a thread, in order."""
        return views.audits(self._store, self._one(thread, graph).id)

    def wait(self, thread: str, timeout: float = 60.0, *, graph: str | None = None) -> Thread:
        """Return the thread when it has ended or is blocked; raise `TimeoutError` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        pause = _POLL_SECONDS_MIN
        while True:
            found = self.get(thread, graph=graph)
            if found.status in ENDED or found.status == BLOCKED:
                return found
            if time.monotonic() >= deadline:
                message = f"thread {thread!r} is still {found.status} after {timeout:g} s"
                raise TimeoutError(message)
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(_POLL_SECONDS_MAX, pause * 1.5)

    def _one(self, thread: str, graph: str | None) -> ThreadView:
        found = [row for row in views.find_threads(self._store, self.tenant, thread) if graph in (None, row.agent)]
        if not found:
            of_graph = f" of graph {graph!r}" if graph is not None else ""
            message = f"there is no thread {thread!r}{of_graph}"
            raise NotFound(message)
        if len(found) > 1:
            choices = ", ".join(f"{row.agent} ({row.application})" for row in found)
            message = f"several graphs have a thread {thread!r}: {choices}; name the graph"
            raise Ambiguous(message)
        return found[0]

    # --- schedules ---

    def schedules(self, name: str | None = None, *, limit: int = 1000) -> list[Schedule]:
        """Return schedules by name; with a `name` those called so, of which each application may have one."""
        return [schedule_of(row) for row in schedules.list_schedules(self._store, self.tenant, name=name, limit=limit)]

    # --- history ---

    def history(self, thread: str, *, graph: str | None = None, after: int = -1) -> list[Checkpoint]:
        """Return a thread's checkpoints in order, those past the seq `after`.

        Raises `HistoryCorrupt` when one of them is not what was written.
        """
        row = self._one(thread, graph)
        found = views.history(self._store, row.id, row.branch, after + 1, row.seq)
        verify([checkpoint for checkpoint, _ in found])
        return [_checkpoint_of(checkpoint, at) for checkpoint, at in found]

    def state(self, thread: str, *, at: int | str | datetime | None = None, graph: str | None = None) -> dict[str, Any]:
        """Return a thread's state: now, or at a seq, at a checkpoint's id, or at a time (aware)."""
        row = self._one(thread, graph)
        seq = self._seq(row, at)
        if seq < 0:
            return {}
        first = views.snapshot_before(self._store, row.id, row.branch, seq)
        found = views.history(self._store, row.id, row.branch, 0 if first is None else first, seq)
        return plain_state([checkpoint for checkpoint, _ in found])

    def _seq(self, row: ThreadView, at: int | str | datetime | None) -> int:
        if at is None:
            return row.seq
        if isinstance(at, datetime):
            if at.tzinfo is None:
                message = "at: give a time with its zone"
                raise InvalidInput(message)
            # Times are shown rounded to microseconds: a checkpoint's own time must find it.
            found = views.seq_at(self._store, row.id, row.branch, at.timestamp() + 1e-6)
        elif isinstance(at, int):
            found = at if 0 <= at <= row.seq else None
        else:
            found = views.seq_of(self._store, row.id, row.branch, at)
        if found is None:
            message = f"thread {row.name!r} has no checkpoint at {at}"
            raise NotFound(message)
        return found

    def head_rows(self, thread_id: str) -> list[CheckpointRow]:
        """Return the stored checkpoints from the last snapshot to the head, for a caller that has the graph."""
        row = self._one(thread_id, None)
        found = views.history(self._store, row.id, row.branch, row.snapshot_seq, row.seq)
        return [checkpoint for checkpoint, _ in found]

    # --- approvals and events ---

    def approvals(
        self,
        *,
        thread: str | None = None,
        graph: str | None = None,
        status: str | None = "open",
        limit: int = 100,
    ) -> list[Approval]:
        """Return approvals, oldest first: open ones, or those of another status, or all (`status=None`)."""
        thread_id = None if thread is None else self._one(thread, graph).id
        of_graph = graph if thread is None else None
        rows = views.approvals(
            self._store, self.tenant, status=status, thread_id=thread_id, graph=of_graph, limit=limit
        )
        found = []
        for row in rows:
            asked = view(row.question)
            found.append(
                Approval(
                    row.id,
                    row.thread,
                    row.agent,
                    row.thread_id,
                    row.run,
                    row.kind,
                    row.status,
                    _shown(asked["question"]),
                    asked["arguments"],
                    asked["context"],
                    asked["to"] if row.assigned is None else json.loads(row.assigned),
                    row.quorum,
                    _time(row.expires_at),
                    datetime.fromtimestamp(row.created_at, UTC),
                    _time(row.closed_at),
                    row.run,
                    json.loads(asked["schema"]) if asked.get("schema") else None,
                    asked.get("choices"),
                    row.on_expiry,
                    json.loads(row.escalate_to) if row.escalate_to else [],
                    asked.get("self_approval", True),
                    row.started_by,
                    row.remind_seconds,
                    row.reminders,
                    bool(row.escalated),
                )
            )
        return found

    def decisions(self, approval_id: str) -> list[dict[str, Any]]:
        """Return the decisions on an approval in order: {id, by, verdict, arguments, answer, comment, at}."""
        return [
            {**view(row.payload), "id": row.id, "at": datetime.fromtimestamp(row.at, UTC)}
            for row in views.decisions(self._store, self.tenant, approval_id)
        ]

    def events(
        self,
        thread: str | None = None,
        *,
        after: int = 0,
        limit: int = 1000,
        kind: str | None = None,
        graph: str | None = None,
        latest: bool = False,
    ) -> list[Event]:
        """Return events past a cursor, in order: the tenant's log, or one thread's; none is missed, none comes twice.

        `after` is the `cursor` of the last one that was read, 0 at first: a cursor of the log counts in the log, one
        of a thread's events in those. `kind` is a kind or the beginning of some (`approval.*`); `latest`: the last
        `limit` of them and not the first. In the log an event stands as soon as a worker has given it its place,
        within a second; a thread's are there at once.
        """
        pattern = _pattern(kind)
        for name, value, least in (("after", after, 0), ("limit", limit, 1)):
            if type(value) is not int or not least <= value < 2**63:
                message = f"{name}: a whole number from {least} on is needed, not {value!r:.50}"
                raise InvalidInput(message)
        if thread is not None:
            thread_id = self._one(thread, graph).id
            found = events.of_thread(self._store, thread_id, after=after, limit=limit, kind=pattern, latest=latest)
            return [event_of(row, row.id) for row in found]
        if graph is not None:
            message = "graph: name a thread of it, too; the log is the whole tenant's"
            raise InvalidInput(message)
        found = events.of_tenant(self._store, self.tenant, after=after, limit=limit, kind=pattern, latest=latest)
        return [event_of(row, row.position or 0) for row in found]

    def next_due(self, thread_id: str) -> float | None:
        """Return when time will wake a thread that waits (seconds since 1970), None when only people can."""
        found = (views.next_due(self._store, thread_id), kin.next_errand(self._store, thread_id))
        return min((each for each in found if each is not None), default=None)


def _pattern(kind: str | None) -> str | None:
    """Return a kind, or the beginning of some, as SQL's LIKE wants it."""
    return None if kind is None else eventkinds.checked(kind).replace("*", "%")


def event_of(row: EventView, cursor: int) -> Event:
    """Return what a row of the log says, under a cursor of the log or of its thread."""
    payload = None if row.payload is None else view(row.payload)
    detail = {} if row.detail is None else json.loads(row.detail)
    if detail:
        payload = detail
    if row.question is not None:
        asked = {name: value for name, value in view(row.question).items() if value is not None}
        if "schema" in asked:
            asked["schema"] = json.loads(asked["schema"])
        payload = {"kind": row.asks, **asked, "quorum": row.quorum, "on_expiry": row.on_expiry, **detail}
    return Event(
        cursor,
        row.id,
        row.kind,
        row.tenant,
        row.application,
        row.agent,
        row.thread,
        row.thread_id,
        row.run_id,
        row.run,
        row.seq,
        row.approval_id,
        payload,
        datetime.fromtimestamp(row.at, UTC),
        bool(row.left_out),
    )


def _shown(text: Any) -> str:
    """Return a text for people: one that JSON cannot carry, such as half an emoji, is shown escaped."""
    return text if isinstance(text, str) else str(text["v"])


def _thread_of(row: ThreadView) -> Thread:
    return Thread(
        row.id,
        row.tenant,
        row.application,
        row.agent,
        row.name,
        row.graph_version,
        row.status,
        row.control == "pause",
        None if row.error is None else json.loads(row.error),
        row.seq,
        row.checkpoint_id,
        row.run_id,
        row.run_steps,
        row.lease_worker,
        row,
    )


def _kin_of(row: KinView) -> Kin:
    return Kin(
        row.parent,
        row.parent_agent,
        row.parent_id,
        row.run,
        row.name,
        row.agent,
        row.graph_version,
        row.child_id,
        row.run_id,
        row.state,
        row.status if row.status is not None else row.thread_status,
        None if row.error is None else json.loads(row.error),
        datetime.fromtimestamp(row.created_at, UTC),
        _time(row.ended_at),
    )


def _checkpoint_of(row: CheckpointRow, at: float) -> Checkpoint:
    meta = view(row.meta)
    cursor = view(row.cursor)
    changed = view(row.change) if row.change is not None else {}
    keys: Mapping[str, Any] = view(row.snapshot) if row.change is None and row.snapshot is not None else changed
    return Checkpoint(
        row.id,
        row.seq,
        row.kind,
        datetime.fromtimestamp(at, UTC),
        row.run_id,
        row.parent_id,
        list(meta.get("nodes", [])),
        due_names(cursor),
        [key for key in keys if HIDDEN not in key] if row.parent_id is None or row.change is not None else [],
        meta,
        row.digest.hex(),
    )


def due_names(cursor: Mapping[str, Any]) -> list[str]:
    """Return the names of the entries of a stored cursor that are due."""
    from keepstep.runtime.planner import Cursor  # noqa: PLC0415

    names: list[str] = []

    def collect(entries: Any, prefix: str) -> None:
        for entry in entries:
            name = f"{prefix}{entry.id}"
            if entry.frame is not None:
                collect(entry.frame.entries, f"{name}/")
            elif entry.done is None:
                names.append(name)

    collect(Cursor.from_plain(cursor).root.entries, "")
    return names


def plain_state(rows: list[CheckpointRow]) -> dict[str, Any]:
    """Return the state at the last of some consecutive checkpoints that begin with a snapshot, as plain values."""
    verify(rows)
    state: dict[str, Any] = view(rows[0].snapshot or b"")
    for row in rows[1:]:
        if row.snapshot is not None:
            state = view(row.snapshot)
        elif row.change is not None:
            state = delta.apply(state, view(row.change))
    return {key: value for key, value in state.items() if HIDDEN not in key}
