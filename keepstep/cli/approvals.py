"""`keepstep approvals`, `approve`, `reject`, `answer`: what graphs ask people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.cli import values
from keepstep.cli.command import command
from keepstep.cli.control import GraphName, read_value, report
from keepstep.cli.session import Session
from keepstep.errors import Ambiguous, NotFound

if TYPE_CHECKING:
    from keepstep.cli.output import Output
    from keepstep.client import Client
    from keepstep.runtime.reader import Approval, Reader

PANEL = "Decide"
_ID_LENGTH = 26
_LOOKED_AT_MAX = 10_000

_Id = Annotated[
    str, typer.Argument(metavar="ID", help="The approval's id, as `keepstep approvals` shows it, or how it begins.")
]
_By = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Who decides; without it the user of this machine.")
]
_Comment = Annotated[str | None, typer.Option("--comment", metavar="TEXT", help="A remark; the graph gets it too.")]


class Status(StrEnum):
    """Which approvals."""

    OPEN = "open"
    APPROVED = "approved"
    REJECTED = "rejected"
    ANSWERED = "answered"
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
        "for": ", ".join(found.to),
        "quorum": f"{len(approved)} of {found.quorum} have approved" if found.quorum > 1 else None,
        "expires": relative(expires.timestamp()) if expires is not None and found.status == "open" else None,
        "decided": "; ".join(_decided(each) for each in decisions),
        "decide": "\n".join(deciding(session, found)) if found.status == "open" else None,
    }
    output.facts({f"  {name}": value for name, value in facts.items()})


@contextmanager
def _deciding(session: Session) -> Iterator[Client]:
    try:
        with session.client() as client:
            yield client
    except NotFound as error:
        message = f"{error.message}: {session.hint('approvals')} lists those that are open"
        raise NotFound(message) from None


def _whole(session: Session, written: str) -> str:
    """Return the one id that begins as it was written; what was written when the database cannot be asked."""
    if len(written) >= _ID_LENGTH or not written:
        return written

    def look(reader: Reader) -> list[str]:
        for status in ("open", None):
            ids = [each.id for each in reader.approvals(status=status, limit=_LOOKED_AT_MAX)]
            found = [each for each in ids if each.startswith(written.lower())]
            if found:
                return found
        return []

    found = session.glance(look) or [written]
    if len(found) > 1:
        message = f"several approvals begin with {written!r}: {', '.join(found[:5])}"
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


@command(
    "approve",
    panel=PANEL,
    sends=True,
    example="""\
keepstep approve 01jdz8k3v5w0c9q2m7r4t6y8xa --comment 'Checked with the shop'
keepstep approve 01jdz8k3v5w0c9q2m7r4t6y8xa --arguments '{"order_id": "81", "amount": "10.00"}'""",
)
def approve(
    session: Session,
    *,
    approval: _Id,
    arguments: Annotated[
        str | None,
        typer.Option(
            "--arguments",
            metavar="JSON",
            help="What is approved, in place of what was asked: all the arguments, edited; - reads it.",
        ),
    ] = None,
    comment: _Comment = None,
    by: _By = None,
) -> None:
    """Approve what was asked, or edited arguments in its place."""
    edited = None
    if arguments is not None:
        text = values.from_file("-", "--arguments") if arguments == "-" else arguments
        edited = values.an_object(text, "--arguments")
    who = by or values.this_user()
    approval = _whole(session, approval)
    with _deciding(session) as client:
        receipt = client.approve(approval, by=who, arguments=edited, comment=comment)
        edits = "" if edited is None else ", with edited arguments"
        report(session, receipt, f"approved {approval} as {who}{edits}", by=who)


@command(
    "reject",
    panel=PANEL,
    sends=True,
    example="keepstep reject 01jdz8k3v5w0c9q2m7r4t6y8xa --comment 'Too much'",
)
def reject(session: Session, *, approval: _Id, comment: _Comment = None, by: _By = None) -> None:
    """Reject what was asked. One rejection decides, whatever the quorum."""
    who = by or values.this_user()
    approval = _whole(session, approval)
    with _deciding(session) as client:
        report(session, client.reject(approval, by=who, comment=comment), f"rejected {approval} as {who}", by=who)


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
) -> None:
    """Answer a question (`reject` refuses to answer)."""
    from keepstep.cli.output import short

    said = read_value(value, "VALUE", text=text)
    who = by or values.this_user()
    approval = _whole(session, approval)
    with _deciding(session) as client:
        receipt = client.answer(approval, said, by=who, comment=comment)
        kind = "text" if isinstance(said, str) else "JSON"
        report(session, receipt, f"answered {approval} as {who} with the {kind} {short(said)}", by=who, answer=said)
