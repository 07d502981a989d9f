"""`keepstep worker`."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keepstep.cli.command import Broker, command
from keepstep.cli.session import Session
from keepstep.errors import DatabaseUnavailable, GraphError, KeepstepError

if TYPE_CHECKING:
    from keepstep.tasks.supervise import Refusal


class Pool(StrEnum):
    """How a worker runs several steps at once."""

    PREFORK = "prefork"
    THREADS = "threads"
    SOLO = "solo"


class LogLevel(StrEnum):
    """How much a worker logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@command(
    "worker",
    panel="Run",
    reads=True,
    has_tenant=False,
    has_json=False,
    example="keepstep worker agent.py --concurrency 4",
)
def worker(
    session: Session,
    *,
    modules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODULE",
            help="Modules (package.module) or files (agent.py) whose graphs it runs. Without any: KEEPSTEP_GRAPHS.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", min=1, metavar="N", help="Steps at once; without it one per processor."),
    ] = None,
    pool: Annotated[
        Pool,
        typer.Option(
            "--pool",
            "-P",
            metavar="|".join(Pool),
            help="Processes (prefork), threads, or one step at a time in itself (solo).",
        ),
    ] = Pool.PREFORK,
    loglevel: Annotated[
        LogLevel, typer.Option("--loglevel", "-l", metavar="|".join(LogLevel), help="What to log.")
    ] = LogLevel.INFO,
    broker: Broker = None,
) -> None:
    """Run a worker, and start it again when it dies.

    It finds the Graph objects of the modules, takes in commands and runs the steps of threads until SIGTERM or Ctrl+C,
    which let running steps finish; a second one does not. Its log goes to standard error, as JSON lines unless that is
    a terminal.
    """
    from keepstep import broker as brokers
    from keepstep import places
    from keepstep.settings import load
    from keepstep.tasks import worker as workers
    from keepstep.tasks.supervise import EXIT_REFUSED

    settings = load(database=session.database, broker=broker or session.broker, graphs=",".join(modules or ()) or None)
    if not settings.graphs:
        message = "name the modules or files that define your graphs: keepstep worker agent.py (or set KEEPSTEP_GRAPHS)"
        raise GraphError(message)
    brokers.kind_of(settings.broker)
    for source in settings.graphs:
        _check_there(source)
    places.check(settings)
    _check_schema(session.refined(broker=broker))
    said: list[Refusal] = []
    code = workers.main(
        settings, concurrency=concurrency, pool=pool.value, loglevel=loglevel.value, on_refusal=said.append
    )
    if code == EXIT_REFUSED:
        _tell_frames(said)
        message = said[0].reason if said else "the worker cannot run as it is configured: its log says why"
        raise KeepstepError(message)
    raise typer.Exit(code)


def _tell_frames(said: list[Refusal]) -> None:
    """Show where in the user's own code a worker's start failed."""
    from keepstep.cli.output import console, visible

    for each in said:
        for frame in each.frames:
            console(to_errors=True).print(visible(f"  {frame}"), style="dim", soft_wrap=True)


def _check_there(source: str) -> None:
    """Refuse at once what the worker's own process would only find out later."""
    if source.endswith(".py") or "/" in source:
        found = Path(source).is_file()
        message = f"{source}: there is no such file"
    else:
        top = source.partition(".")[0]
        found = Path(top).is_dir() or Path(f"{top}.py").is_file() or importlib.util.find_spec(top) is not None
        message = f"{source}: there is no module of that name (looked in {Path.cwd()} and on the Python path)"
    if not found:
        raise GraphError(message)


def _check_schema(session: Session) -> None:
    """Refuse at once a database that the worker could not work with; one that is away is waited for."""
    from keepstep.store import migrate

    with session.store() as store, suppress(DatabaseUnavailable):
        migrate.prepare(store)
