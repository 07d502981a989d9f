"""`keepstep events`: what happened, from the log, and as it happens."""

from __future__ import annotations

import fnmatch
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.cli.command import command
from keepstep.cli.session import Session

if TYPE_CHECKING:
    from keepstep.runtime.reader import Event

_PAGE = 500
_POLL_SECONDS = 0.3
_PAYLOAD_WIDTH = 200


@command(
    "events",
    panel="Look",
    reads=True,
    example="""\
keepstep events
keepstep events --kind 'approval.*' --follow
keepstep events order-81 --graph refunds
keepstep events --after 1207 --json""",
)
def events(
    session: Session,
    *,
    thread: Annotated[
        str | None, typer.Argument(metavar="THREAD", help="Only what happened to this thread, by its name or id.")
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option("--graph", metavar="GRAPH", help="The thread's graph, when threads of several share the name."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--kind", metavar="KIND", help="Only this kind: approval.opened, or 'approval.*' and the like."),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option("--after", min=0, metavar="CURSOR", help="Read on after this one, the last that you saw; 0: all."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, metavar="N", help="At most this many: the latest, unless --after is given.")
    ] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as more happens, until Ctrl+C; with --json one line for each.")
    ] = False,
) -> None:
    """Show what happened to threads and their approvals, and what nodes have emitted, in order.

    Each line begins with its cursor: a program that keeps the last one it has seen, and asks with --after for what
    comes next, misses nothing. Cursors of one thread's events and of the whole log are not the same.
    """
    from keepstep.cli import records

    with session.reader() as reader:
        wanted: dict[str, Any] = {"thread": thread, "graph": graph, "kind": kind}
        found = reader.events(**wanted, after=after or 0, limit=limit, latest=after is None)
        if not follow:
            _answer(session, found, after)
            return
        last = after or 0
        while True:
            for each in found:
                last = each.cursor
                if not fnmatch.fnmatchcase(each.kind, kind or "*"):
                    continue
                if session.as_json:
                    session.output.record(records.event(each))
                else:
                    session.output.line(_line(each))
            if not found:
                time.sleep(_POLL_SECONDS)
            # All kinds: the cursor moves on over those that are not wanted, which else were read again each time.
            found = reader.events(thread, graph=graph, after=last, limit=_PAGE)


def _answer(session: Session, found: list[Event], after: int | None) -> None:
    from keepstep.cli import records

    if session.as_json:
        session.output.document([records.event(each) for each in found])
        return
    for each in found:
        session.output.line(_line(each))
    if not found:
        since = f"since {after}" if after else "here"
        session.output.line(f"nothing has happened {since} (what just has needs a worker's second to stand in the log)")


def _line(found: Event) -> str:
    from keepstep.cli.output import clock, short

    about = f"{found.graph}/{found.thread}"
    parts = [str(found.cursor), clock(found.at.timestamp()), found.kind, about, found.node, found.approval or ""]
    said = "" if found.payload is None else short(found.payload, _PAYLOAD_WIDTH)
    return "  ".join(part for part in (*parts, said) if part)
