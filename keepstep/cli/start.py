"""`keepstep start`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.cli import values
from keepstep.cli.command import Database, command
from keepstep.cli.control import By, report
from keepstep.cli.session import Session
from keepstep.cli.waysout import way_out
from keepstep.errors import InvalidInput
from keepstep.priority import Priority

if TYPE_CHECKING:
    from keepstep.cli.progress import Ending
    from keepstep.client import Reply
    from keepstep.runtime.reader import Reader

WholeInput = Annotated[
    str | None, typer.Option("--input", "-i", metavar="JSON", help="The whole input, a JSON object; - reads it.")
]
InputFile = Annotated[
    str | None, typer.Option("--input-file", "-f", metavar="FILE", help="A file with the whole input as JSON.")
]


@command(
    "start",
    panel="Run",
    sends=True,
    example="""\
keepstep start refunds order-81 order_id=A-81 amount=12.50 --wait
keepstep start refunds order-81 --input '{"order_id": "A-81", "amount": "12.50"}'""",
)
def start(
    session: Session,
    *,
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="The graph's name, as it stands in its code.")],
    thread: Annotated[str, typer.Argument(metavar="THREAD", help="The thread's name; it is made when it is new.")],
    pairs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="The run's input. A VALUE is sent as it is written, and the graph's state makes a number, a date or "
            "true of it; one that begins with [, { or a double quote, or is null, is JSON. "
            "One JSON object is the whole input.",
        ),
    ] = None,
    given: WholeInput = None,
    input_file: InputFile = None,
    request_id: Annotated[
        str | None,
        typer.Option("--request-id", metavar="ID", help="Two starts with one request id are one run."),
    ] = None,
    reject_if_running: Annotated[
        bool,
        typer.Option("--reject-if-running", help="Refuse when the thread's run has not ended, in place of queueing."),
    ] = False,
    step_limit: Annotated[
        int | None, typer.Option("--step-limit", min=1, metavar="N", help="The steps that this run may take.")
    ] = None,
    priority: Annotated[
        Priority | None,
        typer.Option(
            "--priority",
            metavar="high|normal|low",
            help="The thread's from now on: high goes before normal, low after it.",
            show_default=False,
        ),
    ] = None,
    by: By = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Follow the run to its end and print its state.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.1, metavar="SECONDS", help="With --wait: give up following after this long."),
    ] = None,
    database: Database = None,
) -> None:
    """Give a thread of a graph an input, which makes a run.

    With --wait its progress is shown on standard error and its final state on standard output; exit code 0: done, 1:
    failed, blocked, cancelled, or not ended when the time was over. The run goes on, also when following it is stopped.
    """
    _check_together(session, wait=wait, timeout=timeout)
    value = read_input(pairs or [], given, input_file)
    if wait:
        _ = session.refined(database=database).settings  # a setting that is wrong is found before anything was sent
    with session.client() as client:
        receipt = client.start(
            graph,
            thread,
            value,
            request_id=request_id,
            if_running="reject" if reject_if_running else "queue",
            step_limit=step_limit,
            priority=priority,
            by=by or values.this_user(),
        )
        reply = session.reply(receipt)
        if not wait or reply is None:
            run = "" if reply is None else f" as run {reply.run_id}{_queued(session, reply)}"
            report(session, receipt, f"{graph}/{thread} accepted{run}")
            return
    _follow(session.refined(database=database), graph, thread, reply, timeout)


def _check_together(session: Session, *, wait: bool, timeout: float | None) -> None:
    if timeout is not None and not wait:
        message = "--timeout belongs to --wait (for a worker's word there is --confirm-timeout)"
        raise InvalidInput(message)
    if wait and not session.confirm:
        message = "--wait and --no-confirm exclude each other: what is not accepted cannot be followed"
        raise InvalidInput(message)


def read_input(pairs: list[str], given: str | None, input_file: str | None) -> dict[str, Any]:
    """Return a run's input, which is said in one of three ways."""
    if sum(map(bool, (pairs, given is not None, input_file is not None))) > 1:
        message = "give the input once: as KEY=VALUE, as --input or as --input-file"
        raise InvalidInput(message)
    if input_file is not None:
        return values.an_object(values.from_file(input_file, "--input-file"), "--input-file")
    if given is not None:
        return values.an_object(values.from_file("-", "--input") if given == "-" else given, "--input")
    if len(pairs) == 1 and pairs[0].startswith("{"):
        return values.an_object(pairs[0], "the input")
    return values.from_pairs(pairs)


def _queued(session: Session, reply: Reply) -> str:
    """Say that a run has to wait for another one, when the database can be asked."""
    if session.as_json or reply.duplicate:
        return ""

    def look(reader: Reader) -> bool:
        under_way = reader.get(str(reply.thread_id)).run
        ended = {each.id: each.ended_at is not None for each in reader.runs(str(reply.thread_id))}
        return under_way != reply.run_id and ended.get(under_way or "") is False and not ended.get(reply.run_id or "")

    return ", queued behind the one that is under way" if session.glance(look) else ""


def _follow(session: Session, graph: str, thread: str, reply: Any, timeout: float | None) -> None:
    from keepstep.cli import records
    from keepstep.cli.progress import follow

    with session.reader() as reader:
        try:
            ending = follow(session, reader, reply.thread_id, reply.run_id, title=f"{graph}/{thread}", timeout=timeout)
        except KeyboardInterrupt:
            _say(f"no longer followed, but {thread} goes on; look again: {session.hint(f'show {thread}')}")
            raise
        state = reader.state(reply.thread_id, at=ending.seq) if ending.seq >= 0 else {}
    if session.as_json:
        session.output.document(
            {
                "thread": thread,
                "thread_id": reply.thread_id,
                "run_id": reply.run_id,
                "status": ending.status,
                "ended": ending.ended,
                "steps": ending.steps,
                "error": ending.error,
                "approvals": [records.approval(each) for each in ending.approvals],
                "state": state,
            }
        )
    elif ending.ended:
        session.output.state(state, more=session.hint(f"state {thread}"))
    if ending.status != "done":
        _explain(session, thread, ending)
        raise typer.Exit(1)


def _explain(session: Session, thread: str, ending: Ending) -> None:
    """Say on standard error what can be done about a run that is not done."""
    text = way_out(session, thread, ending.status, ending.error)
    if text is None and ending.status != "cancelled":
        text = f"it goes on; look again: {session.hint(f'show {thread}')}"
    if text:
        _say(text)


def _say(text: str) -> None:
    from keepstep.cli.output import console, visible

    console(to_errors=True).print(visible(text), style="dim", soft_wrap=True)
