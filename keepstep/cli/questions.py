"""`keepstep approvals`: what graphs ask people, who must answer, what follows, and the commands that decide it."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.cli.command import command
from keepstep.cli.session import Session
from keepstep.errors import Ambiguous, InvalidInput, NotFound, NothingAsked

if TYPE_CHECKING:
    from keepstep.cli.output import Output
    from keepstep.runtime.reader import Approval, Reader

PANEL = "Decide"
LOOKED_AT_MAX = 10_000
_TO_EDIT_CHARACTERS_MAX = 200
_NOTHING = ""
"""In the place of the id, of a thread that asks nothing."""
_OF_A_CALL = {"tool", "version", "risk", "reason", "digest"}
_WHEN_NOBODY_ANSWERS = {
    "reject": "it counts as rejected",
    "approve": "it counts as approved",
    "fail": "the node that asks fails",
}


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


@command(
    "approvals",
    panel=PANEL,
    reads=True,
    example="""\
keepstep approvals
keepstep approvals 01jdz8k3
keepstep approvals --thread order-81 --status all""",
)
def approvals(
    session: Session,
    *,
    approval: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="Only this one, also when it is decided: its id, or how it begins, or a thread's name."
        ),
    ] = None,
    thread: Annotated[str | None, typer.Option("--thread", metavar="THREAD", help="Only this thread's.")] = None,
    graph: Annotated[str | None, typer.Option("--graph", "-g", metavar="NAME", help="Only this graph's.")] = None,
    status: Annotated[Status, typer.Option("--status", metavar="|".join(Status), help="Which ones.")] = Status.OPEN,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, metavar="N", help="At most N.")] = 100,
) -> None:
    """List what waits for a person's word, the oldest first, with the commands that give it.

    Each says what is asked and with which arguments, whom (`for`), how many must agree and who has (`needs`), and what
    happens when nobody answers in time (`expires`).
    """
    from keepstep.cli import records

    wanted = None if status is Status.ALL else status.value
    if approval is not None and (thread or graph):
        message = "an approval's ID alone says which one it is: leave out --thread and --graph"
        raise InvalidInput(message)
    with session.reader() as reader:
        if approval is None:
            found = reader.approvals(thread=thread, graph=graph, status=wanted, limit=limit)
        else:
            found = beginning_with(reader, approval) or _of_thread(reader, approval)
        decisions = {each.id: reader.decisions(each.id) for each in found}
    if approval is not None and not found:
        message = (
            f"there is no approval {approval!r}, and no thread of that name asks: {session.hint('approvals')} lists "
            f"those that are open, {session.hint('approvals --status all')} those that were decided, too"
        )
        raise NotFound(message)
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
    fitting = None if found.schema is None else f"must fit {shown(found.schema)}"
    facts = {
        "question": found.question,
        "arguments": None if found.arguments is None else shown(found.arguments),
        **_context(found.context),
        "answer" if found.kind == "ask" else "edits": fitting,
        "choices": None if found.choices is None else ", ".join(json.dumps(each) for each in found.choices),
        "for": ", ".join(found.to) or ("anybody" if found.status == "open" else None),
        "needs": needs(session, found, decisions),
        "expires": _expiry(found, relative(expires.timestamp())) if expires and found.status == "open" else None,
        "decided": "; ".join(_decided(each) for each in decisions),
        "decide": "\n".join(deciding(session, found, fully=True)) if found.status == "open" else None,
    }
    output.facts({f"  {name}": value for name, value in facts.items()})


def _context(context: Any) -> dict[str, str | None]:
    """Return what is told beside the arguments; of a tool call what it is and why it is asked about."""
    from keepstep.cli.output import shown

    if not isinstance(context, dict) or not context.keys() >= _OF_A_CALL:
        return {"context": None if context is None else shown(context)}
    scopes = f", scopes {', '.join(context['scopes'])}" if context.get("scopes") else ""
    return {
        "if approved": f"the tool {context['tool']} is called, once, with these arguments or as they are edited",
        "tool": f"{context['tool']}, version {context['version']}, risk {context['risk']}{scopes}",
        "why": context["reason"] or "the tool always asks",
    }


def needs(session: Session, found: Approval, decisions: list[dict[str, Any]]) -> str | None:
    """Return who must approve and who has, when one word of anybody asked does not do."""
    from keepstep.runtime import quorums

    others = found.self_approval and session.settings.self_approval
    rule = quorums.rule(found.quorum, self_approval=others, started_by=found.started_by)
    if rule is None:
        return None
    approved = [each["by"] for each in decisions if each["verdict"] == "approve"]
    return f"{rule}; so far: {', '.join(approved) or 'nobody'}" if found.quorum > 1 else rule


def _expiry(found: Approval, when: str) -> str:
    escalated = _WHEN_NOBODY_ANSWERS["reject"] if found.escalated else f"it goes to {', '.join(found.escalate_to)}"
    return f"{when}; without an answer {_WHEN_NOBODY_ANSWERS.get(found.on_expiry, escalated)}"


def _decided(decision: dict[str, Any]) -> str:
    from keepstep.cli.output import short

    edited = decision.get("arguments")
    comment = f" ({decision['comment']})" if decision.get("comment") else ""
    place = f" in the place of {decision['place']}" if decision.get("place") else ""
    instead = "" if edited is None else f" with {short(edited)} instead"
    return f"{decision['verdict']} by {decision['by']}{place}{instead}{comment}"


# --- the commands that decide -----------------------------------------------------------------------------------------


def deciding(session: Session, found: Approval, *, fully: bool = False) -> list[str]:
    """Return the commands that decide an approval; `fully`: all of them, and arguments to be edited in place."""
    chosen = "VALUE" if found.choices is None else shlex.quote(_word(found.choices[0]))
    if found.kind == "ask":
        verbs = [f"answer {found.id} {chosen}"]
    elif found.choices is not None:
        verbs = [f"approve {found.id} --choice {chosen}"]
    else:
        verbs = [f"approve {found.id}"]
    if found.kind == "approve" and found.arguments:
        verbs.append(f"approve {found.id} --arguments {_to_edit(found.arguments) if fully else 'JSON'}")
    verbs.append(f"reject {found.id}")
    if fully:
        verbs += [f"request-changes {found.id} COMMENT", f"delegate {found.id} NAME"]
    return [session.hint(verb) for verb in verbs]


def _word(choice: Any) -> str:
    return choice if isinstance(choice, str) else json.dumps(choice)


def _to_edit(arguments: Any) -> str:
    """Return arguments as they can be edited on a command line, or `JSON` when they are too long for one."""
    text = json.dumps(_untagged(arguments), ensure_ascii=False)
    return shlex.quote(text) if len(text) <= _TO_EDIT_CHARACTERS_MAX else "JSON"


def _untagged(value: Any) -> Any:
    """Return a value of the reader's views as an edit may give it: a decimal or a date is its text."""
    if isinstance(value, list):
        return [_untagged(each) for each in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$", "v"} and isinstance(value["v"], str):
        return value["v"]
    return {name: _untagged(each) for name, each in value.items()}


# --- which one --------------------------------------------------------------------------------------------------------


def beginning_with(reader: Reader, written: str) -> list[Approval]:
    """Return the approvals whose ids begin as it was written: open ones, or else any."""
    for status in ("open", None):
        listed = reader.approvals(status=status, limit=LOOKED_AT_MAX)
        found = [each for each in listed if written and each.id.startswith(written.lower())]
        if found:
            return found
    return []


def _of_thread(reader: Reader, name: str) -> list[Approval]:
    with suppress(NotFound):
        return reader.approvals(thread=name, limit=LOOKED_AT_MAX)
    return []


def whole(session: Session, written: str) -> str:
    """Return the one id that begins as it was written, or of the thread's only open question.

    What was written when the database cannot be asked.
    """
    if not written:
        return written

    def look(reader: Reader) -> list[str]:
        found = [each.id for each in beginning_with(reader, written)]
        if found:
            return found
        with suppress(NotFound):
            found = [each.id for each in reader.approvals(thread=written, limit=LOOKED_AT_MAX)]
            return found or [_NOTHING]
        return []

    found = session.glance(look) or [written]
    if found == [_NOTHING]:
        message = f"thread {written!r} asks nothing now: {session.hint(f'show {written}')} tells what it does"
        raise NothingAsked(message)
    if len(found) > 1:
        message = (
            f"{written!r} means several approvals: {', '.join(found[:5])} ({session.hint('approvals')} tells them)"
        )
        raise Ambiguous(message)
    return found[0]
