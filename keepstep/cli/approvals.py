"""`keepstep approvals`, `approve`, `reject`, `answer`, `request-changes`, `delegate`: what graphs ask people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.cli import values
from keepstep.cli.command import command
from keepstep.cli.control import GraphName, read_value, report
from keepstep.cli.session import Session
from keepstep.errors import Ambiguous, InvalidInput, NotFound

if TYPE_CHECKING:
    from keepstep.cli.output import Output
    from keepstep.client import Client, Receipt
    from keepstep.runtime.reader import Approval, Reader

PANEL = "Decide"
_LOOKED_AT_MAX = 10_000

_ID_HELP = "The approval's id (`keepstep approvals`), or how it begins, or the name of a thread that asks one thing."
_Id = Annotated[str, typer.Argument(metavar="ID", help=_ID_HELP)]
_Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help=f"{_ID_HELP} Any number of them.")]
_All = Annotated[
    bool, typer.Option("--all", help="Every open approval that --thread and --graph leave, instead of IDs.")
]
_Thread = Annotated[str | None, typer.Option("--thread", metavar="THREAD", help="With --all: only this thread's.")]
_By = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Who decides; without it the user of this machine.")
]
_Roles = Annotated[
    list[str] | None,
    typer.Option("--role", metavar="NAME", help="A role of who decides, for signed commands; may be given again."),
]
_Comment = Annotated[str | None, typer.Option("--comment", metavar="TEXT", help="A remark; the graph gets it too.")]


class Status(StrEnum):
    """Which approvals."""

    OPEN = "open"
    APPROVED = "approved"
    REJECTED = "rejected"
    ANSWERED = "answered"
    CHANGES_REQUESTED = "changes_requested"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    ALL = "all"


@command("approvals", panel=PANEL, reads=True, example="keepstep approvals --thread order-81")
def approvals(
    session: Session,
    *,
    thread: Annotated[str | None, typer.Option("--thread", metavar="THREAD", help="Only this thread's.")] = None,
    graph: GraphName = None,
    status: Annotated[Status, typer.Option("--status", metavar="|".join(Status), help="Which ones.")] = Status.OPEN,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, metavar="N", help="At most N.")] = 100,
) -> None:
    """List what waits for a person's word, the oldest first, with the commands that give it."""
    from keepstep.cli import records

    wanted = None if status is Status.ALL else status.value
    with session.reader() as reader:
        found = reader.approvals(thread=thread, graph=graph, status=wanted, limit=limit)
        decisions = {each.id: reader.decisions(each.id) for each in found}
    if session.as_json:
        session.output.document({"approvals": [records.approval(each, decisions[each.id]) for each in found]})
        return
    if not found:
        session.output.line(f"no approvals are {status.value}" if wanted else "there are no approvals")
    for number, each in enumerate(found):
        if number:
            session.output.line()
        _print(session, each, decisions[each.id])


