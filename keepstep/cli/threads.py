"""`keepstep threads`, `history`, `state`: what threads are and were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from keepstep.cli.command import command
from keepstep.cli.control import By, GraphName, Reason, ThreadName
from keepstep.cli.edit import edit
from keepstep.cli.session import Session
from keepstep.errors import InvalidInput

if TYPE_CHECKING:
    from keepstep.runtime.reader import Checkpoint, Reader, Thread

PANEL = "Look"
_ASKING_MAX = 10_000
_WAITS_MAX = 200
_WAITS_SHOWN_MAX = 3


class Status(StrEnum):
    """Which threads."""

    READY = "ready"
    WAITING = "waiting"
    BLOCKED = "blocked"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@command("threads", panel=PANEL, reads=True, example="keepstep threads --status blocked")
def threads(
    session: Session,
    *,
    graph: GraphName = None,
    status: Annotated[
        Status | None, typer.Option("--status", "-s", metavar="|".join(Status), help="Only of this status.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, metavar="N", help="At most N.")] = 50,
    before: Annotated[
        str | None, typer.Option("--before", metavar="ID", help="Only threads older than this one: the next page.")
    ] = None,
) -> None:
    """List threads, the newest first."""
    from keepstep.cli import records
    from keepstep.cli.output import relative, status_text

    with session.reader() as reader:
        found = reader.threads(
            graph=graph, status=None if status is None else status.value, limit=limit + 1, before=before
        )
        page, more = found[:limit], len(found) > limit
        asking = [] if session.as_json else reader.approvals(limit=_ASKING_MAX)
        waiting = [] if session.as_json else [each.id for each in page if each.status == "waiting"]
        waits = {thread_id: _waits(reader, thread_id) for thread_id in waiting[:_WAITS_MAX]}
    asked = Counter(each.thread_id for each in asking)
    if session.as_json:
        session.output.document(
            {"threads": [records.thread(each) for each in page], "next_before": page[-1].id if more else None}
        )
        return
    if not page:
        session.output.line("there are no such threads" if status or graph or before else "there are no threads yet")
        return
    session.output.table(
        ("THREAD", "GRAPH", "STATUS", "STEPS", "CHANGED", ""),
        [
            (
                each.name,
                each.graph,
                status_text(each.status),
                str(each.steps),
                relative(each.row.updated_at),
                note(each, asked[each.id], waits.get(each.id, ())),
            )
            for each in page
        ],
    )
    if more:
        session.output.line(f"more: {session.hint(f'threads --before {page[-1].id}')}")


def _waits(reader: Reader, thread_id: str) -> list[str]:
    """Return what a thread waits for besides people."""
    from keepstep.cli.show import waited_for

    found = [each for each in reader.waits(thread_id) if each.status == "open" and each.kind != "approval"]
    told = list(dict.fromkeys(waited_for(each, None, absolute=True).removeprefix("time: ") for each in found))
    more = len(told) - _WAITS_SHOWN_MAX
    return [*told[:_WAITS_SHOWN_MAX], *([f"{more} more"] if more > 0 else [])]


def note(found: Thread, asked: int = 0, waits: Sequence[str] = ()) -> str:
    """Return what else there is to say of a thread, in a few words."""
    from keepstep.cli.output import short
    from keepstep.cli.records import said

    parts = []
    if found.paused:
        parts.append("paused")
    if found.undoing:
        parts.append("being undone")
    if found.error is not None:
        parts.append(short(said(found.error), 80))
    elif found.row.fanned and found.status == "waiting":
        done = found.row.fanned - found.row.pending
        parts.append(f"{done} of {found.row.fanned} node runs ended")
    elif found.running_on is not None:
        parts.append("running")
    if asked:
        parts.append(f"waits for {asked} decision{'' if asked == 1 else 's'}")
    parts += [f"waits {'' if each.startswith('until ') else 'for '}{each}" for each in waits]
    if found.row.queued and found.steps:
        parts.append(f"{found.row.queued} more runs queued")
    return ", ".join(parts)


# --- history and state ------------------------------------------------------------------------------------------------


@command("history", panel=PANEL, reads=True, example="keepstep history order-81 --last 20")
def history(
    session: Session,
    *,
    thread: ThreadName,
    graph: GraphName = None,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=1, metavar="N", help="Only the last N checkpoints.")
    ] = None,
) -> None:
    """List a thread's checkpoints: what ran, what it changed, what was due next. Their digests are verified."""
    from keepstep.cli import records
    from keepstep.cli.output import local

    with session.reader() as reader:
        found = reader.get(thread, graph=graph)
        after = -1 if last is None else max(-1, found.seq - last)
        checkpoints = reader.history(found.id, after=after)
    if session.as_json:
        session.output.document(
            {"thread": found.name, "thread_id": found.id, "checkpoints": [records.checkpoint(e) for e in checkpoints]}
        )
        return
    session.output.table(
        ("SEQ", "RAN", "CHANGED", "NEXT", "AT", "CHECKPOINT"),
        [
            (
                str(each.seq),
                records.counted(node["run"] for node in each.nodes) or f"({each.kind}{_by(each)})",
                ", ".join(each.changed) or "-",
                records.counted(each.next) or "(end)",
                local(each.at) or "",
                each.id,
            )
            for each in checkpoints
        ],
    )


def _by(checkpoint: Checkpoint) -> str:
    by = checkpoint.meta.get("edit", {}).get("by")
    return f" by {by}" if by else ""


@command(
    "state",
    panel=PANEL,
    reads=True,
    sends=True,
    example="""\
keepstep state order-81
keepstep state order-81 --at 3
keepstep state order-81 --at 2027-03-01T12:00
keepstep state order-81 --set amount=10.00 --set 'tags=["checked"]' --by anna --reason 'A typing error'""",
)
def state(
    session: Session,
    *,
    thread: ThreadName,
    graph: GraphName = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="SEQ|ID|TIME",
            help="At a checkpoint (its seq or id), or at a time (ISO 8601; of this machine's zone when it names none).",
        ),
    ] = None,
    pairs: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Give a key another value (written as for start); repeatable."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="SEQ|ID",
            help="With --set: the checkpoint that you looked at. Without it the one this command finds.",
        ),
    ] = None,
    reason: Reason = None,
    by: By = None,
) -> None:
    """Print a thread's state, now or as it was; or edit it, with --set.

    An edit is checked against the graph's state and becomes a checkpoint of its own, in your name. What the pending
    step has done stays done, and it goes on from the new state. It is refused while a step runs: pause the thread
    first. With --json, what JSON cannot carry exactly is tagged: {"$": "int", "v": "9007199254740993"}.
    """
    if pairs:
        if at is not None:
            message = "--set and --at exclude each other: the past is not edited"
            raise InvalidInput(message)
        edit(session, thread, graph, pairs, expect=expect, reason=reason, by=by)
        return
    if expect is not None or reason is not None or by is not None:
        message = "--expect, --reason and --by belong to --set KEY=VALUE"
        raise InvalidInput(message)
    moment = None if at is None else _moment(at)
    with session.reader() as reader:
        found = reader.get(thread, graph=graph)
        values = reader.state(found.id, at=moment)
    if session.as_json:
        session.output.document({"thread": found.name, "thread_id": found.id, "at": at, "state": values})
    else:
        session.output.state(values, lines_max=1_000_000)


def _moment(text: str) -> int | str | datetime:
    if text.isascii() and text.isdigit() and len(text) < 10:  # noqa: PLR2004  no thread has more checkpoints
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return moment if moment.tzinfo is not None else moment.astimezone()
