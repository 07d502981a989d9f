"""`keepstep signal`, `pause`, `resume`, `cancel`, `retry`: what people and programs ask of a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.cli import values
from keepstep.cli.command import command
from keepstep.cli.session import Session
from keepstep.errors import WrongStatus

if TYPE_CHECKING:
    from keepstep.runtime.reader import Thread

PANEL = "Steer threads"

ThreadName = Annotated[str, typer.Argument(metavar="THREAD", help="The thread's name or id.")]
GraphName = Annotated[
    str | None,
    typer.Option("--graph", "-g", metavar="NAME", help="The graph, when several have a thread of that name."),
]
Reason = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why, for whoever looks later.")]
By = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Who wants it; without it the user of this machine.")
]


def report(session: Session, receipt: Any, done: str, **facts: Any) -> None:
    """Say what became of a command: `done` when a worker has accepted it."""
    reply = session.reply(receipt)
    if session.as_json:
        accepted = {} if reply is None else _facts(reply)
        session.output.document({"command": receipt.id, "accepted": reply is not None, **accepted, **facts})
    elif reply is None:
        session.output.line(f"sent as command {receipt.id}; no worker has been waited for")
    elif reply.duplicate:
        session.output.line(f"{done} (it had been before: nothing was changed)")
    else:
        session.output.line(done)


def _facts(reply: Any) -> dict[str, Any]:
    return {"thread_id": reply.thread_id, "run_id": reply.run_id, "duplicate": reply.duplicate}


@command(
    "signal",
    panel=PANEL,
    sends=True,
    example="""\
keepstep signal order-81 goods_returned '{"parcel": "P-7"}'""",
)
def signal(
    session: Session,
    *,
    thread: ThreadName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The signal's name.")],
    payload: Annotated[
        str | None,
        typer.Argument(metavar="PAYLOAD", help="What it says: JSON, or a text when it is not JSON. - reads it."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="PAYLOAD is a text even if it looks like JSON.")] = False,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Tells waits of one name apart.")] = None,
    signal_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Two signals with one id are one.")
    ] = None,
    graph: GraphName = None,
    by: By = None,
) -> None:
    """Send a thread a signal. One that comes before anybody waits for it is kept."""
    from keepstep.cli.output import short

    value = None if payload is None else read_value(payload, "PAYLOAD", text=text)
    said = "" if payload is None else f" with the {'text' if isinstance(value, str) else 'JSON'} {short(value)}"
    who = by or values.this_user()
    with session.client() as client:
        receipt = client.signal(thread, name, value, graph=graph, key=key, id=signal_id, by=who)
        report(session, receipt, f"signal {name} accepted for {thread}{said}", payload=value)


def read_value(written: str, what: str, *, text: bool) -> Any:
    """Return a value of the command line, or of standard input for `-`."""
    if written == "-":
        written = values.from_file("-", what).rstrip("\n")
    return written if text else values.from_text(written, what)


@command("pause", panel=PANEL, sends=True, example="keepstep pause order-81 --reason 'Under review'")
def pause(
    session: Session, *, thread: ThreadName, graph: GraphName = None, reason: Reason = None, by: By = None
) -> None:
    """Let a thread take no further step until it is resumed. A step that is running finishes."""
    _control(session, lambda client: client.pause, thread, "paused", graph=graph, reason=reason, by=by)


@command("resume", panel=PANEL, sends=True, example="keepstep resume order-81")
def resume(
    session: Session, *, thread: ThreadName, graph: GraphName = None, reason: Reason = None, by: By = None
) -> None:
    """Let a paused thread go on."""
    _control(session, lambda client: client.resume, thread, "resumed", graph=graph, reason=reason, by=by)


@command("cancel", panel=PANEL, sends=True, example="keepstep cancel order-81 --reason 'The customer withdrew'")
def cancel(
    session: Session, *, thread: ThreadName, graph: GraphName = None, reason: Reason = None, by: By = None
) -> None:
    """End a thread's run, those queued behind it, and its children. What was done stays; retry takes it up again."""
    _control(session, lambda client: client.cancel, thread, "cancelled", graph=graph, reason=reason, by=by)


@command("retry", panel=PANEL, sends=True, example="keepstep retry order-81 --step-limit 40")
def retry(
    session: Session,
    *,
    thread: ThreadName,
    step_limit: Annotated[
        int | None,
        typer.Option("--step-limit", min=1, metavar="N", help="The steps that its run may take from now on, in all."),
    ] = None,
    graph: GraphName = None,
    reason: Reason = None,
    by: By = None,
) -> None:
    """Let a failed, blocked or cancelled thread go on where it stopped. What is committed does not run again."""
    if step_limit is None and session.glance(lambda reader: _at_its_limit(reader.get(thread, graph=graph))):
        message = (
            f"{thread} stopped at its step limit and would again: {session.hint(f'retry {thread} --step-limit N')} "
            "(N includes the steps it has taken)"
        )
        raise WrongStatus(message)
    options = {"graph": graph, "reason": reason, "by": by, "step_limit": step_limit}
    _control(session, lambda client: client.retry, thread, "due again", **options)


def _at_its_limit(found: Thread) -> bool:
    return found.status == "failed" and (found.error or {}).get("code") == "step_limit"


def _control(
    session: Session, verb: Callable[[Any], Callable[..., Any]], thread: str, done: str, **options: Any
) -> None:
    options["by"] = options["by"] or values.this_user()
    with session.client() as client:
        report(session, verb(client)(thread, **options), f"{thread} is {done}")
