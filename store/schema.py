"""The tables.

A tour. A **thread** row is one execution history's present: its status, where its head checkpoint is, who holds its
lease, when it is due and what must be in the queue for it. It is also the outbox: a due thread *is* the message, and
the sweep publishes it again when the queue lost it. A **checkpoint** row is the past: written once, chained by digest,
addressed by `(thread, branch, seq)`. A **run** is one input given to a thread. While a super-step is fanned out, each
of its **node runs** has a row that looks like a small thread: its own lease, attempts, due time and, at the end, its
pending write. An **effect** is the journal of one outside action. A **wait** is what a node run is parked on; an
**approval** is the question behind a wait and a **decision** one person's word on it. A **signal** is kept until a wait
consumes it. **audit** says who asked for what, and its unique command id is what makes every command idempotent.
**event** is what happened to threads and their approvals, and what nodes tell the world (`ctx.emit`): a log in which
each entry gets a position once all before it are known; a **mark** says how far that has come, and how far the log is
published. A **child** row stands between two threads, a parent and the child it spawned: it says what one still has to
do to the other, so that no transaction ever locks both. A **limit** says how
many steps of a graph or tenant may run at once, and a **slot** is one lease that counts against it. A **rate** row
says how often a tenant has called a tool lately, and whether the tool has asked for a pause. A **schedule** is what
gives threads runs by the clock: each of its ticks, at most once. An **artifact** is a value too large
for the row that refers to it, known by the digest of its content. A **worker** row is one worker process and how long
it is believed to be alive.

Times are seconds since 1970 (UTC) by the database's clock. Payload columns are opaque bytes. Text columns hold names
checked at the door or text escaped for the database. Every row carries its tenant. Tables are prefixed, so that they
can live beside an application's own.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    and_,
)

metadata = MetaData()

READY, WAITING, BLOCKED = "ready", "waiting", "blocked"
DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
QUEUED, RUNNING = "queued", "running"
ENDED = (DONE, FAILED, CANCELLED)
UNDOING, UNDONE = 1, 2
"""Of a thread whose run has failed: what it did is being undone, or was."""
NEVER = 1e12
"""A time that does not come."""

_AUTO_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only in an INTEGER primary key


def _text(name: str, *, default: str | None = None) -> Column[str]:
    return Column(name, Text, nullable=False, server_default=default)


def _count(name: str) -> Column[int]:
    return Column(name, Integer, nullable=False, server_default="0")


def _time(name: str, *, nullable: bool = False) -> Column[float]:
    return Column(name, Float(53), nullable=nullable)


def _lease_columns() -> list[Column[Any]]:
    """Who may act on the row, what it has cost so far, and what must be in the queue for it."""
    return [
        Column("version", Integer, nullable=False),
        _text("queue"),  # where its nudges go: one for each graph and version, so that they meet only who carries it
        Column("priority", Integer, nullable=False),  # 0 is the most urgent
        _time("due_at"),
        Column("lease_nonce", Text),
        Column("lease_worker", Text),
        Column("lease_child", Integer),
        _time("lease_deadline", nullable=True),
        _time("lease_seconds"),  # how long the next lease lasts: the longest timeout due, plus grace
        _count("starts"),  # times this step's body was entered
        _count("failures"),  # attempts that ended in an error
        _count("deaths"),  # attempts that took their process down
        Column("last_death", Text),
        _time("next_nudge_at"),
        _count("nudges"),
    ]


worker = Table(
    "keepstep_worker",
    metadata,
    Column("id", Text, primary_key=True),
    _text("host"),
    Column("pid", Integer, nullable=False),
    Column("concurrency", Integer, nullable=False),
    _text("carried"),  # "\n" graph "\x1f" version "\n" …: what it can run, searchable by substring
    _text("release"),
    _time("started_at"),
    _time("alive_until"),
    _time("clock_skew", nullable=True),  # how far its clock was ahead of the database's before its last renewal
)

thread = Table(
    "keepstep_thread",
    metadata,
    Column("id", Text, primary_key=True),
    _text("tenant"),
    _text("application"),
    _text("agent"),  # the graph's name
    _text("name"),
    _text("graph_version"),
    _text("status"),
    _text("control", default=""),  # "" | "pause" | "cancel": written by people, only read by steps
    Column("error", Text),  # JSON {"code", "message", …} of why it is blocked, failed or was cancelled
    Column("branch", Integer, nullable=False, server_default="0"),
    Column("seq", Integer, nullable=False),  # of the head checkpoint; -1: none yet
    Column("snapshot_seq", Integer, nullable=False),  # where loading starts
    Column("checkpoint_id", Text),
    *_lease_columns(),
    _count("fanned"),  # node runs of the step that is under way
    _count("pending"),  # those of them that have not ended
    Column("run_id", Text),
    _count("run_active"),  # 1 from the run's begin until it is done or given up for the next
    _count("run_steps"),  # super-steps of this run
    Column("step_limit", Integer),
    _count("undoing"),  # 1: its run has failed and what that did is being undone; 2: it was undone
    _count("runs"),  # runs ever given
    _count("queued"),  # runs that have not begun
    _time("created_at"),
    _time("updated_at"),
    UniqueConstraint("tenant", "application", "agent", "name", name="keepstep_thread_name"),
    CheckConstraint(
        "status IN ('ready','waiting','blocked','done','failed','cancelled')", name="keepstep_thread_status"
    ),
    # A step updates its row twice: with room beside it, the new version stays on the page and no index learns of it.
    postgresql_with={"fillfactor": 50},
)
# From it the sweep finds one tenant's due rows without reading past another's, however many those are.
Index(
    "keepstep_thread_due",
    thread.c.queue,
    thread.c.priority,
    thread.c.tenant,
    thread.c.next_nudge_at,
    postgresql_where=thread.c.status == READY,
    sqlite_where=thread.c.status == READY,
)

run = Table(
    "keepstep_run",
    metadata,
    Column("id", Text, primary_key=True),
    _text("tenant"),
    _text("thread_id"),
    Column("number", Integer, nullable=False),  # 1, 2, … within the thread
    _text("request_id"),
    Column("request_digest", LargeBinary, nullable=False),
    _text("status"),
    Column("input", LargeBinary, nullable=False),
    Column("step_limit", Integer),
    Column("started_by", Text),  # who asked for it, where that was said
    _count("spawned"),  # 1: a parent spawned it, and its end is written on the child row, too
    _count("steps"),
    Column("error", Text),
    _time("created_at"),
    _time("started_at", nullable=True),
    _time("ended_at", nullable=True),
    UniqueConstraint("tenant", "request_id", name="keepstep_run_request"),
)
Index("keepstep_run_thread", run.c.thread_id, run.c.number)

checkpoint = Table(
    "keepstep_checkpoint",
    metadata,
    Column("thread_id", Text, nullable=False),
    Column("branch", Integer, nullable=False),
    Column("seq", Integer, nullable=False),
    _text("id"),
    Column("parent_id", Text),
    _text("tenant"),
    _text("run_id"),
    _text("kind"),  # "input" | "step" | "edit"
    Column("change", LargeBinary),  # NULL: the snapshot is the change (first of a branch)
    Column("snapshot", LargeBinary),
    Column("cursor", LargeBinary, nullable=False),
    Column("meta", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("parent_digest", LargeBinary, nullable=False),
    _time("created_at"),
    PrimaryKeyConstraint("thread_id", "branch", "seq", name="keepstep_checkpoint_pkey"),
)

node_run = Table(
    "keepstep_node_run",
    metadata,
    Column("thread_id", Text, nullable=False),
    Column("branch", Integer, nullable=False),
    Column("seq", Integer, nullable=False),  # of the checkpoint its super-step will write
    _text("run"),  # "plan", "audit#3", "sub/act"
    _text("tenant"),
    _text("step"),  # the step key: an edit of the state keeps it
    Column("position", Integer, nullable=False),
    _text("node"),
    Column("input", LargeBinary),  # what a Send carries; NULL: the thread's state
    _text("status"),  # ready | waiting | blocked | done | failed | cancelled
    Column("write", LargeBinary),  # the pending write
    Column("error", Text),
    *_lease_columns(),
    _time("created_at"),
    _time("started_at", nullable=True),
    _time("ended_at", nullable=True),
    PrimaryKeyConstraint("thread_id", "branch", "seq", "run", name="keepstep_node_run_pkey"),
)
Index(
    "keepstep_node_run_due",
    node_run.c.queue,
    node_run.c.priority,
    node_run.c.tenant,
    node_run.c.next_nudge_at,
    postgresql_where=node_run.c.status == READY,
    sqlite_where=node_run.c.status == READY,
)

effect = Table(
    "keepstep_effect",
    metadata,
    Column("thread_id", Text, nullable=False),
    _text("step"),  # the step key
    _text("run"),
    _text("call"),  # explicit key, or name + arguments digest + occurrence
    _text("tenant"),
    _text("name"),
    _text("state"),  # intent | done | failed | given_up
    _count("at_risk"),
    Column("arguments_digest", LargeBinary, nullable=False),
    Column("result", LargeBinary),
    Column("error", Text),
    _text("nonce"),  # of the attempt that began it: what fences its result
    _count("calls"),
    _time("deadline"),
    _time("started_at"),
    _time("ended_at", nullable=True),
    Column("arguments", LargeBinary),  # of one at risk, for the person who may have to find out whether it happened
    Column("resolved_by", Text),  # who said what came of it
    Column("meta", LargeBinary),  # of a model call: model, versions, tokens, …
    Column("artifact", Text),  # digest of a result that is too large to stand here
    Column("arguments_artifact", Text),  # the same of the arguments
    Column("run_id", Text),  # of the thread's run
    Column("undo", Text),  # the function that undoes it when the run fails; NULL: none
    Column("undone", Text),  # undone | given_up | not_done: what came of that
    PrimaryKeyConstraint("thread_id", "step", "run", "call", name="keepstep_effect_pkey"),
)

artifact = Table(
    "keepstep_artifact",
    metadata,
    _text("tenant"),
    _text("digest"),  # of the content, in hexadecimal digits
    Column("bytes_count", BigInteger, nullable=False),
    Column("data", LargeBinary),  # NULL: it is kept at `location`
    Column("location", Text),
    _time("created_at"),  # when it was last written
    PrimaryKeyConstraint("tenant", "digest", name="keepstep_artifact_pkey"),
)

wait = Table(
    "keepstep_wait",
    metadata,
    Column("thread_id", Text, nullable=False),
    _text("step"),
    _text("run"),
    Column("occurrence", Integer, nullable=False),
    _text("tenant"),
    Column("branch", Integer, nullable=False),
    Column("seq", Integer, nullable=False),  # with branch: the node run, when the step is fanned out
    _text("kind"),  # approval | signal | timer | child
    Column("digest", LargeBinary, nullable=False),  # of kind, question and arguments
    _text("status"),  # open | answered | closed
    Column("approval_id", Text),
    Column("signal_name", Text),
    Column("signal_key", Text),
    Column("child_run", Text),  # the run id of the child whose end is waited for
    _time("due_at", nullable=True),  # timer, time-out or expiry
    Column("answer", LargeBinary),
    _time("created_at"),
    _time("answered_at", nullable=True),
    PrimaryKeyConstraint("thread_id", "step", "run", "occurrence", name="keepstep_wait_pkey"),
)
Index(
    "keepstep_wait_due",
    wait.c.due_at,
    postgresql_where=wait.c.status == "open",
    sqlite_where=wait.c.status == "open",
)

Index(
    "keepstep_wait_child",
    wait.c.child_run,
    postgresql_where=wait.c.child_run.is_not(None),
    sqlite_where=wait.c.child_run.is_not(None),
)

child = Table(
    "keepstep_child",
    metadata,
    Column("thread_id", Text, nullable=False),  # of the parent
    _text("step"),  # the step key in which it was spawned
    _text("run"),  # the node run that spawned it
    _text("call"),  # explicit key, or graph + input digest + occurrence
    _text("tenant"),
    _text("application"),
    _text("agent"),  # the child's graph
    Column("graph_version", Text),  # NULL: the one that a worker carries when it is started
    _text("name"),  # of the child's thread
    _text("run_id"),  # of the child's run, given before that exists: starting it twice is starting it once
    Column("child_id", Text),  # of the child's thread, once it is started
    Column("input", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False),  # of graph, name and input
    Column("priority", Integer, nullable=False),  # its parent's
    _time("lease_seconds"),
    _text("state"),  # wanted | started | ended | delivered
    _count("cancel"),  # 1: the parent was cancelled, and it is to be
    Column("status", Text),  # how its run ended: done | failed | cancelled
    Column("error", Text),
    Column("branch", Integer),  # with seq: the checkpoint in which a run that is done left its state
    Column("seq", Integer),
    _time("due_at", nullable=True),  # something is left to do, and whoever was about to must be dead by then
    _count("tries"),
    _time("created_at"),
    _time("ended_at", nullable=True),
    PrimaryKeyConstraint("thread_id", "step", "run", "call", name="keepstep_child_pkey"),
    UniqueConstraint("run_id", name="keepstep_child_run"),
)
Index("keepstep_child_thread", child.c.child_id)
Index(
    "keepstep_child_due",
    child.c.due_at,
    postgresql_where=child.c.due_at.is_not(None),
    sqlite_where=child.c.due_at.is_not(None),
)

approval = Table(
    "keepstep_approval",
    metadata,
    Column("id", Text, primary_key=True),
    _text("tenant"),
    _text("thread_id"),
    _text("step"),
    _text("run"),
    Column("occurrence", Integer, nullable=False),
    _text("kind"),  # approve | ask
    _text("status"),  # open | approved | rejected | answered | changes_requested | expired | withdrawn
    Column("question", LargeBinary, nullable=False),  # question, arguments, context, to, schema
    Column("quorum", Integer, nullable=False),
    _text("on_expiry"),  # reject | approve | escalate | fail
    Column("assigned", Text),  # who is asked now (JSON); NULL: those whom the question names
    Column("escalate_to", Text),  # who is asked when nobody has answered in time (JSON)
    _count("escalated"),
    _time("expires_seconds", nullable=True),  # how long it is open, once more when it escalates
    _time("expires_at", nullable=True),
    _time("remind_seconds", nullable=True),  # how long between two reminders while it is open
    _time("remind_at", nullable=True),  # of the next one
    _count("reminders"),
    _time("created_at"),
    _time("closed_at", nullable=True),
)
Index("keepstep_approval_thread", approval.c.thread_id)
_is_to_be_reminded = and_(approval.c.status == "open", approval.c.remind_at.is_not(None))
Index(
    "keepstep_approval_remind",
    approval.c.remind_at,
    postgresql_where=_is_to_be_reminded,
    sqlite_where=_is_to_be_reminded,
)
Index(
    "keepstep_approval_open",
    approval.c.tenant,
    approval.c.created_at,
    postgresql_where=approval.c.status == "open",
    sqlite_where=approval.c.status == "open",
)

decision = Table(
    "keepstep_decision",
    metadata,
    Column("approval_id", Text, nullable=False),
    _text("id"),
    _text("tenant"),
    _text("by"),
    _text("verdict"),
    Column("payload", LargeBinary, nullable=False),
    _time("at"),
    PrimaryKeyConstraint("approval_id", "id", name="keepstep_decision_pkey"),
)

signal = Table(
    "keepstep_signal",
    metadata,
    Column("id", _AUTO_ID, primary_key=True, autoincrement=True),
    _text("tenant"),
    _text("thread_id"),
    _text("name"),
    Column("key", Text),
    Column("payload", LargeBinary, nullable=False),
    _time("created_at"),
    _time("expires_at"),
    Column("consumed_by", Text),  # the wait that took it
)
Index("keepstep_signal_thread", signal.c.thread_id, signal.c.name)

audit = Table(
    "keepstep_audit",
    metadata,
    Column("id", _AUTO_ID, primary_key=True, autoincrement=True),
    _text("tenant"),
    Column("thread_id", Text),
    _text("actor"),
    _text("action"),
    Column("command_id", Text),
    Column("command_digest", LargeBinary),  # of what the command said: another one under its id is refused
    Column("detail", Text),
    _time("at"),
    UniqueConstraint("tenant", "command_id", name="keepstep_audit_command"),
)
Index("keepstep_audit_thread", audit.c.thread_id, audit.c.id)

event = Table(
    "keepstep_event",
    metadata,
    Column("id", _AUTO_ID, primary_key=True, autoincrement=True),
    _text("tenant"),
    _text("thread_id"),
    Column("run_id", Text),
    Column("seq", Integer, nullable=False),
    _text("run"),  # the node run; empty: none
    Column("payload", LargeBinary),  # of one that a node emitted
    _time("at"),
    _text("kind", default="node.emitted"),
    Column("approval_id", Text),
    Column("detail", Text),  # JSON
    Column("position", BigInteger),  # in the log; NULL: not given yet
    UniqueConstraint("position", name="keepstep_event_position"),
)
Index("keepstep_event_thread", event.c.thread_id, event.c.id)
Index("keepstep_event_tenant", event.c.tenant, event.c.position)
Index(
    "keepstep_event_unplaced",
    event.c.id,
    postgresql_where=event.c.position.is_(None),
    sqlite_where=event.c.position.is_(None),
)

mark = Table(
    "keepstep_mark",
    metadata,
    Column("name", Text, primary_key=True),  # placed | published
    Column("position", BigInteger, nullable=False),
    Column("holder", Text),  # who is at it
    _time("held_until"),
)

limit = Table(
    "keepstep_limit",
    metadata,
    _text("kind"),  # graph | tenant
    _text("name"),
    Column("running_max", Integer, nullable=False),
    _time("updated_at"),
    PrimaryKeyConstraint("kind", "name", name="keepstep_limit_pkey"),
)

slot = Table(
    "keepstep_slot",
    metadata,
    _text("scope"),  # "graph refunds", "tenant acme"
    _text("nonce"),  # of the lease: the slot is free when no row is leased under it any more
    _text("thread_id"),
    Column("branch", Integer, nullable=False),
    Column("seq", Integer, nullable=False),
    _text("run"),  # "" for the thread's own lease
    _time("taken_at"),
    PrimaryKeyConstraint("scope", "nonce", name="keepstep_slot_pkey"),
)

rate = Table(
    "keepstep_rate",
    metadata,
    _text("tenant"),
    _text("name"),  # of the tool
    Column("level", Float(53), nullable=False),  # calls that count at `at`
    Column("promised", Float(53), nullable=False),  # and with them those that were told when to come back
    _time("told_seconds"),  # what the last one who asked was told; 0: it was let in
    _time("at"),
    _time("held_until"),  # 0: never held off
    _time("idle_at"),  # from then on the row says nothing that no row would not say
    PrimaryKeyConstraint("tenant", "name", name="keepstep_rate_pkey"),
    # Each call updates its row: the new version stays on the page.
    postgresql_with={"fillfactor": 50},
)
Index(
    "keepstep_rate_held",
    rate.c.held_until,
    postgresql_where=rate.c.held_until > 0,
    sqlite_where=rate.c.held_until > 0,
)

schedule = Table(
    "keepstep_schedule",
    metadata,
    Column("id", Text, primary_key=True),
    _text("tenant"),
    _text("application"),
    _text("name"),
    _text("agent"),  # the graph's name
    Column("graph_version", Text),  # NULL: the one that a worker carries at the tick
    _text("thread"),  # whose further run each tick is; with "{tick}" in it each tick has a thread of its own
    Column("input", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False),  # of all that it says
    _text("cron"),
    _text("timezone"),
    _text("missed"),  # skip | last | all
    _text("overlap"),  # allow | skip
    Column("priority", Integer),  # NULL: the thread keeps its own
    Column("step_limit", Integer),
    _time("lease_seconds"),
    _count("paused"),
    Column("created_by", Text),
    Column("updated_by", Text),  # who last said what it is to do: its runs are started by them
    _time("next_at", nullable=True),  # the first tick that has not been dealt with; NULL: paused, or none comes
    _time("due_at", nullable=True),  # when a sweep looks: at that tick, or later while no worker carries the graph
    _time("last_tick", nullable=True),  # the last tick that has been dealt with
    _time("run_tick", nullable=True),  # the last tick that started a run, which is `run_id`
    Column("run_id", Text),
    _time("skipped_tick", nullable=True),  # the last tick that started none
    Column("error", Text),  # JSON {"code", "message"} of why it waits, or why its last tick started no run
    _time("created_at"),
    _time("updated_at"),
    UniqueConstraint("tenant", "application", "name", name="keepstep_schedule_name"),
)
Index(
    "keepstep_schedule_due",
    schedule.c.due_at,
    postgresql_where=schedule.c.due_at.is_not(None),
    sqlite_where=schedule.c.due_at.is_not(None),
)
