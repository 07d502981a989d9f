"""`keepstep approve`, `reject`, `answer`, `request-changes`, `delegate`: people's words on what graphs ask."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.cli import values
from keepstep.cli.command import command
from keepstep.cli.control import read_value, report
from keepstep.cli.questions import LOOKED_AT_MAX, PANEL, beginning_with, whole
from keepstep.cli.session import Session
from keepstep.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from keepstep.client import Client, Receipt
    from keepstep.runtime.reader import Approval, Reader

_ID_HELP = "The approval's id (`keepstep approvals`), or how it begins, or the name of a thread that asks one thing."
_Id = Annotated[str, typer.Argument(metavar="ID", help=_ID_HELP)]
_Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help=f"{_ID_HELP} Any number of them.")]
_All = Annotated[
    bool, typer.Option("--all", help="Every open approval that --thread and --graph leave, instead of IDs.")
]
_Thread = Annotated[str | None, typer.Option("--thread", metavar="THREAD", help="With --all: only this thread's.")]
_Graph = Annotated[str | None, typer.Option("--graph", "-g", metavar="NAME", help="With --all: only this graph's.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask at a terminal whether to go on.")]
_By = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Who decides; without it the user of this machine.")
]
_Roles = Annotated[
    list[str] | None,
    typer.Option("--role", metavar="NAME", help="A role of who decides, for signed commands; may be given again."),
]
_Comment = Annotated[str | None, typer.Option("--comment", metavar="TEXT", help="A remark; the graph gets it too.")]


@contextmanager
def _deciding(session: Session, roles: list[str] | None) -> Iterator[Client]:
    try:
        with session.client(roles=roles or ()) as client:
            yield client
    except NotFound as error:
        message = f"{error.message}: {session.hint('approvals')} lists those that are open"
        raise type(error)(message) from None


def _named(
    session: Session,
    written: list[str] | None,
    done: str,
    *,
    everything: bool,
    sure: bool,
    thread: str | None,
    graph: str | None,
) -> list[str]:
    """Return the ids that are meant: those that were written, or all that are open, when a person at a terminal agrees.

    `done`: what is done to them, in words.
    """
    if bool(written) == everything:
        message = f"say which approvals: IDs ({session.hint('approvals')} lists them), or --all"
        raise InvalidInput(message)
    if written and thread is not None:
        message = "--thread belongs to --all; an ID, or the name of a thread that asks one thing, says which one it is"
        raise InvalidInput(message)
    if written:
        return list(dict.fromkeys(whole(session, each) for each in written))
    with session.reader() as reader:
        found = reader.approvals(thread=thread, graph=graph, limit=LOOKED_AT_MAX)
    if found and not sure and not session.as_json and sys.stdin.isatty():
        _agreed(found, done)
    return [each.id for each in found]


def _agreed(found: list[Approval], done: str) -> None:
    """Show what is about to be decided and ask whether to go on; raise `Exit` when the answer is no."""
    from keepstep.cli.output import short, visible

    for each in found:
        asked = "" if each.arguments is None else f" {short(each.arguments, 60)}"
        typer.echo(visible(f"{each.id}  {each.graph}/{each.thread}  {short(each.question, 60)}{asked}"), err=True)
    if not typer.confirm(f"These {len(found)} are to be {done}. Go on?", err=True):
        typer.echo("nothing was decided", err=True)
        raise typer.Exit(1)


def _still_open(session: Session, approval: str) -> str:
    """Say that an approval needs more people, when the database can be asked."""

    def look(reader: Reader) -> str:
        found = next(iter(beginning_with(reader, approval)), None)
        if found is None or found.status != "open" or found.id != approval:
            return ""
        places = {
            each.get("place") or each["by"] for each in reader.decisions(approval) if each["verdict"] == "approve"
        }
        return f"; {len(places)} of {found.quorum} people so far: it stays open"

    return "" if session.as_json else session.glance(look) or ""


def _each(
    session: Session,
    ids: list[str],
    roles: list[str] | None,
    decide: Callable[[Client, str], Receipt],
    told: Callable[[str], str],
    **facts: Any,
) -> None:
    """Decide one approval, or several: each is a decision of its own, and one that is refused stops none."""
    with _deciding(session, roles) as client:
        if len(ids) == 1:
            receipt = decide(client, ids[0])
            report(session, receipt, told(ids[0]), **facts)
            return
        results: list[dict[str, Any]] = []
        for approval in ids:
            try:
                session.reply(decide(client, approval))
            except InvalidInput as error:
                results.append({"approval": approval, "accepted": False, "error": error.message})
            else:
                results.append({"approval": approval, "accepted": True, "error": None})
    if session.as_json:
        session.output.document({"decisions": results, **facts})
    for each in results if not session.as_json else ():
        session.output.line(told(each["approval"]) if each["accepted"] else f"{each['approval']}: {each['error']}")
    if not results and not session.as_json:
        session.output.line("no approvals are open")
    if not all(each["accepted"] for each in results):
        raise typer.Exit(1)


@command(
    "approve",
    panel=PANEL,
    sends=True,
    example="""\
