"""Threads and what belongs to them as the JSON documents of `--json` have them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from keepstep.cli.output import iso

if TYPE_CHECKING:
    from keepstep.runtime.reader import Approval, Checkpoint, Event, Kin, Thread
    from keepstep.store.views import AuditView, EffectView, NodeRunView, RunView, WaitView


def thread(found: Thread) -> dict[str, Any]:
    """Return a thread's record."""
    row = found.row
    return {
        "id": found.id,
        "tenant": found.tenant,
        "application": found.application,
        "graph": found.graph,
        "version": found.version,
        "thread": found.name,
        "status": found.status,
        "paused": found.paused,
        "error": found.error,
        "seq": found.seq,
        "checkpoint": found.checkpoint,
        "run": found.run,
        "steps": found.steps,
        "step_limit": row.step_limit,
        "runs_queued": row.queued,
        "running_on": found.running_on,
        "node_runs": row.fanned,
        "node_runs_pending": row.pending,
        "undoing": found.undoing,
        "undone": found.undone,
        "due_at": iso(row.due_at) if found.status == "ready" else None,
        "created_at": iso(row.created_at),
        "updated_at": iso(row.updated_at),
    }


def run(found: RunView) -> dict[str, Any]:
    """Return a run's record."""
    return {
        "id": found.id,
        "number": found.number,
        "request_id": found.request_id,
        "status": found.status,
        "steps": found.steps,
        "error": error_of(found.error),
        "created_at": iso(found.created_at),
        "started_at": iso(found.started_at),
        "ended_at": iso(found.ended_at),
    }


def node_run(found: NodeRunView) -> dict[str, Any]:
    """Return a fanned-out node run's record."""
    return {
        "seq": found.seq,
        "run": found.run,
        "node": found.node,
        "status": found.status,
        "error": error_of(found.error),
        "starts": found.starts,
        "failures": found.failures,
        "deaths": found.deaths,
        "last_death": found.last_death,
        "running_on": found.lease_worker,
        "started_at": iso(found.started_at),
        "ended_at": iso(found.ended_at),
    }


def effect(found: EffectView) -> dict[str, Any]:
    """Return an effect's record."""
    return {
        "key": found.key,
        "step": found.step,
        "run": found.run,
        "call": found.call,
        "name": found.name,
        "state": found.state,
        "calls": found.calls,
        "error": error_of(found.error),
        "resolved_by": found.resolved_by,
        "undo": found.undo,
        "undone": found.undone,
        "model_call": found.meta,
        "started_at": iso(found.started_at),
        "ended_at": iso(found.ended_at),
    }


def wait(found: WaitView) -> dict[str, Any]:
    """Return a wait's record."""
    return {
        "step": found.step,
        "run": found.run,
        "kind": found.kind,
        "status": found.status,
        "approval": found.approval_id,
        "signal": found.signal_name,
        "child": found.child,
        "due_at": iso(found.due_at),
        "created_at": iso(found.created_at),
        "answered_at": iso(found.answered_at),
    }


def kin(found: Kin) -> dict[str, Any]:
    """Return the record of a child and its parent."""
    return {
        "parent": found.parent,
        "parent_graph": found.parent_graph,
        "parent_id": found.parent_id,
        "node_run": found.node_run,
        "thread": found.thread,
        "graph": found.graph,
        "version": found.version,
        "id": found.id,
        "run": found.run,
        "state": found.state,
        "status": found.status,
        "error": found.error,
        "spawned_at": found.spawned_at,
        "ended_at": found.ended_at,
    }


def audit(found: AuditView) -> dict[str, Any]:
    """Return an audit row's record."""
    return {
        "actor": found.actor,
        "action": found.action,
        "command": found.command_id,
        "detail": None if found.detail is None else json.loads(found.detail),
        "at": iso(found.at),
    }


def event(found: Event) -> dict[str, Any]:
    """Return an event's record."""
    return {
        "cursor": found.cursor,
        "id": found.id,
        "kind": found.kind,
        "graph": found.graph,
        "thread": found.thread,
        "thread_id": found.thread_id,
        "run": found.run,
        "node_run": found.node,
        "seq": found.seq,
        "approval": found.approval,
        "payload": found.payload,
        "at": found.at,
    }


def checkpoint(found: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's record."""
    return {
        "id": found.id,
        "seq": found.seq,
        "kind": found.kind,
        "at": found.at,
        "run": found.run,
        "parent": found.parent,
        "nodes": found.nodes,
        "next": found.next,
        "changed": found.changed,
        "digest": found.digest,
    }


def approval(found: Approval, decisions: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return an approval's record."""
    return {
        "id": found.id,
        "graph": found.graph,
        "thread": found.thread,
        "thread_id": found.thread_id,
        "run": found.run,
        "node_run": found.node_run,
        "kind": found.kind,
        "status": found.status,
        "question": found.question,
        "arguments": found.arguments,
        "context": found.context,
        "schema": found.schema,
        "choices": found.choices,
        "to": found.to,
        "on_expiry": found.on_expiry,
        "escalate_to": found.escalate_to,
        "quorum": found.quorum,
        "self_approval": found.self_approval,
        "started_by": found.started_by,
        "escalated": found.escalated,
        "remind_seconds": found.remind_seconds,
        "reminders": found.reminders,
        "decisions": list(decisions),
        "expires_at": found.expires_at,
        "created_at": found.created_at,
        "closed_at": found.closed_at,
    }


def error_of(text: str | None) -> Any:
    """Return a stored error: {code, message, …}, or the text itself when it is another one."""
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return {"code": "error", "message": text}


def said(error: Any) -> str:
    """Return an error in words: `code: message`, and of a cancelled run who wanted it."""
    if error.get("code") != "cancelled":
        return f"{error.get('code')}: {error.get('message')}"
    by = f" by {error['by']}" if error.get("by") else ""
    reason = f": {error['message']}" if error.get("message") not in (None, "cancelled") else ""
    return f"cancelled{by}{reason}"


def counted(names: Iterable[str]) -> str:
    """Return node runs in short: `plan, audit x40`."""
    counts = Counter(name.partition("#")[0] for name in names)
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())