def _print(session: Session, found: Approval, decisions: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from keepstep.cli.output import STATUS_STYLES, relative, shown, visible

    output: Output = session.output
    head = Text(found.id, style="bold")
    head.append(f"  {found.status}", style=STATUS_STYLES.get(found.status, ""))
    asked = relative(found.created_at.timestamp())
    head.append(visible(f"  {found.graph}/{found.thread}  asked {asked} by {found.node_run}"), style="not bold")
    output.line(head)
    expires = found.expires_at
    approved = [each["by"] for each in decisions if each["verdict"] == "approve"]
    fitting = None if found.schema is None else f"must fit {shown(found.schema)}"
    facts = {
        "question": found.question,
        "arguments": None if found.arguments is None else shown(found.arguments),
        "context": None if found.context is None else shown(found.context),
        "answer" if found.kind == "ask" else "edits": fitting,
        "choices": None if found.choices is None else ", ".join(json.dumps(each) for each in found.choices),
        "for": ", ".join(found.to),
        "quorum": f"{len(approved)} of {found.quorum} have approved" if found.quorum > 1 else None,
        "expires": _expiry(found, relative(expires.timestamp())) if expires and found.status == "open" else None,
        "decided": "; ".join(_decided(each) for each in decisions),
        "decide": "\n".join(deciding(session, found)) if found.status == "open" else None,
    }
    output.facts({f"  {name}": value for name, value in facts.items()})


def _expiry(found: Approval, when: str) -> str:
    then = f"asks {', '.join(found.escalate_to)}" if found.on_expiry == "escalate" else found.on_expiry
    return f"{when}, then: {then}"


@contextmanager
def _deciding(session: Session, roles: list[str] | None) -> Iterator[Client]:
    try:
        with session.client(roles=roles or ()) as client:
            yield client
    except NotFound as error:
        message = f"{error.message}: {session.hint('approvals')} lists those that are open"
        raise NotFound(message) from None


def _whole(session: Session, written: str) -> str:
    """Return the one id that begins as it was written, or of the thread's only open question.

    What was written when the database cannot be asked.
    """
    if not written:
        return written

    def look(reader: Reader) -> list[str]:
        for status in ("open", None):
            ids = [each.id for each in reader.approvals(status=status, limit=_LOOKED_AT_MAX)]
            found = [each for each in ids if each.startswith(written.lower())]
            if found:
                return found
        with suppress(NotFound):
            return [each.id for each in reader.approvals(thread=written, limit=_LOOKED_AT_MAX)]
        return []

    found = session.glance(look) or [written]
    if len(found) > 1:
        message = f"{written!r} means several approvals: {', '.join(found[:5])}"
        raise Ambiguous(message)
    return found[0]


def _decided(decision: dict[str, Any]) -> str:
    comment = f" ({decision['comment']})" if decision.get("comment") else ""
    return f"{decision['verdict']} by {decision['by']}{comment}"


def deciding(session: Session, found: Approval) -> list[str]:
    """Return the commands that decide an approval."""
    if found.kind == "ask":
        verbs = [f"answer {found.id} VALUE"]
    else:
        verbs = [f"approve {found.id}", *([f"approve {found.id} --arguments JSON"] if found.arguments else [])]
    return [session.hint(verb) for verb in (*verbs, f"reject {found.id}")]


def _named(
    session: Session, written: list[str] | None, *, everything: bool, thread: str | None, graph: str | None
) -> list[str]:
    """Return the ids that are meant: those that were written, or all that are open."""
    if bool(written) == everything:
        message = "say which approvals: IDs, or --all"
        raise InvalidInput(message)
    if written:
        return list(dict.fromkeys(_whole(session, each) for each in written))
    with session.reader() as reader:
        return [each.id for each in reader.approvals(thread=thread, graph=graph, limit=_LOOKED_AT_MAX)]


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
            report(session, decide(client, ids[0]), told(ids[0]), **facts)
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
    thread: _Thread = None,
    graph: GraphName = None,
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
    """Approve what was asked, or edited arguments in its place; several questions at once, if need be."""
    edited = None
    if arguments is not None:
        text = values.from_file("-", "--arguments") if arguments == "-" else arguments
        edited = values.an_object(text, "--arguments")
    chosen = None if choice is None else values.from_text(choice, "--choice")
    who = by or values.this_user()
    ids = _named(session, approvals, everything=everything, thread=thread, graph=graph)
    edits = "" if edited is None else ", with edited arguments"
    _each(
        session,
        ids,
        roles,
        lambda client, id_: client.approve(id_, by=who, arguments=edited, choice=chosen, comment=comment),
        lambda id_: f"approved {id_} as {who}{edits}",
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
    thread: _Thread = None,
    graph: GraphName = None,
    comment: _Comment = None,
    by: _By = None,
    roles: _Roles = None,
) -> None:
    """Reject what was asked. One rejection decides, whatever the quorum."""
    who = by or values.this_user()
    ids = _named(session, approvals, everything=everything, thread=thread, graph=graph)
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
    approval = _whole(session, approval)
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
    approval = _whole(session, approval)
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
    approval = _whole(session, approval)
    with _deciding(session, roles) as client:
        receipt = client.answer(approval, said, by=who, comment=comment)
        kind = "text" if isinstance(said, str) else "JSON"
        report(session, receipt, f"answered {approval} as {who} with the {kind} {short(said)}", by=who, answer=said)
