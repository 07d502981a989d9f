"""`keepstep schedule`: runs by the clock, made, looked at, paused and removed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal
from zoneinfo import ZoneInfo

import typer

from keepstep.cli import values
from keepstep.cli.command import app, command
from keepstep.cli.control import By, Reason, report
from keepstep.cli.session import Session
from keepstep.cli.start import InputFile, WholeInput, read_input
from keepstep.errors import Ambiguous, NotFound
from keepstep.priority import Priority

if TYPE_CHECKING:
    from keepstep.runtime.schedules import Schedule

PANEL = "Run by the clock"

group = typer.Typer(
    name="schedule", no_args_is_help=True, rich_markup_mode="rich", help="Run graphs by the clock, on cron schedules."
)
app.add_typer(group, name="schedule", rich_help_panel="Run")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]


@command(
    "add",
    panel=PANEL,
    group=group,
    sends=True,
    example="""\
keepstep schedule add nightly-report report '30 2 * * mon-fri' region=eu --timezone Europe/Berlin
keepstep schedule add clean-up janitor @hourly --thread janitor --overlap skip --missed skip""",
)
def add(  # noqa: PLR0913  what a schedule may say
    session: Session,
    *,
    name: _Name,
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="The graph's name, as it stands in its code.")],
    cron: Annotated[
        str,
        typer.Argument(
            metavar="CRON",
            help="When: minute, hour, day of the month, month and day of the week; or @hourly, @daily, @weekly, "
            "@monthly, @yearly.",
        ),
    ],
    pairs: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="The input of each run, as keepstep start takes it."),
    ] = None,
    given: WholeInput = None,
    input_file: InputFile = None,
    timezone: Annotated[
        str, typer.Option("--timezone", "-z", metavar="ZONE", help="Whose clocks it means, as Europe/Berlin.")
    ] = "UTC",
    thread: Annotated[
        str | None,
        typer.Option(
            "--thread",
            metavar="NAME",
            help="The thread that each tick gives a run. With {tick} in it, which stands for the tick's time, each "
            "tick has a thread of its own, and so without this option: NAME-{tick}.",
        ),
    ] = None,
    missed: Annotated[
        Literal["skip", "last", "all"],
        typer.Option(
            "--missed",
            metavar="skip|last|all",
            help="Which ticks that came while no worker ran start a run when one runs again; all of the last 100.",
        ),
    ] = "last",
    overlap: Annotated[
        Literal["allow", "skip"],
        typer.Option(
            "--overlap",
            metavar="allow|skip",
            help="Whether a tick starts a run while the run of an earlier tick has not ended.",
        ),
    ] = "allow",
    graph_version: Annotated[
        str | None, typer.Option("--graph-version", metavar="TEXT", help="The graph's version, to stay with it.")
    ] = None,
    priority: Annotated[
        Priority | None,
        typer.Option("--priority", metavar="high|normal|low", help="The threads' priority.", show_default=False),
    ] = None,
    step_limit: Annotated[
        int | None, typer.Option("--step-limit", min=1, metavar="N", help="The steps that each run may take.")
    ] = None,
    by: By = None,
) -> None:
    """Make a schedule, or change the one of that name. The same again changes nothing.

    At each tick a worker gives a thread of the graph a run: once, however many workers there are and whatever dies.
    """
    value = read_input(pairs or [], given, input_file)
    with session.client() as client:
        receipt = client.schedule(
            name,
            graph,
            cron,
            value,
            timezone=timezone,
            thread=thread,
            version=graph_version,
            missed=missed,
            overlap=overlap,
            priority=priority,
            step_limit=step_limit,
            by=by or values.this_user(),
        )
        done = f"schedule {name} accepted"
        made = session.glance(lambda reader: _one(reader.schedules(name), name))
        if made is not None:
            done += f", next: {_next(made)}"
        report(session, receipt, done)


@command("list", panel=PANEL, group=group, reads=True, example="keepstep schedule list")
def list_(session: Session) -> None:
    """List schedules: when each comes next, and what became of its last tick."""
    with session.reader() as reader:
        found = reader.schedules()
    if session.as_json:
        session.output.document({"schedules": [_document(each) for each in found]})
    elif found:
        session.output.table(
            ("NAME", "GRAPH", "CRON", "ZONE", "NEXT", "LAST TICK", "WHAT BECAME OF IT"),
            [
                (each.name, each.graph, each.cron, each.timezone, _next(each), _at(each, each.last_tick), _became(each))
                for each in found
            ],
        )
    else:
        session.output.line(f"no schedules; make one: {session.hint('schedule add NAME GRAPH CRON')}")


@command("show", panel=PANEL, group=group, reads=True, example="keepstep schedule show nightly-report")
def show(session: Session, *, name: _Name) -> None:
    """Show all of a schedule: what it starts, when, for whom, and what became of it."""
    with session.reader() as reader:
        found = _one(reader.schedules(name), name)
    if session.as_json:
        session.output.document({"schedule": _document(found)})
        return
    session.output.facts(
        {
            "schedule": found.name,
            "graph": found.graph if found.version is None else f"{found.graph} {found.version}",
            "thread": found.thread,
            "cron": found.cron,
            "time zone": found.timezone,
            "next": _next(found),
            "last tick": _at(found, found.last_tick),
            "became of it": _became(found),
            "last run": f"{found.run} of thread {found.run_thread}" if found.run else None,
            "last skipped": _at(found, found.skipped_tick),
            "waits": _waits(found),
            "missed": found.missed,
            "overlap": found.overlap,
            "priority": found.priority,
            "step limit": None if found.step_limit is None else str(found.step_limit),
            "by": found.updated_by,
        }
    )
    session.output.heading("Input")
    session.output.state(found.input)


@command(
    "pause", panel=PANEL, group=group, sends=True, example="keepstep schedule pause nightly-report --reason 'Holidays'"
)
def pause(session: Session, *, name: _Name, reason: Reason = None, by: By = None) -> None:
    """Let no tick start a run until the schedule is resumed. Runs that it has started go on."""
    with session.client() as client:
        receipt = client.pause_schedule(name, reason=reason, by=by or values.this_user())
        report(session, receipt, f"schedule {name} paused")


@command("resume", panel=PANEL, group=group, sends=True, example="keepstep schedule resume nightly-report")
def resume(session: Session, *, name: _Name, reason: Reason = None, by: By = None) -> None:
    """Let a paused schedule go on from its next tick. Ticks that came in the pause start no run."""
    with session.client() as client:
        receipt = client.resume_schedule(name, reason=reason, by=by or values.this_user())
        report(session, receipt, f"schedule {name} resumed")


@command("remove", panel=PANEL, group=group, sends=True, example="keepstep schedule remove nightly-report")
def remove(session: Session, *, name: _Name, reason: Reason = None, by: By = None) -> None:
    """Remove a schedule. Runs that it has started go on."""
    with session.client() as client:
        receipt = client.unschedule(name, reason=reason, by=by or values.this_user())
        report(session, receipt, f"schedule {name} removed")


def _one(found: Sequence[Schedule], name: str) -> Schedule:
    """Return the schedule that a name means: of several the default application's."""
    of_default = [each for each in found if each.application == "default"]
    if not found:
        message = f"there is no schedule {name!r}"
        raise NotFound(message)
    if len(found) > 1 and not of_default:
        message = f"several applications have a schedule {name!r}: {', '.join(each.application for each in found)}"
        raise Ambiguous(message)
    return (of_default or list(found))[0]


def _at(found: Schedule, at: datetime | None) -> str:
    """Return a time as the clocks of the schedule's time zone show it."""
    from keepstep.cli.output import relative

    if at is None:
        return ""
    return f"{at.astimezone(ZoneInfo(found.timezone)):%Y-%m-%d %H:%M} ({relative(at.timestamp())})"


def _next(found: Schedule) -> str:
    if found.paused:
        return "paused"
    return _at(found, found.next_at) or "never"


def _waits(found: Schedule) -> str:
    """Return why the tick that is due has not fired."""
    stuck = found.error is not None and found.error["code"] not in {"missed", "overlap"}
    return str(found.error["message"]) if found.error is not None and stuck else ""


def _became(found: Schedule) -> str:
    waits = _waits(found)
    if waits:
        return f"waits: {waits}"
    if found.outcome == "skipped" and found.error is not None:
        return f"skipped: {found.error['message']}"
    return "" if found.outcome is None else f"{found.outcome} ({found.run_thread})"


def _document(found: Schedule) -> dict[str, Any]:
    """Return a schedule's record."""
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in vars(found).items()}
