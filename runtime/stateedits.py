"""An operator's edit of a thread's state: a checkpoint between two steps, by a named person.

The step that is pending keeps its key. So whatever it did before is found in the journal, what it asked stays asked,
and it goes on with the state as it is now. What was decided from the old state stays: a Send carries the input that it
was given, and a node run that has ended is not run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from keepstep.errors import NotCarried, StaleEdit, StepRunning, ThreadBlocked, WrongStatus
from keepstep.runtime.cursor import Cursor
from keepstep.runtime.environment import Runtime
from keepstep.runtime.history import describe, payload, restore
from keepstep.store import stateedits, threads
from keepstep.store.checkpoints import NewCheckpoint
from keepstep.store.engine import Transaction
from keepstep.store.leases import NUDGE_SECONDS, Nudge, carried_key
from keepstep.store.schema import BLOCKED, READY, UNDOING
from keepstep.store.stateedits import EditedHead
from keepstep.store.threads import ThreadState


class Edited(NamedTuple):
    """What an edit did, for the audit, and what is due after it."""

    detail: dict[str, Any]
    nudges: list[Nudge]


def edit(
    runtime: Runtime,
    transaction: Transaction,
    found: ThreadState,
    values: Mapping[str, Any],
    *,
    by: str,
    reason: str | None = None,
    expect: int | str | None = None,
) -> Edited:
    """Replace values in a locked thread's state by a checkpoint of kind `edit`, the pending step's key kept.

    `expect` is the seq or the id of the checkpoint that the person has looked at. Raises `StateError`, `NotStorable`
    or `TooLarge` naming what does not fit, `StaleEdit` when the head is another one than expected, `StepRunning` while
    somebody holds a lease of the step, `WrongStatus` when there is no state, or none that can be read, and `NotCarried`
    when this process has not the graph in the thread's version.
    """
    at = stateedits.head(transaction, found)
    _check_head(found, at, expect)
    _check_idle(transaction, found, at)
    graph = runtime.graphs.get((found.agent, found.graph_version))
    if graph is None:
        raise _not_carried(transaction, found)
    codec = runtime.codec(graph)
    try:
        head = restore(codec, stateedits.chain(transaction, found, at))
    except ThreadBlocked as error:
        text = f"the state of thread {found.name!r} cannot be edited: {error.message}"
        raise WrongStatus(text) from error
    channels = graph.schema.edited(head.channels, values)
    step = "" if head.cursor.finished else head.cursor.key or f"{found.id}/{found.branch}/{found.seq + 1}"
    keys = sorted(values)
    meta = describe(graph_version=found.graph_version, worker=runtime.owner.worker)
    meta["edit"] = {"by": by, "keys": keys} | ({"reason": reason} if reason else {})
    cursor = Cursor(step, head.cursor.root)
    new = payload(codec, head, channels, cursor, meta, chain_max=runtime.settings.snapshot_steps_max)
    checkpoint = NewCheckpoint(
        seq=found.seq + 1,
        id=new.id,
        parent_id=head.checkpoint_id,
        tenant=found.tenant,
        run_id=found.run_id or "",
        kind="edit",
        change=new.change,
        snapshot=new.snapshot,
        cursor=new.cursor,
        meta=new.meta,
        digest=new.digest,
        parent_digest=head.digest,
        status=found.status,
        run_steps=found.run_steps,
        lease_seconds=0.0,
        nudge_seconds=NUDGE_SECONDS,
    )
    nudges = stateedits.write(transaction, found, at, checkpoint, step=step)
    detail = {
        "keys": keys,
        "reason": reason,
        "seq": checkpoint.seq,
        "checkpoint": checkpoint.id,
        "before": head.digest.hex(),
        "after": checkpoint.digest.hex(),
    }
    return Edited(detail, nudges)


def _check_head(found: ThreadState, at: EditedHead, expect: int | str | None) -> None:
    if found.seq < 0:
        text = f"thread {found.name!r} has no state yet: its first run has not begun"
        raise WrongStatus(text)
    if found.undoing == UNDOING and found.status in {READY, BLOCKED}:
        text = f"the run of thread {found.name!r} has failed and is being undone: edit it when that has ended"
        raise WrongStatus(text)
    if expect is not None and expect not in (found.seq, at.checkpoint_id):
        text = (
            f"thread {found.name!r} is at checkpoint {at.checkpoint_id} (seq {found.seq}) and no longer at {expect}: "
            "look at its state again, then edit that"
        )
        raise StaleEdit(text)


def _check_idle(transaction: Transaction, found: ThreadState, at: EditedHead) -> None:
    """Refuse to change the state under somebody who is working from it."""
    running = stateedits.running_node_runs(transaction, found) if found.fanned else []
    if not at.is_held and not running:
        return
    what = "its step is running" if at.is_held else f"node run {running[0]!r} is running"
    more = f" (and {len(running) - 1} others)" if len(running) > 1 else ""
    text = (
        f"thread {found.name!r} cannot be edited now: {what}{more}. Pause the thread, which lets what is running end "
        "and begins nothing else, then edit its state, then resume it"
    )
    raise StepRunning(text)


def _not_carried(transaction: Transaction, found: ThreadState) -> NotCarried:
    elsewhere = threads.is_carried_by_anybody(transaction, carried_key(found.agent, found.graph_version))
    who = "the worker that took the edit does not carry" if elsewhere else "no live worker carries"
    error = NotCarried(
        f"{who} graph {found.agent!r} version {found.graph_version!r}, whose state schema an edit of thread "
        f"{found.name!r} is checked against: run a worker with the module that defines it, then edit again"
    )
    error.elsewhere = elsewhere
    return error