keepstep approve 01jdz8k3v5w0c9q2m7r4t6y8xa --comment 'Checked with the shop'
keepstep approve order-81 --arguments '{"order_id": "81", "amount": "10.00"}'
keepstep approve --all --graph refunds""",
)
def approve(
    session: Session,
    *,
    approvals: _Ids = None,
    everything: _All = False,
    sure: _Yes = False,
    thread: _Thread = None,
    graph: _Graph = None,
    arguments: Annotated[
        str | None,
        typer.Option(
            "--arguments",
            metavar="JSON",
            help="What is approved, in place of what was asked: all the arguments, edited; - reads it.",
        ),
    ] = None,
    choice: Annotated[
        str | None,
        typer.Option(
            "--choice", metavar="VALUE", help="Where there are choices, the one that is chosen: JSON, or a text."
        ),
    ] = None,
    comment: _Comment = None,
    by: _By = None,
    roles: _Roles = None,
) -> None:
    """Approve what was asked, or edited arguments in its place; several questions at once, if need be.

    Where several people are needed (`needs` in `keepstep approvals`) it stays open until the last of them has approved
    the same. Who approves is --by; where commands are signed, --role says as what.
    """
    edited = None
    if arguments is not None:
        text = values.from_file("-", "--arguments") if arguments == "-" else arguments
        edited = values.an_object(text, "--arguments")
    chosen = None if choice is None else values.from_text(choice, "--choice")
    who = by or values.this_user()
    ids = _named(session, approvals, "approved", everything=everything, sure=sure, thread=thread, graph=graph)
    edits = "" if edited is None else ", with edited arguments"
    _each(
        session,
        ids,
        roles,
        lambda client, id_: client.approve(id_, by=who, arguments=edited, choice=chosen, comment=comment),
        lambda id_: f"approved {id_} as {who}{edits}{_still_open(session, id_)}",
        by=who,
    )


@command(
    "reject",
    panel=PANEL,
    sends=True,
    example="""\
keepstep reject 01jdz8k3v5w0c9q2m7r4t6y8xa --comment 'Too much'
keepstep reject order-81""",
)
def reject(
    session: Session,
    *,
    approvals: _Ids = None,
    everything: _All = False,
    sure: _Yes = False,
    thread: _Thread = None,
    graph: _Graph = None,
    comment: _Comment = None,
    by: _By = None,
    roles: _Roles = None,
) -> None:
    """Reject what was asked. One rejection decides, whatever the quorum."""
    who = by or values.this_user()
    ids = _named(session, approvals, "rejected", everything=everything, sure=sure, thread=thread, graph=graph)
    _each(
        session,
        ids,
        roles,
        lambda client, id_: client.reject(id_, by=who, comment=comment),
        lambda id_: f"rejected {id_} as {who}",
        by=who,
    )


@command(
    "request-changes",
    panel=PANEL,
    sends=True,
    example="keepstep request-changes order-81 'Ask the shop for the receipt first'",
)
def request_changes(
    session: Session,
    *,
    approval: _Id,
    comment: Annotated[str, typer.Argument(metavar="COMMENT", help="What to change; the graph gets it.")],
    by: _By = None,
    roles: _Roles = None,
) -> None:
    """Neither approve nor reject: the graph gets the comment, and may ask again."""
    who = by or values.this_user()
    approval = whole(session, approval)
    with _deciding(session, roles) as client:
        receipt = client.request_changes(approval, comment, by=who)
        report(session, receipt, f"asked for changes of {approval} as {who}", by=who)


@command(
    "delegate",
    panel=PANEL,
    sends=True,
    example="keepstep delegate 01jdz8k3v5w0c9q2m7r4t6y8xa bob@example.com --comment 'On holiday'",
)
def delegate(
    session: Session,
    *,
    approval: _Id,
    to: Annotated[list[str], typer.Argument(metavar="NAME...", help="The people and roles that are asked instead.")],
    comment: _Comment = None,
    by: _By = None,
    roles: _Roles = None,
) -> None:
    """Let others decide in your place. The question stays open."""
    who = by or values.this_user()
    approval = whole(session, approval)
    with _deciding(session, roles) as client:
        receipt = client.delegate(approval, to, by=who, comment=comment)
        report(session, receipt, f"{approval} asks {', '.join(to)} in the place of {who}", by=who, to=to)


@command(
    "answer",
    panel=PANEL,
    sends=True,
    example="""\
keepstep answer 01jdz8k3v5w0c9q2m7r4t6y8xa 42
keepstep answer 01jdz8k3v5w0c9q2m7r4t6y8xa 'It arrived broken'""",
)
def answer(
    session: Session,
    *,
    approval: _Id,
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="The answer: JSON, or a text when it is not JSON. - reads it.")
    ],
    text: Annotated[bool, typer.Option("--text", help="VALUE is a text even if it looks like JSON.")] = False,
    comment: _Comment = None,
    by: _By = None,
    roles: _Roles = None,
) -> None:
    """Answer a question (`reject` refuses to answer)."""
    from keepstep.cli.output import short

    said = read_value(value, "VALUE", text=text)
    who = by or values.this_user()
    approval = whole(session, approval)
    with _deciding(session, roles) as client:
        receipt = client.answer(approval, said, by=who, comment=comment)
        kind = "text" if isinstance(said, str) else "JSON"
        report(session, receipt, f"answered {approval} as {who} with the {kind} {short(said)}", by=who, answer=said)
